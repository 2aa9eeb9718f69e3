"""Reading HLO text: computations, loops, and what a loop's body calls."""

import re


def computations(text):
    """Name -> lines of each computation."""
    found, name = {}, None
    for line in text.splitlines():
        start = re.match(r"\s*(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if start and "=" not in line.split("(")[0]:
            name = start.group(2)
            found[name] = []
        elif line.strip() == "}":
            name = None
        elif name:
            found[name].append(line)
    return found


def reachable(text, name):
    """All lines of a computation and of those that it calls."""
    parts = computations(text)
    lines, todo, seen = [], [name], set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        lines += parts[current]
        for line in parts[current]:
            todo += [n for n in re.findall(r"%?([\w.\-]+)", line) if n in parts]
    return lines


def loop_bodies(text):
    """Names of the bodies of all loops, in the order of the text."""
    return re.findall(r" while\(.*body=%?([\w.\-]+)", text)
