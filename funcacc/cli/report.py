"""``funcacc report``: one page of HTML about a run, which needs nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from funcacc import page
from funcacc.cli import runs
from funcacc.cli.errors import OneLineParser, UsageError
from funcacc.files import write_atomically

STYLE = """
body { margin: 0 auto; padding: 1em; max-width: 72em; background: #fff; color: #1b1b1b;
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5em; margin: .2em 0 .6em; overflow-wrap: anywhere; }
body > h2 { font-size: 1.15em; margin: 1.6em 0 .5em; }
img { width: 100%; height: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(13em, 1fr)); margin: 0;
  gap: .1em 1.5em; }
dl div { display: flex; justify-content: space-between; gap: 1em;
  border-bottom: 1px solid #e4e4e4; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; text-align: right; }
"""
WIDE, NARROW = (9.6, 6.4), (4.4, 7.0)


def main(argv: Sequence[str]) -> int:
    """Run ``funcacc report``; return its exit code."""
    parser = OneLineParser(
        prog="funcacc report",
        description="Write a page about a run of funcacc train: its memory by kind against the "
        "floor, its leaves, its curves, and when programs were built.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="where to write (default: RUN_DIR/report.html)")
    asked = parser.parse_args(argv)
    config, metrics, report = runs.read(asked.run)
    text = rendered(asked.run.resolve().name, config, metrics, report)
    out = asked.out or asked.run / "report.html"
    write_atomically(out, lambda file: file.write(text.encode()))
    print(out)
    return 0


def rendered(
    name: str,
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    report: Mapping[str, Any] | None,
) -> str:
    """The page.

    Args:
        name: Of the run.
        config: What ``config.json`` holds.
        metrics: The records of ``metrics.jsonl``.
        report: What ``report.json`` holds; `None` before the first step.

    Raises:
        UsageError: The report isn't one.
    """
    from funcacc.cli import plot

    # A resumed run has built programs in several processes.
    try:
        builds = [{"step": r["step"], **r["program"]} for r in metrics if "program" in r]
        steps = [int(b["step"]) for b in builds]
        account = "" if report is None else page.fragment({**report, "builds": builds})
        wide, narrow = (_data(plot.curves(metrics, steps, s)) for s in (WIDE, NARROW))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise UsageError(f"report.json or metrics.jsonl isn't of funcacc train: {e!r}") from e
    about = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in config.items()
    )
    taken = max((r["step"] for r in metrics), default=0)
    alt = f"Loss, tokens a second and gradient norm over {taken} steps"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>funcacc: {escape(name)}</title><style>{STYLE}</style></head><body>
<h1>{escape(name)}</h1>
<p>{taken} steps. Red numbers are programs that were built, as listed below.</p>
<picture><source media="(max-width: 620px)" srcset="{narrow}">
<img alt="{alt}" src="{wide}"></picture>
{account or "<p>There is no report.json yet: no step was taken.</p>"}
<h2>Configuration</h2><dl>{about}</dl>
</body></html>
"""


def _data(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
