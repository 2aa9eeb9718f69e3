"""Loops with a number of trips that is known when they are traced: one loop forward, one back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcacc.capture import context, ops
from funcacc.errors import FuncaccError
from funcacc.open_loop import draw_key, execute, run_loop
from funcacc.trips import Backward, Trip
from funcacc.types import TensorSpec


@dataclass
class Counted:
    """A loop over the trips ``start, start + 1, ...``; `num_carry` of the values are its carry.

    Attributes:
        trip: one trip.
        num_carry: leaves of the carry.
        num_xs: leaves of xs.
        length: number of trips, at least 1.
        start: index of the first trip.
        reverse: from the last trip to the first.
    """

    trip: Trip
    num_carry: int
    num_xs: int
    length: int
    start: int
    reverse: bool

    def forward(self, *values: Tensor) -> list[Tensor]:
        """(key, carry, xs, captured) -> (carry, ys, residuals).

        Equals::

            for i in range(length):
                carry, ys[i], residuals[i] = trip(fold_in(key, i), start + i, carry, xs[i])
        """
        key, carry, xs, captured = self._split(values)
        n = self.num_carry
        rows = [_stacked(s, self.length) for s in self.trip.graph.outputs[n:]]

        def body(t: Tensor, *c: Tensor) -> list[Tensor]:
            i = self._index(t, self.reverse)
            inputs = [*self._common(key, i), *c[:n], *(ops.take(x, i) for x in xs), *captured]
            out = list(ops.call(self.trip.graph.serial, inputs))
            return [*out[:n], *(ops.put(b, i, r) for b, r in zip(c[n:], out[n:], strict=True))]

        return self._loop(body, [*carry, *rows], [self.trip.graph])

    def backward(
        self, values: Sequence[Tensor], kept: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of (carry, xs, captured), None for those that nothing reaches.

        Args:
            values: as for `forward`.
            kept: the residuals, one row a trip.
            cotangents: of (carry, ys), None where there is none.
        """
        back = self.trip.backward
        assert back is not None
        plan = _plan(back, self, {i for i, c in enumerate(cotangents) if c is not None})
        used = [*values, *kept, *(c for c in cotangents if c is not None)]
        splits = len(values), len(values) + len(kept)

        def fn(*flat: Tensor) -> list[Tensor]:
            given = iter(flat[splits[1] :])
            ends = [None if c is None else next(given) for c in cotangents]
            return self._run_back(plan, flat[: splits[0]], flat[splits[0] : splits[1]], ends)

        found = execute(fn, used)
        places = [*plan.carries, *plan.xs, *plan.captured]
        by_place = dict(zip(places, found, strict=True))
        total = self.num_carry + self.num_xs + len(self.trip.captured)
        return [by_place.get(i) for i in range(total)]

    def _run_back(
        self,
        plan: _Plan,
        values: Sequence[Tensor],
        kept: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
    ) -> list[Tensor]:
        back = plan.back
        key, carry, xs, captured = self._split(values)
        n = self.num_carry
        sources = [*carry, *xs, *captured]
        start = [_or_zeros(cotangents[i], carry[i]) for i in plan.carries]
        start += [torch.zeros_like(sources[i]) for i in (*plan.xs, *plan.captured)]
        cut = len(plan.carries), len(plan.carries) + len(plan.xs)

        def cotangent(output: int, now: dict[int, Tensor], i: Tensor) -> Tensor:
            if output in now:
                return now[output]
            rows = cotangents[output] if output >= n else None
            if rows is not None:
                row: Tensor = ops.take(rows, i)
                return row
            spec = self.trip.outputs[output]
            return torch.zeros(spec.shape, dtype=spec.dtype)

        def body(t: Tensor, *c: Tensor) -> list[Tensor]:
            i = self._index(t, not self.reverse)
            now = dict(zip(plan.carries, c, strict=False))
            inputs = [
                *self._common(key, i),
                *(ops.take(x, i) for x in xs),
                *captured,
                *(cotangent(o, now, i) for o in back.wanted),
                *(ops.take(k, i) for k in kept),
            ]
            grads = dict(zip(back.targets, ops.call(back.graph.serial, inputs), strict=True))
            after = [grads[p] if p in grads else torch.zeros_like(now[p]) for p in plan.carries]
            after += [ops.put(b, i, grads[p]) for p, b in zip(plan.xs, c[cut[0] :], strict=False)]
            sums = zip(plan.captured, c[cut[1] :], strict=True)
            return [*after, *(s + grads[p] for p, s in sums)]

        return self._loop(body, start, [back.graph])

    def _split(self, values: Sequence[Tensor]) -> tuple[Tensor, Any, Any, Any]:
        a, b = 1 + self.num_carry, 1 + self.num_carry + self.num_xs
        return values[0], values[1:a], values[a:b], values[b:]

    def _index(self, t: Tensor, reverse: bool) -> Tensor:
        # Not `number - t`: torch_xla makes that an int64 whatever t is.
        return torch.full_like(t, self.length - 1) - t if reverse else t

    def _common(self, key: Tensor, i: Tensor) -> list[Tensor]:
        own = ops.fold_in(key, i) if self.trip.draws else key
        return [own, i.to(torch.int64) + self.start]

    def _loop(
        self, body: Callable[..., list[Tensor]], carry: list[Tensor], graphs: list[Any]
    ) -> list[Tensor]:
        tracing = context.current()
        assert tracing is not None
        tracing.keep += graphs
        start = torch.zeros((), dtype=torch.int32)
        out = run_loop(
            lambda t, *c: [t < self.length],
            lambda t, *c: [t + 1, *body(t, *c)],
            [start, *carry],
            [f"carry[{i}]" for i in range(len(carry) + 1)],
        )
        return out[1:]


