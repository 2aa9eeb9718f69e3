"""Whether anything that a step depends on was replaced since it last looked, at little cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

from torch import Tensor, nn

SIMPLE = (bool, int, float, str, type(None))
"""Types of attributes that a trace takes for fixed."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Compared(dict[type, bool]):
    """Whether values of a type are looked at; a table, since `isinstance` of tensors is slow."""

    def __missing__(self, kind: type) -> bool:
        """Find out, once for each type."""
        self[kind] = kind in SIMPLE or issubclass(kind, Tensor)
        return self[kind]


_compared = _Compared()
_flat = itertools.chain.from_iterable
_values = methodcaller("values")
_parameters, _buffers, _modules = map(itemgetter, ("_parameters", "_buffers", "_modules"))
_properties = attrgetter("requires_grad", "shape", "dtype", "_backward_hooks")


class Watch:
    """A look at a model and at what an optimizer holds, to be compared with a later one.

    Objects are compared by identity, and tensors also by what can change while they stay the
    same object; the storage of a tensor isn't looked at. It may say that something changed when
    nothing of importance did, and never the other way.

    The model isn't kept alive, for a step that `train_step` makes must not do that: values are
    kept, modules are walked again.

    Args:
        model: parameters, buffers, structure, hooks, and the attributes that are simple values
            or tensors.
        held: objects to be compared by identity.
    """

    def __init__(self, model: nn.Module, held: Iterable[Any]) -> None:
        self._objects, self._facts = _look(model, held)

    def unchanged(self, model: nn.Module, held: Iterable[Any]) -> bool:
        """Whether a new look finds the same."""
        objects, facts = _look(model, held)
        return same(objects, self._objects) and facts == self._facts


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def _look(model: nn.Module, held: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    tables = _tables(model)
    values = list(_flat(map(_values, tables)))
    objects = [*held, *itertools.compress(values, map(_compared.__getitem__, map(type, values)))]
    named = [list(map(kind, tables)) for kind in (_parameters, _buffers, _modules)]
    names = [*_flat(tables), *_flat(_flat(named))]
    tensors = [t for t in _flat(map(_values, _flat(named[:2]))) if t is not None]
    facts = list(map(_properties, tensors))
    hooks: list[Any] = [(i, *f[3]) for i, f in enumerate(facts) if f[3]]
    for kind in HOOKS:
        of_modules = list(map(itemgetter(kind), tables))
        if any(of_modules):
            hooks += [(kind, i, *found) for i, found in enumerate(of_modules) if found]
    return objects + tensors, [names, facts, hooks]


def _tables(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of each module."""
    tables, seen = [model.__dict__], {model}
    for table in tables:
        for child in table["_modules"].values():
            if child is not None and child not in seen:
                seen.add(child)
                tables.append(child.__dict__)
    return tables
