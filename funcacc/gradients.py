"""`accumulate`: the gradients of a window, for loops that step the optimizer themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from funcacc import model as models
from funcacc.errors import OptionError
from funcacc.one_line import Steps
from funcacc.optimizers.functional import GradientsOnly
from funcacc.step import Accumulated
from funcacc.train import TrainStep
from funcacc.types import LossFn, PyTree

_steps = Steps("accumulate")


def accumulate(
    model: nn.Module,
    batches: PyTree,
    loss_fn: LossFn | None = None,
    *,
    into_grad: bool = False,
    **options: Any,
) -> Accumulated:
    """Gradients of a window, in one program; parameters stay as they are.

    Equals, for a loss function that returns a scalar::

        for batch in window:
            (loss_fn(model, batch) / K).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}

    Buffers and the random key move on as in `train_step`, and are donated.

    Args:
        model: on the device of the engine.
        batches: a `Window`, or a list or iterator of microbatches.
        loss_fn: as for `TrainStep`; a function defined once, outside the loop.
        into_grad: also add the gradients to ``p.grad``, in the parameter's dtype, so that
            ``opt.step()`` can follow.
        **options: those of `TrainStep` that don't concern the optimizer: `engine`, `clip_norm`,
            `clip_value`, `grad_transform`, `accumulate_dtype`, `compute_dtype`, `seed`, `donate`.

    Returns:
        An `Accumulated`; its gradients are those of all parameters that require one and that
        the loss reaches.

    Raises:
        OptionError: for `skip_nonfinite` and `steps_per_call`: there is no step.
        FuncaccError: as `TrainStep` and its call.

    Example:
        >>> import torch, funcacc
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> def loss_fn(model, x):
        ...     return model(x).mean()
        >>> funcacc.accumulate(model, [torch.ones(4, 2), torch.zeros(4, 2)], loss_fn).grads
        {'weight': tensor([[0.5000, 0.5000]])}
    """
    if options.get("skip_nonfinite") is True:
        raise OptionError(
            "accumulate takes no skip_nonfinite, for it takes no optimizer step that could be "
            "skipped; look at grad_norm and don't call opt.step()"
        )
    if options.get("steps_per_call", 1) != 1:
        raise OptionError("accumulate takes no steps_per_call: your own loop takes the steps")
    step = _steps.find(
        model,
        loss_fn,
        tuple(sorted(options.items(), key=lambda kv: kv[0])),
        lambda: TrainStep(model, GradientsOnly(), loss_fn, **options),
    )
    result: Any = step(batches)
    if into_grad:
        _add_to_grad(model, result)
    return result  # type: ignore[no-any-return]


@torch.no_grad()
def _add_to_grad(model: nn.Module, result: Accumulated) -> None:
    params = models.parameters(model)
    for name, grad in result.grads.items():
        p = params[name]
        # A copy where the dtype stays: the caller may change p.grad in place.
        own = grad.to(p.dtype, copy=True)
        p.grad = own if p.grad is None else p.grad.add_(own)
