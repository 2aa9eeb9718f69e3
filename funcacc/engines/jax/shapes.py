"""ATen operations that make, cut, arrange and look up, in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

aten = torch.ops.aten


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[_along(x, dim, slice(start, end, step))]


def _along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """The index that takes `index` along one dimension and everything of the others."""
    return (*(slice(None),) * (dim % x.ndim), index)


def _slice_scatter(
    x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[_along(x, dim, slice(start, end, step))].set(src)


def _squeeze(x: Any, dims: Any = None) -> Any:
    dims = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % x.ndim for d in dims if x.ndim}
    return x.reshape([s for d, s in enumerate(x.shape) if d not in gone or s != 1])


def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Any:
    own = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [a if s == -1 else s for s, a in zip(size, own, strict=True)])


def _repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, tuple(repeats))


def _split(x: Any, size: int, dim: int = 0) -> list[Any]:
    return jnp.split(x, range(size, x.shape[dim], size), axis=dim)


def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=dim)


def _pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    pairs = [(0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        pairs[-1 - i] = (pad[2 * i], pad[2 * i + 1])
    # Negative padding cuts.
    cut = tuple(slice(max(-a, 0), s - max(-b, 0)) for (a, b), s in zip(pairs, x.shape, strict=True))
    positive = [(max(a, 0), max(b, 0)) for a, b in pairs]
    return jnp.pad(x[cut], positive, constant_values=value or 0)


def _strided(shape: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    """Positions of a strided view in the row-major memory behind it."""
    index = np.full(tuple(shape), offset or 0)
    for d, (n, s) in enumerate(zip(shape, stride, strict=True)):
        index = index + s * np.arange(n).reshape([-1] + [1] * (len(shape) - d - 1))
    return index


def _as_strided(x: Any, size: Any, stride: Any, offset: int | None = None) -> Any:
    return x.reshape(-1)[_strided(size, stride, offset)]


def _as_strided_scatter(x: Any, src: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    flat = x.reshape(-1).at[_strided(size, stride, offset)].set(src)
    return flat.reshape(x.shape)


def _diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    places = jnp.arange(math.prod(x.shape)).reshape(x.shape)
    chosen = jnp.diagonal(places, offset, dim1, dim2)
    return x.reshape(-1).at[chosen].set(src).reshape(x.shape)


def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    taken = x[_along(x, dim, starts[:, None] + np.arange(size))]
    return jnp.moveaxis(taken, dim % x.ndim + 1, -1)


def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[tuple(slice(None) if i is None else i for i in indices)]


def _added(x: Any, places: Any, values: Any) -> Any:
    """`x` with values added at places, where half precision would stop short."""
    if x.dtype.itemsize > 2 or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.at[places].add(values)
    return x.astype(jnp.float32).at[places].add(values.astype(jnp.float32)).astype(x.dtype)


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    places = tuple(slice(None) if i is None else i for i in indices)
    return _added(x, places, values) if accumulate else x.at[places].set(values)


def _index_select(x: Any, dim: int, index: Any) -> Any:
    return x if x.ndim == 0 else x[_along(x, dim, index.reshape(-1))]


def _index_add(x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    return _added(x, _along(x, dim, index), source if alpha == 1 else source * alpha)


def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_along(x, dim, index)].set(source)


def _index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    return x.at[_along(x, dim, index)].set(value)


def _places(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """The index of gather and scatter: along `dim` as said, elsewhere its own position."""
    grid = [
        jnp.arange(n).reshape([-1] + [1] * (index.ndim - d - 1)) for d, n in enumerate(index.shape)
    ]
    grid[dim % x.ndim] = index
    return tuple(grid)


def _part(src: Any, index: Any) -> Any:
    return src[tuple(slice(n) for n in index.shape)]


def _gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape)
    return x[_places(x, dim, index)]


def _scatter(x: Any, dim: int, index: Any, src: Any) -> Any:
    if x.ndim == 0:
        return jnp.broadcast_to(jnp.asarray(src, x.dtype).reshape(-1)[:1].reshape(()), x.shape)
    src = _part(src, index) if jnp.ndim(src) else src
    return x.at[_places(x, dim, index)].set(src)


def _scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    if x.ndim == 0:
        return x + src.reshape(())
    return _added(x, _places(x, dim, index), _part(src, index))


def _scatter_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True
) -> Any:
    if x.ndim == 0:
        return _scatter_reduce(
            x.reshape(1), 0, index.reshape(1), src.reshape(1), reduce, include_self=include_self
        ).reshape(())
    places, src = _places(x, dim, index), _part(src, index)
    how = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    base = x
    if not include_self:
        if reduce in ("amax", "amin"):
            base = x.at[places].set(src)
        else:
            base = x.at[places].set(jnp.asarray(reduce == "prod", x.dtype))
    out = getattr(base.at[places], how)(src)
    if reduce == "mean":
        ones = jnp.ones(src.shape, x.dtype)
        count = jnp.full(x.shape, int(include_self), x.dtype).at[places].add(ones)
        out = jnp.where(count > 0, out / jnp.maximum(count, 1), out)
    return out


def _embedding(
    weight: Any, index: Any, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    return weight[index]


def _embedding_backward(grad: Any, index: Any, rows: int, padding: int, by_frequency: bool) -> Any:
    index, grad = index.reshape(-1), grad.reshape(-1, grad.shape[-1])
    grad = jnp.where((index == padding)[:, None], 0, grad)
    if by_frequency:
        count = jnp.zeros(rows, grad.dtype).at[index].add(1)
        grad = grad / count[index][:, None]
    return _added(jnp.zeros((rows, grad.shape[-1]), grad.dtype), index, grad)


def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    mask = jnp.broadcast_to(mask, x.shape).reshape(-1)
    order = jnp.cumsum(mask) - 1
    return jnp.where(mask, source.reshape(-1)[order], x.reshape(-1)).reshape(x.shape)


def _triangle(keep: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, diagonal=0: keep(x, diagonal)


SHAPES: dict[Any, Callable[..., Any]] = {
    aten._unsafe_index.Tensor: _index,
    aten._unsafe_index_put.default: _index_put,
    aten._unsafe_view.default: lambda x, size: x.reshape(size),
    aten.alias.default: lambda x: x,
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.cat.default: lambda xs, dim=0: jnp.concatenate(
        [x for x in xs if x.shape != (0,)] or xs, dim
    ),
    aten.clone.default: lambda x: x,
    aten.constant_pad_nd.default: _pad,
    aten.detach.default: lambda x: x,
    aten.diagonal.default: jnp.diagonal,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.expand.default: _expand,
    aten.flip.default: lambda x, dims: jnp.flip(x, tuple(dims)),
    aten.gather.default: _gather,
    aten.index.Tensor: _index,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_put.default: _index_put,
    aten.index_select.default: _index_select,
    aten.lift_fresh.default: lambda x: x,
    aten.lift_fresh_copy.default: lambda x: x,
    aten.masked_scatter.default: _masked_scatter,
    aten.permute.default: lambda x, dims: jnp.transpose(x, dims) if x.ndim else x,
    aten.repeat.default: _repeat,
    aten.roll.default: lambda x, shifts, dims=(): (
        jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])
    ),
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.select.int: lambda x, dim, index: x[_along(x, dim, index)],
    aten.select_scatter.default: lambda x, src, dim, index: x.at[_along(x, dim, index)].set(src),
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.t.default: lambda x: x.T,
    aten.transpose.int: jnp.swapaxes,
    aten.tril.default: _triangle(jnp.tril),
    aten.triu.default: _triangle(jnp.triu),
    aten.unfold.default: _unfold,
    aten.unsqueeze.default: lambda x, dim: jnp.expand_dims(x, dim),
    aten.view.default: lambda x, size: x.reshape(size),
}
"""Their results have the dtype of their operand."""

MAKING: dict[Any, Callable[..., Any]] = {
    aten.arange.start_step: lambda like, *args: jnp.arange(*args, dtype=like.dtype),
    aten.empty.memory_format: lambda like, *args: jnp.zeros(like.shape, like.dtype),
    aten.empty_like.default: lambda like, *args: jnp.zeros(like.shape, like.dtype),
    aten.empty_permuted.default: lambda like, *args: jnp.zeros(like.shape, like.dtype),
    aten.empty_strided.default: lambda like, *args: jnp.zeros(like.shape, like.dtype),
    aten.eye.default: lambda like, *args: jnp.eye(*like.shape, dtype=like.dtype),
    aten.eye.m: lambda like, *args: jnp.eye(*like.shape, dtype=like.dtype),
    aten.fill.Scalar: lambda like, x, value: jnp.full(like.shape, value, like.dtype),
    aten.full.default: lambda like, size, value: jnp.full(like.shape, value, like.dtype),
    aten.full_like.default: lambda like, x, value: jnp.full(like.shape, value, like.dtype),
    aten.scalar_tensor.default: lambda like, value: jnp.full(like.shape, value, like.dtype),
}
"""Given the shape and dtype of the result, then their own arguments."""
