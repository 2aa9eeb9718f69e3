"""Optimizers as pure functions: the user's own optimizer code, traced as it is."""

from __future__ import annotations

from typing import Any

import torch

from funcacc.errors import OptimizerError
from funcacc.optimizers.functional import (
    FunctionalOptimizer,
    GradientsOnly,
    GradientTransformation,
)
from funcacc.optimizers.torch_optim import TorchOptimizers
from funcacc.optimizers.update import Adopted


def adopt(opt: Any, names: dict[int, str]) -> Adopted:
    """What a step can work with, from what the user gave.

    Args:
        opt: a `torch.optim.Optimizer`, a list of them, or an object with `init` and `update`.
        names: the model's parameters: id of the tensor -> name.

    Raises:
        OptimizerError: for anything else, or an optimizer that can't be traced.
    """
    if isinstance(opt, GradientsOnly):
        opt.refresh(names)
        return opt
    items = list(opt) if isinstance(opt, (list, tuple)) else [opt]
    if items and all(isinstance(x, torch.optim.Optimizer) for x in items):
        return TorchOptimizers(items, names)
    if len(items) == 1 and isinstance(opt, GradientTransformation):
        return FunctionalOptimizer(opt, names)
    if not items:
        raise OptimizerError("opt is an empty list; give at least one torch.optim.Optimizer")
    raise OptimizerError(
        f"opt is a {type(opt).__name__}; give a torch.optim.Optimizer, a list of them, or an "
        "object with init(params) and update(grads, state, params)"
    )
