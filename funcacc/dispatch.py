"""Running a program on the user's own tensors, which have its results afterwards, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcacc import failures, guard
from funcacc.engines.base import Engine, Program
from funcacc.errors import EngineError
from funcacc.programs import Compiled
from funcacc.report import Report
from funcacc.watch import same


class Dispatch:
    """The dispatches of one step.

    Args:
        engine: on which programs run.
        donate: whether programs take the memory of the state.
        report: where programs are noted that have run.
        checkpoint: gives the newest checkpoint of the state that is known.

    Attributes:
        programs: those that have run, oldest first.
    """

    def __init__(
        self,
        engine: Engine,
        donate: bool,
        report: Report,
        checkpoint: Callable[[], Path | None],
    ) -> None:
        self.engine = engine
        self.donate = donate
        self.report = report
        self._checkpoint = checkpoint
        self._copying: dict[int, EngineError] = {}
        self.programs: list[Program] = []
        self._owned: tuple[list[Tensor], list[Any]] = [], []
        self._doubtful = False

    # Ownership -------------------------------------------------------------------------

    def owns(self, targets: list[Tensor]) -> bool:
        """Whether the targets are what the last dispatch left, in the same storages."""
        last, held = self._owned
        return same(targets, last) and same(storages(targets), held)

    def own(self, targets: Sequence[Tensor]) -> None:
        """Separate the buffers of those targets that aren't what the last dispatch left."""
        if self.owns(list(targets)):
            return
        known = {id(t): (t, s) for t, s in zip(*self._owned, strict=True)}
        new = {}
        for t, storage in zip(targets, storages(targets), strict=True):
            if id(t) not in known or known[id(t)][1] is not storage:
                new[id(t)] = t
        if new:
            self.engine.own(list(new.values()), [t for t in targets if id(t) not in new])

    # Running ---------------------------------------------------------------------------

    def check(self, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """Look, after a failure, whether the whole state has values.

        Args:
            state: gives the leaves by path.

        Raises:
            StateError: naming those without.
        """
        self.engine.check()
        if not self._doubtful:
            return
        now = state()
        gone = failures.lost(self.engine, now)
        if gone:
            raise failures.still_lost(gone, now, self._checkpoint())
        self._doubtful = False

    def run(
        self,
        compiled: Compiled,
        targets: list[Tensor],
        others: Iterable[Tensor],
        then: Callable[[list[Tensor]], None],
    ) -> list[Tensor]:
        """Dispatch, and let the targets have the new values.

        Args:
            compiled: the program.
            targets: the state, in the program's order; owned.
            others: what it reads besides, uploaded as it is asked for.
            then: called with the results while signals still wait: what belongs to the same
                step on the host.

        Returns:
            The results that aren't state.

        Raises:
            EngineError: when the program failed and the state is as it was; when it is found to
                copy what was donated, which is the case after its first run and refused later.
            StateError: when the state is lost.
        """
        n = compiled.layout.num_state
        if id(compiled.program) in self._copying:
            raise self._copying[id(compiled.program)]
        first = compiled.program not in self.programs
        with guard.deferred():
            try:
                values = [*targets, *self._apart(targets, list(others))]
                self.engine.settle()
                before = self.engine.addresses(targets) if first and self.donate else None
                outputs = compiled.program(values)
                if first:
                    self._look(outputs[n - 1 : n])
            except (RuntimeError, MemoryError) as e:
                self._doubtful = True
                state = dict(zip(compiled.step.graph.names, targets, strict=False))
                known = [*compiled.leaves, *compiled.inside]
                raise failures.of_dispatch(e, self.engine, state, known, self._checkpoint()) from e
            if first:
                self._note(compiled, before, targets, outputs[:n])
            self.engine.assign(targets, outputs[:n])
            self._owned = targets, storages(targets)
            # What `then` reads may have failed on the device.
            self._doubtful = True
            then(outputs[n:])
            self._doubtful = False
        if id(compiled.program) in self._copying:
            raise self._copying[id(compiled.program)]
        return outputs[n:]

    def _apart(self, targets: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        """Give the program copies of what it reads where that lies in the memory of the state.

        Such are a buffer that is a view of a parameter, and what a loss has closed over by
        ``.detach()``.
        """
        if not self.donate:
            return others
        held = storages(others)
        # The tensor and the list `held`: what isn't the state itself has no alias.
        shared = max(map(_uses, held), default=0) > 2
        if not shared and set(map(id, others)).isdisjoint(map(id, targets)):
            return others
        taken = set(map(_address, storages(targets)))
        found = [i for i, s in enumerate(held) if s._cdata in taken]
        if not found:
            return others
        for i, copy in zip(found, self.engine.copies([others[i] for i in found]), strict=True):
            others[i] = copy
        return others

    def _look(self, outputs: Sequence[Tensor]) -> None:
        """Wait for a program that runs for the first time, which is when memory runs out."""
        for error in self.engine.failures(outputs).values():
            raise error

    def _note(
        self,
        compiled: Compiled,
        before: list[int] | None,
        old: Sequence[Tensor],
        state: Sequence[Tensor],
    ) -> None:
        self.programs.append(compiled.program)
        after = self.engine.addresses(state) if before else []
        places = [a == b for a, b in zip(before or [], after, strict=True)]
        gone = self.engine.consumed(old) if self.donate else [False] * len(old)
        compiled.ran(self.report, gone, places)
        # What has no elements has no memory to take.
        pairs = zip(compiled.leaves, gone, strict=False)
        copied = [x for x, taken in pairs if not taken and x.spec.nbytes]
        if self.donate and copied:
            self._copying[id(compiled.program)] = failures.copied(copied)


_address = attrgetter("_cdata")


def _uses(storage: Any) -> int:
    """How many tensors and Python objects hold a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def storages(tensors: Sequence[Tensor]) -> list[Any]:
    """The storages of tensors, which ``p.data = ...`` replaces; the same objects if not."""
    return list(map(Tensor.untyped_storage, tensors))
