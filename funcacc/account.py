"""What a program takes of memory, leaf by leaf, and what to say when there is too little."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from funcacc.accumulate import carried
from funcacc.capture.graph import Graph
from funcacc.errors import EngineError
from funcacc.microbatch import Microbatch
from funcacc.plan import Plan
from funcacc.report import Leaf, memory_lines
from funcacc.step import Layout

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|can't allocate memory|bad_alloc|allocation failure", re.I
)


def inputs(graph: Graph, layout: Layout, plan: Plan, donate: bool) -> list[Leaf]:
    """The inputs of a step's program; those of the state are donated, or are not to be.

    Args:
        graph: of one step or several.
        layout: of one step.
        plan: where the inputs lie.
        donate: whether state is donated.
    """
    n = layout.num_state
    return [
        Leaf(
            path,
            spec,
            donated=donate and i < n,
            kind=kind,
            output=i if donate and i < n else None,
            **plan.account(path, len(spec.shape)),
        )
        for i, (path, spec, kind) in enumerate(
            zip(graph.names, graph.inputs, _kinds(graph, layout), strict=True)
        )
    ]


def _kinds(graph: Graph, layout: Layout) -> list[str]:
    kinds = [
        *["params"] * len(layout.params),
        *["buffers"] * len(layout.buffers),
        *["optimizer state"] * len(layout.opt_state),
        *["key and numbers"] * 2,
        *["params"] * len(layout.frozen),
        *["buffers"] * len(layout.constants),
        *["key and numbers"] * 2,
        *["window"] * len(layout.window),
    ]
    captured = len(graph.captured)
    # Several steps in one program also take how many of them.
    numbers = len(graph.inputs) - len(kinds) - captured
    return [*kinds, *["key and numbers"] * numbers, *["captured constants"] * captured]


def sums(m: Microbatch, layout: Layout, plan: Plan, accumulate_dtype: torch.dtype) -> list[Leaf]:
    """What the loop over the microbatches carries besides buffers."""
    found = []
    capacity = layout.window[0].shape[0]
    for kind, specs in carried(m, capacity, accumulate_dtype).items():
        first = m.slices()[kind].start
        for i, spec in enumerate(specs):
            named = kind == "grads"
            path = f"params[{m.reached[i]!r}]" if named else ""
            parts = plan.account(path, len(spec.shape)).get("parts", 1)
            if first + i in m.opened and plan.mesh is not None:
                parts = plan.opened(path, len(spec.shape)).parts(plan.mesh.sizes)
            name = f"grads[{m.reached[i]!r}]" if named else f"{kind}[{i}]"
            found.append(Leaf(name, spec, False, parts=parts, kind="accumulators"))
    return found


# Too little of it ----------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a compiler, a device or the host says that there is no memory left."""
    return isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))


def advice(leaves: Sequence[Leaf]) -> str:
    """The table of bytes by kind, and what to change.

    Args:
        leaves: inputs of the program and the sums in its loop.
    """
    lines = memory_lines(leaves, None, any(x.placement for x in leaves))
    return "\n".join(
        [
            *lines,
            "The activations of one microbatch, which are not in this sum, get smaller by smaller "
            "microbatches (and more of them), by funcacc.checkpoint and by "
            "compute_dtype=torch.bfloat16; the rest by a narrower accumulate_dtype, another "
            "optimizer, fewer microbatches in a window, or a mesh that parameters are cut over",
        ]
    )


def out_of_memory(error: BaseException, doing: str, leaves: Sequence[Leaf]) -> EngineError:
    """What to raise when memory ran out and nothing was lost.

    Args:
        error: what was raised.
        doing: what the step was about to do, as a verb.
        leaves: inputs of the program and the sums in its loop.
    """
    return EngineError(
        f"out of memory: the step can't {doing}: {first_line(error)}\n{advice(leaves)}. "
        "Parameters, buffers and optimizer state are as they were before it"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where there is none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
