"""XLA forms of the operations that `funcacc.capture.ops` adds to ATen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch_xla.core.xla_builder as xb

from funcacc import rng

U32, S32 = xb.Type.U32, xb.Type.S32


def shape_of(shape: Sequence[int], dtype: Any) -> Any:
    """An XLA shape of a torch dtype."""
    return xb.Shape.create(xb.Op.from_torch_type(dtype), tuple(shape))


def build(name: str, shapes: Sequence[Any], fn: Callable[..., Sequence[Any]]) -> Any:
    """A computation with one parameter a shape, whose root is always a tuple."""
    builder = xb.create_builder(name)
    params = [xb.mkparam(builder, i, s) for i, s in enumerate(shapes)]
    return xb.Op.tuple(list(fn(builder, *params)), builder=builder).build(name)


def build_root(name: str, shapes: Sequence[Any], fn: Callable[..., Any]) -> Any:
    """A computation with one parameter a shape, whose root is what `fn` gives."""
    builder = xb.create_builder(name)
    return fn(builder, *(xb.mkparam(builder, i, s) for i, s in enumerate(shapes))).build(name)


def _u32(builder: Any, value: int) -> Any:
    # Constants are made from signed numbers; the bits are what counts.
    signed = value - (1 << 32) if value >> 31 else value
    return xb.Op.scalar(builder, signed, dtype=S32).bitcast(U32)


def _rotate(x: Any, r: int, builder: Any) -> Any:
    # The builder has no right shift; XLA turns this division of unsigned words into one.
    left, right = _u32(builder, r), _u32(builder, 1 << (32 - r))
    sizes = x.shape().sizes
    if sizes:
        left, right = left.broadcast(sizes), right.broadcast(sizes)
    return (x << left) | (x / right)


def _threefry(builder: Any, k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """`rng.threefry2x32` on unsigned words."""
    sizes = x0.shape().sizes
    keys = [k0, k1, k0 ^ k1 ^ _u32(builder, rng.PARITY)]
    keys = [k.broadcast(sizes) if sizes else k for k in keys]
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for r in rng.ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = _rotate(x1, r, builder) ^ x0
        step = _u32(builder, group + 1)
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + (step.broadcast(sizes) if sizes else step)
    return x0, x1


def _key_words(key: Any) -> tuple[Any, Any]:
    words = key.bitcast(U32)
    return tuple(words.slice([i], [i + 1]).reshape([]) for i in range(2))


@functools.cache
def fold_in(dtype: Any) -> Any:
    """The computation of `rng.fold_in` for data of a torch integer dtype."""

    def fn(builder: Any, key: Any, data: Any) -> list[Any]:
        low = data.cast(U32) if dtype.itemsize != 4 else data.bitcast(U32)
        words = _threefry(builder, *_key_words(key), _u32(builder, 0), low)
        return [xb.Op.concat_in_dim([w.reshape([1]) for w in words], 0).bitcast(S32)]

    shapes = [xb.Shape.create(S32, (2,)), shape_of((), dtype)]
    return build("fold_in", shapes, fn)


@functools.cache
def random_bits(stream: int, sizes: tuple[int, ...]) -> Any:
    """The computation of `rng.random_bits`."""
    count = 1
    for s in sizes:
        count *= s

    def fn(builder: Any, key: Any) -> list[Any]:
        sub = _threefry(builder, *_key_words(key), _u32(builder, 0), _u32(builder, stream))
        low = xb.Op.iota(builder, xb.Shape.create(U32, (count,)), 0)
        high = _u32(builder, 0).broadcast([count])
        a, b = _threefry(builder, *sub, high, low)
        return [(a ^ b).bitcast(S32).reshape(list(sizes))]

    return build("random_bits", [xb.Shape.create(S32, (2,))], fn)


@functools.cache
def scatter_rows(sizes: tuple[int, ...], dtype: Any, index_dtype: Any, count: int) -> Any:
    """The computation of `ops.scatter_rows`.

    The group is an iota among the indices: by that the partitioner sees that groups don't mix.
    """
    groups, n, d = sizes
    scalar = shape_of((), dtype)
    total = build_root("add", [scalar, scalar], lambda builder, a, b: a + b)

    def fn(builder: Any, xs: Any, indices: Any) -> list[Any]:
        kind = xb.Op.from_torch_type(index_dtype)
        group = xb.Op.iota(builder, xb.Shape.create(kind, (groups, n, 1)), 0)
        pairs = xb.Op.concat_in_dim([group, indices.reshape([groups, n, 1])], 2)
        zeros = xs.slice([0, 0, 0], [1, 1, 1]).reshape([]).zeros_like()
        out = zeros.broadcast([groups, count, d])
        return [out.scatter(pairs, xs, total, [2], [0, 1], [0, 1], 2)]

    return build("scatter_rows", [shape_of(sizes, dtype), shape_of((groups, n), index_dtype)], fn)


def _start(index: Any, rank: int) -> list[Any]:
    index = index.cast(S32)
    return [index] + [index.zeros_like()] * (rank - 1)


@functools.cache
def take(sizes: tuple[int, ...], dtype: Any, index_dtype: Any) -> Any:
    """The computation of ``xs[index]``."""

    def fn(builder: Any, xs: Any, index: Any) -> list[Any]:
        row = xs.dynamic_slice(_start(index, len(sizes)), [1, *sizes[1:]])
        return [row.reshape(list(sizes[1:]))]

    return build("take", [shape_of(sizes, dtype), shape_of((), index_dtype)], fn)


@functools.cache
def put(sizes: tuple[int, ...], dtype: Any, index_dtype: Any, dim: int) -> Any:
    """The computation of ``xs`` with one row along a dimension replaced."""
    rest = (*sizes[:dim], *sizes[dim + 1 :])

    def fn(builder: Any, xs: Any, index: Any, x: Any) -> list[Any]:
        row = x.reshape([*sizes[:dim], 1, *sizes[dim + 1 :]])
        first, *others = _start(index, len(sizes))
        return [xs.dynamic_update_slice(row, [*others[:dim], first, *others[dim:]])]

    shapes = [shape_of(sizes, dtype), shape_of((), index_dtype), shape_of(rest, dtype)]
    return build("put", shapes, fn)


@functools.cache
def remat(sizes: tuple[int, ...], dtype: Any, after_sizes: tuple[int, ...], after: Any) -> Any:
    """The computation of `ops.remat`: ``x`` unless something that never happens, happens.

    An optimisation barrier isn't enough: XLA:CPU drops it before it merges equal operations.
    Nor is ``x + 0 * after``: for integers it is folded, and for floats an infinity spreads.
    """

    def fn(builder: Any, x: Any, last: Any) -> list[Any]:
        one = last.slice([0] * len(after_sizes), [1] * len(after_sizes), [1] * len(after_sizes))
        one = one.reshape([]).cast(xb.Type.F32)
        never = one > xb.Op.scalar(builder, float("inf"), dtype=xb.Type.F32)
        return [never.mkconditional([x], lambda x: x.zeros_like(), lambda x: x)]

    return build("remat", [shape_of(sizes, dtype), shape_of(after_sizes, after)], fn)


def while_loop(cond: Any, body: Any, carry: Sequence[Any], consts: Sequence[Any]) -> Any:
    """A computation of (carry, consts) that loops and returns the carry."""
    n = len(carry)

    def run_body(*values: Any) -> tuple[Any, ...]:
        out = xb.Op.call(body, list(values))
        return (*(out.get_tuple_element(i) for i in range(n)), *values[n:])

    def run_cond(*values: Any) -> Any:
        return xb.Op.call(cond, list(values)).get_tuple_element(0)

    def fn(builder: Any, *values: Any) -> list[Any]:
        out = xb.Op.mkwhile(list(values), run_cond, run_body)
        return [out.get_tuple_element(i) for i in range(n)]

    return build("microbatches", [*carry, *consts], fn)
