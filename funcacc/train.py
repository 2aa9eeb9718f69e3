"""`TrainStep` and `train_step`: the thin stateful shell around the pure step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcacc import account, guard, inspection, parts, rng, several, trees
from funcacc import model as models
from funcacc.batches import Window, as_window
from funcacc.calls import Call, Calls
from funcacc.capture import context
from funcacc.dispatch import Dispatch
from funcacc.engines import get_engine
from funcacc.engines.base import Program
from funcacc.errors import CaptureError, FuncaccError, StateError, user_line
from funcacc.optimizers import adopt
from funcacc.optimizers.update import Adopted
from funcacc.options import Options, checked_seed
from funcacc.plan import mesh_of
from funcacc.programs import Programs
from funcacc.report import Report
from funcacc.several import Scheduler
from funcacc.state import TrainState, by_path, key_misfits, matching
from funcacc.step import StepOutput
from funcacc.types import LossFn


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
        engine: ``"auto"``: ``"xla"`` for a model on an XLA device, else ``"eager"``; or ``"jax"``
            for a model on the CPU.
        clip_norm: clip the window's mean gradient to this global L2 norm.
        clip_value: clamp each gradient element, after `clip_norm`.
        grad_transform: pure ``(grads, params) -> grads`` on dicts by name, after clipping.
        accumulate_dtype: dtype of the accumulators; ``float64`` parameters keep theirs.
        compute_dtype: cast floating parameters, and the floating tensors that the model is
            called with, to this for forward and backward.
        skip_nonfinite: leave everything as it was when loss or gradient isn't finite.
        steps_per_call: how many optimizer steps `run` puts into one dispatch.
        seed: of the random key; `None` takes `torch.initial_seed()`.
        donate: `False` keeps old buffers alive, for debugging.
        mesh: of devices, as `funcacc.sharding.mesh` makes it; `None` takes the process's.
        batch_axis: the mesh axis, or a tuple of them, that batches are cut over; `None` takes
            those called ``data`` and ``fsdp``.
        gather: ``"microbatch"`` or ``"window"``: how often parameters are gathered that are cut
            over the batch axes.
        batch_norm: ``"synchronised"`` or ``"local"``: statistics over the whole batch or over
            each part of it.

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
        mesh: Any = None,
        **options: Any,
    ) -> None:
        self._model: Callable[[], nn.Module | None] = lambda: model
        self.loss_fn = loss_fn
        self.options = Options.of(options)
        self.donate = donate
        device = inspection.device_of(model)
        inspection.check_loss(loss_fn)
        self._engine = get_engine(engine, device, mesh)
        self._adopted = adopt(opt, models.names(model))
        # Tensors made in inference mode can't be written to outside of it.
        with torch.inference_mode(False):
            self._rng = self._engine.put(rng.key(checked_seed(seed)))
            self._step = self._engine.put(torch.zeros((), dtype=torch.int32))
        self._report = Report(
            self._engine.name, seconds={"capture": 0.0, "lower": 0.0, "compile": 0.0}
        )
        mesh_used = mesh_of(self._engine, self.options.batch_axis)
        self._programs = Programs(
            self._engine, loss_fn, self.options, donate, self._report, mesh_used
        )
        self._calls = Calls(lambda: self.model, self._adopted, self._engine, self._programs)
        self._dispatch = Dispatch(
            self._engine, donate, self._report, lambda: parts.newest(self.model)
        )
        self._numbers: tuple[list[float], Tensor] | None = None
        self._counts: dict[int, Tensor] = {}

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        model = self._model()
        assert model is not None
        return model

    def _opt(self) -> Adopted:
        self._adopted.refresh(models.names(self.model))
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
            EngineError: when it can't be compiled or run; model and optimizer are unchanged.
            StateError: when the device failed and their values are lost.
            FuncaccError: when the step can't be traced; model and optimizer are unchanged.
        """
        with torch.inference_mode(False):
            window = as_window(batches)
        with self._alone():
            call = self._find(window)
            numbers = self._adopted.numbers()
            leaves, _ = trees.flatten(window.tree)
            flags = self._flags(call)
            inputs = [self._hyperparameters([*numbers, *flags]), self._count(window.count), *leaves]

            def finish(result: StepOutput) -> None:
                self._adopted.finish(call.compiled.update, numbers, lambda: self._moved(result))

            result: StepOutput = self._run(call, inputs, finish)
            return result

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The conditions under which programs are made and run."""
        if context.current() is not None:
            raise CaptureError(
                f"a TrainStep is called while a loss function or a loop is traced, at "
                f"{user_line()}; take the step outside of it"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CaptureError(
                f"a TrainStep is called inside torch.func, at {user_line()}; take it outside of it"
            )
        # Tensors made in inference mode can't become the parameters' values.
        with guard.lock, torch.inference_mode(False):
            self._dispatch.check(lambda: by_path(self.model, self._opt(), self._rng, self._step))
            try:
                yield
            except BaseException as e:
                self._programs.undo(self._adopted)
                if account.is_out_of_memory(e) and not isinstance(e, FuncaccError):
                    leaves = [*self._report.leaves, *self._report.inside]
                    raise account.out_of_memory(e, "get ready", leaves) from e
                raise

    def _find(self, window: Window, steps: int | None = None) -> Call:
        """The program and its tensors, which own their buffers."""
        built = len(self._report.builds)
        call, known = self._calls.find(window, steps)
        for build in self._report.builds[built:]:
            build.step = int(self._step)
        if not self._dispatch.owns(self._targets(call)):
            if known:
                # That a tensor of the optimizer has another shape now isn't seen before.
                call = self._calls.look(window, steps)
            self._dispatch.own(self._targets(call))
        return call

    def _targets(self, call: Call) -> list[Tensor]:
        return [*call.targets, self._rng, self._step]

    def _run(
        self, call: Call, inputs: Sequence[Tensor], finish: Callable[[Any], None] | None = None
    ) -> Any:
        """Dispatch, and let the user's tensors have the new values."""
        result: list[Any] = []

        def then(outputs: list[Tensor]) -> None:
            self._programs.used()
            result.append(trees.unflatten(call.compiled.step.output, outputs))
            self._adopted.stepped(call.compiled.update, lambda: self._moved(result[0]))
            if finish is not None:
                finish(result[0])

        moved = map(self._engine.move, (*inputs, *call.captured), call.places)
        others = itertools.chain(call.read, moved)
        self._dispatch.run(call.compiled, self._targets(call), others, then)
        return result[0]

    def _moved(self, result: StepOutput) -> bool:
        # Asked only by optimizers that keep counts on the host, or whose state is new: it waits.
        return not (self.options.skip_nonfinite and bool(result.skipped.any()))

    def run(
        self, windows: Iterable[Any], scheduler: Scheduler | None = None
    ) -> Iterator[StepOutput]:
        """Take a step for each window, `steps_per_call` of them in one dispatch.

        Equals, when what is yielded is put together to one output for each dispatch, with a
        leading axis of its steps on all leaves::

            for window in windows:
                yield self(window)
                if scheduler is not None:
                    scheduler.step()

        Windows and hyperparameters of a dispatch are gathered before it. It takes fewer steps
        when the windows end, when one has other shapes, and while a step may be skipped with
        which state starts (momentum); no window is left out. What the user does with an
        output happens between dispatches.

        Args:
            windows: of `funcacc.windows`, or whatever a call takes.
            scheduler: of `torch.optim.lr_scheduler`, or anything with ``step()``.

        Yields:
            A `StepOutput` for each dispatch.

        Raises:
            OptionError: for what can't be gathered ahead: ReduceLROnPlateau, post-hooks,
                counts kept in Python that a skipped step must not move.
            FuncaccError: as a call.
        """
        size = self.options.steps_per_call
        source: Iterator[Window] = map(as_window, windows)
        while (first := next(source, None)) is not None:
            with self._alone():
                call = self._find(first, size)
                several.check(
                    scheduler,
                    self._adopted,
                    call.compiled.update,
                    size,
                    self.options.skip_nonfinite,
                )
            # Only the first step of a dispatch can start state from its gradient, and it may
            # be skipped.
            one = self.options.skip_nonfinite and any(self._flags(call))
            most = 1 if one else size
            # What was gathered belongs to the dispatch: schedulers have moved on for it.
            with guard.deferred():
                group, source = several.gather(first, source, most, call, self._adopted, scheduler)
                with self._alone():
                    self._dispatch.own(self._targets(call))
                    result = self._run(call, several.stacked(group, self._flags(call), size))
            yield several.first_rows(result, len(group.windows), size)
            if group.failure is not None:
                raise group.failure

    def compile(self, batches: Any) -> Report:
        """Trace, lower and compile for windows like this one, without running anything.

        Args:
            batches: as for a call; only shapes and dtypes matter.

        Returns:
            The report so far.
        """
        with self._alone():
            self._calls.find(as_window(batches))
            self._programs.used()
        return self._report

    # Values ----------------------------------------------------------------------------

    def _flags(self, call: Call) -> list[float]:
        """1.0 for each parameter whose optimizer state starts from the next gradient."""
        return [float(self._adopted.fresh(n)) for n in call.compiled.update.born]

    def _count(self, count: Any) -> Tensor:
        if isinstance(count, Tensor):
            return count.to(torch.int32)
        if count not in self._counts:
            self._counts[count] = self._engine.put(torch.tensor(int(count), dtype=torch.int32))
        return self._counts[count]

    def _hyperparameters(self, numbers: list[float]) -> Tensor:
        if self._numbers is None or self._numbers[0] != numbers:
            packed = torch.tensor(numbers, dtype=torch.float64)
            self._numbers = numbers, self._engine.put(packed)
        return self._numbers[1]

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
        return {**state, **self._adopted.own_state()}

    def _misfits(self, state: dict[str, Any]) -> list[str]:
        """What of a state dict doesn't fit this step, a line each."""
        params = models.parameters(self.model)
        return [*key_misfits(state), *self._adopted.own_misfits(state, params)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave.

        Raises:
            StateError: when it isn't such a dict, or of another optimizer; nothing was changed.
        """
        lines = self._misfits(state)
        if lines:
            raise StateError("the state doesn't fit this step:\n  " + "\n  ".join(lines))
        with guard.lock:
            self._adopted.load_own(state, models.parameters(self.model), self._engine.put)
            self._rng = self._engine.put(state["rng"])
            self._step = self._engine.put(torch.tensor(state["step"], dtype=torch.int32))

    @property
    def programs(self) -> list[Program]:
        """The compiled programs that have run, oldest first."""
        return list(self._dispatch.programs)

    def report(self, *, collectives: bool = False, memory: bool = False) -> Report:
        """What was compiled and donated so far, and the memory of the latest program.

        Args:
            collectives: also find the communication between devices of the latest program, for
                which it is compiled once more.
            memory: also ask the compiler what the latest program needs, for which another
                process compiles it once more. Only XLA:CPU on one device tells.
        """
        if self.programs and (collectives or memory):
            last = self._calls.last
            last.compiled.enter(self._report)
            with self._alone():
                if memory:
                    self._report.need = last.compiled.program.need()
                if collectives:
                    values = [*self._targets(last), *last.read, *last.blank_inputs(self._engine)]
                    self._report.collectives = last.compiled.program.collectives(values)
        return self._report

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: compiled programs can't be pickled or copied."""
        raise StateError(
            "a TrainStep can't be pickled or copied; save model.state_dict(), opt.state_dict() "
            "and step.state_dict(), and make a new TrainStep"
        )
