"""Structured loops over trees: one program with a loop in it, instead of many copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from funcacc import trees
from funcacc.capture import context
from funcacc.carries import (
    check_bound,
    check_carry,
    check_condition,
    index_dtype,
    length_of,
    pair,
    tensors,
)
from funcacc.counted import Counted, run_counted
from funcacc.host import python_trips, python_while
from funcacc.open_loop import device_of, run_while
from funcacc.trips import trace_trip
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

    with these differences:

    - the carry keeps its structure, shapes and dtypes;
    - inside a training step, inside `jit` and on XLA devices both functions are traced, so
      their Python side effects happen when that is done, not once a trip;
    - what the body edits in place is its own: the caller's tensors keep their values. Writing
      into a tensor that the body closed over is refused in a trace;
    - random operations draw fresh numbers on each trip, inside a training step from the step's
      key, elsewhere from the device's generator;
    - there is no gradient: the number of trips is unknown when the program is built.

    Args:
        cond_fn: carry -> boolean scalar tensor.
        body_fn: carry -> carry; may close over tensors and use them in any way.
        init: a tree of tensors, numbers and None.

    Returns:
        The last carry; leaves are tensors.

    Raises:
        CarryError: when the body returns another structure, shape or dtype (all
            differences are listed) or something that isn't a tensor, or the condition isn't a
            boolean scalar.
        FuncaccError: when a gradient would have to flow through the loop.

    Example:
        >>> import torch, funcacc
        >>> funcacc.while_loop(lambda c: c < 100, lambda c: c * 3, torch.tensor(1))
        tensor(243)
    """
    carry, spec = tensors(init, "init")
    entered = [TensorSpec.of(t) for t in carry]

    def cond(*flat: Tensor) -> list[Tensor]:
        return [check_condition(cond_fn(trees.unflatten(spec, list(flat))))]

    def body(*flat: Tensor) -> list[Tensor]:
        return check_carry(init, entered, spec, body_fn(trees.unflatten(spec, list(flat))))

    if _on_host(carry):
        return trees.unflatten(spec, python_while(cond, body, carry))
    return trees.unflatten(spec, run_while(cond, body, carry, trees.paths(init, "carry")))


def fori_loop(
    lower: int | Tensor,
    upper: int | Tensor,
    body_fn: Callable[[Tensor, PyTree], PyTree],
    init: PyTree,
    *,
    checkpoint: bool = False,
) -> PyTree:
    """Loop over a range whose bounds may be known on the device only.

    Equals::

        carry = init
        for i in range(lower, upper):
            carry = body_fn(i, carry)
        return carry

    with the differences that `while_loop` lists, and with i an integer scalar tensor: of the
    dtype that holds both bounds, ``int64`` for Python ints. With Python ints as bounds the loop is
    differentiable in reverse mode, once: each trip keeps what its gradient needs, so memory
    grows with the number of trips. With bounds on the device it isn't.

    Args:
        lower: first index: an int that is 0 or more, or an integer scalar tensor.
        upper: one past the last index, likewise; no trip is made unless it is above `lower`.
        body_fn: (i, carry) -> carry.
        init: a tree of tensors, numbers and None.
        checkpoint: keep only the carry of each trip for the gradient, and compute the rest
            again on the way back.

    Returns:
        The last carry.

    Raises:
        CarryError: as `while_loop`, or for a bound that is negative or no integer scalar.

    Example:
        >>> import torch, funcacc
        >>> funcacc.fori_loop(0, 5, lambda i, c: c + i, torch.tensor(0))
        tensor(10)
    """
    check_bound(lower, "lower")
    check_bound(upper, "upper")
    leaves, spec = tensors(init, "init")
    entered = [TensorSpec.of(t) for t in leaves]

    def body(i: Tensor, *flat: Tensor) -> list[Tensor]:
        # Checked against init, so that messages show the caller's carry without the index.
        return check_carry(init, entered, spec, body_fn(i, trees.unflatten(spec, list(flat))))

    if isinstance(lower, Tensor) or isinstance(upper, Tensor):
        return trees.unflatten(spec, _between(lower, upper, body, leaves, init))
    trips = range(max(0, upper - lower))
    names = trees.paths(init, "carry")
    out, _ = _counted(body, trips, leaves, [], names, start=lower, checkpoint=checkpoint)
    return trees.unflatten(spec, out)


