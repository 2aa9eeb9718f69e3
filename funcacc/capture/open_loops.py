"""Sums over rows that are collected in loops, left open until the loop is through.

The gradient of a stack of layers comes out of a loop, whose trips add to it or put a row into it.
`open_loops` lets such a loop collect the parts of the sums and adds them up once, after it: then
they are sums over rows like any other, and `open_sums` can leave them open for longer.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from funcacc.capture import ops
from funcacc.capture.graph import Graph, find
from funcacc.capture.open_sums import Opening
from funcacc.capture.rows import Rows, is_zero, track
from funcacc.types import TensorSpec

aten = torch.ops.aten


def open_loops(graph: Graph, start: Mapping[int, Rows], groups: int) -> Graph:
    """The same program, in which loops collect sums over rows in parts.

    Args:
        graph: of one microbatch, or the body of a loop.
        start: where groups of rows are in its inputs.
        groups: how many there are.
    """
    if not any(n.target in (ops.loop, ops.call) for n in graph.nodes):
        return graph
    graph = _inlined(graph)
    found = track(graph, start, groups)
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    parts = list(graph.parts)
    opened: dict[fx.Node, _Loop] = {}
    for node in graph.module.graph.nodes:
        if node.op == "output":
            continue
        source: Any = node.args[0] if node.target is operator.getitem else None
        if node.target is ops.loop:
            loop = _opened(node, found, groups)
            if loop is not None:
                opened[node] = loop
                parts += [loop.cond, loop.body]
                mapping[node] = loop.insert(new, node, mapping)
                continue
        if source in opened:
            mapping[node] = opened[source].result(new, node, mapping[source])
        else:
            mapping[node] = new.node_copy(node, lambda n: mapping[n])
    new.output([mapping[n] for n in graph.results])
    new.eliminate_dead_code()
    module = fx.GraphModule(graph.module, new)
    g = graph
    return Graph(module, g.inputs, g.outputs, g.names, g.captured, parts)


class _Loop:
    """A loop some slots of whose carry hold parts, along a leading dimension.

    Args:
        cond: the condition; looks at no such slot.
        body: the body.
        slots: which slots.
        groups: how many parts.
    """

    def __init__(self, cond: Graph, body: Graph, slots: set[int], groups: int) -> None:
        self.cond = cond
        self.body = body
        self.slots = slots
        self.groups = groups

    def insert(self, new: fx.Graph, node: fx.Node, mapping: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Put the loop into a graph, in the place of an old one."""
        _, _, carry, consts = _any(node.args)
        values = [mapping[x] for x in carry]
        for i in self.slots:
            spec = self.body.inputs[i]
            zeros = new.call_function(
                aten.full.default,
                (list(spec.shape), 0),
                {"dtype": spec.dtype, "device": torch.device("cpu")},
            )
            values[i] = _typed(zeros, spec)
        args = (self.cond.serial, self.body.serial, values, [mapping[x] for x in consts])
        return new.call_function(ops.loop, args)

    def result(self, new: fx.Graph, node: fx.Node, loop: fx.Node) -> fx.Node:
        """What the old loop gave here: added up, where there are parts."""
        i = _any(node.args[1])
        found = new.call_function(operator.getitem, (loop, i))
        if i not in self.slots:
            found.meta = dict(node.meta)
            return found
        _typed(found, self.body.inputs[i])
        total = new.call_function(aten.sum.dim_IntList, (found, [0]))
        return _typed(total, TensorSpec.of(node.meta["val"]))


def _opened(node: fx.Node, found: Mapping[fx.Node, Rows], groups: int) -> _Loop | None:
    """The loop with parts in all slots that can have them, or None where none can."""
    cond, serial, carry, consts = _any(node.args)
    given = [*carry, *consts]
    places = _places(node, found, groups)
    start = {i: at for i, at in enumerate(places) if at is not None}
    assert len(given) == len(places)
    body = _copy(open_loops(find(serial), start, groups))
    opening = Opening(body, start, groups)
    test = find(cond)
    updates: dict[int, tuple[fx.Node, fx.Node]] = {}
    for i, init in enumerate(carry):
        update = body.results[i]
        added = _added(update, body.placeholders[i])
        usable = added is not None and not test.placeholders[i].users and is_zero(init)
        if usable and added is not None and opening.openable(added):
            updates[i] = update, added
    if not updates:
        return None
    specs = list(body.inputs)
    for i in updates:
        specs[i] = TensorSpec((groups, *specs[i].shape), specs[i].dtype)
    new = _updating(opening, updates, specs)
    test = Graph(test.module, specs, test.outputs, test.names, [], test.parts)
    return _Loop(test, new, set(updates), groups)


