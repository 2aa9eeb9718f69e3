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
    test, test_draws = _drawing(cond, carry, names)
    trip, trip_draws = _drawing(body, carry, names)
    captured = context.entering([*test.captured, *trip.captured])
    refuse_gradient([*carry, *captured])
    cut = len(test.captured)

    def fn(key: Tensor, *values: Tensor) -> list[Tensor]:
        given, closed = values[: len(carry)], values[len(carry) :]
        tracing = context.current()
        assert tracing is not None
        tracing.keep += [test, trip]

        def check(t: Tensor, *c: Tensor) -> list[Tensor]:
            own = ops.fold_in(key, t * 2) if test_draws else key
            return list(ops.call(test.serial, [own, *c, *closed[:cut]]))

        def step(t: Tensor, *c: Tensor) -> list[Tensor]:
            own = ops.fold_in(key, t * 2 + 1) if trip_draws else key
            return [t + 1, *ops.call(trip.serial, [own, *c, *closed[cut:]])]

        start = torch.zeros((), dtype=torch.int32)
        return run_loop(check, step, [start, *given], ["trip", *names])[1:]

    key = draw_key(test_draws or trip_draws, [*carry, *captured])
    return execute(fn, [key, *carry, *captured])


def _drawing(fn: Flat, carry: Sequence[Tensor], names: Sequence[str]) -> tuple[Graph, bool]:
    """The graph of ``(key, *carry) -> fn(*carry)``, and whether it draws from the key."""
    draws = [False]

    def traced(tracing: Tracing, key: Tensor, *flat: Tensor) -> Sequence[Tensor]:
        with tracing.random.drawing_from(key) as source:
            out = fn(*flat)
        draws[0] = source.draws > 0
        return out

    specs = [TensorSpec((2,), torch.int32), *map(TensorSpec.of, carry)]
    return capture(traced, specs, ["key", *names], in_loop=True), draws[0]


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
    outer = context.current()
    assert outer is not None
    specs = [TensorSpec.of(c) for c in carry]
    cond_graph = capture(lambda tracing, *flat: cond(*flat), specs, names)
    body_graph = capture(lambda tracing, *flat: body(*flat), specs, names)
    values = context.entering([*cond_graph.captured, *body_graph.captured])
    extra = [cond_graph.inputs[len(specs) :], body_graph.inputs[len(specs) :]]
    _widen(cond_graph, len(cond_graph.inputs), extra[1])
    _widen(body_graph, len(specs), extra[0])
    outer.keep += [cond_graph, body_graph]
    return list(ops.loop(cond_graph.serial, body_graph.serial, list(carry), values))


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
