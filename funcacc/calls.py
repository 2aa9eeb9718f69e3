"""Which program a call needs and with which tensors: at a glance, when nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcacc import inspection
from funcacc import model as models
from funcacc.batches import Window
from funcacc.capture.context import autocast_state
from funcacc.engines.base import Engine
from funcacc.optimizers.update import Adopted
from funcacc.placement import Placement
from funcacc.programs import Compiled, Programs, shape_of
from funcacc.watch import Watch


class Call(NamedTuple):
    """A program with the tensors that it is called with, as long as they are the same.

    Attributes:
        compiled: the program.
        targets: the state, which it replaces, without key and step count.
        read: other parameters and buffers.
        captured: what the loss closed over, where it is: a tensor on the host is uploaded for
            each call, since it may be written to in place.
        places: where what is neither state nor read belongs: one for each input of a window and
            for each captured tensor; `None` leaves it where it is.
        lying: where targets and read tensors have to lie on a mesh; empty on one device.
    """

    compiled: Compiled
    targets: list[Tensor]
    read: list[Tensor]
    captured: list[Tensor]
    places: list[Placement | None]
    lying: list[Placement]

    def blank_inputs(self, engine: Engine) -> list[Tensor]:
        """Zeros in the place of a window's inputs and of captured tensors."""
        specs = self.compiled.step.graph.inputs[-len(self.places) :]
        zeros = [torch.zeros(s.shape, dtype=s.dtype) for s in specs]
        return list(map(engine.put, zeros, self.places))


class Calls:
    """The calls that a step has made.

    Args:
        model: gives the module.
        opt: the optimizer.
        engine: the engine.
        programs: the programs that there are, and what makes others.

    Attributes:
        last: the latest call.
    """

    def __init__(
        self, model: Callable[[], nn.Module], opt: Adopted, engine: Engine, programs: Programs
    ) -> None:
        self._model = model
        self._opt = opt
        self._engine = engine
        self._programs = programs
        self._watch: Watch | None = None
        self._known: dict[Any, Call] = {}
        self.last: Call

    def find(self, window: Window, steps: int | None = None) -> tuple[Call, bool]:
        """The call for a window, and whether it is a known one.

        Args:
            window: of which shapes and dtypes count.
            steps: how many optimizer steps the program takes at most; `None` for one, without
                a loop around it.

        Raises:
            FuncaccError: when the step can't be traced or built; nothing was changed.
        """
        if self._watch is None or not self._watch.unchanged(self._model(), self._opt.watched()):
            return self.look(window, steps), False
        call = self._known.get(self._place(window, steps))
        if call is None or not call.compiled.update.holds(self._opt.numbers()):
            return self.look(window, steps), False
        if not self._in_place(call):
            return self.look(window, steps), False
        self.last = call
        return call, True

    def look(self, window: Window, steps: int | None = None) -> Call:
        """As `find`, looking at everything."""
        model, opt = self._model(), self._opt
        inspection.check_placed(model, self._engine.device)
        opt.refresh(models.names(model))
        call = self._make(self._programs.find(model, window, opt, steps))
        # What was found in another state of affairs doesn't hold any more.
        same = self._watch is not None and self._watch.unchanged(model, opt.watched())
        self._known = {**(self._known if same else {}), self._place(window, steps): call}
        self._watch = Watch(model, opt.watched())
        self.last = call
        return call

    def _place(self, window: Window, steps: int | None) -> Any:
        autocast = autocast_state(self._engine.device.type)
        return shape_of(window), self._opt.static(), autocast, steps, self._programs.cut(window)

    def _make(self, compiled: Compiled) -> Call:
        model = self._model()
        params, buffers = models.parameters(model), models.buffers(model)
        layout, state = compiled.layout, self._opt.leaves()
        inspection.check_apart({n: params[n] for n in layout.params})
        for path in layout.opt_state:
            # load_state_dict of torch.optim leaves step counts on the CPU.
            if state[path].device.type != self._engine.device.type:
                state[path] = compiled.plan.putting(self._engine)(path, state[path])
                self._opt.replace(path, state[path])
        targets = [
            *(params[n] for n in layout.params),
            *(buffers[n] for n in layout.buffers),
            *(state[p] for p in layout.opt_state),
        ]
        read = [*(params[n] for n in layout.frozen), *(buffers[n] for n in layout.constants)]
        graph, plan, first = compiled.step.graph, compiled.plan, len(targets) + 2 + len(read)
        rest = zip(graph.names[first:], graph.inputs[first:], strict=True)
        inputs = [plan.of(p, len(s.shape)) if p in plan.leaves else None for p, s in rest]
        lying: list[Placement] = []
        if plan.mesh is not None:
            paths = [*graph.names[: len(targets)], *graph.names[first - len(read) : first]]
            tensors = [*targets, *read]
            lying = [plan.of(p, t.ndim) for p, t in zip(paths, tensors, strict=True)]
            self._engine.place(tensors, lying)
        return Call(compiled, targets, read, graph.captured, inputs, lying)

    def _in_place(self, call: Call) -> bool:
        """Whether nobody has placed a tensor otherwise; a replay doesn't look."""
        if call.compiled.plan.mesh is None:
            return True
        return self._engine.placements([*call.targets, *call.read]) == call.lying