def _places(node: fx.Node, found: Mapping[fx.Node, Rows], groups: int) -> list[Rows | None]:
    """Where groups of rows are in the inputs of a loop's body, for all trips."""
    _, _, carry, consts = _any(node.args)
    ends: list[Rows | None] = [None] * len(carry)
    for user in node.users:
        ends[_any(user.args[1])] = found.get(user)
    known = [at if at is not None else found.get(x) for at, x in zip(ends, carry, strict=True)]
    return [*known, *(found.get(x) for x in consts)]


def _added(update: fx.Node, slot: fx.Node) -> fx.Node | None:
    """What a trip adds to a slot or puts into it, if it does nothing else with it."""
    if set(slot.users) != {update} or not slot.meta["val"].is_floating_point():
        return None
    if update.target is aten.add.Tensor and not update.kwargs:
        others = [x for x in update.args if x is not slot]
        return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None
    if update.target is ops.put and update.args[0] is slot and len(update.args) == 3:
        return _any(update.args[2])
    return None


def _updating(
    opening: Opening,
    updates: Mapping[int, tuple[fx.Node, fx.Node]],
    specs: Sequence[TensorSpec],
) -> Graph:
    """The body that adds parts to parts, or puts them where the sum was put."""
    body = opening.graph
    count = len(body.results)
    places = [update.args[1] for update, _ in updates.values() if update.target is ops.put]
    # Results for a while, so that they survive.
    _end(body).args = ([*body.results, *places],)
    body.outputs += [TensorSpec.of(_any(p).meta["val"]) for p in places]
    inner = opening.build({i: added for i, (_, added) in updates.items()})
    graph, slots = inner.module.graph, inner.placeholders
    results, kept = inner.results[:count], iter(inner.results[count:])
    for i, (update, _) in updates.items():
        _typed(slots[i], specs[i])
        with graph.inserting_before(_end(inner)):
            args: tuple[Any, ...] = (slots[i], results[i])
            if update.target is ops.put:
                args = (slots[i], next(kept), results[i], 1)
            results[i] = _typed(graph.call_function(update.target, args), specs[i])
    _end(inner).args = (results,)
    inner.module.recompile()
    return Graph(inner.module, list(specs), list(specs[:count]), inner.names, [], inner.parts)


def _end(graph: Graph) -> fx.Node:
    return next(iter(reversed(graph.module.graph.nodes)))


def _copy(graph: Graph) -> Graph:
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    new.graph_copy(graph.module.graph, mapping)
    new.output([mapping[n] for n in graph.results])
    module = fx.GraphModule(graph.module, new)
    g = graph
    return Graph(module, g.inputs, list(g.outputs), g.names, g.captured, g.parts)


def _inlined(graph: Graph) -> Graph:
    """The same program without calls of other graphs."""
    if not any(n.target is ops.call for n in graph.nodes):
        return graph
    new = fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    parts = list(graph.parts)
    for node in graph.module.graph.nodes:
        if node.op == "output":
            continue
        if node.target is ops.call:
            serial, inputs = _any(node.args)
            called = _inlined(find(serial))
            parts += called.parts
            inner = dict(zip(called.placeholders, (mapping[x] for x in inputs), strict=True))
            new.graph_copy(called.module.graph, inner)
            mapping[node] = [inner[r] for r in called.results]
        elif node.target is operator.getitem and isinstance(mapping.get(node.args[0]), list):
            mapping[node] = mapping[node.args[0]][node.args[1]]
        else:
            mapping[node] = new.node_copy(node, lambda n: mapping[n])
    new.output([mapping[n] for n in graph.results])
    module = fx.GraphModule(graph.module, new)
    g = graph
    return Graph(module, g.inputs, g.outputs, g.names, g.captured, parts)


def _typed(node: fx.Node, spec: TensorSpec) -> fx.Node:
    with FakeTensorMode():
        value: Tensor = torch.empty(spec.shape, dtype=spec.dtype)
    node.meta = {"val": value}
    return node


def _any(args: Any) -> Any:
    """Arguments whose types an operation's schema gives."""
    return args
