"""The ``funcacc`` command: ``funcacc train``, ``report``, ``bench`` and ``doctor``.

Each subcommand is a module of this package with a ``main(argv) -> int``, imported only when
it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from funcacc.cli.errors import OneLineParser, RunError, UsageError

COMMANDS = {
    "train": "train a byte-level GPT on text, on any engine",
    "report": "write a page of HTML about a run of funcacc train",
    "bench": "compare training steps with those of other libraries, in paired runs",
    "doctor": "say what is installed and check each engine against plain PyTorch",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The arguments after the program's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit code: 0 done, 1 failed on the way, 2 asked for the impossible, 130 interrupted.
    """
    parser = _parser()
    try:
        asked = parser.parse_args(argv)
    except UsageError as error:
        return _fail("funcacc", str(error), 2)
    if asked.command is None:
        parser.print_help(sys.stderr)
        return 2
    return _run(asked.command, asked.rest)


def _parser() -> OneLineParser:
    lines = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
    parser = OneLineParser(
        prog="funcacc",
        description="Functional gradient accumulation for PyTorch.",
        epilog=f"commands:\n{lines}\n\n`funcacc COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"funcacc {_version()}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("funcacc")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _run(name: str, rest: list[str]) -> int:
    """Run a command, turning what a user can cause into one line and an exit code."""
    from funcacc.errors import FuncaccError

    command = importlib.import_module(f"funcacc.cli.{name}")
    try:
        return int(command.main(rest))
    except (UsageError, FuncaccError) as error:
        return _fail(f"funcacc {name}", str(error), 2)
    except RunError as error:
        return _fail(f"funcacc {name}", str(error), 1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"funcacc {name}", f"{error.strerror or error}{where}", 2)
    except KeyboardInterrupt:
        return _fail(f"funcacc {name}", "interrupted", 130)


def _fail(prefix: str, message: str, code: int) -> int:
    print(f"{prefix}: {' '.join(message.split())}", file=sys.stderr)
    return code
