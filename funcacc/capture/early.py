"""Sums over the rows of a batch that the batch alone determines, taken out of a microbatch's graph.

The number of labels that a mean divides by couples all rows: a device can't go on before it has
the sum. Since it depends on nothing that changes from one microbatch to the next, it can be found
for all microbatches beforehand, at once.
"""

from __future__ import annotations

import math
from collections.abc import Set

from torch import Tensor, fx

from funcacc.capture.graph import Graph
from funcacc.capture.open_sums import Opening, open_sums
from funcacc.capture.rows import Rows
from funcacc.types import TensorSpec

_MOST = 4096
"""Elements of what is kept for each microbatch."""


def split_early(
    graph: Graph, batch: Set[int], cut: Set[int], groups: int
) -> tuple[Graph, Graph] | None:
    """Cut a microbatch's graph in two.

    Equals::

        graph(*inputs) == late(*inputs, *(part.sum(0) for part in early(*inputs)), *captured)

    Args:
        graph: of one microbatch.
        batch: inputs that belong to the microbatch.
        cut: as for `open_sums`.
        groups: likewise.

    Returns:
        ``(early, late)``, or None where there is no such sum.
    """
    opening = Opening(graph, dict.fromkeys(cut, Rows(0, 1)), groups)
    known = {node for i, node in enumerate(graph.placeholders) if i in batch}
    for node in graph.nodes:
        if all(x in known for x in node.all_input_nodes):
            known.add(node)
    found = [n for n in graph.nodes if n in known and _ends(n, known, opening)]
    if not found:
        return None
    sums = _returning(graph, found)
    early, opened = open_sums(sums, cut, groups, range(len(found)))
    assert len(opened) == len(found)
    return early, _given(graph, found)


def _ends(node: fx.Node, known: Set[fx.Node], opening: Opening) -> bool:
    """Whether the sum in a value ends here: something is made of it that is no such sum."""
    value = node.meta.get("val")
    if (
        not isinstance(value, Tensor)
        or math.prod(value.shape) > _MOST
        or not opening.openable(node)
    ):
        return False
    return not all(user in known and opening.openable(user) for user in node.users)


def _returning(graph: Graph, results: list[fx.Node]) -> Graph:
    new, mapping = _copied(graph)
    new.output([mapping[n] for n in results])
    specs = [TensorSpec.of(n.meta["val"]) for n in results]
    return _finished(graph, new, graph.inputs, graph.names, specs)


def _given(graph: Graph, values: list[fx.Node]) -> Graph:
    """The graph with these values as inputs, before what it closes over."""
    new, mapping = _copied(graph)
    inputs, names, results = list(graph.inputs), list(graph.names), list(graph.results)
    at = len(inputs) - len(graph.captured)
    last = mapping[graph.placeholders[at - 1]]
    for i, node in enumerate(values):
        with new.inserting_after(last):
            last = new.placeholder(f"early_{i}")
        last.meta = dict(node.meta)
        mapping[node].replace_all_uses_with(last)
        mapping[node] = last
    inputs[at:at] = [TensorSpec.of(n.meta["val"]) for n in values]
    names[at:at] = [f"early[{i}]" for i in range(len(values))]
    new.output([mapping[n] for n in results])
    return _finished(graph, new, inputs, names, graph.outputs)


def _copied(graph: Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    new.graph_copy(graph.module.graph, mapping)
    return new, mapping


def _finished(
    graph: Graph,
    new: fx.Graph,
    inputs: list[TensorSpec],
    names: list[str],
    outputs: list[TensorSpec],
) -> Graph:
    new.eliminate_dead_code()
    module = fx.GraphModule(graph.module, new)
    return Graph(module, inputs, outputs, names, graph.captured, graph.parts)
