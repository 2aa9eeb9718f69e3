"""What of a `torch.optim.Optimizer` can't be part of a compiled step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.optim.optimizer as optimizer_module

from funcacc.errors import OptimizerError

_REFUSED: dict[str, str] = {
    "LBFGS": "it calls the loss many times in one step and branches on the results",
    "SparseAdam": "it works on sparse gradients, which an accumulator can't hold",
}


def check_class(opt: torch.optim.Optimizer) -> None:
    """Refuse classes that can't be traced.

    Raises:
        OptimizerError: with the reason.
    """
    for cls in type(opt).__mro__:
        if cls.__name__ in _REFUSED and cls.__module__.startswith("torch.optim"):
            raise OptimizerError(
                f"{type(opt).__name__} can't be part of a compiled step: {_REFUSED[cls.__name__]}"
            )


def post_hooks(opt: torch.optim.Optimizer) -> list[Callable[..., None]]:
    """The user's step post-hooks, of this optimizer and of all."""
    everywhere = optimizer_module._global_optimizer_post_hooks
    return [*opt._optimizer_step_post_hooks.values(), *everywhere.values()]


def check_hooks(opt: torch.optim.Optimizer) -> None:
    """Refuse step pre-hooks.

    Raises:
        OptimizerError: naming the optimizer.
    """
    hooks = optimizer_module._global_optimizer_pre_hooks
    if opt._optimizer_step_pre_hooks or hooks:
        raise OptimizerError(
            f"{type(opt).__name__} has a step pre-hook; gradients exist only inside the compiled "
            "step, so there is nothing for it to look at: use clip_norm, clip_value or "
            "grad_transform, or remove the hook"
        )
