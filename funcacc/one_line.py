"""`train_step`, and the table of the steps that one-line calls have made."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from funcacc.errors import OptionError
from funcacc.step import StepOutput
from funcacc.train import TrainStep
from funcacc.types import LossFn, PyTree


class Steps:
    """The steps that one-line calls have made, each kept as long as its model.

    Args:
        name: of the call, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: weakref.WeakKeyDictionary[nn.Module, dict[Any, TrainStep]] = (
            weakref.WeakKeyDictionary()
        )

    def find(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        other: tuple[Any, ...],
        make: Callable[[], TrainStep],
    ) -> TrainStep:
        """The step for these, made when there is none."""
        made = self._made.setdefault(model, {})
        key = (loss_fn, other)
        if key not in made:
            made[key] = make()
            # The table would keep the model alive for ever otherwise.
            made[key]._model = weakref.ref(model)
            code = getattr(loss_fn, "__code__", None)
            alike = {k[0] for k in made if code and getattr(k[0], "__code__", None) is code}
            if len(alike) == _MANY_LOSSES:
                warnings.warn(
                    f"{self.name} was given a new loss function on each call, and traces and "
                    "compiles each; define the loss function once, outside the training loop",
                    stacklevel=3,
                )
        return made[key]


_steps = Steps("train_step")
_MANY_LOSSES = 3


def train_step(
    model: nn.Module, opt: Any, batches: PyTree, loss_fn: LossFn | None = None, **options: Any
) -> StepOutput:
    """One optimizer step over the microbatches in `batches`.

    Finds or makes the `TrainStep` of (model, opt, loss_fn, options) and calls it.

    Args:
        model: as for `TrainStep`.
        opt: as for `TrainStep`.
        batches: a `Window`, or a list or iterator of microbatches.
        loss_fn: a function defined once, outside the training loop.
        **options: as for `TrainStep`, but `steps_per_call`.

    Returns:
        A `StepOutput`.

    Raises:
        OptionError: for `steps_per_call`: this is one step.
        FuncaccError: as `TrainStep` and its call.

    Example:
        >>> import torch, funcacc
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> def loss_fn(model, batch):
        ...     return funcacc.losses.mse(model(batch["x"]), batch["y"])
        >>> window = funcacc.split({"x": torch.ones(8, 2), "y": torch.zeros(8, 1)}, 4)
        >>> funcacc.train_step(model, opt, window, loss_fn).weight
        tensor(8.)
    """
    if options.get("steps_per_call", 1) != 1:
        raise OptionError(
            "train_step takes one step for each call; for steps_per_call make a TrainStep and "
            "iterate over its run(windows, scheduler)"
        )
    optimizers = tuple(map(id, opt)) if isinstance(opt, (list, tuple)) else (id(opt),)
    step = _steps.find(
        model,
        loss_fn,
        (optimizers, *sorted(options.items(), key=lambda kv: kv[0])),
        lambda: TrainStep(model, opt, loss_fn, **options),
    )
    return step(batches)
