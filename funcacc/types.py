"""Names for the kinds of values that travel through funcacc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

PyTree = Any
"""Any nesting of containers that optree knows, with tensors as leaves."""

LossFn = Callable[[torch.nn.Module, PyTree], Any]
"""``loss_fn(model, microbatch)``: a scalar, ``(scalar, aux)`` or a `funcacc.Loss`."""


class TensorSpec(NamedTuple):
    """What a graph needs to know about a tensor before there is one."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        """As ``float32[2,3]``."""
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize
