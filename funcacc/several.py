"""Several optimizer steps in one dispatch: windows and hyperparameters gathered ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from funcacc import guard, trees
from funcacc.batches import Window
from funcacc.calls import Call
from funcacc.errors import OptionError
from funcacc.optimizers.update import Adopted, Update
from funcacc.programs import shape_of
from funcacc.types import PyTree


class Scheduler(Protocol):
    """What moves hyperparameters between steps, without looking at a loss."""

    def step(self) -> Any:
        """Go to the next step."""


class Group(NamedTuple):
    """What one dispatch takes.

    Attributes:
        windows: of one structure and shape.
        numbers: for each window, the optimizer's numbers in its step.
        failure: what the loader or the scheduler raised after the last window.
    """

    windows: list[Window]
    numbers: list[list[float]]
    failure: BaseException | None


def check(
    scheduler: Scheduler | None, opt: Adopted, update: Update, size: int, skips: bool
) -> None:
    """Refuse what can't be known before the steps are taken.

    Args:
        scheduler: the user's.
        opt: the optimizer.
        update: its step.
        size: how many steps are gathered.
        skips: whether steps may be skipped.

    Raises:
        OptionError: with the reason.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise OptionError(
            "ReduceLROnPlateau looks at a loss before each of its steps; call step(window) and "
            "scheduler.step(float(out.loss)) in a loop of your own"
        )
    if size > 1 and opt.hooked():
        raise OptionError(
            f"the optimizer has a step post-hook, which steps_per_call={size} would call when "
            "the parameters are those of another step; use steps_per_call=1"
        )
    if size > 1 and skips and update.changing:
        raise OptionError(
            f"the optimizer counts its steps in Python, and with skip_nonfinite=True only the "
            f"device knows which of steps_per_call={size} steps count; use steps_per_call=1"
        )


def gather(
    first: Window,
    source: Iterator[Window],
    size: int,
    call: Call,
    opt: Adopted,
    scheduler: Scheduler | None,
) -> tuple[Group, Iterator[Window]]:
    """Take windows until there are `size`, or one needs another program.

    The optimizer's counts and the scheduler move on as if the steps had been taken.

    Returns:
        The group, and the source of what comes after it.

    Raises:
        FuncaccError: when not even one could be taken.
    """
    windows: list[Window] = []
    numbers: list[list[float]] = []
    window: Window | None = first
    try:
        while window is not None:
            now = opt.numbers()
            if windows and not _fits(window, first, call, now):
                return Group(windows, numbers, None), itertools.chain([window], source)
            windows.append(window)
            numbers.append(now)
            opt.finish(call.compiled.update, now, lambda: True)
            if scheduler is not None:
                scheduler.step()
            with guard.allowed():
                window = next(source, None) if len(windows) < size else None
    except BaseException as e:
        if not windows:
            raise
        return Group(windows, numbers, e), iter(())
    return Group(windows, numbers, None), source


def _fits(window: Window, first: Window, call: Call, numbers: list[float]) -> bool:
    return shape_of(window) == shape_of(first) and call.compiled.update.holds(numbers)


def stacked(group: Group, flags: list[float], size: int) -> list[Tensor]:
    """The inputs of the program: hyperparameters, counts, windows, the number of steps.

    Args:
        group: what to stack; the rows that are missing to `size` are never read.
        flags: of the first step.
        size: of the leading axis.
    """
    missing = size - len(group.windows)
    rows = [[*n, *(flags if i == 0 else [0.0] * len(flags))] for i, n in enumerate(group.numbers)]
    rows += [rows[-1]] * missing
    windows = [*group.windows, *[group.windows[-1]] * missing]
    counts = [torch.as_tensor(w.count).to(torch.int32) for w in windows]
    leaves = [trees.flatten(w.tree)[0] for w in windows]
    return [
        torch.tensor(rows, dtype=torch.float64),
        _stack(counts),
        *map(_stack, zip(*leaves, strict=True)),
        torch.tensor(len(group.windows), dtype=torch.int32),
    ]


def first_rows(output: PyTree, count: int, size: int) -> PyTree:
    """Of leaves with `size` rows, the first `count`."""
    return output if count == size else trees.map_tree(lambda t: t[:count], output)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    device = next((t.device for t in tensors if t.device.type != "cpu"), None)
    return torch.stack([t.detach() if device is None else t.detach().to(device) for t in tensors])