@dataclass
class _Plan:
    """Which gradients a backward loop carries, stacks and sums; the others are zero."""

    back: Backward
    carries: list[int]
    xs: list[int]
    captured: list[int]


def _plan(back: Backward, loop: Counted, asked: set[int]) -> _Plan:
    n, m = loop.num_carry, loop.num_carry + loop.num_xs
    before = 2 + loop.num_xs + len(loop.trip.captured)
    live, reached = set(asked), set()
    while True:
        # The cotangent of a carry reaches, a trip earlier, what it was computed from.
        reached = back.gradients_of(live, before)
        more = {t for t in reached if t < n} - live
        if not more:
            break
        live |= more
    return _Plan(
        back,
        sorted(i for i in live if i < n),
        sorted(t for t in reached if n <= t < m),
        sorted(t for t in reached if t >= m),
    )


def _or_zeros(cotangent: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if cotangent is None else cotangent


def _stacked(spec: TensorSpec, n: int) -> Tensor:
    return torch.zeros((n, *spec.shape), dtype=spec.dtype)


class _Loop(torch.autograd.Function):
    """The forward loop, with the backward loop as its gradient."""

    @staticmethod
    def forward(loop: Counted, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(execute(loop.forward, values))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        loop, *values = inputs
        num = len(loop.trip.outputs)
        ctx.loop, ctx.num_values = loop, len(values)
        ctx.save_for_backward(*values, *output[num:])
        wanted = set(loop.trip.backward.wanted)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(output) if i not in wanted))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        loop, n = ctx.loop, ctx.num_values
        saved = ctx.saved_tensors
        asked = cotangents[: len(loop.trip.outputs)]
        present = [c for c in asked if c is not None]
        places = [c is not None for c in asked]
        out = _Once.apply(loop, n, places, *saved, *present)
        return (None, None, *out)


class _Once(torch.autograd.Function):
    """The backward loop, which has no gradient of its own."""

    @staticmethod
    def forward(
        loop: Counted, n: int, places: list[bool], *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        num = len(tensors) - sum(places)
        given = iter(tensors[num:])
        cotangents = [next(given) if here else None for here in places]
        return tuple(loop.backward(tensors[:n], tensors[n:num], cotangents))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise FuncaccError(
            "a second derivative through a loop isn't there: the loop of its gradient has none of "
            "its own; write the loop out where you need it"
        )


def run_counted(loop: Counted, values: Sequence[Tensor]) -> list[Tensor]:
    """The carry and the stacked ys of a loop, differentiable if its trip is.

    Args:
        loop: what to run.
        values: carry and xs.
    """
    values = [*values, *context.entering(loop.trip.captured)]
    inputs = [draw_key(loop.trip.draws, values), *values]
    wants = torch.is_grad_enabled() and any(v.requires_grad for v in values)
    if wants and loop.trip.backward is not None:
        out = list(_Loop.apply(loop, *inputs))
    else:
        out = execute(loop.forward, inputs)
    return out[: len(loop.trip.outputs)]
