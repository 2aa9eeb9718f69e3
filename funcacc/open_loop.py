"""Loops whose number of trips is known only when they have run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from funcacc.capture import context, ops
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph
from funcacc.capture.trace import capture
from funcacc.engines import get_engine
from funcacc.errors import FuncaccError
from funcacc.types import TensorSpec

Flat = Callable[..., Sequence[Tensor]]

NO_GRADIENT = (
    "a gradient would have to flow through this loop, whose number of trips is known only on the "
    "device: its backward pass would need room for an unknown number of trips. Use fori_loop "
    "with Python ints as bounds, or scan; or detach what enters the loop, or call it under "
    "torch.no_grad()"
)


def execute(fn: Callable[..., list[Tensor]], values: Sequence[Tensor]) -> list[Tensor]:
    """Make `fn` part of the surrounding trace; without one, compile and run it."""
    if context.current() is not None:
        return fn(*values)
    engine = get_engine("auto", device_of(values))
    names = [f"values[{i}]" for i in range(len(values))]
    graph = capture(lambda tracing, *flat: fn(*flat), [TensorSpec.of(v) for v in values], names)
    program = engine.compile(graph, 0)
    moved = [engine.move(v) for v in [*values, *graph.captured]]
    engine.settle()
    return program(moved)


def device_of(values: Sequence[Tensor]) -> torch.device:
    """The device of the first tensor that isn't on the CPU, or the CPU."""
    return next((t.device for t in values if t.device.type != "cpu"), torch.device("cpu"))


def draw_key(draws: bool, values: Sequence[Tensor]) -> Tensor:
    """A key for one loop: from the surrounding trace's key, or from the device's generator.

    Args:
        draws: whether the loop needs one; otherwise nothing is drawn.
        values: tensors of the loop, for their device.
    """
    tracing = context.current()
    if not draws:
        return torch.zeros(2, dtype=torch.int32)
    if tracing is not None:
        return tracing.random.source("a random operation in a loop").bits([2])
    limit = 1 << 31
    return torch.randint(-limit, limit, (2,), dtype=torch.int32, device=device_of(values))


def run_while(
    cond: Flat, body: Flat, carry: Sequence[Tensor], names: Sequence[str]
) -> list[Tensor]:
    """``while cond(*carry): carry = body(*carry)``, in one operation of the trace.

    Each evaluation of `cond` and each trip of `body` draws from a key of its own.

    Raises:
        FuncaccError: when a gradient would have to flow through the loop.
    """
    carry = context.entering(carry)
    # Stands for the key while the functions are traced: an input of those that draw.
    mark = torch.empty(2, dtype=torch.int32, device="meta")
    test = _trace(cond, carry, names, mark, 0)
    trip = _trace(body, carry, names, mark, 1)
    captured = [*test.captured, *trip.captured]
    key = draw_key(any(t is mark for t in captured), [*carry, *captured])
    closed = context.entering([key if t is mark else t for t in captured])
    refuse_gradient([*carry, *closed])

    def fn(*values: Tensor) -> list[Tensor]:
        start = torch.zeros((), dtype=torch.int32)
        given = [start, *values[: len(carry)]]
        return _loop(test, trip, given, values[len(carry) :])[1:]

    return execute(fn, [*carry, *closed])


def _trace(
    fn: Flat, carry: Sequence[Tensor], names: Sequence[str], mark: Tensor, draw: int
) -> Graph:
    """The graph of ``(trip, *carry) -> fn(*carry)``; the body (`draw` 1) counts the trips."""

    def traced(tracing: Tracing, trip: Tensor, *flat: Tensor) -> list[Tensor]:
        own = ops.fold_in(tracing.tensors.lift(mark), trip * 2 + draw)
        with tracing.random.drawing_from(own):
            # Copies: two slots of a carry never share memory, whatever the body writes.
            out = list(fn(*(t.clone() for t in flat)))
        return [trip + 1, *out] if draw else out

    specs = [TensorSpec((), torch.int32), *map(TensorSpec.of, carry)]
    return capture(traced, specs, ["trip", *names], in_loop=True)


def refuse_gradient(tensors: Sequence[Tensor]) -> None:
    """Refuse to pass a tensor that asks for a gradient into a loop that has none.

    Raises:
        FuncaccError: with the reason.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise FuncaccError(NO_GRADIENT)


def run_loop(cond: Flat, body: Flat, carry: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Trace both functions and leave one `ops.loop` in the surrounding trace.

    Args:
        cond: flat carry -> [boolean scalar].
        body: flat carry -> flat carry.
        carry: initial values, tensors of the surrounding trace.
        names: a path for each.
    """
    specs = [TensorSpec.of(c) for c in carry]
    cond_graph = capture(lambda tracing, *flat: cond(*flat), specs, names)
    body_graph = capture(lambda tracing, *flat: body(*flat), specs, names)
    values = context.entering([*cond_graph.captured, *body_graph.captured])
    return _loop(cond_graph, body_graph, carry, values)


def _loop(
    cond: Graph, body: Graph, carry: Sequence[Tensor], closed: Sequence[Tensor]
) -> list[Tensor]:
    """One `ops.loop` over the carry, with what both functions close over as constants."""
    outer = context.current()
    assert outer is not None
    n = len(carry)
    extra = cond.inputs[n:], body.inputs[n:]
    _widen(cond, len(cond.inputs), extra[1])
    _widen(body, n, extra[0])
    outer.keep += [cond, body]
    return list(ops.loop(cond.serial, body.serial, list(carry), list(closed)))


def _widen(graph: Graph, position: int, extra: Sequence[TensorSpec]) -> None:
    """Give a graph inputs that it ignores, and make its captured ones plain inputs.

    Both functions of a loop see the same constants: those of the condition first.
    """
    anchor = graph.placeholders[position - 1]
    for i in range(len(extra)):
        with graph.module.graph.inserting_after(anchor):
            anchor = graph.module.graph.placeholder(f"unused_{i}")
    graph.module.recompile()
    graph.inputs[position:position] = extra
    graph.names[position:position] = [f"unused[{i}]" for i in range(len(extra))]
    graph.captured = []
