"""The programs of a step: what each was traced for, and how one is found or built."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from funcacc import account, guard, trees
from funcacc import model as models
from funcacc import plan as plans
from funcacc.attributes import Attributes, differences
from funcacc.batches import Window
from funcacc.capture.context import autocast_state
from funcacc.engines.base import Engine, Program
from funcacc.errors import CarryError
from funcacc.microbatch import Microbatch, Setting, open_sums_of, trace_microbatch
from funcacc.optimizers.update import Adopted, Created, Update
from funcacc.options import Options
from funcacc.placement import Mesh, Placement
from funcacc.plan import Plan
from funcacc.report import Build, Leaf, Report
from funcacc.step import Layout, Step, trace_step, trace_steps
from funcacc.types import LossFn, TensorSpec

log = logging.getLogger("funcacc")

_OF_THE_MODEL = (
    "train() or eval()",
    "requires_grad",
    "parameters",
    "buffers",
    "autocast",
    "attributes",
)


class Compiled(NamedTuple):
    """A program and what it was built for.

    Attributes:
        program: the program.
        step: its graph.
        layout: of its inputs.
        update: of the optimizer.
        plan: where its inputs lie.
        leaves: its inputs, for reports.
        inside: the sums in its loop, for reports.
        build: how it was built.
    """

    program: Program
    step: Step
    layout: Layout
    update: Update
    plan: Plan
    leaves: list[Leaf]
    inside: list[Leaf]
    build: Build

    def enter(self, report: Report) -> None:
        """Let a report be about this program."""
        report.num_state, report.mesh = self.layout.num_state, str(self.plan.mesh or "")
        report.leaves, report.inside = self.leaves, self.inside
        report.collectives = report.need = None

    def ran(self, report: Report, donated: Sequence[bool], in_place: Sequence[bool]) -> None:
        """Note what was seen when this program ran for the first time.

        Args:
            report: to be changed.
            donated: for each state leaf, whether its buffer was taken.
            in_place: likewise, whether it was found at its address; empty where nobody looked.
        """
        report.compiles += 1
        report.seconds["compile"] += self.program.seconds["compile"]
        self.build.seconds["compile"] = self.program.seconds["compile"]
        for i, leaf in enumerate(self.leaves[: self.layout.num_state]):
            leaf.donated = donated[i]
            leaf.output = i if donated[i] else None
            leaf.in_place = in_place[i] if in_place else None
        self.enter(report)


class Programs:
    """All programs of one step.

    Args:
        engine: what builds them.
        loss_fn: of the step.
        options: of the step.
        donate: whether state is donated.
        report: where traces, times and reasons are noted.
        mesh: of devices, or `None` for one device.
    """

    def __init__(
        self,
        engine: Engine,
        loss_fn: LossFn | None,
        options: Options,
        donate: bool,
        report: Report,
        mesh: Mesh | None,
    ) -> None:
        self.engine = engine
        self.loss_fn = loss_fn
        self.options = options
        self.donate = donate
        self.report = report
        self.mesh = mesh
        self._attributes = Attributes()
        self._microbatches: dict[Any, Microbatch] = {}
        # Several for one key differ in the answers about hyperparameters (`Update.holds`).
        self._compiled: dict[Any, list[Compiled]] = {}
        self._last_key: dict[str, Any] | None = None
        self._unused: tuple[Created, Any, dict[str, Any] | None] | None = None

    def find(
        self, model: nn.Module, window: Window, opt: Adopted, steps: int | None = None
    ) -> Compiled:
        """The program for everything as it is now.

        Args:
            model: the module.
            window: of which shapes and dtypes count.
            opt: the optimizer.
            steps: how many optimizer steps the program takes at most; `None` for one, without
                a loop around it.

        Raises:
            FuncaccError: when it can't be traced or built; nothing was changed.
        """
        key = {**self._key(model, window, opt), "steps per call": steps}
        variants = self._compiled.get(tuple(key.values()), [])
        numbers = opt.numbers()
        for compiled in variants:
            if compiled.update.holds(numbers):
                return compiled
        if self._last_key is None:
            reason = "first call"
        elif variants:
            reason = _what_is_asked(opt, variants[-1].update)
        else:
            reason = _what_changed(self._last_key, key)
        compiled, created = self._build(key, model, window, opt)
        # Nothing but the optimizer's first state is missing now; up to here nothing was changed.
        with guard.deferred():
            opt.install(created, compiled.plan.putting(self.engine))
            before = self._last_key
            # The key of a first call had no optimizer state in it; the next one will. Tracing
            # may also have found numbers that were taken for fixed.
            key["optimizer state"] = _specs(opt)
            key["optimizer"] = opt.static()
            self._attributes.traced(model, key["attributes"])
            key["attributes"] = self._attributes.now(model)
            self._compiled.setdefault(tuple(key.values()), []).append(compiled)
            self._last_key = key
            self._unused = created, tuple(key.values()), before
            compiled.build.reason = reason
            self.report.builds.append(compiled.build)
            compiled.enter(self.report)
        log.info("new program: %s", reason)
        return compiled

    def used(self) -> None:
        """The state that the optimizer was given has gone through a step, or is asked for."""
        self._unused = None

    def undo(self, opt: Adopted) -> None:
        """Take the optimizer's first state back, if no step has used it."""
        if self._unused is None:
            return
        created, place, before = self._unused
        self._unused = None
        opt.uninstall(created)
        self._compiled[place].pop()
        self._last_key = before

    def _key(self, model: nn.Module, window: Window, opt: Adopted) -> dict[str, Any]:
        """What a trace depends on, by name."""
        params = models.parameters(model)
        return {
            "batch shapes or dtypes": shape_of(window),
            "train() or eval()": tuple(m.training for m in model.modules()),
            "requires_grad": tuple(p.requires_grad for p in params.values()),
            "parameters": tuple((n, TensorSpec.of(p)) for n, p in params.items()),
            "buffers": tuple((n, TensorSpec.of(b)) for n, b in models.buffers(model).items()),
            "optimizer": opt.static(),
            "optimizer state": _specs(opt) if self.report.traces else (),
            "autocast": autocast_state(self.engine.device.type),
            "attributes": self._attributes.now(model),
            "sharding": tuple(self._placements(model, window).items()),
        }

    def _placements(self, model: nn.Module, window: Window) -> dict[str, Placement]:
        """Where parameters and window lie, and are to lie; by path."""
        if self.mesh is None:
            return {}
        params = {f"params[{n!r}]": p for n, p in models.parameters(model).items()}
        leaves, _ = trees.flatten(window.tree)
        paths = trees.paths(window.tree, "window")
        specs = dict(zip(paths, map(TensorSpec.of, leaves), strict=True))
        given = self.cut(window)
        found = plans.placed(self.engine, params)
        return {**found, **plans.place_window(self.mesh, specs, dict(given))}

    def cut(self, window: Window) -> tuple[tuple[str, Placement], ...]:
        """Where those leaves of a window lie that the user has cut over the mesh, by path."""
        if self.mesh is None:
            return ()
        leaves, _ = trees.flatten(window.tree)
        named = zip(trees.paths(window.tree, "window"), leaves, strict=True)
        there = {p: x for p, x in named if x.device.type == self.engine.device.type}
        found = plans.placed(self.engine, there)
        return tuple((p, at) for p, at in found.items() if at.axes)

    def _plan(self, key: dict[str, Any], layout: Layout) -> Plan:
        if self.mesh is None:
            return Plan()
        found = dict(key["sharding"])
        params = {**layout.params, **layout.frozen}
        leaves = {**found, **plans.follow(layout.opt_state, params, found)}
        return Plan(self.mesh, leaves, self.options.gather)

    def _build(
        self, key: dict[str, Any], model: nn.Module, window: Window, opt: Adopted
    ) -> tuple[Compiled, Created]:
        start, traces = time.perf_counter(), self.report.traces
        m = self._microbatch(key, model, window, opt)
        params = models.parameters(model)
        specs = {n: TensorSpec.of(params[n]) for n in m.trainable}
        created = opt.create(params, m.reached)
        update = opt.capture(specs, m.reached, created)
        layout = _layout(model, m, window, opt, update)
        plan = self._plan(key, layout)
        m = open_sums_of(m, plan)
        step = trace_step(layout, m, update if opt.updates else None, self.options, plan)
        _check_state(layout, step)
        if key["steps per call"]:
            step = trace_steps(step, layout, key["steps per call"])
        seconds = {"capture": time.perf_counter() - start}
        self.report.seconds["capture"] += seconds["capture"]
        leaves = account.inputs(step.graph, layout, plan, self.donate)
        inside = account.sums(m, layout, plan, self.options.accumulate_dtype)
        try:
            program = self.engine.compile(step.graph, layout.num_state if self.donate else 0)
            program.prepare()
        except (RuntimeError, MemoryError) as e:
            if account.is_out_of_memory(e):
                raise account.out_of_memory(e, "compile", [*leaves, *inside]) from e
            raise
        self.report.seconds["lower"] += program.seconds["lower"]
        build = Build("", self.report.traces > traces, {**seconds, **program.seconds})
        return Compiled(program, step, layout, update, plan, leaves, inside, build), created

    def _microbatch(
        self, key: dict[str, Any], model: nn.Module, window: Window, opt: Adopted
    ) -> Microbatch:
        leaves, tree = trees.flatten(window.tree)
        batch = [TensorSpec(tuple(x.shape[1:]), x.dtype) for x in leaves]
        params = models.parameters(model)
        trainable = [n for n, p in params.items() if p.requires_grad and n in opt.held]
        place = (tree, tuple(batch), tuple(trainable), *(key[k] for k in _OF_THE_MODEL))
        if place not in self._microbatches:
            setting = Setting(
                model,
                self.loss_fn,
                {n: self._computed(params[n]) for n in trainable},
                {n: self._computed(p) for n, p in params.items() if n not in trainable},
                {n: TensorSpec.of(b) for n, b in models.buffers(model).items()},
                batch,
                tree,
                self.engine.device.type,
                self._groups(),
                self.options.compute_dtype,
            )
            self._microbatches[place] = trace_microbatch(setting)
            self.report.traces += 1
        return self._microbatches[place]

    def _groups(self) -> int:
        """How many parts of a batch have statistics of their own."""
        local = self.mesh is not None and self.options.batch_norm == "local"
        return self.mesh.rows if local and self.mesh else 1

    def _computed(self, p: Tensor) -> TensorSpec:
        dtype = self.options.compute_dtype
        spec = TensorSpec.of(p)
        return spec._replace(dtype=dtype) if dtype and p.is_floating_point() else spec


