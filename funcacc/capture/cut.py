"""Cutting a traced forward-and-backward program in two, for a loop in each direction."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor, fx

from funcacc.capture.graph import Graph
from funcacc.types import TensorSpec

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
    aten.alias.default,
}


def spec_of(node: fx.Node) -> TensorSpec:
    """Shape and dtype of what a node gives."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return TensorSpec.of(value)


def ancestors(nodes: Iterable[fx.Node], stop: Set[fx.Node] = frozenset()) -> set[fx.Node]:
    """The nodes and all that they are computed from, not looking behind `stop`."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                todo.extend(node.all_input_nodes)
    return seen


def extract(graph: Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Graph:
    """The part of a graph that computes `outputs` from `inputs`, any of its nodes.

    Args:
        graph: where the nodes stand.
        inputs: become the inputs, in this order.
        outputs: become the outputs.
    """
    part = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        mapping[node] = part.placeholder(f"in_{i}")
        mapping[node].meta = dict(node.meta)
    wanted = ancestors(outputs, set(inputs))
    for node in graph.module.graph.nodes:
        if node in wanted and node not in mapping:
            mapping[node] = part.node_copy(node, mapping.__getitem__)
    part.output([mapping[o] for o in outputs])
    specs = [spec_of(n) for n in inputs]
    names = [n.name for n in inputs]
    module = fx.GraphModule(graph.module, part)
    return Graph(module, specs, [spec_of(o) for o in outputs], names, parts=list(graph.parts))


def residuals(
    graph: Graph, num_forward: int, given: Set[fx.Node], constant: Set[fx.Node]
) -> list[fx.Node]:
    """What the gradients need of the forward computation and don't find anew.

    Views are made again from what they look at, and what depends on constants alone is
    computed again: kept, either would be stored once a trip.

    Args:
        graph: its first `num_forward` outputs are results, the others gradients.
        num_forward: how many.
        given: the inputs that the backward pass has without keeping them.
        constant: those of `given` that are equal in all trips.

    Returns:
        Nodes, inputs among them where those aren't given.
    """
    forward = ancestors(graph.results[:num_forward])
    forward |= {
        n for n in graph.nodes if n.target is operator.getitem and n.all_input_nodes[0] in forward
    }
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    todo = list(graph.results[num_forward:])
    while todo:
        node = todo.pop()
        if node in seen or node in given:
            continue
        seen.add(node)
        if node in forward and not _again(node, given, constant):
            found[node] = None
        else:
            todo.extend(node.all_input_nodes)
    return list(found)


def _again(node: fx.Node, given: Set[fx.Node], constant: Set[fx.Node]) -> bool:
    if node.op == "placeholder":
        return False
    if node.target in _VIEWS:
        return True
    sources = {n for n in ancestors([node]) if n.op == "placeholder"}
    cast = node.target is aten._to_copy.default and sources <= given
    return cast or sources <= constant
