"""Sums over the rows of a batch, left open: one partial sum for each group of rows.

A gradient is a sum over the rows of its microbatch. Where the rows lie on many devices, each of
them has a part of the sum, and adding the parts up is communication. That can wait until all
microbatches are through: `open_sums` changes a graph such that it returns the parts, along a
leading dimension of as many groups as there are devices.

Which dimension of a value goes with the rows is found by `rows.track`. Where that is mistaken,
results are right all the same: any sum may be taken in groups.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from funcacc.capture import ops
from funcacc.capture.decompositions import decompositions
from funcacc.capture.graph import Graph
from funcacc.capture.rows import Rows, reduced_dims, track
from funcacc.types import TensorSpec

aten = torch.ops.aten


def open_sums(
    graph: Graph, cut: Iterable[int], groups: int, outputs: Iterable[int]
) -> tuple[Graph, frozenset[int]]:
    """The same program, with the parts of some outputs in the place of their sum.

    Equals, for an output that was opened::

        new_output.sum(0) == old_output

    where ``new_output[g]`` comes from the g-th part of the rows.

    Args:
        graph: of one microbatch.
        cut: inputs that hold the batch's rows along dimension 0.
        groups: how many parts; divides the number of rows.
        outputs: which outputs may be opened.

    Returns:
        The program, and the outputs that were opened: those that are sums over the rows, followed
        by linear operations at most.
    """
    opening = Opening(graph, dict.fromkeys(cut, Rows(0, 1)), groups)
    found = {o: r for o in outputs if opening.openable(r := graph.results[o])}
    if not found:
        return graph, frozenset()
    return opening.build(found), frozenset(found)


class Opening:
    """What can be opened in a graph, and the graph that does it."""

    def __init__(self, graph: Graph, start: Mapping[int, Rows], groups: int) -> None:
        self.graph = graph
        self.groups = groups
        self.rows = track(graph, start, groups)
        self.known: dict[fx.Node, bool] = {}

    def openable(self, node: fx.Node) -> bool:
        """Whether a value is a sum over rows, or linear in such sums."""
        if node not in self.known:
            self.known[node] = False
            if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
                self.known[node] = self.summed(node) is not None or bool(self.linear_in(node))
        return self.known[node]

    def summed(self, node: fx.Node) -> dict[fx.Node, Rows] | None:
        """The operands of a sum over rows, to be taken in groups; None for another operation."""
        rule = _SUMS.get(node.target)
        return rule(node, self.rows) if rule else None

    def linear_in(self, node: fx.Node) -> list[fx.Node]:
        """The operands, sums over rows themselves, that a value is linear in."""
        if node.target in _ADDING:
            every = [x for x in _operands(node, _ADDING[node.target])]
            opened = [x for x in every if self.openable(x)]
            # The others count for all groups together, so each takes its share of them.
            shared = all(x.meta["val"].is_floating_point() for x in every)
            return opened if shared and not _numbers(node, _ADDING[node.target]) else []
        places = _LINEAR.get(node.target, ())
        opened = [x for x in _operands(node, places) if self.openable(x)]
        # Not linear in the product of two of them, in a quotient with itself, in whole numbers.
        elsewhere = _operands(node, [p for p in range(len(node.args)) if p not in places])
        if len(opened) != 1 or opened[0] in elsewhere or _truncates(node, opened[0]):
            return []
        return opened

    def build(self, found: Mapping[int, fx.Node]) -> Graph:
        """The graph with these outputs opened."""
        order = self._needed(found.values())
        inputs = list(dict.fromkeys(x for n in order for x in self._closed(n)))
        module = self._trace(order, inputs, list(found.values()))
        new = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        new.graph_copy(self.graph.module.graph, mapping)
        inner = dict(zip(_placeholders(module), (mapping[n] for n in inputs), strict=True))
        new.graph_copy(module.graph, inner)
        results = [mapping[n] for n in self.graph.results]
        specs = list(self.graph.outputs)
        opened = next(iter(reversed(module.graph.nodes))).args[0]
        for o, node in zip(found, opened, strict=True):
            results[o] = inner[node]
            specs[o] = TensorSpec.of(node.meta["val"])
        new.output(results)
        new.eliminate_dead_code()
        joined = fx.GraphModule(self.graph.module, new)
        g = self.graph
        return Graph(joined, g.inputs, specs, g.names, g.captured, g.parts)

    def _closed(self, node: fx.Node) -> list[fx.Node]:
        """The operands that are taken as they are."""
        opened = [] if self.summed(node) is not None else self.linear_in(node)
        return [x for x in _operation(node)[0].all_input_nodes if x not in opened]

    def _needed(self, results: Iterable[fx.Node]) -> list[fx.Node]:
        """The operations from the sums on, in order."""
        seen: set[fx.Node] = set()
        todo = list(results)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                if self.summed(node) is None:
                    todo += self.linear_in(node)
        return [n for n in self.graph.module.graph.nodes if n in seen]

    def _trace(
        self, order: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> fx.GraphModule:
        def fn(*values: Tensor) -> list[Tensor]:
            closed = dict(zip(inputs, values, strict=True))
            opened: dict[fx.Node, Tensor] = {}
            for node in order:
                opened[node] = self._run(node, closed, opened)
            return [opened[n] for n in results]

        with _use_lazy_graph_module(True), FakeTensorMode(), torch.no_grad():
            fakes = [torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in inputs]
            return make_fx(fn, decomposition_table=decompositions())(*fakes)

    def _run(
        self, node: fx.Node, closed: Mapping[fx.Node, Any], opened: Mapping[fx.Node, Tensor]
    ) -> Tensor:
        parts = self.summed(node)
        if parts is not None:
            given = {x: self._groups(closed[x], at) for x, at in parts.items()}
        else:
            given = {x: opened[x] for x in self.linear_in(node)}
            if node.target in _ADDING:
                for x in _operands(node, _ADDING[node.target]):
                    if x not in given:
                        # Of all groups together, it counts once.
                        share = closed[x] / self.groups
                        given[x] = share.expand(self.groups, *share.shape)
        nodes = list(given)
        source, place = _operation(node)
        if node.target in _IN_PARTS:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given.get(n, closed[n]))
            return _IN_PARTS[node.target](*args, **kwargs)

        def one(*values: Tensor) -> Tensor:
            here = dict(zip(nodes, values, strict=True))
            args, kwargs = fx.map_arg(
                (source.args, source.kwargs), lambda n: here[n] if n in here else closed[n]
            )
            out = source.target(*args, **kwargs)
            return out if place is None else out[place]

        out: Tensor = torch.func.vmap(one)(*given.values())
        return out / self.groups if node.target in _MEANS and parts is not None else out

    def _groups(self, x: Tensor, at: Rows) -> Tensor:
        """`x` with its rows in groups, along a new leading dimension."""
        shape, d = list(x.shape), at.dim
        each = shape[d] // (at.outer * self.groups)
        split = x.reshape(*shape[:d], at.outer, self.groups, each, *shape[d + 1 :])
        first = split.movedim(d + 1, 0)
        return first.reshape(self.groups, *shape[:d], at.outer * each, *shape[d + 1 :])


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _any(args: Any) -> Any:
    """Arguments whose types an operation's schema gives."""
    return args


