"""Tensors of PyTorch over the memory of JAX arrays, and the arrays behind them.

A donated program writes its results where its inputs were. So a tensor over the memory of an
array stays right from step to step without being touched, and so do all aliases of it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from funcacc.engines.jax.lower import DTYPES


def wide() -> Any:
    """Inside, JAX has 64-bit types, as PyTorch has; the process's own setting stays."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


class Slot:
    """A place in memory and the array that has it now.

    Attributes:
        array: the array.
        address: of its memory.
        taken: whether a program has consumed an earlier array here.
    """

    __slots__ = ("__weakref__", "address", "array", "taken")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.address: int = array.unsafe_buffer_pointer()
        self.taken = False


class Memory:
    """Which arrays lie behind which tensors.

    Args:
        device: of JAX.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._slots: dict[int, weakref.ref[Slot]] = {}
        self._imports: dict[int, tuple[weakref.ref[Tensor], int, Any]] = {}
        self._lost: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def tensor(self, array: Any, dtype: torch.dtype) -> Tensor:
        """A tensor over the memory of an array, which stays as long as any alias of it."""
        if not array.nbytes:
            return torch.empty(array.shape, dtype=dtype)
        slot = Slot(array)
        address, slots = slot.address, self._slots

        def forget(gone: weakref.ref[Slot]) -> None:
            if slots.get(address) is gone:
                del slots[address]

        slots[address] = weakref.ref(slot, forget)
        memory = (ctypes.c_char * array.nbytes).from_address(address)
        memory.slot = slot
        return torch.frombuffer(memory, dtype=dtype).view(array.shape)

    def slot(self, tensor: Tensor) -> Slot | None:
        """The slot that a tensor is all of; `None` if it is something else."""
        found = self._slots.get(tensor.data_ptr())
        slot = found and found()
        if not slot or not tensor.is_contiguous() or slot.array.shape != tensor.shape:
            return None
        return slot if slot.array.dtype == DTYPES[tensor.dtype] else None

    def read(self, tensor: Tensor) -> Any:
        """An array with the values of a tensor, over the same memory if that can be.

        It is for a program that has finished before anybody writes to the tensor again.
        """
        known = self._imports.get(id(tensor))
        if known and known[0]() is tensor and known[1] == tensor.data_ptr():
            return known[2]
        # JAX keeps the object that it was given, hence another one.
        source = tensor.detach().resolve_conj().resolve_neg()
        if not source.is_contiguous() or source.data_ptr() % 64:
            source = source.clone(memory_format=torch.contiguous_format)
        # Dimensions of one element may have any stride, which JAX takes for another layout.
        source = source.view(-1).view(source.shape)
        with wide():
            if not source.numel():
                return jnp.zeros(source.shape, DTYPES[source.dtype], device=self.device)
            array = jax.dlpack.from_dlpack(source)
        if source.data_ptr() == tensor.data_ptr() == array.unsafe_buffer_pointer():
            self._remember(tensor, array)
        return array

    def _remember(self, tensor: Tensor, array: Any) -> None:
        key, imports = id(tensor), self._imports
        entry: Any = None

        def forget(gone: weakref.ref[Tensor]) -> None:
            if imports.get(key) is entry:
                del imports[key]

        entry = (weakref.ref(tensor, forget), tensor.data_ptr(), array)
        imports[key] = entry

    def copy(self, tensor: Tensor) -> Any:
        """An array of its own with the values of a tensor."""
        slot = self.slot(tensor)
        array = slot.array if slot else self.read(tensor)
        with wide():
            return jnp.array(array, copy=True)

    def lose(self, tensors: Sequence[Tensor]) -> None:
        """Lay tensors whose arrays are gone over other memory, and remember that they are lost."""
        for t in tensors:
            t.data = torch.zeros(t.shape, dtype=t.dtype)
            self._lost[id(t)] = weakref.ref(t), t._version

    def lost(self, tensor: Tensor) -> bool:
        """Whether a tensor was lost, and nothing has been written to it since then."""
        known = self._lost.get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] == tensor._version
