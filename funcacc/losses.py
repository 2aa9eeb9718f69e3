"""Ready-made losses that return a `Loss`: sums with their weights, exact over a window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from funcacc.errors import ModelError
from funcacc.loss import Loss


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Loss:
    """Cross entropy, summed, with the weight that PyTorch's mean divides by.

    With ``l[n]`` the loss of element n (smoothed as in PyTorch), w the class weights::

        total  = sum_n l[n],   weight = sum_n w[target[n]]  over target[n] != ignore_index

    so that over a window ``sum(total) / sum(weight)`` equals
    ``F.cross_entropy(..., reduction="mean")`` of the whole batch.

    Args:
        logits: ``[N, C]`` or ``[N, C, d1, ...]``, floating; or ``[C]``.
        target: ``[N]`` or ``[N, d1, ...]``, integer classes; or probabilities like `logits`.
        weight: ``[C]`` class weights.
        ignore_index: class that doesn't count.
        label_smoothing: 0 <= s < 1.

    Returns:
        One term.
    """
    total = F.cross_entropy(
        logits,
        target,
        weight=weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if target.is_floating_point():
        return Loss(total, float(target.numel() // logits.shape[1 if logits.ndim > 1 else 0]))
    valid = target != ignore_index
    if weight is None:
        return Loss(total, valid.sum())
    picked = weight[torch.where(valid, target, 0)]
    return Loss(total, torch.where(valid, picked, 0).sum())


def causal_lm(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Loss:
    """Next-token cross entropy: position t predicts label t + 1.

    ``total = sum_{b,t} -log softmax(logits[b, t])[labels[b, t + 1]]`` over labels that are not
    `ignore_index`, in ``float32``; ``weight`` = their number.

    Args:
        logits: ``[B, T, V]``, floating.
        labels: ``[B, T]``, integer, not shifted.
        ignore_index: label that doesn't count.

    Returns:
        One term.
    """
    flat = logits[:, :-1].float().flatten(0, 1)
    return cross_entropy(flat, labels[:, 1:].flatten(), ignore_index=ignore_index)


def mse(prediction: Tensor, target: Tensor) -> Loss:
    """Squared error: ``total = sum (prediction - target)^2``, ``weight`` = number of elements.

    Args:
        prediction: any shape, floating.
        target: same shape.

    Returns:
        One term; over a window it equals ``F.mse_loss`` of the whole batch.

    Raises:
        ModelError: when the shapes differ; they aren't broadcast.
    """
    _check_shapes("mse", prediction, target)
    return Loss(F.mse_loss(prediction, target, reduction="sum"), float(prediction.numel()))


def bce_with_logits(logits: Tensor, target: Tensor, *, pos_weight: Tensor | None = None) -> Loss:
    """Binary cross entropy of logits, summed; ``weight`` = number of elements.

    Args:
        logits: any shape, floating.
        target: same shape, in [0, 1].
        pos_weight: as in `torch.nn.functional.binary_cross_entropy_with_logits`.

    Returns:
        One term; over a window it equals PyTorch's mean over the whole batch.

    Raises:
        ModelError: when the shapes differ.
    """
    _check_shapes("bce_with_logits", logits, target)
    total = F.binary_cross_entropy_with_logits(
        logits, target, pos_weight=pos_weight, reduction="sum"
    )
    return Loss(total, float(logits.numel()))


def _check_shapes(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ModelError(
            f"losses.{name} was given shapes {tuple(a.shape)} and {tuple(b.shape)}; make them "
            "equal, e.g. by unsqueeze(-1): broadcasting would count pairs of elements"
        )
