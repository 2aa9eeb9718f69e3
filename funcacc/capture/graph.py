"""`Graph`: a pure function over flat lists of tensors, as a list of ATen operations."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from funcacc.types import TensorSpec

_serial = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Graph:
    """A pure ATen program: flat tensors in, flat tensors out.

    No autograd, no mutation, no random operation (each draws from an explicit key),
    no host read, no closed-over tensor: those that user code made or closed over are
    trailing inputs, and their values stand in `captured`.

    Attributes:
        module: the operations; its placeholders are the inputs in order.
        inputs: spec of each input, captured ones last.
        outputs: spec of each output.
        names: a path for each input, e.g. ``params['fc.weight']``.
        captured: the tensors behind the trailing inputs.
        parts: graphs that this one calls or loops over, which it keeps alive.
    """

    module: fx.GraphModule
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    names: list[str]
    captured: list[Tensor] = field(default_factory=list)
    parts: list[Graph] = field(default_factory=list)
    serial: int = field(default_factory=lambda: next(_serial))

    def __post_init__(self) -> None:
        """Make the graph findable by its number, under which operations name it."""
        _alive[self.serial] = self

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations, without inputs and outputs."""
        return [n for n in self.module.graph.nodes if n.op == "call_function"]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The input nodes."""
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that are returned."""
        return list(next(iter(reversed(self.module.graph.nodes))).args[0])

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """Run the operations on `values`, one for each input, captured ones included."""
        with torch.no_grad():
            return list(self.module(*values))

    def __str__(self) -> str:
        """The program as text: one line an operation."""
        lines = [f"graph {self.serial}("]
        lines += [
            f"  {node.name}: {spec}  # {name}"
            for node, spec, name in zip(self.placeholders, self.inputs, self.names, strict=True)
        ]
        lines.append("):")
        for node in self.nodes:
            value = node.meta.get("val")
            spec = f": {TensorSpec.of(value)}" if isinstance(value, Tensor) else ""
            args = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
            lines.append(f"  {node.name}{spec} = {node.target}({', '.join(args)})")
        results = zip(self.results, self.outputs, strict=True)
        lines.append("  return " + ", ".join(f"{n}: {s}" for n, s in results))
        return "\n".join([*lines, *(str(part) for part in self.parts)])


def find(serial: int) -> Graph:
    """The graph that an operation names."""
    return _alive[serial]


def fake_outputs(graph: Graph) -> list[Tensor]:
    """Tensors like the outputs of `graph`, for tracing."""
    return [torch.empty(s.shape, dtype=s.dtype) for s in graph.outputs]


def uses(graph: Graph, outputs: Sequence[int]) -> set[int]:
    """Which inputs the given outputs depend on, by index."""
    index = {node: i for i, node in enumerate(graph.placeholders)}
    seen: set[fx.Node] = set()
    todo = [graph.results[o] for o in outputs]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return {index[n] for n in seen if n in index}


def select(graph: Graph, outputs: Sequence[int]) -> Graph:
    """The same program with some of its outputs, without what only the others need.

    All inputs stay, in their places.
    """
    module = fx.GraphModule(graph.module, fx.Graph())
    mapping: dict[fx.Node, fx.Node] = {}
    module.graph.graph_copy(graph.module.graph, mapping)
    module.graph.output([mapping[graph.results[o]] for o in outputs])
    module.graph.eliminate_dead_code()
    module.recompile()
    specs = [graph.outputs[o] for o in outputs]
    return Graph(module, graph.inputs, specs, graph.names, graph.captured, graph.parts)
