"""The eager engine: graphs run as they stand, for CPU and CUDA models; the reference."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from funcacc import guard
from funcacc.capture.graph import Graph
from funcacc.capture.passes import place
from funcacc.engines.base import unreadable
from funcacc.placement import Placement
from funcacc.report import Collective, Need


class EagerProgram:
    """A graph and how many of its inputs it overwrites."""

    def __init__(self, graph: Graph, donate: int, device: torch.device) -> None:
        start = time.perf_counter()
        self.graph = graph
        self.donate = donate
        if device.type != "cpu":
            place(graph, device)
        self.seconds = {"lower": 0.0, "compile": time.perf_counter() - start}

    def prepare(self) -> None:
        """Nothing is left to do."""

    @torch.no_grad()
    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Run the operations one by one, then write the first outputs over the first inputs."""
        with guard.allowed():
            outputs = list(self.graph.module(*values))
        storages = {v.untyped_storage()._cdata for v in values}
        # An output may be (a view of) an input that is about to be overwritten.
        outputs = [o.clone() if o.untyped_storage()._cdata in storages else o for o in outputs]
        for i in range(self.donate):
            outputs[i] = values[i].copy_(outputs[i])
        return outputs

    def text(self) -> str:
        """The graph."""
        return str(self.graph)

    def collectives(self, values: Sequence[Tensor]) -> list[Collective]:
        """None: there is one device."""
        return []

    def need(self) -> Need | None:
        """Unknown: PyTorch allocates as it goes."""
        return None


class EagerEngine:
    """Runs graphs in plain Python on the device where the model is."""

    name = "eager"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.axes: dict[str, int] = {}

    def put(self, tensor: Tensor, placement: Placement | None = None) -> Tensor:
        """A clone on the device."""
        return tensor.detach().to(self.device, copy=True)

    def move(self, tensor: Tensor, placement: Placement | None = None) -> Tensor:
        """The tensor on the device."""
        return tensor.detach().to(self.device)

    def placements(self, tensors: Sequence[Tensor]) -> list[Placement]:
        """One device has all of each."""
        return [Placement.whole(t.ndim) for t in tensors]

    def place(self, tensors: Sequence[Tensor], placements: Sequence[Placement]) -> None:
        """Nothing to do on one device."""

    def own(self, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Separate tensors that share memory, which in-place writing would mix up."""
        seen = {t.untyped_storage()._cdata for t in others}
        for t in tensors:
            storage = t.untyped_storage()._cdata
            if storage in seen:
                t.data = t.data.clone()
            seen.add(storage)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Clones."""
        return [t.detach().clone() for t in tensors]

    def compile(self, graph: Graph, donate: int) -> EagerProgram:
        """Keep the graph."""
        return EagerProgram(graph, donate, self.device)

    @torch.no_grad()
    def assign(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy, unless the program has written in place already."""
        for target, value in zip(targets, values, strict=True):
            if target is not value:
                target.copy_(value)

    def settle(self) -> None:
        """Nothing to do: copies are real at once."""

    def wait(self) -> None:
        """Wait for CUDA; the CPU has always finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        """The data pointers."""
        return [t.data_ptr() for t in tensors]

    def consumed(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Always: donated tensors are written in place."""
        return [True] * len(tensors)

    def check(self) -> None:
        """PyTorch itself refuses CUDA after a fork."""

    def failures(self, tensors: Sequence[Tensor]) -> dict[int, Exception]:
        """None on the CPU, where operations fail before they write."""
        return {} if self.device.type == "cpu" else unreadable(tensors)