def shape_of(window: Window) -> tuple[Any, ...]:
    """Structure, shapes and dtypes of a window."""
    leaves, tree = trees.flatten(window.tree)
    return tree, tuple(map(TensorSpec.of, leaves))


def _layout(
    model: nn.Module, m: Microbatch, window: Window, opt: Adopted, update: Update
) -> Layout:
    params = {n: TensorSpec.of(p) for n, p in models.parameters(model).items()}
    buffers = {n: TensorSpec.of(b) for n, b in models.buffers(model).items()}
    leaves, _ = trees.flatten(window.tree)
    trained = {n: params[n] for n in m.trainable}
    read = {n: params[n] for n in m.frozen}
    return Layout(
        trained if opt.updates else {},
        {n: s for n, s in buffers.items() if n in m.changed},
        update.state,
        read if opt.updates else {**trained, **read},
        {n: s for n, s in buffers.items() if n not in m.changed},
        update.size,
        [TensorSpec.of(x) for x in leaves],
        trees.paths(window.tree, "window"),
    )


_GONE = object()


def _what_changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    changed = [k for k, v in after.items() if before.get(k) != v]
    if "optimizer" in changed:
        a, b = dict(before["optimizer"]), dict(after["optimizer"])
        place = changed.index("optimizer")
        changed[place : place + 1] = [k for k in {**a, **b} if a.get(k, _GONE) != b.get(k, _GONE)]
    if "attributes" in changed:
        names = differences(before["attributes"], after["attributes"])
        place = changed.index("attributes")
        changed[place : place + 1] = [f"attribute {n}" for n in names]
    return ", ".join(changed) + " changed"


def _what_is_asked(opt: Adopted, update: Update) -> str:
    names = [opt.name_of(i) for i in update.broken(opt.numbers())]
    return f"{', '.join(names)} changed, which decides what the optimizer does"


def _specs(opt: Adopted) -> tuple[tuple[str, TensorSpec], ...]:
    return tuple((path, TensorSpec.of(x)) for path, x in opt.leaves().items())


def _check_state(layout: Layout, step: Step) -> None:
    n = layout.num_state
    names: Sequence[str] = step.graph.names[:n]
    lines = [
        f"  {path} enters as {a} and leaves as {b}"
        for path, a, b in zip(names, step.graph.inputs[:n], step.graph.outputs[:n], strict=True)
        if a != b
    ]
    if lines:
        raise CarryError("the step changes the shape or dtype of its state:\n" + "\n".join(lines))
