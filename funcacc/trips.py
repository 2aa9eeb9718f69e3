"""One trip of a loop as a graph, with its gradient where one may be asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from funcacc.capture import cut
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph
from funcacc.capture.trace import capture
from funcacc.types import TensorSpec

Flat = Callable[..., Sequence[Tensor]]
KEY = TensorSpec((2,), torch.int32)
INDEX = TensorSpec((), torch.int64)


@dataclass
class Backward:
    """The gradient of one trip.

    Attributes:
        graph: (key, index, xs, captured, cotangents, residuals) -> gradients.
        wanted: which outputs of the trip (carry, ys) the cotangents belong to.
        targets: which inputs (carry, xs, captured) the gradients belong to.
        residuals: what each trip keeps for it.
    """

    graph: Graph
    wanted: list[int]
    targets: list[int]
    residuals: list[TensorSpec]

    def gradients_of(self, cotangents: set[int], first: int) -> set[int]:
        """The targets whose gradient depends on the cotangents of these outputs.

        Args:
            cotangents: outputs of the trip.
            first: how many inputs of the graph stand before the cotangents.
        """
        live = {first + k for k, o in enumerate(self.wanted) if o in cotangents}
        nodes = self.graph.placeholders
        marked = {nodes[i] for i in live}
        return {
            target
            for target, result in zip(self.targets, self.graph.results, strict=True)
            if cut.ancestors([result]) & marked
        }


@dataclass
class Trip:
    """One traced trip.

    Attributes:
        graph: (key, index, carry, xs, captured) -> (carry, ys, residuals).
        captured: what the body closed over.
        outputs: specs of (carry, ys).
        draws: whether it uses the key.
        backward: None when no gradient can be asked for.
    """

    graph: Graph
    captured: list[Tensor]
    outputs: list[TensorSpec]
    draws: bool
    backward: Backward | None = None


@dataclass
class _Traced:
    """What `capture` doesn't return of a trace with gradients."""

    outputs: int = 0
    draws: bool = False
    wants: bool = False
    wanted: list[int] = field(default_factory=list)
    cotangents: list[Tensor] = field(default_factory=list)
    targets: list[int | Tensor] = field(default_factory=list)


def trace_trip(
    body: Flat,
    carry: Sequence[Tensor],
    xs: Sequence[TensorSpec],
    names: Sequence[str],
    *,
    differentiate: Sequence[bool],
    checkpoint: bool = False,
) -> Trip:
    """Trace ``body(index, *carry, *xs) -> (carry, ys)``.

    Args:
        body: flat, drawing random numbers from the trip's own key.
        carry: initial values; only shape, dtype and `requires_grad` matter.
        xs: specs of the slices.
        names: a path for each of carry and xs.
        differentiate: which of carry and xs need a gradient.
        checkpoint: keep carries only.

    Raises:
        CaptureError: for code that can't be part of a pure graph.
    """
    specs = [*map(TensorSpec.of, carry), *xs]
    active = list(differentiate)
    if any(active):
        active = _all_carries(active, specs, len(carry))
    graph, found = _trace(body, specs, names, active)
    if found.wants and not any(active):
        # A tensor that the body closes over needs a gradient, so every carry may.
        active = _all_carries(active, specs, len(carry))
        graph, found = _trace(body, specs, names, active)
    return _cut(graph, found, len(carry), checkpoint)


def _all_carries(active: Sequence[bool], specs: Sequence[TensorSpec], n: int) -> list[bool]:
    return [s.dtype.is_floating_point or s.dtype.is_complex for s in specs[:n]] + list(active[n:])


