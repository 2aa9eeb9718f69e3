"""The parameter groups of `torch.optim` optimizers: which hyperparameters are inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc import trees
from funcacc.errors import OptimizerError
from funcacc.optimizers.shadow import Group
from funcacc.watch import SIMPLE


class Member(NamedTuple):
    """Where a parameter is held."""

    param: Tensor
    opt: int
    group: int


def members_of(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> dict[str, Member]:
    """All parameters of optimizers by name.

    Args:
        optimizers: over disjoint parameters.
        names: the model's parameters: id of the tensor -> name.

    Raises:
        OptimizerError: for no parameters, one that two hold, or one of another model.
    """
    members: dict[str, Member] = {}
    for i, opt in enumerate(optimizers):
        for g, group in enumerate(opt.param_groups):
            for p in group["params"]:
                name = names.get(id(p))
                if name is None:
                    raise OptimizerError(
                        f"{type(opt).__name__} holds a parameter of shape {tuple(p.shape)} "
                        "that the model doesn't have; make the optimizer after moving the "
                        "model, from model.parameters()"
                    )
                if name in members:
                    raise OptimizerError(
                        f"params[{name!r}] is in two optimizers; give each its own parameters"
                    )
                members[name] = Member(p, i, g)
    if not members:
        raise OptimizerError("the optimizer has no parameters; pass model.parameters()")
    return members


class Groups:
    """The groups of several optimizers, read again where a value was replaced.

    Args:
        optimizers: the user's.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        # Integer hyperparameters that the optimizer's step has been seen to change.
        self._counters: frozenset[tuple[int, int, str]] = frozenset()
        self._seen: dict[tuple[int, int], _SeenGroup] = {}
        self._on_device: dict[int, tuple[Tensor, int, float]] = {}

    def counts(self, found: Iterator[tuple[int, int, str]]) -> bool:
        """Take integer hyperparameters for inputs from now on; whether any is new.

        Args:
            found: numbers of the optimizer and of its group, and the path in the group.
        """
        before = self._counters
        self._counters |= frozenset(found)
        if self._counters == before:
            return False
        self._seen.clear()
        return True

    def __call__(self, i: int, g: int) -> Group:
        """Group `g` of optimizer `i`."""
        group = self.optimizers[i].param_groups[g]
        seen = self._seen.get((i, g))
        if seen is not None and seen.holds(group):
            return seen.group
        read = self._read(i, g)
        if all(map(_is_fixed, (v for k, v in group.items() if k != "params"))):
            self._seen[i, g] = _SeenGroup(list(group), list(group.values()), read)
        return read

    def _read(self, i: int, g: int) -> Group:
        group = self.optimizers[i].param_groups[g]
        leaves, spec = trees.flatten({k: v for k, v in group.items() if k != "params"})
        counters = {path for o, index, path in self._counters if (o, index) == (i, g)}
        if counters:
            at = dict(enumerate(trees.spec_paths(spec, f"param_groups[{g}]")))
            numeric = tuple(n for n, x in enumerate(leaves) if _is_hyper(x) or at[n] in counters)
        else:
            numeric = tuple(n for n, x in enumerate(leaves) if _is_hyper(x))
        return Group(g, leaves, spec, numeric)

    def every(self) -> Iterator[tuple[int, Group]]:
        """Number of the optimizer and group, for each."""
        for i, opt in enumerate(self.optimizers):
            for g in range(len(opt.param_groups)):
                yield i, self(i, g)

    def value(self, x: Any) -> float:
        """A numeric hyperparameter as it is now."""
        if not isinstance(x, Tensor) or x.device.type == "cpu":
            return float(x)
        # Reading waits for the device: only when the tensor was written to since.
        seen = self._on_device.get(id(x))
        if seen is None or seen[0] is not x or seen[1] != x._version:
            seen = self._on_device[id(x)] = (x, x._version, float(x))
        return seen[2]


class _SeenGroup(NamedTuple):
    """A group as it was read, with the values that it had; none can change in place."""

    keys: list[str]
    values: list[Any]
    group: Group

    def holds(self, group: dict[str, Any]) -> bool:
        """Whether a group still has these values."""
        return all(map(is_, self.values, group.values())) and self.keys == list(group)


def _is_fixed(x: Any) -> bool:
    return type(x) in SIMPLE or (type(x) is tuple and all(type(y) in SIMPLE for y in x))


def _is_hyper(x: Any) -> bool:
    return x.numel() == 1 if isinstance(x, Tensor) else isinstance(x, float)


def fixed(group: Group) -> tuple[Any, ...]:
    """The hyperparameters that aren't inputs, comparable."""
    return tuple(
        "number" if i in group.numeric else id(x) if isinstance(x, Tensor) else x
        for i, x in enumerate(group.leaves)
    )