def _between(
    lower: int | Tensor,
    upper: int | Tensor,
    body: Callable[..., list[Tensor]],
    leaves: list[Tensor],
    init: PyTree,
) -> list[Tensor]:
    """The trips from `lower` to `upper`, at least one of them a tensor."""
    dtype = index_dtype(lower, upper)
    start, stop = (torch.as_tensor(b) for b in (lower, upper))
    device = device_of([start, stop, *leaves])
    carry = [start.to(device, dtype), stop.to(device, dtype), *leaves]

    def cond(i: Tensor, end: Tensor, *flat: Tensor) -> list[Tensor]:
        return [i < end]

    def step(i: Tensor, end: Tensor, *flat: Tensor) -> list[Tensor]:
        return [i + 1, end, *body(i.clone(), *flat)]

    if _on_host(carry):
        return python_while(cond, step, carry)[2:]
    return run_while(cond, step, carry, ["index", "upper", *trees.paths(init, "carry")])[2:]


def scan(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
    *,
    checkpoint: bool = False,
) -> tuple[PyTree, PyTree]:
    """Loop over the leading axis of `xs`, stacking a result for each trip.

    Equals::

        carry, ys = init, [None] * length
        for i in reversed(range(length)) if reverse else range(length):
            carry, ys[i] = f(carry, x_i)          # x_i: the i-th slice of each leaf of xs
        return carry, stack(ys)

    with the differences that `while_loop` lists, but for the last: it is differentiable in
    reverse mode, once, as `fori_loop` is.

    Args:
        f: (carry, x) -> (carry, y); y is a tree of tensors, numbers and None.
        init: a tree of tensors, numbers and None.
        xs: a tree of tensors with equal leading axes; `None` needs `length`.
        length: number of trips, where `xs` doesn't tell.
        reverse: from the last slice to the first; ``ys[i]`` still belongs to ``xs[i]``.
        checkpoint: as for `fori_loop`.

    Returns:
        ``(carry, ys)``: the leaves of ys have a leading axis of `length`.

    Raises:
        CarryError: as `while_loop`, or when leading axes disagree.

    Example:
        >>> import torch, funcacc
        >>> funcacc.scan(lambda c, x: (c + x, c * x), torch.tensor(0), torch.arange(4))
        (tensor(6), tensor([0, 0, 2, 9]))
    """
    slices, xs_spec = tensors(xs, "xs")
    leaves, spec = tensors(init, "init")
    entered = [TensorSpec.of(t) for t in leaves]
    n = length_of(slices, length)
    y_spec: list[trees.TreeSpec] = []

    def body(i: Tensor, *flat: Tensor) -> list[Tensor]:
        carry = trees.unflatten(spec, list(flat[: len(leaves)]))
        after, y = pair(f(carry, trees.unflatten(xs_spec, list(flat[len(leaves) :]))))
        rows, row_spec = tensors(y, "y")
        y_spec[:] = [row_spec]
        return [*check_carry(init, entered, spec, after), *rows]

    trips = range(n - 1, -1, -1) if reverse else range(n)
    names = [*trees.paths(init, "carry"), *trees.paths(xs, "x")]
    out, ys = _counted(body, trips, leaves, slices, names, checkpoint=checkpoint)
    return trees.unflatten(spec, out), trees.unflatten(y_spec[0], ys)


def _counted(
    body: Callable[..., list[Tensor]],
    trips: range,
    carry: list[Tensor],
    xs: list[Tensor],
    names: Sequence[str],
    *,
    start: int = 0,
    checkpoint: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """The carry and the stacked ys of a loop whose number of trips is known."""
    carry, xs = context.entering(carry), context.entering(xs)
    host = _on_host([*carry, *xs])
    if host and len(trips):
        out, rows = python_trips(body, trips, start, carry, xs, checkpoint=checkpoint)
        return out, [torch.stack(r) for r in zip(*(rows[i] for i in sorted(rows)), strict=True)]
    enabled = torch.is_grad_enabled() and len(trips) > 0
    trip = trace_trip(
        body,
        carry,
        [TensorSpec(tuple(x.shape[1:]), x.dtype) for x in xs],
        names,
        differentiate=[enabled and t.requires_grad for t in [*carry, *xs]],
        checkpoint=checkpoint,
    )
    n = len(carry)
    if not len(trips):
        device = device_of([*carry, *xs])
        empty = [torch.zeros((0, *s.shape), dtype=s.dtype) for s in trip.outputs[n:]]
        return [t.clone() for t in carry], [t.to(device) for t in empty]
    loop = Counted(trip, n, len(xs), len(trips), start, reverse=trips.step < 0)
    values = run_counted(loop, [*carry, *xs])
    return values[:n], values[n:]


def _on_host(values: Sequence[Tensor]) -> bool:
    """Whether Python runs the loop: no trace is under way, and no lazy device is involved."""
    return context.current() is None and all(t.device.type != "xla" for t in values)
