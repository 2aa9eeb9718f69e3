"""`Graph` to a function of JAX arrays, to be traced by `jax.jit`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor, fx

from funcacc.capture import ops
from funcacc.capture.graph import Graph, find
from funcacc.engines.jax.elementwise import ARITHMETIC, COMPARING
from funcacc.engines.jax.products import PRODUCTS
from funcacc.engines.jax.reductions import ORDERING, SUMMING
from funcacc.engines.jax.shapes import MAKING, SHAPES
from funcacc.errors import EngineError

aten = torch.ops.aten

DTYPES: dict[torch.dtype, Any] = {
    getattr(torch, name): jnp.dtype(getattr(jnp, name))
    for name in (
        "bfloat16 float16 float32 float64 complex64 complex128 "
        "uint8 uint16 uint32 uint64 int8 int16 int32 int64"
    ).split()
}
DTYPES[torch.bool] = jnp.dtype(bool)
_TORCH_ONLY = ("dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking")


def check_operations(graph: Graph) -> None:
    """Refuse operations that the table lacks, before anything was lowered.

    Raises:
        EngineError: naming each of them.
    """
    missing = sorted({str(n.target) for n in graph.nodes if not has(n.target)})
    if missing:
        raise EngineError(
            f"the jax engine has no form of {', '.join(missing)}; write the model without "
            'them, or let engine="eager" run it'
        )
    for part in graph.parts:
        check_operations(part)


def has(target: Any) -> bool:
    """Whether an operation can be lowered."""
    return target in _TABLE


def lowered(graph: Graph) -> Callable[..., list[Any]]:
    """The function of arrays, one for each input, that gives a list of arrays."""

    def run(*arrays: Any) -> list[Any]:
        out = _interpret(graph, arrays)
        given = {id(a) for a in arrays}
        # An output that is an input as it stands would share its buffer.
        return [jnp.array(x, copy=True) if id(x) in given else x for x in out]

    return run


def _interpret(graph: Graph, arrays: Sequence[Any]) -> list[Any]:
    env: dict[fx.Node, Any] = dict(zip(graph.placeholders, arrays, strict=True))
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        kwargs = {k: v for k, v in kwargs.items() if k not in _TORCH_ONLY}
        env[node] = _TABLE[node.target](node.meta.get("val"), *args, **kwargs)
    return [env[n] for n in graph.results]


# How results get the dtypes that PyTorch gives them ----------------------------------------


def _typed(like: Any, value: Any) -> Any:
    """`value` in the dtypes of what was traced."""
    if isinstance(like, (tuple, list)):
        return [_typed(a, v) if isinstance(a, Tensor) else v for a, v in zip(like, value)]  # noqa: B905
    if not isinstance(like, Tensor):
        return value
    return jnp.asarray(value).astype(DTYPES[like.dtype])


def _cast(value: Any, dtype: Any) -> Any:
    return value.astype(dtype) if hasattr(value, "astype") else value


def _arithmetic(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(like: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = DTYPES[like.dtype]
        args = tuple(_cast(a, dtype) for a in args)
        # Two numbers and a tensor on the right: something must have the dtype.
        return _typed(like, fn(*args, **kwargs))

    return run


def _summing(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(like: Any, *args: Any, **kwargs: Any) -> Any:
        first = like if isinstance(like, Tensor) else like[0]
        dtype = DTYPES[first.dtype]
        if dtype.itemsize == 2:
            dtype = jnp.dtype(jnp.float32)
        args = tuple(_cast(a, dtype) for a in args)
        return _typed(like, fn(*args, **kwargs))

    return run


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda like, *args, **kwargs: _typed(like, fn(*args, **kwargs))


def _making(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(like: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(jax.ShapeDtypeStruct(tuple(like.shape), DTYPES[like.dtype]), *args, **kwargs)

    return run


def _bits(like: Any, x: Any, dtype: torch.dtype) -> Any:
    wanted = DTYPES[dtype]
    if x.dtype.itemsize < wanted.itemsize:
        x = x.reshape([*x.shape[:-1], -1, wanted.itemsize // x.dtype.itemsize])
    return lax.bitcast_convert_type(x, wanted).reshape(like.shape)


# Operations that `funcacc.capture.ops` adds to ATen ----------------------------------------


def _loop(
    like: Any, cond: int, body: int, carry: Sequence[Any], consts: Sequence[Any]
) -> list[Any]:
    go, step = find(cond), find(body)
    return lax.while_loop(
        lambda values: _interpret(go, [*values, *consts])[0],
        lambda values: _interpret(step, [*values, *consts]),
        list(carry),
    )


def _key(key: Any) -> Any:
    return jax.random.wrap_key_data(lax.bitcast_convert_type(key, jnp.uint32), impl="threefry2x32")


def _random_bits(like: Any, key: Any, stream: int, shape: Sequence[int]) -> Any:
    sub = jax.random.fold_in(_key(key), stream)
    with jax.threefry_partitionable(True):
        words = jax.random.bits(sub, tuple(shape), jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def _fold_in(like: Any, key: Any, data: Any) -> Any:
    words = jax.random.key_data(jax.random.fold_in(_key(key), data.astype(jnp.uint32)))
    return lax.bitcast_convert_type(words, jnp.int32)


def _take(like: Any, xs: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(xs, index, 0, keepdims=False)


def _put(like: Any, xs: Any, index: Any, x: Any, dim: int = 0) -> Any:
    return lax.dynamic_update_index_in_dim(xs, x, index, dim)


def _scatter_rows(like: Any, xs: Any, indices: Any, count: int) -> Any:
    zeros = jnp.zeros((xs.shape[0], count, xs.shape[2]), xs.dtype)
    return zeros.at[jnp.arange(len(xs))[:, None], indices].add(xs)


def _remat(like: Any, x: Any, after: Any) -> Any:
    """`x` unless something that never happens, happens.

    An optimisation barrier isn't enough: XLA:CPU drops it before it merges equal operations.
    """
    never = after.reshape(-1)[0].astype(jnp.float32) > jnp.inf
    return lax.cond(never, jnp.zeros_like, lambda x: x, x)


_TABLE: dict[Any, Callable[..., Any]] = {
    **{target: _arithmetic(fn) for target, fn in ARITHMETIC.items()},
    **{target: _summing(fn) for target, fn in SUMMING.items()},
    **{
        target: _plain(fn)
        for table in (COMPARING, SHAPES, ORDERING, PRODUCTS)
        for target, fn in table.items()
    },
    **{target: _making(fn) for target, fn in MAKING.items()},
    aten._to_copy.default: _typed,
    aten.view.dtype: _bits,
    operator.getitem: lambda like, values, i: values[i],
    ops.call: lambda like, serial, inputs: _interpret(find(serial), inputs),
    ops.loop: _loop,
    ops.take: _take,
    ops.put: _put,
    ops.scatter_rows: _scatter_rows,
    ops.pin: lambda like, x, placement: x,
    ops.hold: lambda like, xs: list(lax.optimization_barrier(tuple(xs))),
    ops.remat: _remat,
    ops.fold_in: _fold_in,
    ops.random_bits: _random_bits,
}
"""``fn(what was traced, *arrays and numbers)``."""
