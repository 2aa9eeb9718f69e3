"""What the guards of a step cost, by the number of state leaves: microseconds a step.

    python benchmarks/guards.py [PARAMETERS ...]

Steps with all guards and steps without one of them run in turns; the median of the differences
is printed, since what a guard looks at first is in the caches for the rest of the step.

Storages: whether each leaf is still in the storage that the last dispatch left. Reads: whether
anything that the program reads lies in the memory of the state. Signals: handlers are exchanged
before a dispatch and put back after it. Copy: what a step takes longer after somebody has cloned
a parameter, for the sync that makes the copy real.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import funcacc
from funcacc import guard
from funcacc.dispatch import Dispatch

ROUNDS = 25


class Many(nn.Module):
    """As many parameters of four elements as asked."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of products with `x`."""
        return torch.stack([(w * x).sum() for w in self.weights]).sum()


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """In the place of `guard.deferred`."""
    yield


WITHOUT: dict[str, Callable[[], Any]] = {
    "storages": lambda: mock.patch.object(Dispatch, "owns", lambda self, targets: True),
    "reads": lambda: mock.patch.object(Dispatch, "_apart", lambda self, targets, others: others),
    "signals": lambda: mock.patch.object(guard, "deferred", nothing),
}


def timed(run: Callable[[], object], turns: int) -> float:
    """Microseconds of each turn."""
    start = time.perf_counter()
    for _ in range(turns):
        run()
    return 1e6 * (time.perf_counter() - start) / turns


def measure(count: int) -> list[float]:
    """Leaves; microseconds of a step, of each guard, and of a sync for a copy."""
    device = funcacc.device("xla")
    model = Many(count).to(device)
    step = funcacc.TrainStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x))
    (window,) = funcacc.windows([torch.ones(4)] * 2, 2, device=device)
    out = step(window)
    kept: list[Tensor] = []

    def plain() -> None:
        step(window)

    def after_a_copy() -> None:
        kept[:] = [next(model.parameters()).detach().clone()]
        step(window)

    turns = max(10, 400 // count)
    timed(plain, turns)
    whole, rest = [], {name: [] for name in (*WITHOUT, "copy")}
    for _ in range(ROUNDS):
        base = timed(plain, turns)
        whole.append(base)
        for name, without in WITHOUT.items():
            with without():
                rest[name].append(base - timed(plain, turns))
        rest["copy"].append(timed(after_a_copy, turns) - base)
    assert torch.isfinite(out.loss.cpu())
    return [step.report().state_leaves, median(whole), *map(median, rest.values())]


def main() -> None:
    """Print a table."""
    print("| leaves | step, us | storages | reads | signals | a copy |\n|--:|--:|--:|--:|--:|--:|")
    for count in map(int, sys.argv[1:] or ["1", "20", "100", "300"]):
        leaves, *times = measure(count)
        print(f"| {leaves} | " + " | ".join(f"{t:.0f}" for t in times) + " |", flush=True)


if __name__ == "__main__":
    main()
