"""Paired, alternating runs of peers in processes of their own; medians and tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from funcacc.bench.peers import PEERS
from funcacc.bench.work import WORK
from funcacc.engines.dump import dumped

OURS = "funcacc"
SCHEDULED = 50


class Failed(RuntimeError):
    """A peer that ended instead of answering."""


class Worker:
    """A peer's process.

    Args:
        command: what to run.
        environment: variables to add.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={"PJRT_DEVICE": "CPU", **os.environ, **environment},
        )

    def ask(self, do: str, count: int = 0) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            Failed: with the last line that the process wrote.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "count": count}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raised = re.findall(
                r"^[\w.]*(?:Error|Exception|Refused)\b.*", self._errors.read(), re.M
            )
            raise Failed(raised[-1] if raised else f"exit code {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._errors.close()


class Row(NamedTuple):
    """One peer on one piece of work.

    Attributes:
        work: key of `WORK`.
        microbatches: K.
        peer: its name.
        first: seconds of the first call.
        parts: of the first call, where they are known.
        step: milliseconds of a step: lower quartile, median, upper quartile.
        ratio: funcacc's time divided by this peer's: median over the rounds.
        host: milliseconds until the call returns, median.
        programs: compiled in 50 steps with a schedule, the last window shorter.
        program_bytes: all buffers of the program with the most instructions, as XLA assigned them.
        instructions: of that program, before optimisation.
        peak_bytes: peak resident set of the process.
        version: of the library.
        failure: why there are no figures.
    """

    work: str
    microbatches: int
    peer: str
    first: float = 0.0
    parts: dict[str, float] | None = None
    step: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ratio: float | None = None
    host: float = 0.0
    programs: int | None = None
    program_bytes: int | None = None
    instructions: int | None = None
    peak_bytes: int = 0
    version: str = ""
    failure: str = ""


def commands(work: str, count: int, peers: Sequence[str], jax: dict[str, str]) -> dict[str, Any]:
    """The command line of each peer that can do this work."""
    made = {p: [sys.executable, "-m", "funcacc.bench.worker", p, work, str(count)] for p in peers}
    shape = WORK[work].shape
    if shape is not None:
        script = str(Path(__file__).with_name("plain_jax.py"))
        made.update({p: [i, script, json.dumps(shape), str(count)] for p, i in jax.items()})
    return made


def compare(work: str, count: int, made: dict[str, Any], rounds: int, seconds: float) -> list[Row]:
    """Run all peers on one piece of work, in turns.

    Args:
        work: key of `WORK`.
        count: K.
        made: command lines by peer.
        rounds: how often each peer has its turn.
        seconds: about how long a turn of funcacc's is; the others take as many steps.
    """
    workers = {name: Worker(command) for name, command in made.items()}
    failed: dict[str, str] = {}
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}

    def ask(name: str, do: str, steps: int = 0) -> dict[str, Any]:
        if name not in failed:
            try:
                return workers[name].ask(do, steps)
            except Failed as e:
                failed[name] = str(e)
        return {}

    def row(name: str) -> Row:
        found = ask(name, "schedule", SCHEDULED) | ask(name, "figures")
        workers[name].close()
        if name in failed:
            return Row(work, count, name, failure=failed[name])
        program = dumped(lambda environment: _three_steps(made[name], environment))
        row = Row(work, count, name, first=first[name])
        if program is not None:
            row = row._replace(program_bytes=program.need.total, instructions=program.instructions)
        return _row(row, times[name], times[OURS], found)

    try:
        first = {name: ask(name, "steps", 1).get("seconds", 0.0) for name in workers}
        for name in workers:
            # The second step compiles again in some of them.
            ask(name, "steps", 3)
        steps = _steps_in(workers[OURS], seconds)
        for _ in range(rounds):
            for name in workers:
                times[name].append(ask(name, "steps", steps))
        return [row(name) for name in workers]
    finally:
        for worker in workers.values():
            worker.close()


def _three_steps(command: Sequence[str], environment: Mapping[str, str]) -> None:
    worker = Worker(command, environment)
    try:
        worker.ask("steps", 3)
    finally:
        worker.close()


def _steps_in(worker: Worker, seconds: float) -> int:
    try:
        once: float = worker.ask("steps", 3)["seconds"] / 3
    except Failed:
        return 3
    return max(3, min(300, round(seconds / once)))


def _row(
    row: Row, own: list[dict[str, Any]], ours: list[dict[str, Any]], found: dict[str, Any]
) -> Row:
    each = [1e3 * t["seconds"] / t["steps"] for t in own]
    low, middle, high = quantiles(each, n=4) if len(each) > 1 else each * 3
    pairs = zip(ours, own, strict=True)
    return row._replace(
        parts=found.get("parts"),
        step=(low, middle, high),
        ratio=median(a["seconds"] / b["seconds"] for a, b in pairs) if all(ours) else None,
        host=median(1e3 * t["host"] / t["steps"] for t in own),
        programs=found.get("programs"),
        peak_bytes=found["peak_bytes"],
        version=found["version"],
    )


def markdown(rows: Sequence[Row]) -> str:
    """The rows as tables, one for each piece of work."""
    lines: list[str] = []
    for work in dict.fromkeys(r.work for r in rows):
        lines += [f"### {work}: {WORK[work].what}", "", *_HEAD]
        lines += [_line(r) for r in rows if r.work == work]
        lines.append("")
    return "\n".join(lines)


_HEAD = [
    "| K | peer | step, ms | quartiles | funcacc / peer | host, ms | first call, s "
    "| programs | HLO instructions | program, MB | peak resident, MB |",
    "|--:|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
]


def _line(r: Row) -> str:
    if r.failure:
        return f"| {r.microbatches} | {r.peer} | fails: {r.failure[:90]} |" + 8 * " |"
    low, middle, high = r.step
    cells = [
        str(r.microbatches),
        r.peer,
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        "" if r.ratio is None else f"{r.ratio:.2f}",
        f"{r.host:.2f}",
        f"{r.first:.2f}",
        *("" if n is None else str(n) for n in (r.programs, r.instructions)),
        *("" if n is None else f"{n / 2**20:.1f}" for n in (r.program_bytes, r.peak_bytes)),
    ]
    return "| " + " | ".join(cells) + " |"


def all_peers() -> list[str]:
    """The peers that run in this environment."""
    return list(PEERS)
