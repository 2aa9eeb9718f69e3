"""The microbatch loop: what one window gives, as a pure function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcacc import inspection, loops, model, trees
from funcacc.capture import ops
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph, select, uses
from funcacc.capture.random import noticing_host_draws
from funcacc.capture.trace import capture
from funcacc.default_loss import default_loss
from funcacc.errors import CarryError, ModelError
from funcacc.loss import Last, Mean, Stack, Sum, split_aux, terms_and_aux
from funcacc.types import LossFn, PyTree, TensorSpec


@dataclass
class Microbatch:
    """One microbatch, traced.

    The graph's inputs are trainable parameters, frozen parameters, buffers, the key, the
    scale of each loss term, the leaves of the microbatch, and captured tensors. Its
    outputs are the gradients of `reached`, totals, weights, aux values, aux weights, and
    the buffers in `changed`.

    Attributes:
        graph: the program.
        trainable: names of the parameters that are differentiated.
        frozen: names of the other parameters.
        buffers: names of the buffers.
        scales: what each term's total is multiplied by before it is differentiated; without
            effect for one term.
        reached: those of `trainable` that the loss depends on.
        changed: those of `buffers` that the forward pass writes.
        coefficients: one for each loss term.
        reductions: the kind of each aux leaf.
        aux: structure of the aux tree.
    """

    trainable: list[str]
    frozen: list[str]
    buffers: list[str]
    scales: TensorSpec
    graph: Graph = field(init=False)
    reached: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    reductions: list[type] = field(default_factory=list)
    aux: trees.TreeSpec | None = None

    def slices(self) -> dict[str, slice]:
        """Where each kind of output stands."""
        counts = {
            "grads": len(self.reached),
            "totals": len(self.coefficients),
            "weights": len(self.coefficients),
            "aux": len(self.reductions),
            "aux_weights": self.reductions.count(Mean),
            "buffers": len(self.changed),
        }
        out, at = {}, 0
        for name, n in counts.items():
            out[name] = slice(at, at + n)
            at += n
        return out


class Setting(NamedTuple):
    """What a microbatch is traced for."""

    module: nn.Module
    loss_fn: LossFn | None
    trainable: dict[str, TensorSpec]
    frozen: dict[str, TensorSpec]
    buffers: dict[str, TensorSpec]
    batch: list[TensorSpec]
    batch_tree: trees.TreeSpec
    device_type: str


def trace_microbatch(s: Setting) -> Microbatch:
    """Trace loss and gradient of one microbatch.

    Raises:
        ModelError: for a loss that isn't a scalar, or depends on no trainable parameter.
        CarryError: for a buffer that changes its shape or dtype.
        CaptureError: for code that can't be part of a pure graph.
    """
    traced = _trace(s, TensorSpec((1,), torch.float32))
    n = len(traced.coefficients)
    if n > 1:
        totals = traced.graph.outputs[traced.slices()["totals"]]
        widest = functools.reduce(torch.promote_types, (t.dtype for t in totals), torch.float32)
        traced = _trace(s, TensorSpec((n,), widest))
    return traced


def _trace(s: Setting, scales_spec: TensorSpec) -> Microbatch:
    out = Microbatch(list(s.trainable), list(s.frozen), list(s.buffers), scales_spec)
    counts = [len(s.trainable), len(s.frozen), len(s.buffers), 2, len(s.batch)]
    hooks = inspection.gradient_hooks(s.module)

    def fn(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
        params, frozen, buffers, (key, scales), batch = _cut(flat, counts)
        leaves = [p.detach().requires_grad_() for p in params]
        values = dict(zip(s.trainable, leaves, strict=True))
        values.update(zip(s.frozen, frozen, strict=True))
        values.update({n: b.clone() for n, b in zip(s.buffers, buffers, strict=True)})
        for name, p in zip(s.trainable, leaves, strict=True):
            for hook in hooks.get(name, ()):
                p.register_hook(hook)
        names, attributes = inspection.all_names(s.module), inspection.tensor_attributes(s.module)
        with tracing.random.drawing_from(key), model.swapped(s.module, values):
            with noticing_host_draws():
                microbatch = trees.unflatten(s.batch_tree, batch)
                result = (s.loss_fn or default_loss)(s.module, microbatch)
            terms, aux = terms_and_aux(result)
            after = dict(s.module.named_buffers(remove_duplicate=False))
            inspection.refuse_new_state(s.module, names, dict(zip(s.frozen, frozen, strict=True)))
            inspection.refuse_attribute_state(attributes)
            totals = [t.total.reshape(()) for t in terms]
            objective = totals[0]
            if len(terms) > 1:
                usable = torch.stack([t.to(scales.dtype) for t in totals])
                objective = (usable * scales[: len(terms)]).sum()
            if not objective.requires_grad:
                raise ModelError(
                    "the loss depends on no trainable parameter, so it has no gradient; check "
                    "for detach(), torch.no_grad() and requires_grad=False on the way to it"
                )
            grads = _gradients(objective, leaves)
        found, out.aux = split_aux(aux)
        out.reductions = [type(r) for r in found]
        out.coefficients = [t.coefficient for t in terms]
        out.reached = [n for n, g in zip(s.trainable, grads, strict=True) if g is not None]
        out.changed = list(s.buffers)
        _check_buffers(s.buffers, after)
        like = totals[0].detach()
        return [
            *(g for g in grads if g is not None),
            *(t.detach() for t in totals),
            *(t.weight for t in terms),
            *(torch.as_tensor(r.value).detach() for r in found),
            *(_aux_weight(r.weight, like) for r in found if isinstance(r, Mean)),
            *(after[n].detach() for n in s.buffers),
        ]

    specs = [*s.trainable.values(), *s.frozen.values(), *s.buffers.values()]
    specs += [TensorSpec((2,), torch.int32), scales_spec, *s.batch]
    names = [f"params[{n!r}]" for n in [*s.trainable, *s.frozen]]
    names += [f"buffers[{n!r}]" for n in s.buffers] + ["key", "scales"]
    names += trees.spec_paths(s.batch_tree, "batch")
    weights = len(s.trainable) + len(s.frozen)
    out.graph = capture(fn, specs, names, device_type=s.device_type, protected=weights)
    _drop_unchanged(out)
    return out


def _gradients(objective: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    # The forward pass may have frozen some of them.
    wanted = [p for p in leaves if p.requires_grad]
    found = iter(torch.autograd.grad(objective, wanted, allow_unused=True))
    return [next(found) if p.requires_grad else None for p in leaves]


def _cut(flat: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    parts, at = [], 0
    for n in counts:
        parts.append(list(flat[at : at + n]))
        at += n
    return parts


def _aux_weight(weight: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(weight).detach().to(torch.promote_types(like.dtype, torch.float32))


def _check_buffers(before: dict[str, TensorSpec], after: dict[str, Tensor]) -> None:
    lines = [
        f"  buffers[{n!r}] enters as {spec} and leaves as "
        f"{TensorSpec.of(after[n]) if n in after else 'nothing'}"
        for n, spec in before.items()
        if n not in after or TensorSpec.of(after[n]) != spec
    ]
    if lines:
        raise CarryError(
            "the forward pass changes the shape or dtype of buffers; keep them as they are:\n"
            + "\n".join(lines)
        )


def _drop_unchanged(m: Microbatch) -> None:
    """Buffers that leave as they came are constants, not state."""
    first = len(m.trainable) + len(m.frozen)
    inputs = dict(zip(m.buffers, m.graph.placeholders[first:], strict=False))
    at = m.slices()["buffers"].start
    results = m.graph.results
    keep = [i for i, n in enumerate(m.buffers) if results[at + i] is not inputs[n]]
    m.changed = [m.buffers[i] for i in keep]
    m.graph = select(m.graph, [*range(at), *(at + i for i in keep)])


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
    """Tensors of the trace that a window is computed from."""

    params: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    key: Tensor
    batch: list[Tensor]
    trips: Tensor


def run_window(
    tracing: Tracing, m: Microbatch, x: WindowInputs, accumulate_dtype: torch.dtype
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
    """
    cut = m.slices()
    outs = m.graph.outputs
    capacity = int(x.batch[0].shape[0])
    # A count on the device can't be checked; indices past the capacity would read its last row.
    x = x._replace(trips=x.trips.clamp(max=capacity))
    captured = [tracing.tensors.admit(t) for t in m.graph.captured]
    scales = torch.ones(m.scales.shape, dtype=m.scales.dtype)
    if len(m.coefficients) > 1:
        scales = _term_scales(m, x, captured)

    def call(graph: Graph, i: Tensor, buffers: dict[str, Tensor]) -> list[Tensor]:
        return _call(graph, m, x, i, buffers, scales, captured)

    zeros = {
        "grads": [_zeros(s, _acc_dtype(s.dtype, accumulate_dtype)) for s in outs[cut["grads"]]],
        "totals": [_zeros(s, _sum_dtype(s.dtype)) for s in outs[cut["totals"]]],
        "weights": [_zeros(s, _sum_dtype(s.dtype)) for s in outs[cut["weights"]]],
        "aux": _aux_zeros(m, outs[cut["aux"]], capacity),
        "aux_weights": [_zeros(s, s.dtype) for s in outs[cut["aux_weights"]]],
        "buffers": [x.buffers[n] for n in m.changed],
    }

    def body(i: Tensor, c: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        buffers = {**x.buffers, **dict(zip(m.changed, c["buffers"], strict=True))}
        out = call(m.graph, i, buffers)
        new = {k: _add(c[k], out[cut[k]]) for k in ("grads", "totals", "weights", "aux_weights")}
        new["aux"] = _aux_step(m, i, c["aux"], out[cut["aux"]], out[cut["aux_weights"]])
        new["buffers"] = out[cut["buffers"]]
        return new

    start = torch.zeros((), dtype=torch.int32)
    end = loops.fori_loop(start, x.trips, body, zeros)
    loss, grads = _normalise(m, end, outs[cut["totals"]])
    return WindowResult(
        loss,
        dict(zip(m.reached, grads, strict=True)),
        _aux_end(m, end["aux"], end["aux_weights"]),
        end["weights"][0],
        dict(zip(m.changed, end["buffers"], strict=True)),
    )


def _call(
    graph: Graph,
    m: Microbatch,
    x: WindowInputs,
    i: Tensor,
    buffers: dict[str, Tensor],
    scales: Tensor,
    captured: list[Tensor],
) -> list[Tensor]:
    inputs = [*x.params.values(), *x.frozen.values(), *(buffers[n] for n in m.buffers)]
    batch = [ops.take(leaf, i) for leaf in x.batch]
    return list(ops.call(graph.serial, [*inputs, ops.fold_in(x.key, i), scales, *batch, *captured]))


def _term_scales(m: Microbatch, x: WindowInputs, captured: list[Tensor]) -> Tensor:
    """``c[t] / sum_i weight[t, i]`` for each term, 0 where the weights sum to 0."""
    cut = m.slices()
    wanted = list(range(*cut["weights"].indices(len(m.graph.outputs))))
    first = len(m.trainable) + len(m.frozen)
    positions = {first + m.buffers.index(n) for n in m.changed}
    # Buffers evolve in this loop only if a weight looks at them.
    evolving = bool(uses(m.graph, wanted) & positions)
    if evolving:
        wanted += range(*cut["buffers"].indices(len(m.graph.outputs)))
    graph = select(m.graph, wanted)
    n = len(m.coefficients)
    zeros = [_zeros(s, _sum_dtype(s.dtype)) for s in graph.outputs[:n]]
    scales = torch.ones(m.scales.shape, dtype=m.scales.dtype)

    def body(i: Tensor, c: tuple[list[Tensor], list[Tensor]]) -> Any:
        buffers = {**x.buffers, **dict(zip(m.changed, c[1], strict=False))}
        out = _call(graph, m, x, i, buffers, scales, captured)
        return _add(c[0], out[:n]), out[n:]

    start = torch.zeros((), dtype=torch.int32)
    state = [x.buffers[b] for b in m.changed] if evolving else []
    sums, _ = loops.fori_loop(start, x.trips, body, (zeros, state))
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
    return loss, [ratios[0](_scaled(m.coefficients[0], g)) for g in end["grads"]]


def _scaled(coefficient: float, x: Tensor) -> Tensor:
    return x if coefficient == 1 else coefficient * x


class _Ratio:
    """``total / weight`` in the dtype of the total, and 0 where the weight is 0.

    Computed in at least ``float32``: half precision holds few counts, and none past 65504.
    """

    def __init__(self, weight: Tensor) -> None:
        self.usable = weight > 0
        self.weight = weight
        self._parts: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def __call__(self, total: Tensor) -> Tensor:
        wide = _sum_dtype(total.dtype)
        if wide not in self._parts:
            w = self.weight.to(wide)
            one, zero = w.new_ones(()), w.new_zeros(())
            self._parts[wide] = torch.where(self.usable, w, one), zero
        w, zero = self._parts[wide]
        return torch.where(self.usable, total.to(wide) / w, zero).to(total.dtype)


def _acc_dtype(dtype: torch.dtype, asked: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else asked


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.int64
    return torch.promote_types(dtype, torch.float32)


def _zeros(spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    return torch.zeros(spec.shape, dtype=dtype)


def _add(sums: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    return [s + v.to(s.dtype) for s, v in zip(sums, values, strict=True)]


def _aux_zeros(m: Microbatch, specs: Sequence[TensorSpec], capacity: int) -> list[Tensor]:
    out = []
    for kind, s in zip(m.reductions, specs, strict=True):
        if kind is Mean:
            wide = s.dtype if s.dtype.is_floating_point else torch.float32
            out.append(_zeros(s, torch.promote_types(wide, torch.float32)))
        elif kind is Sum:
            out.append(_zeros(s, _sum_dtype(s.dtype)))
        elif kind is Last:
            out.append(_zeros(s, s.dtype))
        else:
            out.append(torch.zeros((capacity, *s.shape), dtype=s.dtype))
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
