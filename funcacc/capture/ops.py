"""Operations of a graph that ATen lacks: calls, loops, random bits, dynamic indexing.

They are registered as ordinary functional torch operators, so tracing, fake tensors and
functionalisation treat them like any other. The kernels here are their meaning: the
eager engine runs them, another engine lowers them natively.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcacc import rng
from funcacc.capture import graph as graphs

_library = torch.library.Library("funcacc", "DEF")


def _define(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"funcacc::{name}", fake, lib=_library)
    return getattr(torch.ops.funcacc, name).default


def _run_call(serial: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    return _fresh(graphs.find(serial)(*inputs), inputs)


def _fresh(values: list[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """`values`, with copies of those that were passed through: the schemas promise that."""
    same = {id(t) for t in given}
    return [v.clone() if id(v) in same else v for v in values]


def _run_loop(
    cond: int, body: int, carry: Sequence[Tensor], consts: Sequence[Tensor]
) -> list[Tensor]:
    cond_graph, body_graph = graphs.find(cond), graphs.find(body)
    values = list(carry)
    while bool(cond_graph(*values, *consts)[0]):
        values = body_graph(*values, *consts)
    return _fresh(values, [*carry, *consts])


def _run_put(xs: Tensor, index: Tensor, x: Tensor, dim: int = 0) -> Tensor:
    return xs.index_copy(dim, index.view(1).to(torch.int64), x.unsqueeze(dim))


def _run_scatter_rows(xs: Tensor, indices: Tensor, count: int) -> Tensor:
    out = xs.new_zeros(xs.shape[0], count, xs.shape[2])
    groups = torch.arange(len(xs), device=xs.device).unsqueeze(1).expand_as(indices)
    return out.index_put_([groups, indices], xs, accumulate=True)


call = _define(
    "call(int graph, Tensor[] inputs) -> Tensor[]",
    _run_call,
    lambda serial, inputs: graphs.fake_outputs(graphs.find(serial)),
)
"""Run another graph."""

loop = _define(
    "loop(int cond, int body, Tensor[] carry, Tensor[] consts) -> Tensor[]",
    _run_loop,
    lambda cond, body, carry, consts: [torch.empty_like(c) for c in carry],
)
"""``while cond(*carry, *consts): carry = body(*carry, *consts)``; returns the carry."""

random_bits = _define(
    "random_bits(Tensor key, int stream, SymInt[] shape) -> Tensor",
    rng.random_bits,
    lambda key, stream, shape: key.new_empty(shape, dtype=torch.int32),
)
"""`funcacc.rng.random_bits`."""

fold_in = _define(
    "fold_in(Tensor key, Tensor data) -> Tensor",
    rng.fold_in,
    lambda key, data: torch.empty_like(key),
)
"""`funcacc.rng.fold_in`."""

take = _define(
    "take(Tensor xs, Tensor index) -> Tensor",
    lambda xs, index: xs.index_select(0, index.view(1)).squeeze(0),
    lambda xs, index: xs.new_empty(xs.shape[1:]),
)
"""``xs[index]`` for an integer tensor `index`, without a host read."""

put = _define(
    "put(Tensor xs, Tensor index, Tensor x, int dim=0) -> Tensor",
    _run_put,
    lambda xs, index, x, dim=0: torch.empty_like(xs),
)
"""A copy of `xs` with ``xs[index] = x``, or with `x` at `index` along another dimension."""

scatter_rows = _define(
    "scatter_rows(Tensor xs, Tensor indices, int count) -> Tensor",
    _run_scatter_rows,
    lambda xs, indices, count: xs.new_empty(xs.shape[0], count, xs.shape[2]),
)
"""Zeros ``[groups, count, d]`` with the rows of `xs` ``[groups, n, d]`` added at `indices`
``[groups, n]``, within each group."""

remat = _define(
    "remat(Tensor x, Tensor after) -> Tensor",
    lambda x, after: x.clone(),
    lambda x, after: torch.empty_like(x),
)
"""`x`, but not before `after` is there, and never taken for the same value as `x`."""

hold = _define(
    "hold(Tensor[] xs) -> Tensor[]",
    lambda xs: [x.clone() for x in xs],
    lambda xs: [torch.empty_like(x) for x in xs],
)
"""`xs`, none of which is used before all of them are there."""

pin = _define(
    "pin(Tensor x, str placement) -> Tensor",
    lambda x, placement: x.clone(),
    lambda x, placement: torch.empty_like(x),
)
"""`x`, lying over a mesh as a `funcacc.placement.Placement` says, where there is one; or as an
engine's own text says, which user code named."""
