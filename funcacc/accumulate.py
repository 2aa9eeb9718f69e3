"""The microbatch loop: what one window gives, as a pure function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc import loops, trees
from funcacc.capture import ops
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph, select, uses
from funcacc.loss import Mean, Stack, Sum
from funcacc.microbatch import Microbatch
from funcacc.plan import Plan
from funcacc.types import PyTree, TensorSpec


class WindowResult(NamedTuple):
    """What a window gives, before the optimizer.

    Attributes:
        loss: J, 0-d.
        grads: dJ/dparams by name, in the accumulators' dtype; only reached parameters.
        aux: the reduced aux tree.
        weight: total weight of the first term, 0-d.
        buffers: the changed buffers by name.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    aux: PyTree
    weight: Tensor
    buffers: dict[str, Tensor]


class WindowInputs(NamedTuple):
    """Tensors of the trace that a window is computed from; `batch` by path."""

    params: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    key: Tensor
    batch: dict[str, Tensor]
    trips: Tensor


def run_window(
    tracing: Tracing,
    m: Microbatch,
    x: WindowInputs,
    accumulate_dtype: torch.dtype,
    plan: Plan,
) -> WindowResult:
    """Accumulate over the microbatches of a window, in one loop.

    Equals, for a loss with one term::

        grads, total, weight = zeros, 0, 0
        for i in range(count):
            batch = [leaf[i] for leaf in window]
            t, w = loss(params, buffers, fold_in(key, i), batch)   # buffers change in place
            grads, total, weight = grads + grad(t), total + t, weight + w
        return total / weight, grads / weight

    With several terms the total weights are found first, by a loop that computes nothing
    else, and each microbatch's gradient is that of ``sum_t c[t] * total[t] / weight[t]``.

    Args:
        tracing: the surrounding trace.
        m: the traced microbatch.
        x: its inputs; leaves of `batch` have a leading axis of the capacity.
        accumulate_dtype: of the accumulators; ``float64`` gradients keep theirs.
        plan: where parameters, buffers and batches lie; accumulators follow their parameter.
    """
    cut = m.slices()
    outs = m.graph.outputs
    capacity = int(next(iter(x.batch.values())).shape[0])
    # A count on the device can't be checked; indices past the capacity would read its last row.
    x = x._replace(trips=x.trips.clamp(max=capacity))
    if plan.gather == "window":
        x = x._replace(params=_gathered(plan, x.params), frozen=_gathered(plan, x.frozen))
    around = _Around(
        x,
        [tracing.tensors.admit(t) for t in m.graph.captured],
        torch.ones(m.scales.shape, dtype=m.scales.dtype),
        plan,
    )
    if m.early is not None:
        around = around._replace(early=_early_values(m, m.early, around, capacity))
    if len(m.coefficients) > 1:
        around = around._replace(scales=_term_scales(m, around))

    zeros = {
        kind: [torch.zeros(s.shape, dtype=s.dtype) for s in specs]
        for kind, specs in carried(m, capacity, accumulate_dtype).items()
    }
    zeros["grads"] = _kept(m, plan, "grads", zeros["grads"])
    zeros["buffers"] = [x.buffers[n] for n in m.changed]

    def body(i: Tensor, c: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        buffers = {**x.buffers, **dict(zip(m.changed, c["buffers"], strict=True))}
        out = _call(m.graph, m, around, i, buffers)
        new = {k: _add(c[k], out[cut[k]]) for k in ("grads", "totals", "weights", "aux_weights")}
        new["aux"] = _aux_step(m, i, c["aux"], out[cut["aux"]], out[cut["aux_weights"]])
        new |= {k: _kept(m, plan, k, new[k]) for k in ("grads", "totals", "weights")}
        new["buffers"] = [
            plan.pin(f"buffers[{n!r}]", b)
            for n, b in zip(m.changed, out[cut["buffers"]], strict=True)
        ]
        return new

    start = torch.zeros((), dtype=torch.int32)
    end = loops.fori_loop(start, x.trips, body, zeros)
    end = {k: _added_up(m, plan, k, v) for k, v in end.items()}
    loss, grads = _normalise(m, end, outs[cut["totals"]])
    return WindowResult(
        loss,
        dict(zip(m.reached, grads, strict=True)),
        _aux_end(m, end["aux"], end["aux_weights"]),
        end["weights"][0],
        dict(zip(m.changed, end["buffers"], strict=True)),
    )


def carried(
    m: Microbatch, capacity: int, accumulate_dtype: torch.dtype
) -> dict[str, list[TensorSpec]]:
    """The sums that the loop over the microbatches carries, by kind of output."""
    outs, cut = m.graph.outputs, m.slices()
    sums = {k: _wide(outs[cut[k]], _sum_dtype) for k in ("totals", "weights")}
    return {
        "grads": _wide(outs[cut["grads"]], lambda d: _acc_dtype(d, accumulate_dtype)),
        **sums,
        "aux": _aux_sums(m, outs[cut["aux"]], capacity),
        "aux_weights": list(outs[cut["aux_weights"]]),
    }


class _Around(NamedTuple):
    """What is the same for all microbatches, or for all of them together."""

    x: WindowInputs
    captured: list[Tensor]
    scales: Tensor
    plan: Plan
    early: Sequence[Tensor] = ()


def _call(
    graph: Graph, m: Microbatch, around: _Around, i: Tensor, buffers: dict[str, Tensor]
) -> list[Tensor]:
    x, plan = around.x, around.plan
    weights = {**x.params, **x.frozen}
    batch = {path: ops.take(leaf, i) for path, leaf in x.batch.items()}
    scattered = [n for n in weights if plan.scattered(f"params[{n!r}]")]
    if scattered and plan.gather == "microbatch":
        # What is equal for all microbatches would be gathered before the loop, and stay.
        held = ops.hold([*(weights[n] for n in scattered), *batch.values()])
        weights.update(zip(scattered, held, strict=False))
        batch = dict(zip(batch, held[len(scattered) :], strict=True))
    inputs = [*_gathered(plan, weights).values(), *(buffers[n] for n in m.buffers)]
    batch = {path: plan.pin_batch(leaf, path) for path, leaf in batch.items()}
    inputs += [ops.fold_in(x.key, i), around.scales, *batch.values()]
    inputs += [ops.take(e, i) for e in around.early]
    return list(ops.call(graph.serial, [*inputs, *around.captured]))


def _gathered(plan: Plan, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: plan.pin_gathered(f"params[{n!r}]", w) for n, w in weights.items()}


def _kept(m: Microbatch, plan: Plan, kind: str, values: Sequence[Tensor]) -> list[Tensor]:
    """Sums of one kind, lying where they stay during the loop."""
    out, first = [], m.slices()[kind].start
    for i, v in enumerate(values):
        path = f"params[{m.reached[i]!r}]" if kind == "grads" else ""
        if first + i in m.opened:
            v = plan.pin_parts(path, v)
        elif path:
            v = plan.pin(path, v)
        out.append(v)
    return out


def _added_up(m: Microbatch, plan: Plan, kind: str, values: Sequence[Tensor]) -> list[Tensor]:
    """Sums of one kind after the loop, with their parts added up."""
    out, first = [], m.slices()[kind].start
    for i, v in enumerate(values):
        if first + i in m.opened:
            # A stack has a row for each microbatch before the parts.
            stacked = kind == "aux" and m.reductions[i] is Stack
            v = v.sum(1 if stacked else 0, dtype=v.dtype)
        if kind == "grads":
            v = plan.pin(f"params[{m.reached[i]!r}]", v)
        out.append(v)
    return out


def _early_values(m: Microbatch, graph: Graph, around: _Around, capacity: int) -> list[Tensor]:
    """The inputs that the batch alone determines, a row for each microbatch."""
    x = around.x
    zeros = [torch.zeros((capacity, *s.shape), dtype=s.dtype) for s in graph.outputs]

    def body(i: Tensor, c: list[Tensor]) -> list[Tensor]:
        out = _call(graph, m, around, i, x.buffers)
        return [ops.put(s, i, v) for s, v in zip(c, out, strict=True)]

    start = torch.zeros((), dtype=torch.int32)
    parts = loops.fori_loop(start, x.trips, body, zeros)
    return [p.sum(1, dtype=p.dtype) for p in parts]


def _term_scales(m: Microbatch, around: _Around) -> Tensor:
    """``c[t] / sum_i weight[t, i]`` for each term, 0 where the weights sum to 0."""
    cut, x = m.slices(), around.x
    wanted = list(range(*cut["weights"].indices(len(m.graph.outputs))))
    first = len(m.trainable) + len(m.frozen)
    positions = {first + m.buffers.index(n) for n in m.changed}
    # Buffers evolve in this loop only if a weight looks at them.
    evolving = bool(uses(m.graph, wanted) & positions)
    if evolving:
        wanted += range(*cut["buffers"].indices(len(m.graph.outputs)))
    graph = select(m.graph, wanted)
    n = len(m.coefficients)
    zeros = [torch.zeros(s.shape, dtype=_sum_dtype(s.dtype)) for s in graph.outputs[:n]]

    def body(i: Tensor, c: tuple[list[Tensor], list[Tensor]]) -> Any:
        buffers = {**x.buffers, **dict(zip(m.changed, c[1], strict=False))}
        out = _call(graph, m, around, i, buffers)
        return _add(c[0], out[:n]), out[n:]

    start = torch.zeros((), dtype=torch.int32)
    state = [x.buffers[b] for b in m.changed] if evolving else []
    sums, _ = loops.fori_loop(start, x.trips, body, (zeros, state))
    sums = _added_up(m, around.plan, "weights", sums)
    weights = torch.stack([w.to(m.scales.dtype) for w in sums])
    c = torch.tensor(m.coefficients, dtype=m.scales.dtype)
    return torch.where(weights > 0, c / torch.where(weights > 0, weights, 1.0), 0.0)


def _normalise(
    m: Microbatch, end: dict[str, list[Tensor]], specs: Sequence[TensorSpec]
) -> tuple[Tensor, list[Tensor]]:
    ratios = [_Ratio(w) for w in end["weights"]]
    parts = [
        ratio(_scaled(c, total))
        for c, total, ratio in zip(m.coefficients, end["totals"], ratios, strict=True)
    ]
    loss = parts[0]
    for part in parts[1:]:
        loss = loss + part
    if len(parts) > 1:
        return loss, end["grads"]
    return loss, [ratios[0].by_reciprocal(_scaled(m.coefficients[0], g)) for g in end["grads"]]


def _scaled(coefficient: float, x: Tensor) -> Tensor:
    return x if coefficient == 1 else coefficient * x


class _Ratio:
    """``total / weight`` in the dtype of the total, and 0 where the weight is 0.

    Computed in at least ``float32``: half precision holds few counts, and none past 65504.
    """

    def __init__(self, weight: Tensor) -> None:
        self.usable = weight > 0
        self.weight = weight
        self._parts: dict[torch.dtype, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, total: Tensor) -> Tensor:
        w, _, zero = self._in(_sum_dtype(total.dtype))
        return torch.where(self.usable, total.to(w.dtype) / w, zero).to(total.dtype)

    def by_reciprocal(self, total: Tensor) -> Tensor:
        """The same, multiplied by ``1 / weight``.

        XLA computes a product again wherever it is needed, and keeps a quotient, which for
        gradients would be in memory beside the accumulators.
        """
        w, reciprocal, zero = self._in(_sum_dtype(total.dtype))
        return torch.where(self.usable, total.to(w.dtype) * reciprocal, zero).to(total.dtype)

    def _in(self, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        if wide not in self._parts:
            w = self.weight.to(wide)
            one, zero = w.new_ones(()), w.new_zeros(())
            usable = torch.where(self.usable, w, one)
            self._parts[wide] = usable, one / usable, zero
        return self._parts[wide]


def _acc_dtype(dtype: torch.dtype, asked: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else asked


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.int64
    return torch.promote_types(dtype, torch.float32)


def _add(sums: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    return [s + v.to(s.dtype) for s, v in zip(sums, values, strict=True)]


def _wide(
    specs: Sequence[TensorSpec], dtype: Callable[[torch.dtype], torch.dtype]
) -> list[TensorSpec]:
    return [s._replace(dtype=dtype(s.dtype)) for s in specs]


def _aux_sums(m: Microbatch, specs: Sequence[TensorSpec], capacity: int) -> list[TensorSpec]:
    out = []
    for kind, s in zip(m.reductions, specs, strict=True):
        if kind is Mean:
            wide = s.dtype if s.dtype.is_floating_point else torch.float32
            out.append(s._replace(dtype=torch.promote_types(wide, torch.float32)))
        elif kind is Sum:
            out.append(s._replace(dtype=_sum_dtype(s.dtype)))
        else:
            rows = (capacity,) if kind is Stack else ()
            out.append(s._replace(shape=(*rows, *s.shape)))
    return out


def _aux_step(
    m: Microbatch,
    i: Tensor,
    sums: Sequence[Tensor],
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> list[Tensor]:
    out, w = [], iter(weights)
    for kind, s, v in zip(m.reductions, sums, values, strict=True):
        if kind is Mean:
            weight = next(w).to(s.dtype)
            # What has no weight may be 0 / 0.
            out.append(s + torch.where(weight != 0, v.to(s.dtype) * weight, 0.0))
        elif kind is Sum:
            out.append(s + v.to(s.dtype))
        elif kind is Stack:
            out.append(ops.put(s, i, v))
        else:
            out.append(v)
    return out


def _aux_end(m: Microbatch, sums: Sequence[Tensor], weights: Sequence[Tensor]) -> PyTree:
    w = iter(weights)
    values = [
        _Ratio(next(w))(s) if kind is Mean else s
        for kind, s in zip(m.reductions, sums, strict=True)
    ]
    assert m.aux is not None
    return trees.unflatten(m.aux, values)
