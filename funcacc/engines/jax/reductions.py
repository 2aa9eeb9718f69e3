"""ATen operations that reduce, scan and order along dimensions, in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

aten = torch.ops.aten


def _dims(x: Any, dim: Any) -> tuple[int, ...] | None:
    if dim is None or (not isinstance(dim, int) and not len(dim)) or x.ndim == 0:
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _over(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """``reduce(x, axis, keepdims)`` with the arguments of ATen; no dimensions are all."""

    def run(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return reduce(x, axis=_dims(x, dim), keepdims=keepdim)

    return run


def _var(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _var_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    axes = _dims(x, dim)
    mean = jnp.mean(x, axes, keepdims=True)
    count = x.size // max(mean.size, 1)
    square = jnp.sum(jnp.square(x - mean), axes, keepdims=keepdim)
    divisor = max(count - (1 if correction is None else correction), 0)
    return square / jnp.asarray(divisor, square.dtype), mean.reshape(square.shape)


def _norm(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    axes = _dims(x, dim)
    size = jnp.abs(x)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axes, keepdims=keepdim))
    if order == float("inf"):
        return jnp.max(size, axes, keepdims=keepdim)
    if order == float("-inf"):
        return jnp.min(size, axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum(size != 0, axes, keepdims=keepdim)
    return jnp.sum(size**order, axes, keepdims=keepdim) ** (1 / order)


def _extreme(values: Callable[..., Any], places: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        index = places(x, axis=dim, keepdims=True)
        found = jnp.take_along_axis(x, index, dim)
        return (found, index) if keepdim else (found.squeeze(dim), index.squeeze(dim))

    return run


def _place(find: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        return find(x, axis=dim if x.ndim else None, keepdims=keepdim)

    return run


def _scan(scan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim: scan(x, dim % x.ndim) if x.ndim else x


def _log_cumulated(x: Any, dim: int) -> Any:
    return lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x


def _sort(x: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


def _stable_sort(
    x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    return _sort(x, dim, descending)


def _top(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    if largest:
        values, index = lax.top_k(jnp.moveaxis(x, dim, -1), k)
        return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim)
    values, index = _sort(x, dim)
    first = (*(slice(None),) * (dim % x.ndim), slice(k))
    return values[first], index[first]


def _softmax(x: Any, dim: int, to_float: bool = False) -> Any:
    dim = dim if x.ndim else None
    e = jnp.exp(x - lax.stop_gradient(jnp.max(x, dim, keepdims=True)))
    return e / jnp.sum(e, dim, keepdims=True)


def _log_softmax(x: Any, dim: int, to_float: bool = False) -> Any:
    dim = dim if x.ndim else None
    shifted = x - jnp.max(x, dim, keepdims=True)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), dim, keepdims=True))


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    var, mean = _var_mean(x, dims, correction=0, keepdim=True)
    rstd = lax.rsqrt(var + eps)
    out = (x - mean) * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rstd


SUMMING: dict[Any, Callable[..., Any]] = {
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten.cumprod.default: _scan(jnp.cumprod),
    aten.cumsum.default: _scan(jnp.cumsum),
    aten.linalg_vector_norm.default: _norm,
    aten.logcumsumexp.default: _log_cumulated,
    aten.logsumexp.default: _over(jax.nn.logsumexp),
    aten.mean.default: _over(jnp.mean),
    aten.mean.dim: _over(jnp.mean),
    aten.native_layer_norm.default: _layer_norm,
    aten.prod.default: _over(jnp.prod),
    aten.prod.dim_int: _over(jnp.prod),
    aten.sum.default: _over(jnp.sum),
    aten.sum.dim_IntList: _over(jnp.sum),
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    # PyTorch writes `std` in terms of it.
    torch.ops.prims.var.default: lambda x, dims, correction=1: _var(x, dims, correction),
}
"""Those that sum, in the dtype of their result or wider: operands are cast first."""

ORDERING: dict[Any, Callable[..., Any]] = {
    aten.amax.default: _over(jnp.max),
    aten.amin.default: _over(jnp.min),
    aten.all.default: _over(jnp.all),
    aten.all.dim: _over(jnp.all),
    aten.all.dims: _over(jnp.all),
    aten.any.default: _over(jnp.any),
    aten.any.dim: _over(jnp.any),
    aten.any.dims: _over(jnp.any),
    aten.argmax.default: _place(jnp.argmax),
    aten.argmin.default: _place(jnp.argmin),
    aten.max.default: _over(jnp.max),
    aten.max.dim: _extreme(jnp.max, jnp.argmax),
    aten.min.default: _over(jnp.min),
    aten.min.dim: _extreme(jnp.min, jnp.argmin),
    aten.sort.default: _sort,
    aten.sort.stable: _stable_sort,
    aten.topk.default: _top,
}
"""Those that compare; places are counted in int64."""
