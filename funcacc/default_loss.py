"""The loss of a call without a loss function: the model's own, weighted exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from funcacc.loss import Loss
from funcacc.types import PyTree


def default_loss(model: nn.Module, batch: PyTree) -> Any:
    """Call the model on a microbatch, and weigh the loss that it returns.

    When the output is one of transformers, and the forward pass took the mean of one cross
    entropy over labels (causal and masked language models, encoder-decoders, classification
    of tokens, sequences, images or pixels), that is::

        total = loss * count,   weight = count = number of labels that aren't ignored

    as the model itself counts them, shifted or not. So J is the mean over all labels of the
    window: what the model computes for the full batch, and for a causal language model what
    it computes with ``num_items_in_batch`` of the whole window. The router loss of a mixture
    of experts stays apart and is averaged over the microbatches.

    Any other loss is returned as it is, and averaged over the microbatches: for a loss that
    is a mean over samples that is the mean over the samples of the window.

    Args:
        model: a module, called as ``model(**batch)``, ``model(*batch)`` or ``model(batch)``.
        batch: a mapping, a tuple or list, or a tensor.
    """
    if not isinstance(batch, Mapping):
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    with _CrossEntropies() as means:
        result = model(**batch)
    ours = any(cls.__name__ == "ModelOutput" for cls in type(result).__mro__)
    loss = getattr(result, "loss", None)
    if not ours or not isinstance(loss, Tensor) or len(means.counts) != 1:
        return result
    (count,) = means.counts
    if count is None:
        return result
    router = getattr(result, "aux_loss", None)
    coefficient = _router_coefficient(model)
    if not isinstance(router, Tensor) or not coefficient:
        return _mean_of(loss, count)
    return _mean_of(loss - coefficient * router, count) + coefficient * Loss.mean(router)


def _mean_of(mean: Tensor, count: Tensor) -> Loss:
    # The mean of no labels is NaN, which a weight of 0 would not undo.
    return Loss(torch.where(count > 0, mean * count, 0.0), count)


def _router_coefficient(model: nn.Module) -> float | None:
    name = "router_aux_loss_coef"
    found = (getattr(getattr(m, "config", None), name, None) for m in model.modules())
    return next((c for c in found if c is not None), None)


class _CrossEntropies(TorchFunctionMode):
    """Watches cross entropies.

    Attributes:
        counts: for each, how many labels it is the mean of; `None` when it isn't such a mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Tensor | None] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the call, and make it."""
        if func is F.cross_entropy:
            self.counts.append(_count(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _count(
    _logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    legacy = size_average is not None or reduce is not None
    if legacy or reduction != "mean" or weight is not None or target.is_floating_point():
        return None
    return (target != ignore_index).sum()
