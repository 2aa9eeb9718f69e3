"""The XLA engine: one HLO program for a graph, compiled once, replayed by position."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc import guard
from funcacc.capture.graph import Graph
from funcacc.engines.base import unreadable
from funcacc.engines.xla import private
from funcacc.engines.xla.account import need
from funcacc.engines.xla.hlo import collectives
from funcacc.engines.xla.lower import Target, check_operations, lower
from funcacc.engines.xla.mesh import DeviceMesh
from funcacc.engines.xla.slots import compile_with_slots
from funcacc.errors import EngineError
from funcacc.placement import Placement
from funcacc.report import Collective, Need

private.copy_into_fresh_buffers()


class _Compiled(NamedTuple):
    """A cached program of torch_xla, and how the graph's order becomes its own and back."""

    hash: Any
    inputs: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    outputs: Callable[[Sequence[Tensor]], Sequence[Tensor]]


class XlaProgram:
    """A cached program of torch_xla with its inputs and outputs in the graph's order."""

    def __init__(self, graph: Graph, donate: int, target: Target) -> None:
        check_operations(graph)
        self.graph = graph
        self.donate = donate
        self.device = target.device
        start = time.perf_counter()
        self.computation = lower(graph, "step", target)
        self.seconds = {"lower": time.perf_counter() - start, "compile": 0.0}
        # By the shardings of the inputs, which a replay doesn't look at.
        self._compiled: dict[tuple[str, ...], _Compiled] = {}

    def _compile(self, values: Sequence[Tensor]) -> _Compiled:
        start = time.perf_counter()
        try:
            pending = private.user_computation("funcacc_step", values, self.computation)
            order = private.input_order(pending, values)
            found, slots = compile_with_slots(pending, order, values[: self.donate])
        finally:
            private.clear_pending(self.device)
        self.seconds["compile"] += time.perf_counter() - start
        places = sorted(range(len(slots)), key=slots.__getitem__)
        return _Compiled(found, _picking(order), _picking(places))

    def prepare(self) -> None:
        """Compile with placeholders in place of the inputs.

        Not for several devices, where the first call compiles: placeholders can't be sharded.
        """
        if self.graph.outputs and not self._compiled and not private.sharded():
            with guard.lock:
                private.sync()
                private.wait()
                holders = [private.placeholder(s.shape, s.dtype) for s in self.graph.inputs]
                self._compiled[()] = self._compile(holders)

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Dispatch, once it is compiled."""
        if not self.graph.outputs:
            return []
        self.prepare()
        shardings = tuple(private.sharding_texts(values)) if private.sharded() else ()
        compiled = self._compiled.get(shardings)
        if compiled is None:
            with guard.lock:
                private.wait()
                compiled = self._compiled[shardings] = self._compile(values)
        results = private.run_cached(compiled.hash, compiled.inputs(values))
        return list(compiled.outputs(results))

    def text(self) -> str:
        """HLO before optimisation."""
        return private.computation_text(self.computation)

    def optimized(self, values: Sequence[Tensor]) -> str:
        """HLO as XLA runs it on inputs like these; compiles once more, and runs nothing."""
        try:
            private.sync()
            private.wait()
            pending = private.user_computation("funcacc_step", values, self.computation)
            return private.optimized_hlo_text(pending)
        finally:
            private.clear_pending(self.device)

    def collectives(self, values: Sequence[Tensor]) -> list[Collective]:
        """From the optimised HLO."""
        return collectives(self.optimized(values))

    def need(self) -> Need | None:
        """On XLA:CPU, from a process of its own."""
        return need(self.computation, self.graph.inputs, self.donate, self.device)


def _picking(places: Sequence[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """The function that picks the values at these places, in this order."""
    if len(places) < 2:
        # `itemgetter` gives a single value bare.
        return lambda values: [values[i] for i in places]
    return operator.itemgetter(*places)


_COPIED_AT_ONCE = 256 * 2**20


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of limited size, so that copying needs little more memory than there was."""
    group: list[Tensor] = []
    size = 0
    for t in tensors:
        if group and size + t.nbytes > _COPIED_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(t)
        size += t.nbytes
    if group:
        yield group


