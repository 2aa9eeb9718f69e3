"""ATen operations that multiply matrices, convolve, pool and resample, in JAX.

Backward passes of operations that are linear, or that JAX can differentiate, are its transposes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

aten = torch.ops.aten


def _matmul(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b)


def _scaled(x: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _matmul(a, b)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (x if beta == 1 else x * beta)


# Convolution -----------------------------------------------------------------------------


def _each(value: Any, n: int) -> list[int]:
    """One number for each of `n` dimensions."""
    value = [value] if isinstance(value, int) else list(value)
    return value * n if len(value) == 1 else value


def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    n = x.ndim - 2
    stride, padding, dilation = _each(stride, n), _each(padding, n), _each(dilation, n)
    if transposed:
        out = _transposed(x, weight, stride, padding, dilation, _each(output_padding, n), groups)
    else:
        out = lax.conv_general_dilated(
            x,
            weight,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            feature_group_count=groups,
        )
    return out if bias is None else out + bias.reshape([-1] + [1] * n)


def _transposed(
    x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, extra: Any, groups: int
) -> Any:
    n = x.ndim - 2
    inputs, outputs, *kernel = weight.shape
    # [in, out, *kernel] becomes [groups * out, in / groups, *kernel], flipped.
    grouped = weight.reshape([groups, inputs // groups, outputs, *kernel])
    turned = jnp.swapaxes(grouped, 1, 2).reshape([groups * outputs, inputs // groups, *kernel])
    turned = jnp.flip(turned, tuple(range(2, 2 + n)))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
    return lax.conv_general_dilated(
        x,
        turned,
        [1] * n,
        pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )


def _convolution_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Any, *rest: Any
) -> tuple[Any, Any, Any]:
    *settings, _ = rest
    _, back = jax.vjp(lambda x, w: _convolution(x, w, None, *settings), x, weight)
    dx, dw = back(grad)
    return dx, dw, jnp.sum(grad, (0, *range(2, grad.ndim)))


# Pooling ---------------------------------------------------------------------------------


def _lengths(
    sizes: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> list[int]:
    found = []
    for s, k, t, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        span = s + 2 * p - d * (k - 1) - 1
        n = (-(-span // t) if ceil else span // t) + 1
        # The last window starts inside the input or its left padding.
        found.append(n - 1 if ceil and (n - 1) * t >= s + p else n)
    return found


def _max_pool(n: int) -> Callable[..., tuple[Any, Any]]:
    def run(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil: bool = False,
    ) -> tuple[Any, Any]:
        kernel = _each(kernel, n)
        stride = _each(stride, n) if len(stride) else kernel
        padding, dilation = _each(padding, n), _each(dilation, n)
        sizes = x.shape[-n:]
        lengths = _lengths(sizes, kernel, stride, padding, dilation, ceil)
        # For each output, the positions in its window, flat, and whether they're inside.
        flat, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), bool)
        parts = zip(sizes, kernel, stride, padding, dilation, lengths, strict=True)
        for s, k, t, p, d, m in parts:
            at = np.arange(m)[:, None] * t - p + np.arange(k)[None] * d
            flat = (flat[:, None, :, None] * s + at.clip(0, s - 1)[None, :, None, :]).reshape(
                flat.shape[0] * m, -1
            )
            ok = (at >= 0) & (at < s)
            inside = (inside[:, None, :, None] & ok[None, :, None, :]).reshape(flat.shape)
        least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min
        rows = x.reshape(*x.shape[:-n], -1)
        windows = jnp.where(inside, rows[..., flat], least)
        best = jnp.argmax(windows, -1)
        values = jnp.take_along_axis(windows, best[..., None], -1)[..., 0]
        places = jnp.asarray(flat)[np.arange(len(flat)), best]
        shape = (*x.shape[:-n], *lengths)
        return values.reshape(shape), places.reshape(shape)

    return run


def _max_pool_backward(n: int) -> Callable[..., Any]:
    def run(grad: Any, x: Any, *settings: Any) -> Any:
        places = settings[-1]
        rows = math.prod(x.shape[:-n])
        flat = jnp.zeros((rows, math.prod(x.shape[-n:])), grad.dtype)
        at = places.reshape(rows, -1)
        flat = flat.at[jnp.arange(rows)[:, None], at].add(grad.reshape(rows, -1))
        return flat.reshape(x.shape)

    return run


def _avg_pool(n: int) -> Callable[..., Any]:
    def run(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Any:
        kernel = _each(kernel, n)
        stride = _each(stride, n) if len(stride) else kernel
        padding = _each(padding, n)
        sums, counts = x, []
        sizes = x.shape[-n:]
        lengths = _lengths(sizes, kernel, stride, padding, [1] * n, ceil)
        for i, (s, k, t, p, m) in enumerate(
            zip(sizes, kernel, stride, padding, lengths, strict=True)
        ):
            first = np.arange(m) * t - p
            matrix = (np.arange(s) >= first[:, None]) & (np.arange(s) < first[:, None] + k)
            sums = _apply(sums, x.ndim - n + i, matrix)
            within = np.minimum(first + k, s + p) - first
            counts.append(within if count_include_pad else matrix.sum(1))
        count = counts[0]
        for c in counts[1:]:
            count = count[..., None] * c
        return sums / jnp.asarray(divisor or count, x.dtype)

    return run


def _apply(x: Any, dim: int, matrix: Any) -> Any:
    """Multiply one dimension by a constant matrix [out, in]."""
    out = jnp.tensordot(x, jnp.asarray(matrix, x.dtype), ((dim,), (1,)))
    return jnp.moveaxis(out, -1, dim)


def _backward_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``(grad, x, *settings)`` to the gradient of `x`."""

    def run(grad: Any, x: Any, *settings: Any) -> Any:
        return jax.vjp(lambda x: forward(x, *settings), x)[1](grad)[0]

    return run


