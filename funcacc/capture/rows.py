"""Where groups of a batch's rows are in the values of a graph: which dimension goes with them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcacc.capture import ops
from funcacc.capture.graph import Graph, find

aten = torch.ops.aten


class Rows(NamedTuple):
    """The groups of rows within a dimension: its size is ``outer * groups * inner``.

    Attributes:
        dim: the dimension.
        outer: how many times the groups are gone through in it.
    """

    dim: int
    outer: int


def track(graph: Graph, start: Mapping[int, Rows], groups: int) -> dict[fx.Node, Rows]:
    """Follow groups of consecutive rows of a batch through a graph.

    A guess for operations that aren't known here: whoever relies on the answer must be right in
    any case, and only slower when it is wrong.

    Args:
        graph: with the graphs that it calls and loops over.
        start: where they are in inputs.
        groups: how many there are.

    Returns:
        Where they are in those values that have them in one place.
    """
    found = {graph.placeholders[i]: at for i, at in start.items()}
    several: dict[fx.Node, list[Rows | None]] = {}
    for node in graph.nodes:
        if node.target in (ops.call, ops.loop):
            several[node] = (_called if node.target is ops.call else _looped)(node, found, groups)
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        source: Any = node.args[0] if node.target is operator.getitem else node
        if source in several:
            at = several[source][node.args[1]]
        else:
            rule = _RULES.get(source.target, _same_place)
            at = rule(source, found, tuple(value.shape), groups)
        if at is not None and _fits(value.shape, at, groups):
            found[node] = at
    return found


def _within(
    graph: Graph, values: Sequence[fx.Node], places: Sequence[Rows | None], groups: int
) -> list[Rows | None]:
    """Where the groups are in the results of a graph that is given some values."""
    start = {i: at for i, at in enumerate(places) if at is not None}
    found = track(graph, start, groups)
    return [found.get(r) for r in graph.results]


def _called(node: fx.Node, found: Found, groups: int) -> list[Rows | None]:
    serial, inputs = _any(node.args)
    return _within(find(serial), inputs, [found.get(x) for x in inputs], groups)


def _looped(node: fx.Node, found: Found, groups: int) -> list[Rows | None]:
    """What the carry has before each trip, and so at the end: the same in all of them."""
    _, serial, carry, consts = _any(node.args)
    outside = [found.get(x) for x in consts]
    places = [found.get(x) for x in carry]
    given_up: set[int] = set()
    for _ in range(len(carry) + 2):
        after = _within(find(serial), [*carry, *consts], [*places, *outside], groups)
        agreed = list(places)
        for i, at in enumerate(after[: len(carry)]):
            if places[i] is None and at is not None and i not in given_up and is_zero(carry[i]):
                # A stack that is filled trip by trip.
                agreed[i] = at
            elif places[i] != at:
                agreed[i] = None
                given_up.add(i)
        if agreed == places:
            return places
        places = agreed
    return [None] * len(carry)


def is_zero(node: fx.Node) -> bool:
    """Whether a value is a constant of zeros."""
    if node.target in (aten.full.default, aten.full_like.default):
        return bool(node.args[1] == 0)
    return node.target in (aten.zeros.default, aten.zeros_like.default)


def _any(args: Any) -> Any:
    """Arguments whose types an operation's schema gives."""
    return args


def _fits(shape: Sequence[int], at: Rows, groups: int) -> bool:
    return 0 <= at.dim < len(shape) and shape[at.dim] % (at.outer * groups) == 0 < shape[at.dim]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


Found = dict[fx.Node, Rows]
Rule = Callable[[fx.Node, Found, tuple[int, ...], int], "Rows | None"]


def _same_place(node: fx.Node, found: Found, shape: tuple[int, ...], groups: int) -> Rows | None:
    """The dimension of the same size, counted from the last one, as in broadcasting."""
    for x in node.all_input_nodes:
        if x in found:
            dim = found[x].dim + len(shape) - len(_shape(x))
            if dim >= 0 and shape[dim] == _shape(x)[found[x].dim]:
                return found[x]._replace(dim=dim)
    return None


