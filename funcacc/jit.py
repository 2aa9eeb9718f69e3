"""`jit`: compile a pure function over trees, with donation by position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from funcacc import trees
from funcacc.capture import ops
from funcacc.capture.context import Tracing
from funcacc.capture.trace import capture
from funcacc.engines import get_engine
from funcacc.engines.base import Program
from funcacc.errors import CarryError
from funcacc.types import PyTree, TensorSpec

log = logging.getLogger("funcacc")


class _Entry(NamedTuple):
    program: Program
    out: trees.TreeSpec
    captured: list[Tensor]
    order: list[int]
    slots: list[int]


def jit(fn: Callable[..., PyTree], donate_argnums: Sequence[int] = ()) -> Callable[..., PyTree]:
    """Compile `fn` once for each structure, shapes and dtypes of its arguments.

    Equals ``fn``, except that its Python side effects happen when it is traced, and that the
    leaves of donated arguments are consumed: the first result leaves of equal shape and
    dtype take their buffers, in order.

    Args:
        fn: trees of tensors in, a tree of tensors out; pure.
        donate_argnums: positions of arguments that the caller gives away.

    Returns:
        The compiled function.

    Raises:
        CarryError: when a donated leaf has no result of its shape and dtype.

    Example:
        >>> import torch, funcacc
        >>> add = funcacc.jit(lambda a, b: {"sum": a + b["x"]})
        >>> add(torch.ones(2), {"x": torch.ones(2)})
        {'sum': tensor([2., 2.])}
    """
    entries: dict[Any, _Entry] = {}

    def compiled(*args: PyTree) -> PyTree:
        leaves, spec = trees.flatten(args)
        key = (spec, tuple(TensorSpec.of(x) for x in leaves), leaves[0].device)
        engine = get_engine("auto", leaves[0].device)
        if key not in entries:
            if entries:
                log.info("jit(%s): new program for %s", fn, key[1])
            entries[key] = _build(fn, args, donate_argnums, engine)
        entry = entries[key]
        values = [*leaves, *(engine.move(t) for t in entry.captured)]
        engine.settle()
        outputs = entry.program([values[i] for i in entry.order])
        placed = [outputs[entry.slots.index(i)] for i in range(len(outputs))]
        return trees.unflatten(entry.out, placed)

    return compiled


def _build(fn: Callable[..., PyTree], args: Any, donate: Sequence[int], engine: Any) -> _Entry:
    leaves, spec = trees.flatten(args)
    found: list[trees.TreeSpec] = []

    def traced(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
        out, out_spec = trees.flatten(fn(*trees.unflatten(spec, list(flat))))
        found[:] = [out_spec]
        return [x.clone() for x in out]

    names = trees.paths(args, "args")
    graph = capture(traced, [TensorSpec.of(x) for x in leaves], names)
    donated = [i for i, n in enumerate(names) if any(n.startswith(f"args[{a}]") for a in donate)]
    free = list(range(len(graph.outputs)))
    slots = []
    for i in donated:
        match = [o for o in free if graph.outputs[o] == graph.inputs[i]]
        if not match:
            raise CarryError(
                f"{names[i]} is donated, but no result is left that is {graph.inputs[i]}; "
                "don't donate it"
            )
        slots.append(match[0])
        free.remove(match[0])
    slots += free
    order = [*donated, *(i for i in range(len(graph.inputs)) if i not in donated)]

    def reordered(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
        values = [flat[order.index(i)] for i in range(len(order))]
        out = list(ops.call(graph.serial, values))
        return [out[i] for i in slots]

    arranged = capture(reordered, [graph.inputs[i] for i in order], [graph.names[i] for i in order])
    return _Entry(engine.compile(arranged, len(donated)), found[0], graph.captured, order, slots)
