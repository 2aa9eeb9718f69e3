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


class Engine(Protocol):
    """One kind of device.

    Attributes:
        name: as in the option ``engine=``.
        device: where its tensors are.
    """

    name: str
    device: torch.device

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the device in a buffer that nothing else refers to."""
        ...

    def move(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device, for reading only; may be `tensor` itself.

        In any thread, while another one runs programs.
        """
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
        """Where the buffers of these tensors lie, for proving that donation took place."""
        ...