def _operation(node: fx.Node) -> tuple[fx.Node, int | None]:
    """The operation that gives a value, and which of its results it is."""
    if node.target is operator.getitem:
        source, place = _any(node.args[:2])
        return source, place
    return node, None


def _truncates(node: fx.Node, x: fx.Node) -> bool:
    before, after = x.meta["val"].dtype, node.meta["val"].dtype
    return after == torch.bool or (before.is_floating_point and not after.is_floating_point)


def _numbers(node: fx.Node, places: Sequence[int]) -> bool:
    """Whether there is a Python number at some of these places."""
    return any(isinstance(node.args[p], (bool, int, float)) for p in places if p < len(node.args))


def _operands(node: fx.Node, places: Sequence[int]) -> list[fx.Node]:
    """The values at some places of the arguments; a list counts as its elements."""
    given: list[Any] = []
    for p in places:
        arg = node.args[p] if p < len(node.args) else None
        given += arg if isinstance(arg, (list, tuple)) else [arg]
    return [x for x in given if isinstance(x, fx.Node)]


Found = Mapping[fx.Node, Rows]
Sum = Callable[[fx.Node, Found], "dict[fx.Node, Rows] | None"]


def _reduction(node: fx.Node, rows: Found) -> dict[fx.Node, Rows] | None:
    x: Any = node.args[0]
    dims = node.args[1] if len(node.args) > 1 else None
    if x in rows and rows[x].dim in reduced_dims(dims, x.meta["val"].ndim):
        return {x: rows[x]}
    return None


