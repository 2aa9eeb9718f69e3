"""The tables and the plot of docs/benchmarks.md, from what `funcacc bench` wrote.

    python benchmarks/page.py OUT [OUT ...]

Each OUT is a folder of ``funcacc bench --out OUT``; rows of the same work, K and peer in a later
one replace those of an earlier one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from funcacc.bench import compare
from funcacc.bench.work import WORK
from funcacc.cli import plot

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def main() -> None:
    """Write both."""
    found = {}
    for folder in map(Path, sys.argv[1:]):
        where = (folder / "bench.md").read_text().splitlines()[0]
        for row in json.loads((folder / "bench.json").read_text()):
            found[row["work"], row["microbatches"], row["peer"]] = row
    peers = list(dict.fromkeys(peer for _, _, peer in found))
    order = sorted(found, key=lambda k: (list(WORK).index(k[0]), k[1], peers.index(k[2])))
    rows = [found[k] for k in order]
    versions = {r["peer"]: r["version"] for r in rows if r["version"]}
    listed = ", ".join(f"{peer} {version}" for peer, version in versions.items())
    tables = compare.markdown([compare.Row(**r) for r in rows])
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    middle = f"{BEGIN}\n\n{where} Versions: {listed}.\n\n{tables}\n{END}"
    PAGE.write_text(before + middle + after)
    plot.comparison(rows, PAGE.with_suffix(".svg"))


if __name__ == "__main__":
    main()
