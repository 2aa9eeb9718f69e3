"""The seam: what a device must be able to do for funcacc.

An engine knows graphs and flat lists of tensors, and nothing of models, optimizers or
trees. Loops, random bits and dynamic indexing are operations of the graph
(`funcacc.capture.ops`), so a whole training step is one graph and reaches the engine by
one call of `compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from funcacc.capture.graph import Graph
from funcacc.placement import Placement
from funcacc.report import Collective, Need


class Program(Protocol):
    """A compiled graph.

    Attributes:
        seconds: what building it took, by stage: ``lower`` and ``compile``.
    """

    seconds: dict[str, float]

    def prepare(self) -> None:
        """Compile now, if the first call would otherwise do it."""
        ...

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Run the graph on `values`, one for each input, without tracing anything.

        The donated inputs (the first ones, as said to `Engine.compile`) are consumed: the
        outputs at the same positions have taken their memory.
        """
        ...

    def text(self) -> str:
        """The program as the engine sees it, e.g. HLO."""
        ...

    def collectives(self, values: Sequence[Tensor]) -> list[Collective]:
        """The communication between devices that a call with these values would take.

        Runs nothing, and may compile once more.
        """
        ...

    def need(self) -> Need | None:
        """The memory that the compiler has assigned; `None` where it doesn't tell.

        Runs nothing, and may compile once more, in another process.

        Raises:
            EngineError: when that process failed.
        """
        ...


class Engine(Protocol):
    """One kind of device.

    Attributes:
        name: as in the option ``engine=``.
        device: where its tensors are.
        axes: name and size of each axis of the mesh of devices behind `device`; empty where
            that is one device.
    """

    name: str
    device: torch.device
    axes: dict[str, int]

    def put(self, tensor: Tensor, placement: Placement | None = None) -> Tensor:
        """A copy of `tensor` on the device in a buffer that nothing else refers to.

        Args:
            tensor: of any device.
            placement: on the mesh; `None` puts all of it on each device.
        """
        ...

    def move(self, tensor: Tensor, placement: Placement | None = None) -> Tensor:
        """`tensor` on the device, for reading only; may be `tensor` itself.

        In any thread, while another one runs programs, unless it is on the device already and
        placed otherwise. `None` leaves it as it lies.
        """
        ...

    def placements(self, tensors: Sequence[Tensor]) -> list[Placement]:
        """How device tensors lie over the mesh.

        Raises:
            EngineError: for a tensor that lies over another mesh.
        """
        ...

    def place(self, tensors: Sequence[Tensor], placements: Sequence[Placement]) -> None:
        """Let device tensors lie over the mesh like this; objects and aliases stay."""
        ...

    def own(self, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Give each of these device tensors a buffer of its own.

        Args:
            tensors: about to be donated for the first time.
            others: tensors that have buffers of their own already, not shared among them.

        Afterwards a donation of any of them destroys no value but its own. The tensor
        objects stay, and so do their aliases.
        """
        ...

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of device tensors in buffers of their own, lying as the tensors do."""
        ...

    def compile(self, graph: Graph, donate: int) -> Program:
        """Build a program.

        Args:
            graph: what to run.
            donate: this many first outputs overwrite as many first inputs, position by
                position; shapes and dtypes agree.

        Raises:
            EngineError: for an operation that the engine lacks, by name.
        """
        ...

    def assign(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Make each target hold its value, keeping object identity and live aliases.

        The values are outputs of a program; they are given away.
        """
        ...

    def settle(self) -> None:
        """Make copies real that users took of tensors about to be donated.

        Called before each dispatch. Afterwards no pending work on the device reads them.
        """
        ...

    def wait(self) -> None:
        """Block until the device has finished."""
        ...

    def addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        """Where the buffers of these tensors lie, for proving that donation took place.

        Empty where the engine can't tell: on a mesh.
        """
        ...

    def consumed(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Whether a program has taken the buffers of these inputs, for proving donation."""
        ...

    def check(self) -> None:
        """Refuse a process in which the device can't be used.

        Raises:
            EngineError: after a fork that the device doesn't survive.
        """
        ...

    def failures(self, tensors: Sequence[Tensor]) -> dict[int, Exception]:
        """Which of these tensors have no value, by position, and why; waits for the device."""
        ...


def unreadable(tensors: Sequence[Tensor]) -> dict[int, Exception]:
    """`Engine.failures`, found out by reading each tensor."""
    found: dict[int, Exception] = {}
    for i, t in enumerate(tensors):
        try:
            t.detach().cpu()
        except RuntimeError as e:
            found[i] = e
    return found
