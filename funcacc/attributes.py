"""Attributes of modules that a trace reads: those that have changed ask for another trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Set
from typing import Any

from torch import Tensor, nn

from funcacc.types import TensorSpec
from funcacc.watch import HOOKS, SIMPLE

Entry = tuple[str, Any, Any]
"""Path of an attribute, its type, and its value (for a tensor: identity and spec)."""

_OTHERWISE_KNOWN = frozenset({"training"})


class Attributes:
    """The attributes of a model's modules, as far as a change of theirs can be seen.

    Watched are numbers, strings, `None` and tensors that a module holds directly, and hooks of
    modules and parameters. An attribute that the forward pass itself changes isn't: it changes
    once a trace, which is no reason for the next. The model isn't kept: a step that is made
    by `train_step` must not keep it alive.
    """

    def __init__(self) -> None:
        self._changing: set[str] = set()

    def now(self, model: nn.Module) -> tuple[Entry, ...]:
        """What there is at present."""
        return tuple(e for e in entries(model) if e[0] not in self._changing)

    def traced(self, model: nn.Module, before: tuple[Entry, ...]) -> None:
        """Leave out what has changed since `before` by tracing alone."""
        self._changing.update(differences(before, self.now(model)))


def entries(model: nn.Module) -> Iterator[Entry]:
    """The entries of a model, one after another."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in module.__dict__.items():
            kind = value.__class__
            if kind in SIMPLE:
                if name not in _OTHERWISE_KNOWN:
                    yield prefix + name, kind, value if value == value else "nan"
            elif isinstance(value, Tensor):
                yield prefix + name, kind, (id(value), TensorSpec.of(value))
            elif value and name in HOOKS:
                yield prefix + name, "hooks", tuple(value)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter._backward_hooks:
                yield prefix + name, "hooks", tuple(parameter._backward_hooks)


def differences(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> list[str]:
    """Paths of what was added, removed or changed."""
    old, new = set(before), set(after)
    return sorted({path for path, _, _ in old ^ new})


@contextlib.contextmanager
def noting_reads(model: nn.Module, paths: Set[str]) -> Iterator[set[str]]:
    """Collect which of these attributes are read, by their paths."""
    read: set[str] = set()
    classes = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        names = {p[len(prefix) :] for p in paths if p.startswith(prefix)}
        names.intersection_update(module.__dict__)
        if names:
            classes.append((module, module.__class__))
            module.__class__ = _noting(module.__class__, prefix, names, read)
    try:
        yield read
    finally:
        for module, cls in classes:
            module.__class__ = cls


def _noting(cls: type[nn.Module], prefix: str, names: set[str], read: set[str]) -> Any:
    def look(self: nn.Module, name: str) -> Any:
        if name in names:
            read.add(prefix + name)
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": look, "__module__": cls.__module__})
