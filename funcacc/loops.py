"""Structured loops over trees: one program with a loop in it, instead of many copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcacc import trees
from funcacc.capture import context, ops
from funcacc.capture.graph import Graph
from funcacc.capture.trace import capture
from funcacc.errors import CarryError, FuncaccError
from funcacc.types import PyTree, TensorSpec


def while_loop(
    cond_fn: Callable[[PyTree], Tensor], body_fn: Callable[[PyTree], PyTree], init: PyTree
) -> PyTree:
    """Loop while a traced condition holds.

    Equals::

        carry = init
        while cond_fn(carry):
            carry = body_fn(carry)
        return carry

    except that both functions are traced once, so their Python side effects happen once,
    and that the carry keeps its structure, shapes and dtypes. Not differentiable: the
    number of trips is unknown when the program is built.

    Args:
        cond_fn: carry -> boolean scalar tensor.
        body_fn: carry -> carry; may close over tensors, use them in any way, and edit the
            carry in place without touching the caller's tensors.
        init: a tree of tensors and numbers.

    Returns:
        The last carry; leaves are tensors.

    Raises:
        CarryError: when the body returns another structure, shape or dtype; all
            differences are listed.

    Example:
        >>> import torch, funcacc
        >>> funcacc.while_loop(lambda c: c < 100, lambda c: c * 3, torch.tensor(1))
        tensor(243)
    """
    carry, spec = _tensors(init, "init")
    if not _under_trace() and _on_host(carry):
        return _python_while(cond_fn, body_fn, carry, spec)

    def cond(*flat: Tensor) -> list[Tensor]:
        answer = cond_fn(trees.unflatten(spec, list(flat)))
        if not isinstance(answer, Tensor) or answer.ndim or answer.dtype != torch.bool:
            got = TensorSpec.of(answer) if isinstance(answer, Tensor) else type(answer).__name__
            raise CarryError(f"cond_fn returned {got}; it must return a boolean scalar tensor")
        return [answer]

    def body(*flat: Tensor) -> list[Tensor]:
        out = body_fn(trees.unflatten(spec, list(flat)))
        return check_carry(init, [TensorSpec.of(t) for t in flat], spec, out)

    return trees.unflatten(spec, run_loop(cond, body, carry, trees.paths(init, "carry")))


def fori_loop(
    lower: int | Tensor,
    upper: int | Tensor,
    body_fn: Callable[[Tensor, PyTree], PyTree],
    init: PyTree,
) -> PyTree:
    """Loop over a range whose bounds may be known on the device only.

    Equals::

        carry = init
        for i in range(lower, upper):
            carry = body_fn(i, carry)
        return carry

    with the differences that `while_loop` lists, and with i an ``int32`` or ``int64`` tensor.

    Args:
        lower: first index: an int or an integer scalar tensor.
        upper: one past the last index.
        body_fn: (i, carry) -> carry.
        init: a tree of tensors and numbers.

    Returns:
        The last carry.

    Raises:
        CarryError: as `while_loop`.

    Example:
        >>> import torch, funcacc
        >>> funcacc.fori_loop(0, 5, lambda i, c: c + i, torch.tensor(0))
        tensor(10)
    """
    start, stop = _bound(lower, "lower"), _bound(upper, "upper")
    leaves, spec = _tensors(init, "init")
    entered = [TensorSpec.of(t) for t in leaves]

    def body(c: tuple[Tensor, Tensor, PyTree]) -> tuple[Tensor, Tensor, PyTree]:
        # Checked here, so that the message shows the caller's carry without the index.
        after = check_carry(init, entered, spec, body_fn(c[0], c[2]))
        return c[0] + 1, c[1], trees.unflatten(spec, after)

    (_, _, out) = while_loop(
        lambda c: c[0] < c[1],
        body,
        (start, stop.to(start.device), init),
    )
    return out


def scan(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[PyTree, PyTree]:
    """Loop over the leading axis of `xs`, stacking a result for each trip.

    Equals::

        carry, ys = init, [None] * length
        for i in reversed(range(length)) if reverse else range(length):
            carry, ys[i] = f(carry, x_i)          # x_i: the i-th slice of each leaf of xs
        return carry, stack(ys)

    with the differences that `while_loop` lists.

    Args:
        f: (carry, x) -> (carry, y).
        init: a tree of tensors and numbers.
        xs: a tree of tensors with equal leading axes; `None` needs `length`.
        length: number of trips, where `xs` doesn't tell.
        reverse: from the last slice to the first; ``ys[i]`` still belongs to ``xs[i]``.

    Returns:
        ``(carry, ys)``: the leaves of ys have a leading axis of `length`.

    Raises:
        CarryError: as `while_loop`, or when leading axes disagree.

    Example:
        >>> import torch, funcacc
        >>> funcacc.scan(lambda c, x: (c + x, c * x), torch.tensor(0), torch.arange(4))
        (tensor(6), tensor([0, 0, 2, 9]))
    """
    slices, xs_spec = _tensors(xs, "xs")
    n = _length(slices, length)

    def at(i: Tensor) -> PyTree:
        return trees.unflatten(xs_spec, [ops.take(x, i) for x in slices])

    carry, carry_spec = _tensors(init, "init")
    device = (carry + slices)[0].device if carry or slices else torch.device("cpu")
    specs, y_spec = _result_specs(f, init, xs_spec, slices, carry_spec)
    ys = [torch.zeros((n, *s.shape), dtype=s.dtype, device=device) for s in specs]

    def body(trip: Tensor, state: tuple[PyTree, list[Tensor]]) -> tuple[PyTree, list[Tensor]]:
        i = torch.full_like(trip, n - 1) - trip if reverse else trip
        new, y = f(state[0], at(i))
        rows, _ = _tensors(y, "y")
        return new, [ops.put(buf, i, row) for buf, row in zip(state[1], rows, strict=True)]

    lower = torch.zeros((), dtype=torch.int32, device=device)
    out, filled = fori_loop(lower, n, body, (trees.unflatten(carry_spec, carry), ys))
    return out, trees.unflatten(y_spec, filled)


def _result_specs(
    f: Callable[..., Any],
    init: PyTree,
    xs_spec: trees.TreeSpec,
    slices: list[Tensor],
    carry_spec: trees.TreeSpec,
) -> tuple[list[TensorSpec], trees.TreeSpec]:
    """What one trip of a scan gives, found by tracing it."""
    carry, _ = _tensors(init, "init")
    found: list[trees.TreeSpec] = []

    def trip(tracing: context.Tracing, *flat: Tensor) -> list[Tensor]:
        x = trees.unflatten(xs_spec, list(flat[len(carry) :]))
        _, y = f(trees.unflatten(carry_spec, list(flat[: len(carry)])), x)
        leaves, spec = _tensors(y, "y")
        found[:] = [spec]
        return leaves

    specs = [TensorSpec.of(c) for c in carry]
    specs += [TensorSpec(tuple(x.shape[1:]), x.dtype) for x in slices]
    graph = capture(trip, specs, [f"in[{i}]" for i in range(len(specs))])
    return graph.outputs, found[0]


def _length(slices: list[Tensor], length: int | None) -> int:
    sizes = {int(x.shape[0]) if x.ndim else -1 for x in slices}
    if length is not None:
        sizes.add(length)
    if len(sizes) != 1 or -1 in sizes:
        raise CarryError(
            "scan needs one length: the leading axes of xs are "
            f"{[list(x.shape) for x in slices]}, length is {length}"
        )
    if min(sizes) < 0:
        raise CarryError(f"scan's length is {length}; give 0 or more")
    return sizes.pop()


def _bound(value: int | Tensor, name: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.ndim or value.is_floating_point() or value.dtype == torch.bool:
            raise CarryError(f"{name} is {TensorSpec.of(value)}; it must be an integer scalar")
        return value
    return torch.full((), value, dtype=torch.int64)


def _tensors(tree: PyTree, root: str) -> tuple[list[Tensor], trees.TreeSpec]:
    leaves, spec = trees.flatten(tree)
    for leaf, path in zip(leaves, trees.paths(tree, root), strict=True):
        if not isinstance(leaf, (Tensor, bool, int, float)):
            raise CarryError(
                f"{path} is a {type(leaf).__name__}; a carry holds tensors and numbers"
            )
    return [x if isinstance(x, Tensor) else torch.tensor(x) for x in leaves], spec


def check_carry(
    init: PyTree, entered: Sequence[TensorSpec], spec: trees.TreeSpec, out: PyTree
) -> list[Tensor]:
    """The leaves of what a body returned.

    Raises:
        CarryError: listing every leaf that left otherwise than it entered.
    """
    leaves, left = _tensors(out, "carry")
    if left != spec:
        raise CarryError(
            "the body returns another structure than the carry had:\n"
            + trees.describe_difference(init, out, "carry")
        )
    lines = [
        f"  {path} enters as {before} and leaves as {TensorSpec.of(after)}"
        for path, before, after in zip(trees.paths(init, "carry"), entered, leaves, strict=True)
        if before != TensorSpec.of(after)
    ]
    if lines:
        raise CarryError(
            "the body changes the shape or dtype of the carry; cast or reshape inside it:\n"
            + "\n".join(lines)
        )
    return leaves


def _under_trace() -> bool:
    return context.current() is not None


def _on_host(tensors: Sequence[Tensor]) -> bool:
    return all(t.device.type != "xla" for t in tensors)


def _python_while(
    cond_fn: Callable[[PyTree], Tensor],
    body_fn: Callable[[PyTree], PyTree],
    carry: list[Tensor],
    spec: trees.TreeSpec,
) -> PyTree:
    """The loop of the docstring, on tensors that are at hand."""
    with torch.no_grad():
        tree = trees.unflatten(spec, [t.detach().clone() for t in carry])
        entered = [TensorSpec.of(t) for t in carry]
        while bool(cond_fn(tree)):
            leaves = check_carry(tree, entered, spec, body_fn(tree))
            tree = trees.unflatten(spec, leaves)
    return tree


def run_loop(
    cond: Callable[..., list[Tensor]],
    body: Callable[..., list[Tensor]],
    carry: list[Tensor],
    names: Sequence[str],
) -> list[Tensor]:
    """Trace both functions and leave one `ops.loop` in the surrounding trace.

    Args:
        cond: flat carry -> [boolean scalar].
        body: flat carry -> flat carry.
        carry: initial values, tensors of the surrounding trace.
        names: a path for each.

    Raises:
        FuncaccError: when gradients would have to flow through the loop.
    """
    specs = [TensorSpec.of(c) for c in carry]
    cond_graph = capture(lambda tracing, *flat: cond(*flat), specs, names)
    body_graph = capture(lambda tracing, *flat: body(*flat), specs, names)
    captured = [*cond_graph.captured, *body_graph.captured]
    if torch.is_grad_enabled() and any(t.requires_grad for t in [*carry, *captured]):
        raise FuncaccError(
            "a gradient would have to flow through this loop, and loops aren't differentiable; "
            "detach what enters it, or write the loop out"
        )
    outer = context.current()
    values = [outer.tensors.admit(t) if outer else t for t in captured]
    cond_full = _widen(cond_graph, body_graph, after=False)
    body_full = _widen(body_graph, cond_graph, after=True)
    if outer:
        outer.keep += [cond_full, body_full]
    return list(ops.loop(cond_full.serial, body_full.serial, carry, values))


def _widen(graph: Graph, other: Graph, *, after: bool) -> Graph:
    """The graph with the captured inputs of another one as inputs that it ignores.

    Both functions of a loop see the same constants: those of the condition first.
    """
    fx_graph = graph.module.graph
    own = graph.placeholders
    n = len(graph.inputs) - len(graph.captured)
    anchor = own[n - 1] if after else own[-1]
    for i, spec in enumerate(other.inputs[len(other.inputs) - len(other.captured) :]):
        with fx_graph.inserting_after(anchor):
            anchor = fx_graph.placeholder(f"unused_{i}")
            anchor.meta["spec"] = spec
    graph.module.recompile()
    extra = other.inputs[len(other.inputs) - len(other.captured) :]
    names = [f"unused[{i}]" for i in range(len(extra))]
    head, tail = graph.inputs[:n], graph.inputs[n:]
    head_names, tail_names = list(graph.names[:n]), list(graph.names[n:])
    graph.inputs = [*head, *extra, *tail] if after else [*head, *tail, *extra]
    graph.names = (
        [*head_names, *names, *tail_names] if after else [*head_names, *tail_names, *names]
    )
    graph.captured = []
    return graph
