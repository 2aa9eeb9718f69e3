"""Reading optimised HLO text: which communication a program has, and where."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from funcacc.report import Collective

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_NAME = re.compile(r"%?([\w.\-]+)")
_LOOP = re.compile(r" while\(.*?condition=%?([\w.\-]+).*?body=%?([\w.\-]+)")


def collectives(text: str) -> list[Collective]:
    """The communication of a program, in the order of its text.

    Args:
        text: of the optimised module, for one of its devices.
    """
    parts = _computations(text)
    loops = {n for lines in parts.values() for x in lines for m in _LOOP.findall(x) for n in m}
    inside = _reachable(parts, loops)
    return [
        Collective(found[2], _bytes(found[1], bool(found[3])), name in inside)
        for name, lines in parts.items()
        for line in lines
        if (found := _COLLECTIVE.search(line))
    ]


def _computations(text: str) -> dict[str, list[str]]:
    """Name -> lines of each computation."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in map(str.strip, text.splitlines()):
        head = _HEAD.match(line)
        if head and "=" not in line.split("(")[0]:
            lines = found[head[1]] = []
        elif line != "}":
            lines.append(line)
    return found


def _reachable(parts: dict[str, list[str]], names: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    todo = [n for n in names if n in parts]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [n for x in parts[name] for n in _NAME.findall(x) if n in parts]
    return seen


def _bytes(shape: str, started: bool) -> int:
    """Bytes of a result; a started one has its operands before it."""
    sizes = [
        math.prod(map(int, dims.split(","))) * _width(kind, bits) if dims else _width(kind, bits)
        for kind, bits, dims in _ARRAY.findall(shape)
    ]
    return sum(sizes) // (2 if started and len(sizes) > 1 else 1)


def _width(kind: str, bits: str) -> int:
    return 1 if kind == "pred" else max(1, int(bits) // 8)
