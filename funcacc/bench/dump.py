"""What XLA's CPU compiler says of the programs of a process, from the files that it dumps."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Dumped(NamedTuple):
    """Figures of the largest program of a process.

    Attributes:
        program_bytes: all buffers: inputs, results, temporaries, as XLA assigned them.
        instructions: before optimisation, in all computations.
    """

    program_bytes: int
    instructions: int


def dumped(run: Callable[[dict[str, str]], None]) -> Dumped | None:
    """Run something with XLA's dump switched on, and read what it wrote.

    Args:
        run: runs it in a process of its own, with this environment added.

    Returns:
        The figures, or `None` when no program was compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        run({"XLA_FLAGS": f"--xla_dump_to={folder}"})
        sizes = [_bytes(p.read_text()) for p in Path(folder).glob("*memory-usage-report.txt")]
        counts = [
            _instructions(p.read_text()) for p in Path(folder).glob("*before_optimizations.txt")
        ]
    return Dumped(max(sizes), max(counts)) if sizes and counts else None


def _bytes(report: str) -> int:
    found = re.search(r"Total bytes used: (\d+)", report)
    return int(found[1]) if found else 0


def _instructions(hlo: str) -> int:
    return len(re.findall(r"^\s+(?:ROOT )?\S+ = ", hlo, re.MULTILINE))
