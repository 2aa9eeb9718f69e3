"""The pure step: (state, window) -> (state, output), one graph for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc import loops, trees
from funcacc.accumulate import WindowInputs, run_window
from funcacc.capture import ops
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph
from funcacc.capture.trace import capture
from funcacc.errors import ModelError
from funcacc.microbatch import Microbatch
from funcacc.optimizers.update import Update, apply
from funcacc.options import Options
from funcacc.plan import Plan
from funcacc.types import PyTree, TensorSpec


class StepOutput(NamedTuple):
    """What a step returns; device tensors, read when you read them.

    Attributes:
        loss: J of the window, 0-d.
        aux: the aux tree, reduced as its wrappers say.
        grad_norm: global L2 norm of the mean gradient before clipping, 0-d.
        weight: total weight of the first loss term, 0-d.
        skipped: whether the window was skipped as not finite, 0-d bool.
    """

    loss: Tensor
    aux: PyTree
    grad_norm: Tensor
    weight: Tensor
    skipped: Tensor


class Accumulated(NamedTuple):
    """Gradients of a window; device tensors, read when you read them.

    Attributes:
        loss: J of the window, 0-d.
        grads: dJ/dparams by parameter name, in the accumulators' dtype, clipped and transformed
            as the options say; without the parameters that the loss doesn't reach.
        aux: the aux tree, reduced as its wrappers say.
        grad_norm: global L2 norm of the mean gradient before clipping, 0-d.
        weight: total weight of the first loss term, 0-d.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    aux: PyTree
    grad_norm: Tensor
    weight: Tensor


class Layout(NamedTuple):
    """Names and specs of everything that goes into the step, in order.

    The state comes first and is donated: `params`, `buffers`, `opt_state`, the key, the
    step count. What follows is only read. Without an optimizer there are no `params`: all
    parameters are `frozen`.
    """

    params: dict[str, TensorSpec]
    buffers: dict[str, TensorSpec]
    opt_state: dict[str, TensorSpec]
    frozen: dict[str, TensorSpec]
    constants: dict[str, TensorSpec]
    numbers: int
    window: list[TensorSpec]
    window_paths: list[str]

    @property
    def num_state(self) -> int:
        """How many leaves are state."""
        return len(self.params) + len(self.buffers) + len(self.opt_state) + 2

    def signature(self) -> tuple[list[TensorSpec], list[str]]:
        """Spec and path of each input."""
        named = [
            *((f"params[{n!r}]", s) for n, s in self.params.items()),
            *((f"buffers[{n!r}]", s) for n, s in self.buffers.items()),
            *self.opt_state.items(),
            ("rng", TensorSpec((2,), torch.int32)),
            ("step", TensorSpec((), torch.int32)),
            *((f"params[{n!r}]", s) for n, s in self.frozen.items()),
            *((f"buffers[{n!r}]", s) for n, s in self.constants.items()),
            ("hyperparameters", TensorSpec((self.numbers,), torch.float64)),
            ("window.count", TensorSpec((), torch.int32)),
            *zip(self.window_paths, self.window, strict=True),
        ]
        return [s for _, s in named], [n for n, _ in named]


class Step(NamedTuple):
    """A traced step.

    Attributes:
        graph: state leaves in, state leaves and output leaves out.
        output: structure of the `StepOutput`.
    """

    graph: Graph
    output: trees.TreeSpec