def _reshaped(node: fx.Node, found: Found, shape: tuple[int, ...], groups: int) -> Rows | None:
    """As many elements before the rows as there were."""
    x: Any = node.args[0]
    if x not in found:
        return None
    before = math.prod(_shape(x)[: found[x].dim]) * found[x].outer
    for dim in range(len(shape)):
        own = math.prod(shape[:dim])
        if own and before % own == 0 and _fits(shape, Rows(dim, before // own), groups):
            return Rows(dim, before // own)
    return None


def _moved(place: Callable[..., int | None]) -> Rule:
    """A rule for one operand whose dimension `d` becomes ``place(d, rank, *args)``."""

    def rule(node: fx.Node, found: Found, shape: tuple[int, ...], groups: int) -> Rows | None:
        x: Any = node.args[0]
        if x not in found:
            return None
        dim = place(found[x].dim, len(_shape(x)), *node.args[1:])
        return None if dim is None else found[x]._replace(dim=dim)

    return rule


def _transposed(d: int, rank: int, a: int = 0, b: int = 1) -> int:
    return {a % rank: b % rank, b % rank: a % rank}.get(d, d)


def _permuted(d: int, rank: int, dims: Sequence[int]) -> int:
    return [i % rank for i in dims].index(d)


def _selected(d: int, rank: int, dim: int, index: int) -> int | None:
    return None if d == dim % rank else d - (d > dim % rank)


def _reduced(d: int, rank: int, dims: Any = None, keepdim: bool = False, *rest: Any) -> int | None:
    gone = reduced_dims(dims, rank)
    if d in gone:
        return None
    return d if keepdim else d - sum(i < d for i in gone)


def reduced_dims(dims: Any, rank: int) -> set[int]:
    """The dimensions that a reduction goes over; all where none is named."""
    named = [dims] if isinstance(dims, int) else dims
    return {i % rank for i in named} if named else set(range(rank))


def _put(node: fx.Node, found: Found, shape: tuple[int, ...], groups: int) -> Rows | None:
    """A row that has them within it gives them to the stack."""
    xs, _, x = _any(node.args[:3])
    if xs in found:
        return found[xs]
    dim = node.args[3] if len(node.args) > 3 else 0
    return None if x not in found else found[x]._replace(dim=found[x].dim + (found[x].dim >= dim))


def _product(*operands: tuple[int, dict[int, int]]) -> Rule:
    """A rule for products: (position of an operand, where each of its dimensions goes)."""

    def rule(node: fx.Node, found: Found, shape: tuple[int, ...], groups: int) -> Rows | None:
        for position, places in operands:
            x: Any = node.args[position]
            if x in found and found[x].dim in places:
                return found[x]._replace(dim=places[found[x].dim])
        return None

    return rule


def _looked_up(node: fx.Node, found: Found, shape: tuple[int, ...], groups: int) -> Rows | None:
    """``weight[indices]``: the dimensions of the indices come first."""
    x: Any = node.args[1]
    x = x[0] if isinstance(x, (list, tuple)) else x
    return found.get(x)


def _joined(node: fx.Node, found: Found, shape: tuple[int, ...], groups: int) -> Rows | None:
    """Pieces with all groups in each, one after the other, have them several times."""
    pieces: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    at = next((found[x] for x in pieces if x in found), None)
    if at is None or at.dim != dim % len(shape):
        return at
    outer = sum(found[x].outer if found.get(x) else 0 for x in pieces)
    return at._replace(outer=outer) if all(x in found for x in pieces) else None


_RULES: dict[Any, Rule] = {
    aten.cat.default: _joined,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.permute.default: _moved(_permuted),
    aten.transpose.int: _moved(_transposed),
    aten.t.default: _moved(_transposed),
    aten.select.int: _moved(_selected),
    aten.mm.default: _product((0, {0: 0}), (1, {1: 1})),
    aten.addmm.default: _product((1, {0: 0}), (2, {1: 1})),
    aten.bmm.default: _product((0, {0: 0, 1: 1}), (1, {0: 0, 2: 2})),
    ops.take: _moved(lambda d, rank, index: d - 1 if d else None),
    ops.put: _put,
    aten.embedding.default: _looked_up,
    aten.index.Tensor: _looked_up,
}
_REDUCTIONS = (
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.any.dim,
    aten.all.dim,
    aten.logsumexp.default,
)
_RULES.update(dict.fromkeys(_REDUCTIONS, _moved(_reduced)))
