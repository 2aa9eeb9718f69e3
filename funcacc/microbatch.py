"""One microbatch, traced: loss, gradients and buffers as a pure graph."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcacc import inspection, model, trees
from funcacc.capture.batch_norm import local_statistics
from funcacc.capture.context import Tracing
from funcacc.capture.early import split_early
from funcacc.capture.graph import Graph, select
from funcacc.capture.open_loops import open_loops
from funcacc.capture.open_sums import open_sums
from funcacc.capture.random import noticing_host_draws, warn_of_host_draws
from funcacc.capture.rows import Rows
from funcacc.capture.trace import capture
from funcacc.default_loss import default_loss
from funcacc.errors import CarryError, ModelError
from funcacc.loss import Mean, split_aux, terms_and_aux
from funcacc.plan import Plan
from funcacc.types import LossFn, TensorSpec


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
        opened: outputs that are parts of a sum over the rows of the batch, along a leading
            dimension.
        early: what gives parts of further inputs of `graph`, which come after the microbatch's
            leaves; its inputs are those of `graph` without them.
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
    opened: frozenset[int] = frozenset()
    early: Graph | None = None

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
    """What a microbatch is traced for.

    Attributes:
        groups: how many parts of its rows have statistics of their own.
        dtype: of the floating tensors that the model is called with; `None` for any.
    """

    module: nn.Module
    loss_fn: LossFn | None
    trainable: dict[str, TensorSpec]
    frozen: dict[str, TensorSpec]
    buffers: dict[str, TensorSpec]
    batch: list[TensorSpec]
    batch_tree: trees.TreeSpec
    device_type: str
    groups: int = 1
    dtype: torch.dtype | None = None


def trace_microbatch(s: Setting) -> Microbatch:
    """Trace loss and gradient of one microbatch.

    Raises:
        ModelError: for a loss that isn't a scalar, or depends on no trainable parameter.
        CarryError: for a buffer that changes its shape or dtype.
        CaptureError: for code that can't be part of a pure graph.
    """
    drawn: set[str] = set()
    traced = _trace(s, TensorSpec((1,), torch.float32), drawn)
    if drawn:
        # An import draws too, but not a second time: jax's does, which torch_xla's marks import.
        again: set[str] = set()
        traced = _trace(s, TensorSpec((1,), torch.float32), again)
        warn_of_host_draws(drawn & again)
    n = len(traced.coefficients)
    if n > 1:
        totals = traced.graph.outputs[traced.slices()["totals"]]
        widest = functools.reduce(torch.promote_types, (t.dtype for t in totals), torch.float32)
        traced = _trace(s, TensorSpec((n,), widest), set())
    return traced


def _trace(s: Setting, scales_spec: TensorSpec, drawn: set[str]) -> Microbatch:
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
            cast = model.inputs_as(s.module, s.dtype)
            with cast, noticing_host_draws(drawn), local_statistics(s.groups):
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


def open_sums_of(m: Microbatch, plan: Plan) -> Microbatch:
    """The microbatch with sums over its rows left open, as far as the plan wants that.

    Args:
        m: as traced.
        plan: which has the batches cut.
    """
    if plan.mesh is None or plan.mesh.rows == 1:
        return m
    at = m.slices()
    wanted = [i for i, n in enumerate(m.reached) if plan.opens(f"params[{n!r}]")]
    for kind in ("totals", "weights", "aux"):
        wanted += range(at[kind].start, at[kind].stop)
    first = len(m.trainable) + len(m.frozen) + len(m.buffers) + 2
    cut = {
        i
        for i, name in enumerate(m.graph.names)
        if i >= first and plan.cut_by_rows("window" + name.removeprefix("batch"))
    }
    out = copy.copy(m)
    graph = open_loops(m.graph, dict.fromkeys(cut, Rows(0, 1)), plan.mesh.rows)
    out.graph, out.opened = open_sums(graph, cut, plan.mesh.rows, wanted)
    end = len(m.graph.inputs) - len(m.graph.captured)
    parts = split_early(out.graph, set(range(first, end)), cut, plan.mesh.rows)
    if parts is not None:
        out.early, out.graph = parts
    return out