def trace_step(
    layout: Layout, m: Microbatch, update: Update | None, options: Options, plan: Plan
) -> Step:
    """Trace the whole step.

    The order inside is: mean gradient, global norm (reported), `clip_norm`, `clip_value`,
    `grad_transform`, finite check, optimizer update, selection of the old state when the
    window is skipped. Without an `update` the step ends before the finite check, and its
    output is `Accumulated`. State leaves as `plan` says that it lies.
    """
    found: list[trees.TreeSpec] = []

    def fn(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
        it = iter(flat)
        params = {n: next(it) for n in layout.params}
        buffers = {n: next(it) for n in layout.buffers}
        state = {k: next(it) for k in layout.opt_state}
        key, count = next(it), next(it)
        frozen = {n: next(it) for n in layout.frozen}
        constants = {n: next(it) for n in layout.constants}
        numbers, trips = next(it), next(it)
        every = {**params, **frozen}
        inputs = WindowInputs(
            _cast({n: every[n] for n in m.trainable}, options.compute_dtype),
            _cast({n: every[n] for n in m.frozen}, options.compute_dtype),
            {**buffers, **constants},
            key,
            dict(zip(layout.window_paths, it, strict=True)),
            trips,
        )
        window = run_window(tracing, m, inputs, options.accumulate_dtype, plan)
        grads, norm = _shape_gradients(window.grads, every, options)
        # The key advances by itself, also when the window is skipped.
        next_key = ops.fold_in(key, torch.full((), -1, dtype=torch.int32))
        after = [window.buffers[n] for n in layout.buffers]
        if update is None:
            grads = {n: plan.pin(f"params[{n!r}]", g) for n, g in grads.items()}
            result = Accumulated(window.loss, grads, window.aux, norm, window.weight)
            leaves, spec = trees.flatten(result)
            found[:] = [spec]
            return [*_pinned(plan, layout, [*after, next_key, count + 1]), *leaves]
        new_params, new_state = apply(tracing, update, params, grads, state, numbers)
        old = [*params.values(), *buffers.values(), *state.values(), count]
        new = [
            *new_params.values(),
            *after,
            *new_state.values(),
            count + 1,
        ]
        skipped = torch.zeros((), dtype=torch.bool)
        if options.skip_nonfinite:
            skipped = ~(torch.isfinite(window.loss) & torch.isfinite(norm))
            new = [torch.where(skipped, o, n) for o, n in zip(old, new, strict=True)]
        output = StepOutput(window.loss, window.aux, norm, window.weight, skipped)
        leaves, spec = trees.flatten(output)
        found[:] = [spec]
        return [*_pinned(plan, layout, [*new[:-1], next_key, new[-1]]), *leaves]

    specs, names = layout.signature()
    graph = capture(fn, specs, names)
    return Step(graph, found[0])


def trace_steps(step: Step, layout: Layout, steps: int) -> Step:
    """Several steps in one program, whose loop goes around that over the microbatches.

    Equals, with a leading axis of `steps` on hyperparameters, counts, window and output::

        for i in range(count_of_steps):
            state, output[i] = step(state, hyperparameters[i], window[i])

    Args:
        step: one step.
        layout: of the one step.
        steps: how many at most; the inputs end with the number of those to be taken, ``int32``.
    """
    n = layout.num_state
    num_read = len(layout.frozen) + len(layout.constants)
    specs, names = layout.signature()
    each = [s._replace(shape=(steps, *s.shape)) for s in specs[n + num_read :]]

    def fn(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
        read, inputs = flat[n : n + num_read], flat[n + num_read : -1]
        captured = [tracing.tensors.admit(t) for t in step.graph.captured]
        outputs = [torch.zeros((steps, *s.shape), dtype=s.dtype) for s in step.graph.outputs[n:]]

        def body(i: Tensor, carry: tuple[list[Tensor], list[Tensor]]) -> Any:
            own = [ops.take(x, i) for x in inputs]
            out = list(ops.call(step.graph.serial, [*carry[0], *read, *own, *captured]))
            return out[:n], [ops.put(x, i, y) for x, y in zip(carry[1], out[n:], strict=True)]

        start = torch.zeros((), dtype=torch.int32)
        state, outputs = loops.fori_loop(start, flat[-1], body, (list(flat[:n]), outputs))
        return [*state, *outputs]

    count = TensorSpec((), torch.int32)
    graph = capture(fn, [*specs[: n + num_read], *each, count], [*names, "number of steps"])
    return Step(graph, step.output)


def _pinned(plan: Plan, layout: Layout, state: Sequence[Tensor]) -> list[Tensor]:
    _, names = layout.signature()
    return list(map(plan.pin, names[: layout.num_state], state))


def _cast(values: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    if dtype is None:
        return values
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in values.items()}


def _shape_gradients(
    grads: dict[str, Tensor], params: dict[str, Tensor], options: Options
) -> tuple[dict[str, Tensor], Tensor]:
    """Clip and transform; returns the gradients and their norm before that."""
    norm = global_norm(list(grads.values()))
    if options.clip_norm is not None:
        # As torch.nn.utils.clip_grad_norm_, whose 1e-6 keeps a zero norm finite.
        scale = torch.clamp(options.clip_norm / (norm + 1e-6), max=1.0)
        grads = {n: g * scale.to(g.dtype) for n, g in grads.items()}
    if options.clip_value is not None:
        limit = options.clip_value
        grads = {n: g.clamp(-limit, limit) for n, g in grads.items()}
    if options.grad_transform is not None:
        changed = options.grad_transform(dict(grads), {n: params[n] for n in grads})
        if not isinstance(changed, dict) or set(changed) != set(grads):
            raise ModelError(
                "grad_transform must return a dict with the keys that it was given; "
                + trees.describe_difference(grads, changed, "grads")
            )
        grads = {n: _like(n, g, changed[n]) for n, g in grads.items()}
    return grads, norm


def _like(name: str, grad: Tensor, changed: object) -> Tensor:
    """What `grad_transform` returned for one gradient, in that gradient's dtype."""
    if not isinstance(changed, Tensor) or changed.shape != grad.shape:
        got = TensorSpec.of(changed) if isinstance(changed, Tensor) else repr(changed)
        raise ModelError(
            f"grad_transform returned {got} for grads[{name!r}], which is {TensorSpec.of(grad)}; "
            "return a tensor of that shape (zeros, for no gradient)"
        )
    return changed.to(grad.dtype)


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm over all elements, summed in at least ``float32``."""
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    total = torch.zeros((), dtype=torch.float32)
    for g in wide:
        total = total + (g * g).sum()
    return total.sqrt()
