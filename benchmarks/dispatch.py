"""A step of funcacc against the bare dispatch of its own program, by the number of leaves.

    python benchmarks/dispatch.py [PARAMETERS ...]

The bare loop hands the same program's outputs to it as its next inputs: torch_xla's own dispatch,
the release of the tensors that it replaces, and nothing that a user needs besides. Both run in
turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import funcacc
from funcacc.engines import get_engine
from funcacc.engines.xla import private

ROUNDS = 15


class Many(nn.Module):
    """As many parameters of four elements as asked."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of products with `x`."""
        return torch.stack([(w * x).sum() for w in self.weights]).sum()


def measure(count: int) -> tuple[int, float, float, float]:
    """Leaves; milliseconds of a bare dispatch, of a step; median of their ratio."""
    device = funcacc.device("xla")
    model = Many(count).to(device)
    step = funcacc.TrainStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x))
    (window,) = funcacc.windows([torch.ones(4)] * 2, 2, device=device)
    step(window)
    program, seen = step.programs[0], []
    dispatch = private.run_cached

    def noting(found: object, inputs: list[Tensor]) -> list[Tensor]:
        seen[:] = inputs
        return dispatch(found, inputs)

    private.run_cached = noting
    step(window)
    private.run_cached = dispatch
    bare = _bare(program, seen)

    def steps() -> None:
        step(window)

    turns = max(5, 2000 // count)
    pairs = [(_timed(bare, turns), _timed(steps, turns)) for _ in range(ROUNDS)][1:]
    dispatched, taken = zip(*pairs, strict=True)
    ratio = median(b / a for a, b in pairs)
    return program.donate, 1e3 * median(dispatched), 1e3 * median(taken), ratio


def _bare(program: Any, inputs: list[Tensor]) -> Callable[[], None]:
    (compiled,) = program._compiled.values()
    # `inputs` is in the order of XLA's parameters.
    order = compiled.inputs(list(range(len(program.graph.inputs))))
    given = dict(zip(order, inputs, strict=True))
    others = [given[i] for i in range(program.donate, len(given))]
    specs = program.graph.inputs[: program.donate]
    put = get_engine("xla", funcacc.device("xla")).put
    state = [put(torch.zeros(s.shape, dtype=s.dtype)) for s in specs]

    def run() -> None:
        nonlocal state
        results = private.run_cached(compiled.hash, compiled.inputs([*state, *others]))
        state = list(compiled.outputs(results))[: program.donate]

    return run


def _timed(run: Callable[[], None], turns: int) -> float:
    private.wait()
    start = time.perf_counter()
    for _ in range(turns):
        run()
    return (time.perf_counter() - start) / turns


def main() -> None:
    """Print a table."""
    print("| leaves | bare dispatch, ms | step, ms | ratio |\n|--:|--:|--:|--:|")
    for count in map(int, sys.argv[1:] or ["1", "20", "100", "300"]):
        leaves, bare, step, ratio = measure(count)
        print(f"| {leaves} | {bare:.3f} | {step:.3f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
