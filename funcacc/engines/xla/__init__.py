"""The XLA engine: one HLO program for a graph, compiled once, replayed by position."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from funcacc.capture.graph import Graph
from funcacc.engines.xla import private
from funcacc.engines.xla.lower import check_operations, lower

private.copy_into_fresh_buffers()


class XlaProgram:
    """A cached program of torch_xla with its inputs and outputs in the graph's order."""

    def __init__(self, graph: Graph, donate: int, device: torch.device) -> None:
        check_operations(graph)
        self.graph = graph
        self.donate = donate
        self.device = device
        start = time.perf_counter()
        self.computation = lower(graph, "step", device)
        self.seconds = {"lower": time.perf_counter() - start, "compile": 0.0}
        self._hash: object = None
        self._inputs: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple
        self._outputs: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple

    def _compile(self, values: Sequence[Tensor]) -> None:
        start = time.perf_counter()
        try:
            pending = private.user_computation("funcacc_step", values, self.computation)
            order = private.input_order(pending, values)
            # XLA gives each donor, in the order of the parameters, to the next output of
            # its shape: outputs in that same order put every buffer into its own slot.
            first = [i for i in order if i < self.donate]
            slots = [*first, *range(self.donate, len(pending))]
            roots = [pending[i] for i in slots]
            with private.donation(values[: self.donate]):
                self._hash = private.compile_cached(roots)
            self._inputs = _picking(order)
            self._outputs = _picking(sorted(range(len(slots)), key=slots.__getitem__))
        finally:
            private.clear_pending(self.device)
        self.seconds["compile"] = time.perf_counter() - start

    def prepare(self) -> None:
        """Compile with placeholders in place of the inputs."""
        if self._hash is None:
            private.sync()
            private.wait()
            self._compile([private.placeholder(s.shape, s.dtype) for s in self.graph.inputs])

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Dispatch; the first call compiles, without running anything before."""
        if self._hash is None:
            private.wait()
            self._compile(values)
        results = private.run_cached(self._hash, self._inputs(values))
        return list(self._outputs(results))

    def text(self) -> str:
        """HLO before optimisation."""
        return private.computation_text(self.computation)


def _picking(places: Sequence[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """The function that picks the values at these places, in this order."""
    pick = operator.itemgetter(*places, places[0])
    return lambda values: pick(values)[:-1]


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

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._settled = -1

    def put(self, tensor: Tensor) -> Tensor:
        """Upload into a fresh buffer; a device tensor goes by way of the host."""
        return private.device_data(tensor.detach().cpu(), self.device)

    def move(self, tensor: Tensor) -> Tensor:
        """Upload at once, if it isn't on the device; nothing is left pending."""
        if tensor.device.type == "xla":
            return tensor
        return private.device_data(tensor.detach().cpu(), self.device)

    def own(self, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Replace all buffers: which of them somebody else holds too can't be found out."""
        private.sync()
        private.wait()
        small = [t for t in tensors if t.numel() <= 1]
        for t in small:
            private.rebind(t, self.put(t))
        for group in _groups([t for t in tensors if t.numel() > 1]):
            private.rebind_all(group, private.copies(group))

    def compile(self, graph: Graph, donate: int) -> XlaProgram:
        """Lower now; compile at the first call, which has the inputs."""
        try:
            private.sync()
            private.wait()
            return XlaProgram(graph, donate, self.device)
        finally:
            private.clear_pending(self.device)

    def assign(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Exchange buffers."""
        private.rebind_all(targets, values)
        self._settled = private.tensors_made_elsewhere()

    def settle(self) -> None:
        """Materialise what is pending, if anything may be."""
        if private.tensors_made_elsewhere() != self._settled:
            private.sync()

    def wait(self) -> None:
        """Wait for the device."""
        private.wait()

    def addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        """Buffer addresses, once the device has finished."""
        private.wait()
        return private.addresses(tensors)
