"""`Update`: an optimizer step as calls of traced rules, for the pure step to make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from funcacc.capture import ops
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph
from funcacc.capture.numbers import Guard
from funcacc.optimizers.asked import Asked
from funcacc.types import TensorSpec


class Move(NamedTuple):
    """A host number that the optimizer changes in its step.

    Attributes:
        slot: which of the rule's numbers.
        new: its next value, from the rule's numbers.
    """

    slot: int
    new: Callable[[Sequence[float]], Any]


@dataclass
class Rule:
    """The step for one parameter (or several that depend on each other), traced.

    Attributes:
        graph: inputs params, grads, numbers (0-d ``float64`` each), flags (1.0 on the first
            step of a parameter whose state starts from its gradient), state tensors;
            outputs params, state tensors.
        guards: answers about the numbers that the trace depends on.
        moves: numbers that change in the step.
        adds: (position of the group, key, value) of numbers that the first step adds to a
            parameter group.
        asked: what of the groups the step looks at.
    """

    graph: Graph
    guards: list[Guard]
    moves: list[Move]
    adds: list[tuple[int, str, Move]] = field(default_factory=list)
    asked: Asked = field(default_factory=lambda: Asked(0))

    def holds(self, numbers: Sequence[float]) -> bool:
        """Whether the rule would be traced the same with these numbers."""
        return all(g.question(numbers) == g.answer for g in self.guards)


UNREAD = -1


class Call(NamedTuple):
    """A rule applied to parameters.

    Attributes:
        rule: what to do.
        names: the parameters.
        numbers: where the rule's numbers and flags stand among all numbers; `UNREAD` for one
            that its graph doesn't use.
        state: paths of the state leaves.
    """

    rule: Rule
    names: list[str]
    numbers: list[int]
    state: list[str]


@dataclass(frozen=True)
class Update:
    """A whole optimizer step.

    Attributes:
        calls: each touches its own parameters and state.
        state: spec of each state leaf, by path.
        size: how many numbers and flags there are.
        born: names whose state starts from the first gradient; their flags are the last
            numbers, in this order.
    """

    calls: list[Call]
    state: dict[str, TensorSpec]
    size: int
    born: list[str]

    @functools.cached_property
    def guarded(self) -> list[tuple[Rule, tuple[int, ...]]]:
        """The rules that depend on numbers, each with the numbers it is applied to."""
        found = {}
        # The numbers end with the flags, which no guard looks at.
        plain = self.size - len(self.born)
        for call in self.calls:
            if call.rule.guards:
                own = tuple(i for i in call.numbers if i < plain)
                found[id(call.rule), own] = call.rule, own
        return list(found.values())

    @functools.cached_property
    def changing(self) -> list[Call]:
        """The calls that move numbers on the host."""
        return [c for c in self.calls if c.rule.moves or c.rule.adds]

    def holds(self, numbers: Sequence[float]) -> bool:
        """Whether the guards of all rules agree with the numbers as they are now."""
        asked = [numbers[i] for i in self._asked]
        if asked != self._agreed:
            if self.broken(numbers):
                return False
            self._agreed[:] = asked
        return True

    def broken(self, numbers: Sequence[float]) -> list[int]:
        """Which numbers have a value to which the answers differ that the trace was made with."""
        found = set()
        for rule, own in self.guarded:
            values = [numbers[i] if i != UNREAD else 0.0 for i in own]
            for guard in rule.guards:
                if guard.question(values) != guard.answer:
                    found |= {own[i] for i in guard.depends}
        return sorted(found)

    @functools.cached_property
    def _asked(self) -> list[int]:
        """Where the numbers stand that a guard depends on."""
        return sorted(
            {own[i] for rule, own in self.guarded for g in rule.guards for i in g.depends}
        )

    @functools.cached_property
    def _agreed(self) -> list[float | None]:
        """Their values when all guards agreed for the last time."""
        return [None] * len(self._asked)


class Created(NamedTuple):
    """State that an optimizer doesn't have yet.

    Attributes:
        entries: state to be, by parameter name; tensors are on the host.
        born: names whose state starts from the first gradient.
    """

    entries: dict[str, Any]
    born: list[str]


class Adopted(Protocol):
    """What a training step needs of the user's optimizer, whatever its kind.

    Attributes:
        held: names of its parameters.
        updates: whether there is an update; without one a step gives gradients only.
    """

    held: set[str]
    updates: bool

    def refresh(self, names: dict[int, str]) -> None:
        """Look at the parameters again: groups may have been added, tensors replaced."""

    def watched(self) -> list[Any]:
        """The objects it refers to; while they are the same, so is all but `numbers` and `static`.

        Otherwise `refresh` has to be called before anything else.
        """

    def numbers(self) -> list[float]:
        """Hyperparameters and other host numbers that are inputs of the program."""

    def static(self) -> tuple[tuple[str, Any], ...]:
        """Everything else that a trace depends on, hashable, by name."""

    def name_of(self, number: int) -> str:
        """The path of one of `numbers`."""

    def leaves(self) -> dict[str, Tensor]:
        """The state tensors by path."""

    def replace(self, path: str, value: Tensor) -> None:
        """Put another tensor in the place of a state leaf."""

    def create(self, params: Mapping[str, Tensor], reached: Sequence[str]) -> Created:
        """The state that is missing for these parameters; the optimizer isn't changed."""

    def capture(
        self, params: dict[str, TensorSpec], reached: Sequence[str], created: Created
    ) -> Update:
        """Trace the step for the parameters that have a gradient."""

    def install(self, created: Created, put: Callable[[str, Tensor], Tensor]) -> None:
        """Give the optimizer the state that was missing; `put` takes a leaf and its path."""

    def fresh(self, name: str) -> bool:
        """Whether a parameter's state is as `install` left it, to start from a gradient."""

    def stepped(self, update: Update, moved: Callable[[], bool]) -> None:
        """The update ran.

        Args:
            update: what ran.
            moved: whether the step counts; asked only where an answer is needed.
        """

    def uninstall(self, created: Created) -> None:
        """Take back what `install` gave."""

    def finish(self, update: Update, numbers: Sequence[float], moved: Callable[[], bool]) -> None:
        """Do on the host what a step does there: counts, hooks.

        Args:
            update: what ran.
            numbers: with which numbers.
            moved: whether the step counts; asked only where an answer is needed.
        """

    def hooked(self) -> bool:
        """Whether `finish` calls functions of the user's."""

    def own_state(self) -> dict[str, Any]:
        """A plain dict of the state that no other state dict holds; host copies."""

    def own_misfits(self, state: dict[str, Any], params: Mapping[str, Tensor]) -> list[str]:
        """What of a dict that `own_state` is part of doesn't fit, a line each."""

    def load_own(
        self,
        state: dict[str, Any],
        params: Mapping[str, Tensor],
        put: Callable[[Tensor], Tensor],
    ) -> None:
        """Take the state from a dict without misfits."""

    def tree(self) -> Any:
        """The state as the user knows it."""


