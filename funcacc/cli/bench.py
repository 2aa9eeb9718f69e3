"""``funcacc bench``: training steps of funcacc and of its peers, in paired runs."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from funcacc.bench import compare
from funcacc.bench.work import WORK
from funcacc.cli import plot
from funcacc.cli.errors import OneLineParser, RunError

JAX = ("0.7.1", "latest")


def main(argv: Sequence[str]) -> int:
    """Run ``funcacc bench``; the tables go to standard output and into ``--out``."""
    parser = OneLineParser(
        prog="funcacc bench",
        description="Compare training steps of funcacc and of its peers, in alternating runs "
        "of processes of their own.",
    )
    parser.add_argument("--work", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 4, 16, 64], metavar="K")
    parser.add_argument("--peers", nargs="+", choices=compare.all_peers())
    parser.add_argument("--jax", nargs="*", default=[], metavar="VERSION", help=f"e.g. {JAX}")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each peer")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn, about")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    asked = parser.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    peers = list(dict.fromkeys([compare.OURS, *(asked.peers or compare.all_peers())]))
    jax = {f"JAX {v}": _environment(asked.out / "environments", v) for v in asked.jax}
    rows = []
    for work in asked.work:
        for count in asked.microbatches:
            made = compare.commands(work, count, peers, jax)
            print(f"{work}, K = {count}", file=sys.stderr)
            rows += compare.compare(work, count, made, asked.rounds, asked.seconds)
            (asked.out / "bench.json").write_text(json.dumps([r._asdict() for r in rows], indent=1))
    text = f"{_where()}\n\n{compare.markdown(rows)}"
    (asked.out / "bench.md").write_text(text)
    plot.comparison([r._asdict() for r in rows], asked.out / "bench.svg")
    print(text)
    return 0


def _where() -> str:
    cores = os.cpu_count()
    return (
        f"{datetime.date.today()}, {platform.machine()}, {cores} cores, "
        f"Python {platform.python_version()}."
    )


def _environment(folder: Path, version: str) -> str:
    """The interpreter of an environment with JAX and optax, made when it isn't there."""
    home = folder / f"jax-{version}"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        which = "jax" if version == "latest" else f"jax=={version}"
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", which, "optax"])
        if done.returncode:
            raise RunError(f"pip couldn't install {which} into {home}")
    return str(python)
