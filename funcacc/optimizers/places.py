"""Where the host numbers of an optimizer are kept, and how a step moves them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc import trees
from funcacc.optimizers.groups import Member
from funcacc.optimizers.shadow import Role
from funcacc.optimizers.update import UNREAD, Call, Rule
from funcacc.types import TensorSpec


class Place(NamedTuple):
    """Where a host number is kept: in a group (`owner` is its numbers) or in state (a name)."""

    owner: tuple[int, int] | str
    leaf: int


def call_of(
    rule: Rule,
    roles: Sequence[Role],
    slots: Sequence[Place],
    places: Mapping[Place, int],
    born: Sequence[str],
) -> Call:
    """A rule applied to parameters.

    Args:
        rule: what to do.
        roles: the parameters.
        slots: where the rule's numbers are kept.
        places: the index of each number that is an input.
        born: the parameters whose flags follow the numbers.
    """
    flags = [len(places) + born.index(r.name) for r in roles if r.born]
    state = [
        path
        for r in roles
        for path, x in zip(
            trees.spec_paths(r.tree, f"opt_state[{r.name!r}]"), r.leaves, strict=True
        )
        if isinstance(x, TensorSpec)
    ]
    where = [places.get(s, UNREAD) for s in slots] + flags
    return Call(rule, [r.name for r in roles], where, state)


def moved(
    calls: Sequence[Call],
    numbers: Sequence[float],
    places: Sequence[Place],
    members: Mapping[str, Member],
) -> tuple[dict[Place, Any], dict[tuple[int, int, str], Any]]:
    """The numbers after a step that changes them.

    Args:
        calls: of rules that move or add numbers.
        numbers: with which the step ran.
        places: where each is kept.
        members: the parameters.

    Returns:
        New values, and those of keys that are new: by optimizer, group and key.
    """
    new: dict[Place, Any] = {}
    added: dict[tuple[int, int, str], Any] = {}
    for call in calls:
        own = [numbers[i] if i != UNREAD else 0.0 for i in call.numbers if i < len(numbers)]
        for move in call.rule.moves:
            place = places[call.numbers[move.slot]]
            if place not in new:
                new[place] = move.new(own)
        first = members[call.names[0]]
        groups = sorted({members[n].group for n in call.names})
        for position, key, move in call.rule.adds:
            where = (first.opt, groups[position], key)
            if where not in added:
                added[where] = move.new(own)
    return new, added


def like(old: Any, value: float) -> Any:
    """A new value of the kind of the old one."""
    if isinstance(old, Tensor):
        return torch.full_like(old, value)
    return int(value) if isinstance(old, int) and float(value).is_integer() else value
