"""The JAX engine: a graph under `jax.jit`, for models whose tensors are on the CPU."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Sequence

import jax
import torch
from torch import Tensor

from funcacc import guard
from funcacc.capture.graph import Graph
from funcacc.engines.jax.expand import expanded
from funcacc.engines.jax.lower import DTYPES, check_operations, has, lowered
from funcacc.engines.jax.memory import Memory, wide
from funcacc.errors import EngineError
from funcacc.placement import Placement
from funcacc.report import Collective, Need

_forked_from: int | None = None


def _note_fork() -> None:
    global _forked_from
    _forked_from = os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class JaxProgram:
    """A compiled program of JAX.

    Args:
        graph: what to run.
        donate: how many inputs it overwrites.
        memory: of the engine.

    Attributes:
        compiled: of `jax.stages`, once there is one.
    """

    def __init__(self, graph: Graph, donate: int, memory: Memory) -> None:
        start = time.perf_counter()
        expanded(graph, has)
        check_operations(graph)
        self.graph = graph
        self.donate = donate
        self.memory = memory
        sharding = jax.sharding.SingleDeviceSharding(memory.device)
        specs = [
            jax.ShapeDtypeStruct(s.shape, DTYPES[s.dtype], sharding=sharding) for s in graph.inputs
        ]
        with wide():
            donated = tuple(range(donate))
            jitted = jax.jit(lowered(graph), donate_argnums=donated, keep_unused=True)
            self.lowered = jitted.lower(*specs)
        self.compiled: jax.stages.Compiled | None = None
        self.seconds = {"lower": time.perf_counter() - start, "compile": 0.0}

    def prepare(self) -> None:
        """Compile."""
        if self.compiled is not None:
            return
        start = time.perf_counter()
        with wide():
            compiled = self.lowered.compile()
        state = sum(s.nbytes for s in self.graph.inputs[: self.donate])
        found = compiled.memory_analysis()
        if found is not None and found.alias_size_in_bytes != state:
            raise EngineError(
                f"XLA overwrites {found.alias_size_in_bytes} bytes of a state of {state}; pass "
                "donate=False, and please report the model"
            )
        self.compiled = compiled
        self.seconds["compile"] += time.perf_counter() - start

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Run, and wait: tensors over the same memory can be read at any time."""
        self.prepare()
        assert self.compiled is not None
        memory, n = self.memory, self.donate
        slots = list(map(memory.slot, values))
        arrays = [
            s.array if s else memory.copy(v) if i < n else memory.read(v)
            for i, (s, v) in enumerate(zip(slots, values, strict=True))
        ]
        try:
            outputs = jax.block_until_ready(self.compiled(*arrays))
        except Exception:
            gone = [v for v, a in zip(values[:n], arrays, strict=False) if a.is_deleted()]
            memory.lose(gone)
            raise
        results = []
        for i, output in enumerate(outputs):
            slot = slots[i] if i < n else None
            if slot is not None and output.unsafe_buffer_pointer() == slot.address:
                slot.taken = slot.taken or arrays[i].is_deleted()
                slot.array = output
                results.append(values[i])
            else:
                results.append(memory.tensor(output, self.graph.outputs[i].dtype))
        return results

    def text(self) -> str:
        """StableHLO."""
        return self.lowered.as_text()

    def collectives(self, values: Sequence[Tensor]) -> list[Collective]:
        """None: there is one device."""
        return []

    def need(self) -> Need | None:
        """From XLA's assignment of buffers; constants are part of the code."""
        self.prepare()
        found = self.compiled.memory_analysis()
        if found is None:
            return None
        inputs, temporaries = found.argument_size_in_bytes, found.temp_size_in_bytes
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        return Need(inputs + temporaries + outputs, inputs, temporaries, outputs, 0)


class JaxEngine:
    """JAX on the CPU, for models of ordinary tensors.

    After `own`, a tensor lies over the memory of a JAX array. Programs write into that memory,
    so the tensor and its aliases have the new values without anything being copied or rebound.
    A tensor of which somebody held an alias before stays where it is, and is copied in and out.
    """

    name = "jax"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.axes: dict[str, int] = {}
        self._memory = Memory(jax.devices("cpu")[0])
        self.check()

    def put(self, tensor: Tensor, placement: Placement | None = None) -> Tensor:
        """A copy over the memory of an array of its own."""
        return self._memory.tensor(self._memory.copy(tensor.cpu()), tensor.dtype)

    def move(self, tensor: Tensor, placement: Placement | None = None) -> Tensor:
        """The tensor: programs read it where it is, and know the same object again."""
        return tensor if tensor.device.type == "cpu" else tensor.detach().cpu()

    def placements(self, tensors: Sequence[Tensor]) -> list[Placement]:
        """One device has all of each."""
        return [Placement.whole(t.ndim) for t in tensors]

    def place(self, tensors: Sequence[Tensor], placements: Sequence[Placement]) -> None:
        """Nothing to do on one device."""

    def own(self, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Lay tensors over arrays, unless somebody else holds their memory too."""
        storages = [t.untyped_storage() for t in (*tensors, *others)]
        times = collections.Counter(s._cdata for s in storages)
        for t, storage in zip(tensors, storages, strict=False):
            if times[storage._cdata] > 1:
                t.data = self.put(t)
            elif self._memory.slot(t) is None and not _held_elsewhere(storage):
                t.data = self.put(t)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Clones."""
        return [t.detach().clone() for t in tensors]

    def compile(self, graph: Graph, donate: int) -> JaxProgram:
        """Lower; `prepare` compiles."""
        with guard.lock:
            return JaxProgram(graph, donate, self._memory)

    @torch.no_grad()
    def assign(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy what the program hasn't written in place; autograd hears of the rest."""
        written = []
        for target, value in zip(targets, values, strict=True):
            if target is value:
                written.append(target)
            else:
                target.copy_(value)
        torch.autograd.graph.increment_version(written)

    def settle(self) -> None:
        """Nothing to do: copies are real at once."""

    def wait(self) -> None:
        """Programs have finished when they return."""

    def addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        """The data pointers."""
        return [t.data_ptr() for t in tensors]

    def consumed(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Whether JAX says that the array of before is deleted.

        A tensor that lies over none has been given its value by a copy, in its own memory.
        """
        slots = map(self._memory.slot, tensors)
        return [s is None or s.taken for s in slots]

    def check(self) -> None:
        """Refuse a child of the process whose threads run programs."""
        if _forked_from is not None:
            raise EngineError(
                f"this process was forked from process {_forked_from} after JAX was imported "
                "there, and the threads that run programs exist there only; start processes by "
                "multiprocessing.get_context('spawn')"
            )

    def failures(self, tensors: Sequence[Tensor]) -> dict[int, Exception]:
        """Those whose memory a failed program took."""
        gone = RuntimeError("a program that failed had taken its memory")
        return {i: gone for i, t in enumerate(tensors) if self._memory.lost(t)}


def _held_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether more than one tensor, array or program holds this memory."""
    alone = 2  # the tensor, and the object `storage`
    return int(torch._C._storage_Use_Count(storage._cdata)) > alone