def _contraction(left: int, right: int) -> Sum:
    """A product of two operands whose dimensions `left` and `right` are summed over."""

    def rule(node: fx.Node, rows: Found) -> dict[fx.Node, Rows] | None:
        a, b = _any(node.args[:2])
        for x, dim in ((a, left), (b, right)):
            if x in rows and rows[x].dim == dim and a is not b:
                # The other one may be equal for all rows, and is cut all the same.
                return {a: Rows(left, rows[x].outer), b: Rows(right, rows[x].outer)}
        return None

    return rule


def _scattered_rows(node: fx.Node, rows: Found) -> dict[fx.Node, Rows] | None:
    grad, indices, _, _, by_frequency = _any(node.args[:5])
    at = rows.get(indices)
    if at is None or rows.get(grad) != at or by_frequency:
        return None
    return {grad: at, indices: at}


def _convolved(node: fx.Node, rows: Found) -> dict[fx.Node, Rows] | None:
    """The gradients of a convolution's weight and bias, which are results of one operation."""
    source, place = _operation(node)
    if source.target is not aten.convolution_backward.default or place == 0:
        return None
    grad, x = _any(source.args[:2])
    at = Rows(0, 1)
    return {grad: at, x: at} if rows.get(grad) == at == rows.get(x) else None


def _embedding_parts(
    grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool
) -> Tensor:
    """`embedding_dense_backward` of each group, as one operation that partitioners can cut."""
    if padding >= 0:
        grad = torch.where((indices == padding).unsqueeze(-1), 0.0, grad)
    return ops.scatter_rows(grad.flatten(1, -2), indices.flatten(1), count)


_SUMS: dict[Any, Sum] = {
    aten.sum.dim_IntList: _reduction,
    aten.sum.default: _reduction,
    aten.mean.dim: _reduction,
    aten.mean.default: _reduction,
    aten.mm.default: _contraction(1, 0),
    aten.bmm.default: _contraction(2, 1),
    aten.mv.default: _contraction(1, 0),
    aten.dot.default: _contraction(0, 0),
    aten.embedding_dense_backward.default: _scattered_rows,
    operator.getitem: _convolved,
}
"""Operations that are sums over rows, and what they sum."""

_IN_PARTS: dict[Any, Callable[..., Tensor]] = {
    aten.embedding_dense_backward.default: _embedding_parts,
}
"""Sums that are written in another way where they are taken in groups."""

_MEANS = {aten.mean.dim, aten.mean.default}

_LINEAR: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.permute.default,
            aten.transpose.int,
            aten.t.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.expand.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.clone.default,
            aten.alias.default,
            aten.detach.default,
            aten.neg.default,
            aten._to_copy.default,
            aten.mul.Scalar,
            aten.div.Scalar,
            aten.div.Tensor,
            aten.sum.dim_IntList,
            aten.sum.default,
            aten.mean.dim,
            aten.mean.default,
            aten.flip.default,
            aten.tril.default,
            aten.triu.default,
            aten.diagonal.default,
            aten.index_select.default,
            aten.gather.default,
        ),
        (0,),
    ),
    aten.mul.Tensor: (0, 1),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
}
"""Operations that are linear in each of these operands by itself."""

_ADDING: dict[Any, tuple[int, ...]] = {
    aten.add.Tensor: (0, 1),
    aten.sub.Tensor: (0, 1),
    aten.cat.default: (0,),
    aten.stack.default: (0,),
    aten.where.self: (1, 2),
    aten.slice_scatter.default: (0, 1),
}
"""Operations that are linear in all of these operands together."""
