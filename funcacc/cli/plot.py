"""The pictures of a run: loss, throughput and gradient norm over steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from funcacc.files import write_atomically

Metrics = Sequence[Mapping[str, Any]]
MOST_POINTS = 1500


def draw(metrics: Metrics, entropy: float, path: Path) -> None:
    """Draw a run as a PNG.

    Args:
        metrics: The records of ``metrics.jsonl``.
        entropy: The held-out text's unigram entropy, drawn as a line to be below of.
        path: Where to put the PNG.
    """
    # A bare Figure draws with Agg: no display is needed, no global backend is touched.
    figure = Figure(figsize=(9, 4), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    _loss(loss, metrics)
    loss.axhline(entropy, color="grey", linestyle="--", linewidth=0.8, label="unigram entropy")
    loss.legend(frameon=False)
    _speed(speed, metrics)
    for axes in (loss, speed):
        axes.set_xlabel("step")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))


def curves(metrics: Metrics, builds: Sequence[int], size: tuple[float, float]) -> bytes:
    """Draw a run as SVG: loss, throughput and gradient norm above one axis of steps.

    Args:
        metrics: The records of ``metrics.jsonl``.
        builds: After which steps programs were built; marked by numbers from 1 on.
        size: Width and height in inches.
    """
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    _loss(panels[0], metrics)
    if panels[0].get_lines():
        panels[0].legend(frameon=False)
    _speed(panels[1], metrics)
    panels[2].plot(*_series(metrics, "grad_norm"), linewidth=0.8, color="C2")
    panels[2].set_ylabel("gradient norm")
    panels[2].set_ylim(bottom=0)
    panels[2].set_xlabel("step")
    _plain(panels[2])
    for step, numbers in _numbered(builds).items():
        for axes in panels:
            axes.axvline(step, color="#b00020", linestyle=":", linewidth=1)
        panels[0].annotate(
            numbers,
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, 1),
            textcoords="offset points",
            color="#b00020",
            fontsize="small",
        )
    file = io.BytesIO()
    # The same run gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "funcacc"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def comparison(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw step time and memory over the number of microbatches, a column for each work.

    Args:
        rows: of `funcacc bench`, as dicts.
        path: Where to put the SVG.
    """
    good = [r for r in rows if not r["failure"]]
    works, peers = (list(dict.fromkeys(r[k] for r in good)) for k in ("work", "peer"))
    ticks = sorted({r["microbatches"] for r in good})
    figure = Figure(figsize=(3.2 * len(works), 6), layout="constrained")
    panels = figure.subplots(2, len(works), squeeze=False, sharex=True)
    for column, work in enumerate(works):
        for i, peer in enumerate(peers):
            own = [r for r in good if (r["work"], r["peer"]) == (work, peer)]
            style = {"marker": "o", "markersize": 3, "color": f"C{i}", "label": peer}
            style["linewidth"] = 2 if peer == peers[0] else 1
            counts = [r["microbatches"] for r in own]
            panels[0, column].plot(counts, [r["step"][1] for r in own], **style)
            sized = [r for r in own if r["program_bytes"]]
            counts = [r["microbatches"] for r in sized]
            panels[1, column].plot(counts, [r["program_bytes"] / 2**20 for r in sized], **style)
        panels[0, column].set_title(work, fontsize="medium")
        panels[1, column].set_xlabel("microbatches")
        for axes in panels[:, column]:
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(k) for k in ticks])
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
            _plain(axes)
    panels[0, 0].set_ylabel("step (ms)")
    panels[1, 0].set_ylabel("program (MiB)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    with matplotlib.rc_context({"svg.hashsalt": "funcacc"}):
        write_atomically(
            path, lambda file: figure.savefig(file, format="svg", metadata={"Date": None})
        )


def _numbered(builds: Sequence[int]) -> dict[int, str]:
    at: dict[int, list[str]] = {}
    for i, step in enumerate(builds, 1):
        at.setdefault(step, []).append(str(i))
    return {
        step: f"{n[0]}–{n[-1]}" if len(n) > 2 else ", ".join(n)  # noqa: RUF001
        for step, n in at.items()
    }


def _loss(axes: Axes, metrics: Metrics) -> None:
    axes.plot(*_series(metrics, "loss"), linewidth=0.8, label="training")
    axes.plot(*_series(metrics, "heldout_loss"), marker="o", markersize=3, label="held out")
    axes.set_ylabel("loss (nats a byte)")
    _plain(axes)


def _speed(axes: Axes, metrics: Metrics) -> None:
    steps, rates = _series(metrics, "tokens_per_s")
    axes.plot(steps, rates, linewidth=0.8)
    axes.set_ylabel("tokens a second")
    axes.set_ylim(0, 1.1 * max(rates, default=1.0))
    _plain(axes)


def _series(metrics: Metrics, key: str) -> tuple[list[int], list[float]]:
    points = thinned([(r["step"], float(r[key])) for r in metrics if key in r])
    return [step for step, _ in points], [value for _, value in points]


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `MOST_POINTS` of these, with the lowest and the highest of each stretch."""
    stretch = -(-2 * len(points) // MOST_POINTS)
    if stretch <= 2:
        return list(points)
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