def _trace(
    body: Flat, specs: Sequence[TensorSpec], names: Sequence[str], active: Sequence[bool]
) -> tuple[Graph, _Traced]:
    found = _Traced()

    def fn(tracing: Tracing, key: Tensor, index: Tensor, *flat: Tensor) -> list[Tensor]:
        leaves = [
            t.detach().requires_grad_() if a else t for t, a in zip(flat, active, strict=True)
        ]
        with tracing.random.drawing_from(key) as source:
            out = list(body(index, *(t.clone() for t in leaves)))
            found.draws = source.draws > 0
        found.outputs = len(out)
        found.wanted = [k for k, o in enumerate(out) if o.requires_grad]
        found.wants = bool(found.wanted) and torch.is_grad_enabled()
        return [*out, *_gradients(tracing, found, leaves, active, out)] if found.wants else out

    graph = capture(fn, [KEY, INDEX, *specs], ["key", "index", *names], in_loop=True)
    return graph, found


def _gradients(
    tracing: Tracing,
    found: _Traced,
    leaves: Sequence[Tensor],
    active: Sequence[bool],
    out: Sequence[Tensor],
) -> list[Tensor]:
    closed = [(real, fake) for real, fake in tracing.tensors.lifted.values() if fake.requires_grad]
    targets: list[tuple[int | Tensor, Tensor]] = [
        (i, t) for i, (t, a) in enumerate(zip(leaves, active, strict=True)) if a
    ]
    targets += closed
    # Cotangents are inputs whose shapes are known only now: stand-ins of empty tensors.
    found.cotangents = [
        torch.empty(out[k].shape, dtype=out[k].dtype, device="meta") for k in found.wanted
    ]
    grads = torch.autograd.grad(
        [out[k] for k in found.wanted],
        [t for _, t in targets],
        [tracing.tensors.lift(c) for c in found.cotangents],
        allow_unused=True,
    )
    reached = [(who, g) for (who, _), g in zip(targets, grads, strict=True) if g is not None]
    found.targets = [who for who, _ in reached]
    return [g for _, g in reached]


def _cut(joint: Graph, found: _Traced, num_carry: int, checkpoint: bool) -> Trip:
    """The forward and the backward graph of a trace that holds both."""
    nodes = joint.placeholders
    num = len(nodes) - len(joint.captured)
    marks = {id(c): k for k, c in enumerate(found.cotangents)}
    closed = [
        (t, n) for t, n in zip(joint.captured, nodes[num:], strict=True) if id(t) not in marks
    ]
    captured = [t for t, _ in closed]
    constants = [n for _, n in closed]
    base = [*nodes[:num], *constants]
    results, n = joint.results, found.outputs
    outputs = joint.outputs[:n]
    if not found.wants:
        return Trip(cut.extract(joint, base, results), captured, outputs, found.draws)
    given = [*nodes[:2], *nodes[2 + num_carry : num], *constants]
    cotangents = _cotangent_nodes(joint, found, nodes[num:], marks)
    known = {*given, *(c for c in cotangents if c is not None)}
    if checkpoint:
        carries = nodes[2 : 2 + num_carry]
        needed = cut.ancestors(results[n:])
        kept = [c for c in carries if c in needed]
    else:
        kept = cut.residuals(joint, n, known, set(constants))
    present = [k for k, c in enumerate(cotangents) if c is not None]
    inputs = [*given, *(c for c in cotangents if c is not None), *kept]
    where = {id(t): num - 2 + i for i, t in enumerate(captured)}
    pairs = list(zip([_position(w, where) for w in found.targets], results[n:], strict=True))
    backward = Backward(
        cut.extract(joint, inputs, [r for _, r in pairs]),
        [found.wanted[k] for k in present],
        [p for p, _ in pairs],
        [cut.spec_of(k) for k in kept],
    )
    forward = cut.extract(joint, base, [*results[:n], *kept])
    return Trip(forward, captured, outputs, found.draws, backward)


def _position(target: int | Tensor, where: dict[int, int]) -> int:
    return target if isinstance(target, int) else where[id(target)]


def _cotangent_nodes(
    joint: Graph, found: _Traced, trailing: Sequence[fx.Node], marks: dict[int, int]
) -> list[fx.Node | None]:
    """The input of each cotangent; None where no gradient looks at it."""
    nodes: list[fx.Node | None] = [None] * len(found.cotangents)
    for tensor, node in zip(joint.captured, trailing, strict=True):
        if id(tensor) in marks:
            nodes[marks[id(tensor)]] = node
    return nodes