def _adaptive_avg_pool(n: int) -> Callable[..., Any]:
    def run(x: Any, size: Sequence[int]) -> Any:
        for i, m in enumerate(size):
            s = x.shape[x.ndim - n + i]
            matrix = np.zeros((m, s))
            for o in range(m):
                first, last = o * s // m, -(-(o + 1) * s // m)
                matrix[o, first:last] = 1 / (last - first)
            x = _apply(x, x.ndim - n + i, matrix)
        return x

    return run


# Resampling ------------------------------------------------------------------------------


def _cubic(t: Any) -> Any:
    """Keys' kernel with a = -0.75, for distances -2..2."""
    a, t = -0.75, np.abs(t)
    near = (a + 2) * t**3 - (a + 3) * t**2 + 1
    far = a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def _resampling(kind: str, s: int, m: int, aligned: bool, scale: float | None) -> Any:
    """The matrix [m, s] by which a dimension of size `s` becomes one of size `m`."""
    out = np.arange(m)
    ratio = 1 / scale if scale else s / m
    if kind == "nearest":
        at = np.floor(out * np.float32(ratio)).astype(int).clip(0, s - 1)
        return np.eye(s)[at]
    if kind == "exact":
        at = np.floor((out + 0.5) * np.float32(ratio)).astype(int).clip(0, s - 1)
        return np.eye(s)[at]
    if aligned:
        source = out * ((s - 1) / (m - 1) if m > 1 else 0.0)
    else:
        source = (out + 0.5) * ratio - 0.5
    source = source if kind == "cubic" else source.clip(0, None)
    low = np.floor(source).astype(int)
    matrix = np.zeros((m, s))
    for step in range(-1, 3) if kind == "cubic" else range(2):
        distance = source - (low + step)
        weight = _cubic(distance) if kind == "cubic" else 1 - np.abs(distance)
        np.add.at(matrix, (out, (low + step).clip(0, s - 1)), weight)
    return matrix


def _upsample(kind: str, n: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of an ``upsample_*`` operation over `n` dimensions."""

    def forward(x: Any, size: Sequence[int], *settings: Any) -> Any:
        aligned = kind in ("linear", "cubic") and bool(settings[0])
        scales = settings[1:] if kind in ("linear", "cubic") else settings
        for i, (m, scale) in enumerate(itertools.zip_longest(size, scales)):
            s = x.shape[x.ndim - n + i]
            x = _apply(x, x.ndim - n + i, _resampling(kind, s, m, aligned, scale))
        return x

    def backward(grad: Any, size: Sequence[int], source: Sequence[int], *settings: Any) -> Any:
        zeros = jnp.zeros(tuple(source), grad.dtype)
        return jax.vjp(lambda x: forward(x, size, *settings), zeros)[1](grad)[0]

    return forward, backward


PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten._adaptive_avg_pool2d.default: _adaptive_avg_pool(2),
    aten._adaptive_avg_pool2d_backward.default: lambda grad, x: _backward_of(_adaptive_avg_pool(2))(
        grad, x, grad.shape[-2:]
    ),
    aten._adaptive_avg_pool3d.default: _adaptive_avg_pool(3),
    aten._adaptive_avg_pool3d_backward.default: lambda grad, x: _backward_of(_adaptive_avg_pool(3))(
        grad, x, grad.shape[-3:]
    ),
    aten.addmm.default: _scaled,
    aten.addmv.default: _scaled,
    aten.avg_pool1d.default: _avg_pool(1),
    aten.avg_pool2d.default: _avg_pool(2),
    aten.avg_pool2d_backward.default: _backward_of(_avg_pool(2)),
    aten.avg_pool3d.default: _avg_pool(3),
    aten.avg_pool3d_backward.default: _backward_of(_avg_pool(3)),
    aten.baddbmm.default: _scaled,
    aten.bmm.default: _matmul,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.dot.default: _matmul,
    aten.max_pool2d_with_indices.default: _max_pool(2),
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices.default: _max_pool(3),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.mm.default: _matmul,
    aten.mv.default: _matmul,
}
"""Their results have the dtype of their operands."""

for _kind, _word, _dims in (
    ("nearest", "nearest1d", 1),
    ("nearest", "nearest2d", 2),
    ("nearest", "nearest3d", 3),
    ("linear", "linear1d", 1),
    ("linear", "bilinear2d", 2),
    ("linear", "trilinear3d", 3),
    ("cubic", "bicubic2d", 2),
):
    _forward, _backward = _upsample(_kind, _dims)
    PRODUCTS[getattr(aten, f"upsample_{_word}").default] = _forward
    PRODUCTS[getattr(aten, f"upsample_{_word}_backward").default] = _backward
for _dims in (1, 2, 3):
    _forward, _backward = _upsample("exact", _dims)
    PRODUCTS[getattr(aten, f"_upsample_nearest_exact{_dims}d").default] = _forward
    PRODUCTS[getattr(aten, f"_upsample_nearest_exact{_dims}d_backward").default] = _backward