class XlaEngine:
    """torch_xla on any PJRT device."""

    name = "xla"

    def __init__(self, device: torch.device, mesh: Any = None) -> None:
        if mesh is not None and not private.sharded():
            raise EngineError(
                "a mesh of devices needs torch_xla.runtime.use_spmd(), which comes first in a "
                "program, before anything is on a device; call it there"
            )
        self.device = device
        self._sharded = private.sharded()
        mesh = private.global_mesh() if mesh is None else mesh
        self._mesh = None if mesh is None else DeviceMesh(mesh)
        self.axes = {} if self._mesh is None else dict(self._mesh.sizes)
        self._settled = -1
        self.check()

    def put(self, tensor: Tensor, placement: Placement | None = None) -> Tensor:
        """Upload into a fresh buffer; a device tensor goes by way of the host."""
        host, cut = tensor.detach().cpu(), None
        if self._mesh is not None and placement is not None:
            cut = self._mesh.upload(host, placement)
        return private.device_data(host, self.device, cut)

    def move(self, tensor: Tensor, placement: Placement | None = None) -> Tensor:
        """Upload at once, if it isn't on the device; `settle` computes what is pending."""
        if tensor.device.type != "xla":
            return self.put(tensor, placement)
        if tensor._is_view():
            private.renew(tensor)
        if self._mesh is None or placement in (None, *self.placements([tensor])):
            return tensor
        return private.copies([tensor], [self._mesh.sharding(placement)])[0]

    def placements(self, tensors: Sequence[Tensor]) -> list[Placement]:
        """From the tensors' shardings; one without has all on each device."""
        if self._mesh is None:
            return [Placement.whole(t.ndim) for t in tensors]
        texts = private.sharding_texts(tensors)
        return [self._mesh.read(s, t.ndim) for s, t in zip(texts, tensors, strict=True)]

    def place(self, tensors: Sequence[Tensor], placements: Sequence[Placement]) -> None:
        """Exchange buffers for copies that lie otherwise."""
        if self._mesh is None:
            return
        now = zip(tensors, placements, self.placements(tensors), strict=True)
        moving = [(t, self._mesh.sharding(wanted)) for t, wanted, found in now if wanted != found]
        for t, sharding in moving:
            private.rebind_all([t], private.copies([t], [sharding]))

    def own(self, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Replace all buffers: which of them somebody else holds too can't be found out."""
        with guard.lock:
            private.sync()
            private.wait()
            small = [t for t in tensors if t.numel() <= 1]
            for t in small:
                private.rebind(t, self.put(t))
            for group in _groups([t for t in tensors if t.numel() > 1]):
                private.rebind_all(group, private.copies(group, private.op_shardings(group)))

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Clones, made real by a sync."""
        with guard.lock:
            return private.copies(tensors, private.op_shardings(tensors))

    def compile(self, graph: Graph, donate: int) -> XlaProgram:
        """Lower; `prepare` compiles."""
        with guard.lock:
            try:
                private.sync()
                private.wait()
                return XlaProgram(graph, donate, Target(self.device, self._mesh))
            finally:
                private.clear_pending(self.device)

    def assign(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Exchange buffers; a graph that has saved the old values can't go backward any more."""
        private.rebind_all(targets, values)
        torch.autograd.graph.increment_version(targets)
        self._settled = private.tensors_made_elsewhere()

    def settle(self) -> None:
        """Materialise what is pending, if anything may be."""
        if self._sharded != private.sharded():
            raise EngineError(
                "SPMD was switched on after this program was made for one device; call "
                "torch_xla.runtime.use_spmd() first in the program, before anything is on a device"
            )
        if private.tensors_made_elsewhere() != self._settled:
            with guard.lock:
                private.sync()

    def wait(self) -> None:
        """Wait for the device."""
        private.wait()

    def addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        """Buffer addresses, once the device has finished; none for sharded buffers."""
        private.wait()
        return [] if private.sharded() else private.addresses(tensors)

    def consumed(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Whether the old buffers are gone; reads those that aren't."""
        # A sharded program runs in the background; looking meanwhile crashes.
        private.wait()
        return list(map(private.consumed, tensors))

    def check(self) -> None:
        """Refuse a child of the process whose threads drive the device."""
        if private.forked_from is not None:
            raise EngineError(
                f"this process was forked from process {private.forked_from} after its XLA device "
                "was initialised, and the threads that drive the device exist there only; start "
                "processes by multiprocessing.get_context('spawn'), or fork before the device is "
                "first used"
            )

    def failures(self, tensors: Sequence[Tensor]) -> dict[int, Exception]:
        """What a failed program left, or a donation took, can't be read."""
        return unreadable(tensors)
