"""`TrainStep` and `train_step`: the thin stateful shell around the pure step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcacc import inspection, rng, trees
from funcacc import model as models
from funcacc.batches import Window, as_window
from funcacc.capture.context import autocast_state
from funcacc.engines import get_engine
from funcacc.engines.base import Program
from funcacc.errors import StateError
from funcacc.optimizers import adopt
from funcacc.optimizers.update import Adopted
from funcacc.options import Options, checked_seed
from funcacc.programs import Compiled, Programs, shape_of
from funcacc.report import Leaf, Report
from funcacc.state import TrainState, matching
from funcacc.step import StepOutput
from funcacc.types import LossFn, TensorSpec
from funcacc.watch import Watch, same


class _Call(NamedTuple):
    """A program with the tensors that it is called with, as long as they are the same.

    Attributes:
        compiled: the program.
        targets: the state, which it replaces.
        read: other parameters and buffers.
        captured: what the loss closed over.
    """

    compiled: Compiled
    targets: list[Tensor]
    read: list[Tensor]
    captured: list[Tensor]


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
        self._report = Report(
            self._engine.name, seconds={"capture": 0.0, "lower": 0.0, "compile": 0.0}
        )
        self._programs = Programs(self._engine, loss_fn, self.options, donate, self._report)
        self._noted: list[Program] = []
        self._watch: Watch | None = None
        self._calls: dict[Any, _Call] = {}
        self._owned: tuple[list[Tensor], list[Any]] = [], []
        self._numbers: tuple[list[float], Tensor] | None = None
        self._counts: dict[int, Tensor] = {}

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
            window = as_window(batches)
            call, known = self._prepare(window)
            if not self._owns(call.targets):
                if known:
                    # That a tensor of the optimizer has another shape now isn't seen before.
                    call = self._look(window)
                self._own(call.targets)
            return self._run(call, window)

    def _run(self, call: _Call, window: Window) -> StepOutput:
        compiled, targets = call.compiled, call.targets
        numbers = self._adopted.numbers()
        values = [*targets, *call.read, *self._fresh(call, numbers, window)]
        self._engine.settle()
        first_run = compiled.program not in self._noted
        before = self._engine.addresses(targets) if first_run and self.donate else None
        outputs = compiled.program(values)
        if first_run:
            self._note_program(compiled, before, outputs)
        n = compiled.layout.num_state
        self._engine.assign(targets, outputs[:n])
        self._owned = targets, storages(targets)
        self._programs.born.clear()
        result: StepOutput = trees.unflatten(compiled.step.output, outputs[n:])
        self._adopted.finish(compiled.update, numbers, lambda: self._moved(result))
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
            self._prepare(as_window(batches))
        return self._report

    def _prepare(self, window: Window) -> tuple[_Call, bool]:
        """The program for this window with its tensors, and whether they are known ones."""
        opt = self._adopted
        if self._watch is None or not self._watch.unchanged(self.model, opt.watched()):
            return self._look(window), False
        call = self._calls.get(self._place(window))
        if call is None or not call.compiled.update.holds(opt.numbers()):
            return self._look(window), False
        return call, True

    def _place(self, window: Window) -> Any:
        device = self._engine.device.type
        return shape_of(window), self._adopted.static(), autocast_state(device)

    def _look(self, window: Window) -> _Call:
        """Find the program in the long way."""
        opt = self._adopted
        opt.refresh(self._names())
        compiled = self._programs.find(self.model, window, opt)
        call = self._call_of(compiled)
        # What was found in another state of affairs doesn't hold any more.
        same = self._watch is not None and self._watch.unchanged(self.model, opt.watched())
        self._calls = {**(self._calls if same else {}), self._place(window): call}
        self._watch = Watch(self.model, opt.watched())
        return call

    # Values ----------------------------------------------------------------------------

    def _call_of(self, compiled: Compiled) -> _Call:
        params, buffers = models.parameters(self.model), models.buffers(self.model)
        layout, state = compiled.layout, self._adopted.leaves()
        for path in layout.opt_state:
            # load_state_dict of torch.optim leaves step counts on the CPU.
            if state[path].device.type != self._engine.device.type:
                state[path] = self._engine.put(state[path])
                self._adopted.replace(path, state[path])
        targets = [
            *(params[n] for n in layout.params),
            *(buffers[n] for n in layout.buffers),
            *(state[p] for p in layout.opt_state),
            self._rng,
            self._step,
        ]
        read = [*(params[n] for n in layout.frozen), *(buffers[n] for n in layout.constants)]
        captured = [self._engine.move(t) for t in compiled.step.graph.captured]
        return _Call(compiled, targets, read, captured)

    def _fresh(self, call: _Call, numbers: list[float], window: Window) -> list[Tensor]:
        """The inputs that may differ from call to call."""
        born = self._programs.born
        flags = [float(n in born) for n in call.compiled.update.born]
        leaves, _ = trees.flatten(window.tree)
        return [
            self._hyperparameters([*numbers, *flags]),
            self._count(window.count),
            *map(self._engine.move, leaves),
            *call.captured,
        ]

    def _count(self, count: Any) -> Tensor:
        if isinstance(count, Tensor):
            return self._engine.move(count.to(torch.int32))
        if count not in self._counts:
            self._counts[count] = self._engine.put(torch.tensor(int(count), dtype=torch.int32))
        return self._counts[count]

    def _hyperparameters(self, numbers: list[float]) -> Tensor:
        if self._numbers is None or self._numbers[0] != numbers:
            packed = torch.tensor(numbers, dtype=torch.float64)
            self._numbers = numbers, self._engine.put(packed)
        return self._numbers[1]

    def _owns(self, targets: list[Tensor]) -> bool:
        """Whether the targets are what the last step left, in the same storages."""
        last, held = self._owned
        return same(targets, last) and same(storages(targets), held)

    def _own(self, targets: Sequence[Tensor]) -> None:
        """Separate the buffers of state leaves that aren't what the last step left there."""
        known = {id(t): (t, s) for t, s in zip(*self._owned, strict=True)}
        new = {}
        for t, storage in zip(targets, storages(targets), strict=True):
            if id(t) not in known or known[id(t)][1] is not storage:
                new[id(t)] = t
        if new:
            self._engine.own(list(new.values()), [t for t in targets if id(t) not in new])

    def _note_program(
        self, compiled: Compiled, before: list[int] | None, outputs: Sequence[Tensor]
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
        self._watch = None

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


def storages(tensors: Sequence[Tensor]) -> list[Any]:
    """The storages of tensors, which ``p.data = ...`` replaces; the same objects if not."""
    return list(map(Tensor.untyped_storage, tensors))
