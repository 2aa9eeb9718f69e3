"""Which ATen operations are written out in terms of simpler ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from funcacc.errors import CaptureError, user_line

aten = torch.ops.aten


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation from means, with PyTorch's unbiased running variance.

    Engines disagree on the running variance of their own kernels, and the
    operator's schema hides its update of the running statistics.
    """
    dims = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    if training:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = torch.var_mean(wide, dims, correction=0)
        invstd = torch.rsqrt(var + eps)
        count = x.numel() // x.shape[1]
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        if running_var is not None:
            unbiased = var * (count / max(count - 1, 1))
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
        saved = mean, invstd
    else:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean, torch.rsqrt(running_var + eps)
        saved = x.new_empty(0), x.new_empty(0)
    out = (x - mean.view(shape)) * invstd.view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(x.dtype), *saved


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts in `bins` intervals from `min` to `max`, the last one closed; XLA has no kernel."""
    values = x.reshape(-1)
    low, high = values.new_full((), min), values.new_full((), max)
    if min == max:
        low, high = values.min(), values.max()
        flat = low == high
        low, high = torch.where(flat, low - 1, low), torch.where(flat, high + 1, high)
    position = ((values - low) * bins / (high - low)).floor()
    position = torch.where(values == high, float(bins - 1), position)
    inside = (values >= low) & (values <= high)
    hits = (position.unsqueeze(1) == torch.arange(bins, device=x.device)) & inside.unsqueeze(1)
    return hits.sum(0).to(x.dtype)


def _zeros(size: list[int], *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """The tangent of a constant, in forward mode, as an ordinary tensor."""
    return torch.zeros(size, dtype=dtype)


_PRODUCTS = (
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
)


def _same_dtypes(op: Any) -> Callable[..., Any]:
    """Refuse operands of several dtypes, which fake tensors multiply without a word."""

    def check(*args: Any, **kwargs: Any) -> Any:
        dtypes = [x.dtype for x in args if isinstance(x, Tensor)]
        if len(set(dtypes)) > 1:
            given = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise CaptureError(
                f"{op} at {user_line()} is given operands of different dtypes ({given}), which no "
                "kernel multiplies; cast one of them, e.g. x.to(weight.dtype). With compute_dtype "
                "the parameters have that dtype there, and buffers keep theirs"
            )
        return NotImplemented

    return check


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table: core ATen, with batch normalisation written out."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    table.update(
        get_decompositions(
            [
                aten.native_batch_norm_backward,
                aten.native_layer_norm_backward,
                aten.native_group_norm,
                aten.native_group_norm_backward,
                aten.nll_loss_forward,
                aten.nll_loss_backward,
                aten._softmax_backward_data,
                aten._log_softmax_backward_data,
                aten.embedding_dense_backward,
                aten.addcmul,
                aten.addcdiv,
                aten.lerp,
                aten.std,
                aten.var,
            ]
        )
    )
    # Engines have these as they are, and better than in pieces.
    whole = aten.embedding_dense_backward, aten.lift_fresh_copy, aten.index_add
    for name in (packet.default for packet in whole):
        table.pop(name, None)
    table.update({op: _same_dtypes(op) for op in _PRODUCTS})
    table[aten.native_batch_norm.default] = _batch_norm
    table[aten.histc.default] = _histc
    table[aten._efficientzerotensor.default] = _zeros
    return table