class NothingKept:
    """Answers to `Adopted` of an optimizer that has nothing of a kind."""

    def name_of(self, number: int) -> str:
        """There are no numbers."""
        raise IndexError(number)

    def fresh(self, name: str) -> bool:
        """State doesn't start from a gradient."""
        return False

    def stepped(self, update: Update, moved: Callable[[], bool]) -> None:
        """There is nothing to note."""

    def finish(self, update: Update, numbers: Sequence[float], moved: Callable[[], bool]) -> None:
        """Nothing is kept on the host."""

    def hooked(self) -> bool:
        """There are no hooks."""
        return False

    def own_state(self) -> dict[str, Any]:
        """There is no state, or the optimizer has a state dict of its own."""
        return {}

    def own_misfits(self, state: dict[str, Any], params: Mapping[str, Tensor]) -> list[str]:
        """There is nothing to compare."""
        return []

    def load_own(
        self,
        state: dict[str, Any],
        params: Mapping[str, Tensor],
        put: Callable[[Tensor], Tensor],
    ) -> None:
        """There is nothing to load."""


def apply(
    tracing: Tracing,
    update: Update,
    params: dict[str, Tensor],
    grads: dict[str, Tensor],
    state: dict[str, Tensor],
    numbers: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The step inside a trace.

    Equals, for an optimizer that treats each parameter by itself::

        for name, grad in grads.items():
            params[name], state[name] = rule(params[name], grad, numbers, state[name])

    Args:
        tracing: the surrounding trace.
        update: the rules and where they apply.
        params: all parameters by name.
        grads: gradients by name.
        state: state leaves by path.
        numbers: ``float64[update.size]``.

    Returns:
        New parameters and state, with the same keys in the same order.
    """
    scalars: dict[int, Tensor] = {}
    params, state = dict(params), dict(state)
    for call in update.calls:
        for i in call.numbers:
            if i not in scalars:
                scalars[i] = numbers[i] if i != UNREAD else numbers.new_zeros(())
        inputs = [
            *(params[n] for n in call.names),
            *(grads[n].to(params[n].dtype) for n in call.names),
            *(scalars[i] for i in call.numbers),
            *(state[p] for p in call.state),
            *(tracing.tensors.admit(t) for t in call.rule.graph.captured),
        ]
        out = list(ops.call(call.rule.graph.serial, inputs))
        params.update(zip(call.names, out, strict=False))
        state.update(zip(call.state, out[len(call.names) :], strict=True))
    return params, state
