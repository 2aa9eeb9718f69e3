"""What torch_xla's own annotations become while user code is traced: operations of the graph."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch_xla.distributed.spmd import xla_sharding

from funcacc.capture import context, ops
from funcacc.engines.xla import private


class _Marked(NamedTuple):
    """Stands for a sharding while user code is traced."""

    mesh: xs.Mesh
    spec: tuple[Any, ...]

    def __str__(self) -> str:
        """The text that `sharding` reads."""
        spec = xla_sharding._translate_named_partition_spec(self.mesh, self.spec)
        shape = list(map(int, self.mesh.mesh_shape))
        return json.dumps([self.mesh.device_ids.flatten().tolist(), shape, spec])


@functools.cache
def sharding(text: str) -> Any:
    """torch_xla's sharding, from the text of a mark."""
    devices, shape, spec = json.loads(text)
    cut = tuple(tuple(d) if isinstance(d, list) else d for d in spec)
    return xs.Mesh(np.array(devices), tuple(shape)).get_op_sharding(cut)


def from_strings(mesh: str, spec: str) -> Any:
    """torch_xla's sharding, from the arguments of its operator ``aot_mark_sharding``."""
    found = xs.Mesh.from_str(mesh)
    assert found is not None
    return found.get_op_sharding(ast.literal_eval(spec))


def _marking(original: Any) -> Any:
    def mark(tensor: Tensor, sharding: Any) -> None:
        tracing = context.current()
        if tracing is None or not isinstance(sharding, _Marked):
            original(tensor, sharding)
        else:
            text = str(sharding)
            tracing.replace(tensor, lambda x: ops.pin(x, text), "mark_sharding")

    return mark


def _wrapping(original: Any) -> Any:
    def wrap(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass of Tensor around a traced one would hide it from the trace.
        return tensor if context.current() is not None else original(tensor, *args, **kwargs)

    return wrap


def _sharding(original: Any) -> Any:
    def get_op_sharding(self: xs.Mesh, spec: tuple[Any, ...]) -> Any:
        return original(self, spec) if context.current() is None else _Marked(self, spec)

    return get_op_sharding


def _barrier(original: Any) -> Any:
    def barrier(tensors: Sequence[Tensor]) -> None:
        if not any(isinstance(t, FakeTensor) for t in tensors):
            original(tensors)

    return barrier


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Let annotations of torch_xla be traced, whatever name user code has for their functions."""
    patches = (
        (private.extension, "_xla_mark_sharding", _marking),
        (private.extension, "_xla_annotate_custom_sharding", _marking),
        (private.extension, "_xla_optimization_barrier_", _barrier),
        (xla_sharding, "wrap_as_sharded_tensor", _wrapping),
        (xs.Mesh, "get_op_sharding", _sharding),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, make in patches:
            replaced = make(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, replaced))
        yield


context.while_tracing(traced)
MARK = torch.ops.xla.aot_mark_sharding.default
"""The operator of `mark_sharding_with_gradients`, which a trace keeps as it is."""
