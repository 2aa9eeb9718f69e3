"""The parameter groups of `torch.optim` optimizers: which hyperparameters are inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc import trees
from funcacc.errors import OptimizerError
from funcacc.optimizers import shadow
from funcacc.optimizers.asked import Asked
from funcacc.optimizers.shadow import Group, is_number
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


class Part(NamedTuple):
    """What of a group programs depend on: what the traced steps look at.

    Attributes:
        numeric: positions in the group's leaves of what is an input.
        static: everything else, a path and a value each; inputs have a path only.
    """

    numeric: tuple[int, ...]
    static: tuple[tuple[str, Any], ...]


class Groups:
    """The groups of several optimizers, read again where a value was replaced.

    Args:
        optimizers: the user's.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        # Paths that are inputs although they hold an integer: those that the optimizer's step
        # has been seen to change, and those that held a float before.
        self._numeric: dict[tuple[int, int], set[str]] = {}
        self._asked: dict[tuple[int, int], set[str] | None] = {}
        self._attributes: list[set[str]] = [set() for _ in optimizers]
        self._seen: dict[tuple[int, int], _SeenGroup] = {}
        self._names: dict[tuple[int, trees.TreeSpec], list[tuple[Any, str]]] = {}
        self._on_device: dict[int, tuple[Tensor, int, float]] = {}

    def counts(self, i: int, found: Iterable[tuple[int, str]]) -> bool:
        """Take integer hyperparameters for inputs from now on; whether any is new.

        Args:
            i: number of the optimizer.
            found: number of the group, and the path in it.
        """
        new = False
        for g, path in found:
            paths = self._numeric.setdefault((i, g), set())
            new |= path not in paths
            paths.add(path)
            self._seen.pop((i, g), None)
        return new

    def asked(self, i: int, groups: Sequence[Group], asked: Asked) -> None:
        """Programs depend on what a step of optimizer `i` has looked at in these groups."""
        self._attributes[i] |= asked.attributes
        for group, keys in zip(groups, asked.keys, strict=True):
            at = (i, group.position)
            before = self._asked.get(at, set())
            self._asked[at] = None if before is None or keys is None else before | keys
            self._seen.pop(at, None)

    def __call__(self, i: int, g: int) -> Group:
        """Group `g` of optimizer `i`."""
        return self._look(i, g).group

    def part(self, i: int, g: int) -> Part:
        """What of the group programs depend on."""
        return self._look(i, g).part

    def _look(self, i: int, g: int) -> _SeenGroup:
        content = self.optimizers[i].param_groups[g]
        seen = self._seen.get((i, g))
        if seen is not None and seen.holds(content):
            return seen
        group, part = self._read(i, g, content)
        seen = _SeenGroup(list(content), list(content.values()), group, part)
        if all(map(_is_fixed, (v for k, v in content.items() if k != "params"))):
            self._seen[i, g] = seen
        return seen

    def _read(self, i: int, g: int, content: dict[str, Any]) -> tuple[Group, Part]:
        leaves, spec = trees.flatten({k: v for k, v in content.items() if k != "params"})
        names = self._names.get((g, spec))
        if names is None:
            paths = trees.spec_paths(spec, f"param_groups[{g}]")
            names = list(zip(trees.first_entries(spec), paths, strict=True))
            self._names[g, spec] = names
        known = self._numeric.setdefault((i, g), set())
        known.update(
            path
            for (key, path), x in zip(names, leaves, strict=True)
            if _is_hyper(x) or (key == "lr" and is_number(x))
        )
        numeric = tuple(
            n
            for n, ((_, path), x) in enumerate(zip(names, leaves, strict=True))
            if _is_hyper(x) or (path in known and is_number(x))
        )
        asked = self._asked.get((i, g), set())
        read = [
            n
            for n, (key, _) in enumerate(names)
            if (asked is None or key in asked) and key not in shadow.REPLACED
        ]
        inputs = set(numeric)
        root = f"opt[{i}]." if len(self.optimizers) > 1 else ""
        static = tuple(
            (root + names[n][1], "a number" if n in inputs else _comparable(leaves[n]))
            for n in read
        )
        return Group(g, leaves, spec, numeric), Part(tuple(n for n in read if n in inputs), static)

    def every(self) -> Iterator[tuple[int, Group, Part]]:
        """Number of the optimizer, group and what counts of it, for each."""
        for i, opt in enumerate(self.optimizers):
            for g in range(len(opt.param_groups)):
                seen = self._look(i, g)
                yield i, seen.group, seen.part

    def static(self) -> tuple[tuple[str, Any], ...]:
        """What programs depend on besides the inputs, by name."""
        out = [pair for _, _, part in self.every() for pair in part.static]
        for i in range(len(self.optimizers)):
            out += self.attributes(i)
        return tuple(out)

    def attributes(self, i: int) -> tuple[tuple[str, Any], ...]:
        """The simple values among an optimizer's own attributes that its steps look at."""
        opt = self.optimizers[i]
        own, name = vars(opt), type(opt).__name__
        found = sorted(self._attributes[i] & own.keys())
        return tuple((f"{name}.{x}", own[x]) for x in found if type(own[x]) in SIMPLE)

    def value(self, x: Any) -> float:
        """A numeric hyperparameter as it is now."""
        if not isinstance(x, Tensor) or x.device.type == "cpu":
            return float(x)
        # Reading waits for the device: only when the tensor was written to since.
        seen, writes = self._on_device.get(id(x)), _writes(x)
        if seen is None or seen[0] is not x or seen[1] != writes:
            seen = self._on_device[id(x)] = (x, writes, float(x))
        return seen[2]


class _SeenGroup(NamedTuple):
    """A group as it was read, with the values that it had; none can change in place."""

    keys: list[str]
    values: list[Any]
    group: Group
    part: Part

    def holds(self, group: dict[str, Any]) -> bool:
        """Whether a group still has these values."""
        return all(map(is_, self.values, group.values())) and self.keys == list(group)


def _is_fixed(x: Any) -> bool:
    return type(x) in SIMPLE or (type(x) is tuple and all(type(y) in SIMPLE for y in x))


def _is_hyper(x: Any) -> bool:
    return x.numel() == 1 if isinstance(x, Tensor) else isinstance(x, float)


def _writes(x: Tensor) -> int:
    """How often a tensor was written to; where that's known, also through `x.data`."""
    if torch._is_functional_tensor(x):
        return torch._functionalize_mutation_counter(x)
    return x._version


def _comparable(x: Any) -> Any:
    return id(x) if isinstance(x, Tensor) else x


def fixed(group: Group) -> tuple[Any, ...]:
    """The hyperparameters that aren't inputs, comparable."""
    return tuple(
        "number" if i in group.numeric else _comparable(x) for i, x in enumerate(group.leaves)
    )
