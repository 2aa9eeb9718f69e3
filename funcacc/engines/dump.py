"""What XLA's CPU compiler says of the programs of a process, from the files that it dumps."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from funcacc.report import Need


class Dumped(NamedTuple):
    """Figures of the program of a process that has the most instructions.

    Attributes:
        need: all buffers, as XLA assigned them.
        instructions: before optimisation, in all computations.
    """

    need: Need
    instructions: int


def dumped(run: Callable[[dict[str, str]], None]) -> Dumped | None:
    """Run something with XLA's dump switched on, and read what it wrote.

    Args:
        run: runs it in a process of its own, with this environment added.

    Returns:
        The figures, or `None` when no program was compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = os.environ.get("XLA_FLAGS", "")
        run({"XLA_FLAGS": f"{flags} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()})
        found = []
        for hlo in Path(folder).glob("*before_optimizations.txt"):
            stem = str(hlo).removesuffix("before_optimizations.txt")
            # Not the largest: copying a state takes more than a step of it.
            for assignment in Path(folder).glob(f"{Path(stem).name}*buffer-assignment.txt"):
                found.append((_instructions(hlo.read_text()), need(assignment.read_text())))
    if not found:
        return None
    instructions, needed = max(found)
    return Dumped(needed, instructions)


_ALLOCATION = re.compile(r"^allocation \d+: .*?size (\d+), (.*)$", re.MULTILINE)


def need(assignment: str) -> Need:
    """The bytes of an assignment of buffers, as XLA's CPU compiler writes it."""
    sizes = {"inputs": 0, "temporaries": 0, "outputs": 0, "constants": 0}
    for found in _ALLOCATION.finditer(assignment):
        sizes[_use(found[2])] += int(found[1])
    return Need(sum(sizes.values()), **sizes)


def _use(attributes: str) -> str:
    # An input that an output has taken is both.
    for words, use in (("parameter", "inputs"), ("constant", "constants"), ("live-out", "outputs")):
        if words in attributes:
            return use
    return "temporaries"


def _instructions(hlo: str) -> int:
    return len(re.findall(r"^\s+(?:ROOT )?\S+ = ", hlo, re.MULTILINE))
