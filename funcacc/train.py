"""`TrainStep` and `train_step`: the thin stateful shell around the pure step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcacc import inspection, rng, trees
from funcacc import model as models
from funcacc.accumulate import Microbatch, Setting, trace_microbatch
from funcacc.attributes import Attributes, differences
from funcacc.batches import Window, as_window
from funcacc.capture.context import autocast_state
from funcacc.engines import get_engine
from funcacc.engines.base import Program
from funcacc.errors import CarryError, StateError
from funcacc.optimizers import adopt
from funcacc.optimizers.update import Adopted, Update
from funcacc.options import Options, checked_seed
from funcacc.report import Leaf, Report
from funcacc.state import TrainState, matching
from funcacc.step import Layout, Step, StepOutput, trace_step
from funcacc.types import LossFn, TensorSpec

log = logging.getLogger("funcacc")


class _Compiled(NamedTuple):
    """A program and what it was built for."""

    program: Program
    step: Step
    layout: Layout
    update: Update


class TrainStep:
    """One optimizer step over a window of microbatches, compiled once.

    Equals, with K microbatches in the window and a loss that returns a scalar::

        opt.zero_grad()
        for batch in window:
            (loss_fn(model, batch) / K).backward()
        opt.step()

    After each call the model, the optimizer and its state dict are up to date;
    `Parameter` objects keep their identity. ``p.grad`` is neither read nor written.

    Args:
        model: on the device of the engine; moved before the optimizer was made.
        opt: a `torch.optim.Optimizer`, or a list of them over disjoint parameters.
        loss_fn: ``loss_fn(model, microbatch)``, returning a scalar, ``(scalar, aux)``, a
            `Loss`, or an object with ``.loss``. `None` calls the model; the loss of a
            transformers model is then weighted by its labels, exactly over the window.
        engine: ``"auto"``: ``"xla"`` for a model on an XLA device, else ``"eager"``.
        clip_norm: clip the window's mean gradient to this global L2 norm.
        clip_value: clamp each gradient element, after `clip_norm`.
        grad_transform: pure ``(grads, params) -> grads`` on dicts by name, after clipping.
        accumulate_dtype: dtype of the accumulators; ``float64`` parameters keep theirs.
        compute_dtype: cast floating parameters to this for forward and backward.
        skip_nonfinite: leave everything as it was when loss or gradient isn't finite.
        seed: of the random key; `None` takes `torch.initial_seed()`.
        donate: `False` keeps old buffers alive, for debugging.

    Raises:
        FuncaccError: for a model or optimizer that a step can't be made of.

    Example:
        >>> import torch, funcacc
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = funcacc.TrainStep(model, opt, lambda m, x: m(x).square().mean())
        >>> out = step([torch.ones(4, 2), torch.zeros(4, 2)])
        >>> out.weight
        tensor(2.)
    """

    def __init__(
        self,
        model: nn.Module,
        opt: Any,
        loss_fn: LossFn | None = None,
        *,
        engine: str = "auto",
        seed: int | None = None,
        donate: bool = True,
        **options: Any,
    ) -> None:
        self._model: Callable[[], nn.Module | None] = lambda: model
        self.loss_fn = loss_fn
        self.options = Options.of(options)
        self.donate = donate
        device = inspection.device_of(model)
        self._engine = get_engine(engine, device)
        self._adopted = adopt(opt, self._names())
        start = rng.key(checked_seed(seed))
        self._rng = self._engine.put(start)
        self._step = self._engine.put(torch.zeros((), dtype=torch.int32))
        self._lock = threading.Lock()
        self._attributes = Attributes()
        self._microbatches: dict[Any, Microbatch] = {}
        self._compiled: dict[Any, _Compiled] = {}
        self._last_key: dict[str, Any] | None = None
        self._owned: dict[int, tuple[Tensor, int]] = {}
        self._born: set[str] = set()
        self._noted: list[Program] = []
        self._numbers: tuple[list[float], Tensor] | None = None
        self._report = Report(
            self._engine.name, seconds={"capture": 0.0, "lower": 0.0, "compile": 0.0}
        )

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        model = self._model()
        assert model is not None
        return model

    def _names(self) -> dict[int, str]:
        return {id(p): n for n, p in models.parameters(self.model).items()}

    def _opt(self) -> Adopted:
        self._adopted.refresh(self._names())
        return self._adopted

    # Running ---------------------------------------------------------------------------

    def __call__(self, batches: Any) -> StepOutput:
        """Take one optimizer step.

        Args:
            batches: a `Window`, or a list or iterator of microbatches.

        Returns:
            A `StepOutput` of device tensors.

        Raises:
            BatchError: for microbatches that disagree, or something that isn't a window.
            FuncaccError: when the step can't be traced; model and optimizer are unchanged.
        """
        # Tensors made in inference mode can't become the parameters' values.
        with self._lock, torch.inference_mode(False):
            compiled, opt, window = self._prepare(batches)
            targets = self._targets(compiled, opt)
            self._own(targets)
            numbers = opt.numbers()
            values = [*targets, *self._read_only(compiled, numbers, window)]
            self._engine.settle()
            first_run = compiled.program not in self._noted
            before = self._engine.addresses(targets) if first_run and self.donate else None
            outputs = compiled.program(values)
            if first_run:
                self._note_program(compiled, before, outputs)
            n = compiled.layout.num_state
            self._engine.assign(targets, outputs[:n])
            self._owned = {id(t): (t, _storage(t)) for t in targets}
            self._born.clear()
            result: StepOutput = trees.unflatten(compiled.step.output, outputs[n:])
            opt.finish(compiled.update, numbers, lambda: self._moved(result))
            return result

    def _moved(self, result: StepOutput) -> bool:
        # Asked only by optimizers that keep counts on the host: reading waits.
        return not (self.options.skip_nonfinite and bool(result.skipped))

    def compile(self, batches: Any) -> Report:
        """Trace and lower for windows like this one, without running anything.

        Args:
            batches: as for a call; only shapes and dtypes matter.

        Returns:
            The report so far.
        """
        with self._lock:
            self._prepare(batches)
        return self._report

    def _prepare(self, batches: Any) -> tuple[_Compiled, Adopted, Window]:
        window = as_window(batches)
        opt = self._opt()
        numbers = opt.numbers()
        key = self._trace_key(window, opt)
        compiled = self._compiled.get(tuple(key.values()))
        if compiled is not None and compiled.update.holds(numbers):
            return compiled, opt, window
        if self._last_key is None:
            reason = "first call"
        else:
            reason = _what_changed(self._last_key, key)
        compiled = self._build(key, window, opt)
        self._compiled[tuple(key.values())] = compiled
        self._last_key = key
        self._report.reasons.append(reason)
        log.info("new program: %s", reason)
        return compiled, opt, window

    def _trace_key(self, window: Window, opt: Adopted) -> dict[str, Any]:
        """What a trace depends on, by name."""
        leaves, spec = trees.flatten(window.tree)
        params = models.parameters(self.model)
        return {
            "batch shapes or dtypes": (spec, tuple(TensorSpec.of(x) for x in leaves)),
            "train() or eval()": tuple(m.training for m in self.model.modules()),
            "requires_grad": tuple(p.requires_grad for p in params.values()),
            "parameters": tuple((n, TensorSpec.of(p)) for n, p in params.items()),
            "buffers": tuple((n, TensorSpec.of(b)) for n, b in models.buffers(self.model).items()),
            "optimizer": opt.static(),
            "optimizer state": _specs(opt) if self._report.traces else (),
            "autocast": autocast_state(self._engine.device.type),
            "attributes": self._attributes.now(self.model),
        }

    # Building --------------------------------------------------------------------------

    def _build(self, key: dict[str, Any], window: Window, opt: Adopted) -> _Compiled:
        start = time.perf_counter()
        m = self._microbatch(key, window, opt)
        params = models.parameters(self.model)
        specs = {n: TensorSpec.of(params[n]) for n in m.trainable}
        created = opt.create(params, m.reached)
        update = opt.capture(specs, m.reached, created)
        buffers = {n: TensorSpec.of(b) for n, b in models.buffers(self.model).items()}
        leaves, _ = trees.flatten(window.tree)
        read = {n: TensorSpec.of(params[n]) for n in m.frozen}
        layout = Layout(
            specs if opt.updates else {},
            {n: s for n, s in buffers.items() if n in m.changed},
            update.state,
            read if opt.updates else {**specs, **read},
            {n: s for n, s in buffers.items() if n not in m.changed},
            update.size,
            [TensorSpec.of(x) for x in leaves],
            trees.paths(window.tree, "window"),
        )
        step = trace_step(layout, m, update if opt.updates else None, self.options)
        _check_state(layout, step)
        self._report.seconds["capture"] += time.perf_counter() - start
        program = self._engine.compile(step.graph, layout.num_state if self.donate else 0)
        self._report.seconds["lower"] += program.seconds["lower"]
        opt.install(created, self._engine.put)
        self._born.update(created.born)
        # The key of a first call had no optimizer state in it; the next one will. Tracing
        # may also have found numbers that were taken for fixed.
        key["optimizer state"] = _specs(opt)
        key["optimizer"] = opt.static()
        self._attributes.traced(self.model, key["attributes"])
        key["attributes"] = self._attributes.now(self.model)
        return _Compiled(program, step, layout, update)

    def _microbatch(self, key: dict[str, Any], window: Window, opt: Adopted) -> Microbatch:
        leaves, tree = trees.flatten(window.tree)
        batch = [TensorSpec(tuple(x.shape[1:]), x.dtype) for x in leaves]
        watched = (
            "train() or eval()",
            "requires_grad",
            "parameters",
            "buffers",
            "autocast",
            "attributes",
        )
        trainable = [
            n for n, p in models.parameters(self.model).items() if p.requires_grad and n in opt.held
        ]
        place = (tree, tuple(batch), tuple(trainable), *(key[k] for k in watched))
        if place not in self._microbatches:
            params = models.parameters(self.model)
            setting = Setting(
                self.model,
                self.loss_fn,
                {n: self._computed(params[n]) for n in trainable},
                {n: self._computed(p) for n, p in params.items() if n not in trainable},
                {n: TensorSpec.of(b) for n, b in models.buffers(self.model).items()},
                batch,
                tree,
                self._engine.device.type,
            )
            self._microbatches[place] = trace_microbatch(setting)
            self._report.traces += 1
        return self._microbatches[place]

    def _computed(self, p: Tensor) -> TensorSpec:
        dtype = self.options.compute_dtype
        spec = TensorSpec.of(p)
        return spec._replace(dtype=dtype) if dtype and p.is_floating_point() else spec

    # Values ----------------------------------------------------------------------------

    def _targets(self, compiled: _Compiled, opt: Adopted) -> list[Tensor]:
        params, buffers = models.parameters(self.model), models.buffers(self.model)
        state = opt.leaves()
        for path in compiled.layout.opt_state:
            # load_state_dict of torch.optim leaves step counts on the CPU.
            if state[path].device.type != self._engine.device.type:
                state[path] = self._engine.put(state[path])
                opt.replace(path, state[path])
        return [
            *(params[n] for n in compiled.layout.params),
            *(buffers[n] for n in compiled.layout.buffers),
            *(state[p] for p in compiled.layout.opt_state),
            self._rng,
            self._step,
        ]

    def _read_only(self, compiled: _Compiled, numbers: list[float], window: Window) -> list[Tensor]:
        params, buffers = models.parameters(self.model), models.buffers(self.model)
        flags = [float(n in self._born) for n in compiled.update.born]
        count = window.count
        if not isinstance(count, Tensor):
            count = torch.tensor(int(count))
        leaves, _ = trees.flatten(window.tree)
        rest = [
            self._hyperparameters([*numbers, *flags]),
            count.to(torch.int32),
            *leaves,
            *compiled.step.graph.captured,
        ]
        return [
            *(params[n].detach() for n in compiled.layout.frozen),
            *(buffers[n] for n in compiled.layout.constants),
            *(self._engine.move(t) for t in rest),
        ]

    def _hyperparameters(self, numbers: list[float]) -> Tensor:
        if self._numbers is None or self._numbers[0] != numbers:
            packed = torch.tensor(numbers, dtype=torch.float64)
            self._numbers = numbers, self._engine.put(packed)
        return self._numbers[1]

    def _own(self, targets: Sequence[Tensor]) -> None:
        """Separate the buffers of state leaves that aren't what the last step left there."""
        new = {}
        for t in targets:
            known = self._owned.get(id(t))
            if known is None or known[0] is not t or known[1] != _storage(t):
                new[id(t)] = t
        if new:
            self._engine.own(list(new.values()), [t for t in targets if id(t) not in new])

    def _note_program(
        self, compiled: _Compiled, before: list[int] | None, outputs: Sequence[Tensor]
    ) -> None:
        self._noted.append(compiled.program)
        self._report.compiles += 1
        self._report.seconds["compile"] += compiled.program.seconds["compile"]
        n = compiled.layout.num_state
        self._report.num_state = n
        graph = compiled.step.graph
        after = self._engine.addresses(outputs[:n]) if before else []
        self._report.leaves = [
            Leaf(
                path,
                spec,
                donated=self.donate and i < n,
                in_place=before[i] == after[i] if before and i < n else None,
            )
            for i, (path, spec) in enumerate(zip(graph.names, graph.inputs, strict=True))
        ]

    # State -----------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The live state: the model's and optimizer's own tensors."""
        opt = self._opt()
        params = dict(models.parameters(self.model))
        return TrainState({**params}, models.buffers(self.model), opt.tree(), self._rng, self._step)

    @torch.no_grad()
    def load_state(self, state: TrainState) -> None:
        """Copy a state into the model, the optimizer and this step.

        Args:
            state: of the same structure, shapes and dtypes as `state`.

        Raises:
            StateError: naming the leaves that differ; nothing was changed.
        """
        mine = self.state
        pairs = matching(mine, state)
        for target, value in pairs:
            target.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Key and step count, as a plain dict that loads with ``weights_only=True``.

        With an ``init``/``update`` optimizer also its state, by path, once there is one: after
        the first step, or after `compile`. A torch optimizer has a state dict of its own.
        """
        state = {"rng": self._rng.cpu().clone(), "step": int(self._step)}
        own = self._adopted.own_state()
        return {**state, "opt_state": own} if own else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave.

        Raises:
            StateError: when it isn't such a dict; nothing was changed.
        """
        key = state.get("rng")
        if not isinstance(key, Tensor) or TensorSpec.of(key) != TensorSpec((2,), torch.int32):
            raise StateError(
                "state['rng'] must be an int32[2] tensor, as TrainStep.state_dict gives"
            )
        if not isinstance(state.get("step"), int):
            raise StateError("state['step'] must be an int, as TrainStep.state_dict gives")
        own, given = self._adopted.own_state(), state.get("opt_state", {})
        lines = [
            f"  {p}: {_spec_of(given, p)} given, {_spec_of(own, p)} needed"
            for p in sorted({*own, *given})
            if _spec_of(given, p) != _spec_of(own, p)
        ]
        if lines:
            raise StateError(
                "state['opt_state'] doesn't fit this step (without any yet, call "
                "step.compile(batches) before loading):\n" + "\n".join(lines)
            )
        for path, value in given.items():
            self._adopted.replace(path, self._engine.put(value))
        self._rng = self._engine.put(key)
        self._step = self._engine.put(torch.tensor(state["step"], dtype=torch.int32))

    @property
    def programs(self) -> list[Program]:
        """The compiled programs that have run, oldest first."""
        return list(self._noted)

    def report(self) -> Report:
        """What was compiled and donated so far."""
        return self._report

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: compiled programs can't be pickled or copied."""
        raise StateError(
            "a TrainStep can't be pickled or copied; save model.state_dict(), opt.state_dict() "
            "and step.state_dict(), and make a new TrainStep"
        )


