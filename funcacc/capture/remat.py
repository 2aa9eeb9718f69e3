"""Rematerialisation: every kind of checkpoint, traced so that a compiler can't undo it.

A checkpoint computes its region again in the backward pass. Both computations stand in one
program, and a compiler that finds them equal keeps the first one's results alive instead.
So the second is made to depend on what the backward pass had computed last before it: it is
no longer equal, and can't be moved to an earlier place either.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from funcacc.capture import ops
from funcacc.capture.cut import ancestors
from funcacc.capture.random import KeySource


def _last_result() -> Tensor | None:
    """What was traced last and depends on an input of the trace."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    tracer = mode.tracer
    for node in reversed(tracer.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            continue
        if any(n.op == "placeholder" for n in ancestors([node])):
            stand_in = torch.empty_like(value)
            track_tensor(stand_in, fx.Proxy(node, tracer), constant=None, tracer=tracer)
            return stand_in
    return None


class Recompute(TorchDispatchMode):
    """While it is on, operations see tensors from outside only as results of `ops.remat`.

    Autograd, which is above dispatch modes, doesn't notice: gradients and saved tensors are
    those of the tensors themselves.

    Args:
        source: the key in force, which the recompute draws from too.
        is_weight: tells parameters and buffers. What is computed from these alone may well
            be shared with the forward pass, and copies of them would cost memory.
    """

    def __init__(self, source: KeySource | None, is_weight: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.source = source
        self.is_weight = is_weight
        self.last: Tensor | None = None
        self.key: Tensor | None = None
        self.tied: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: dict[int, Tensor] = {}

    def __enter__(self) -> Recompute:
        """Begin, at this place of the trace."""
        self.last = _last_result()
        if self.source and self.last is not None:
            self.key = self.source.key
            self.source.key = ops.remat(self.key, self.last)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """End; the key is the old one again."""
        super().__exit__(*exc)
        if self.source and self.key is not None:
            self.source.key = self.key
        self.tied.clear()
        self.made.clear()

    def _tie(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._tie, x))
        if not isinstance(x, Tensor) or id(x) in self.made or self.is_weight(x):
            return x
        if id(x) not in self.tied:
            self.tied[id(x)] = x, ops.remat(x, self.last)
        return self.tied[id(x)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` on tied tensors; those that it writes into stay themselves."""
        kwargs = kwargs or {}
        if self.last is not None:
            written = [a.alias_info is not None and a.alias_info.is_write for a in _arguments(func)]
            written += [False] * (len(args) - len(written))
            args = [a if w else self._tie(a) for a, w in zip(args, written, strict=False)]
            kwargs = {k: self._tie(v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, Tensor):
                self.made[id(t)] = t
        return out


def _arguments(func: Any) -> list[Any]:
    return list(func._schema.arguments)


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def _without_reentry(generator: Callable[..., Any], recompute: Callable[[], Recompute]) -> Any:
    """Torch's checkpoint by saved-tensor hooks, its second run inside `Recompute`."""

    def run(fn: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any) -> Any:
        def contexts() -> tuple[Any, Any]:
            forward, again = context_fn()
            return forward, _both(again, recompute())

        # torch asks for modes there when it believes that torch.compile runs.
        with mock.patch.object(torch_checkpoint, "_is_compiling", lambda *_: False):
            yield from generator(fn, preserve, contexts, *args, **kwargs)

    return run


class Reentrant:
    """Stands in for the autograd functions of reentrant checkpoints.

    These call ``backward`` inside ``backward``, which differentiation with respect to given
    leaves refuses. The values and gradients are those of the other kind.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Run ``function(*args)``, to be computed again in the backward pass."""
        if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            warnings.warn(
                "a reentrant checkpoint none of whose inputs requires a gradient gives none to "
                "the parameters in it either; pass use_reentrant=False",
                stacklevel=3,
            )
            with torch.no_grad():
                return function(*args)
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve
        )


@contextlib.contextmanager
def checkpoints(recompute: Callable[[], Recompute]) -> Iterator[None]:
    """Let checkpoints of torch, of torch_xla and of what builds on them be traced.

    They are replaced behind the functions that users import, under whatever name.

    Args:
        recompute: makes the mode for one recompute.
    """
    generator = "_checkpoint_without_reentrant_generator"
    run = _without_reentry(getattr(torch_checkpoint, generator), recompute)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch_checkpoint, generator, run))
        modules = [torch_checkpoint]
        if "torch_xla" in sys.modules:
            modules.append(importlib.import_module("torch_xla.utils.checkpoint"))
        for module in modules:
            # The class stays: other functions of its module use what else it has.
            apply = staticmethod(Reentrant.apply)
            stack.enter_context(mock.patch.object(module.CheckpointFunction, "apply", apply))
        yield