def _spec_of(tensors: dict[str, Any], path: str) -> TensorSpec | None:
    value = tensors.get(path)
    return TensorSpec.of(value) if isinstance(value, Tensor) else None


def _what_changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    changed = [k for k, v in after.items() if before.get(k) != v]
    if "attributes" in changed:
        names = differences(before["attributes"], after["attributes"])
        place = changed.index("attributes")
        changed[place : place + 1] = [f"attribute {n}" for n in names]
    return ", ".join(changed) + " changed" if changed else "a hyperparameter changed"


def _storage(t: Tensor) -> int:
    """Identity of the storage, which ``p.data = ...`` replaces."""
    return int(t.untyped_storage()._cdata)


def _specs(opt: Adopted) -> tuple[tuple[str, TensorSpec], ...]:
    return tuple((path, TensorSpec.of(x)) for path, x in opt.leaves().items())


def _check_state(layout: Layout, step: Step) -> None:
    n = layout.num_state
    lines = [
        f"  {path} enters as {a} and leaves as {b}"
        for path, a, b in zip(
            step.graph.names[:n], step.graph.inputs[:n], step.graph.outputs[:n], strict=True
        )
        if a != b
    ]
    if lines:
        raise CarryError("the step changes the shape or dtype of its state:\n" + "\n".join(lines))
