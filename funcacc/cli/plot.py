"""The picture of a run: loss and throughput over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from funcacc.files import write_atomically


def draw(metrics: Sequence[Mapping[str, Any]], entropy: float, path: Path) -> None:
    """Draw a run as a PNG.

    Args:
        metrics: The records of ``metrics.jsonl``.
        entropy: The held-out text's unigram entropy, drawn as a line to be below of.
        path: Where to put the PNG.
    """
    # A bare Figure draws with Agg: no display is needed, no global backend is touched.
    figure = Figure(figsize=(9, 4), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    loss.plot(*_series(metrics, "loss"), linewidth=0.8, label="training")
    loss.plot(*_series(metrics, "heldout_loss"), marker="o", markersize=3, label="held out")
    loss.axhline(entropy, color="grey", linestyle="--", linewidth=0.8, label="unigram entropy")
    loss.set_ylabel("loss (nats a byte)")
    loss.legend(frameon=False)
    steps, rates = _series(metrics, "tokens_per_s")
    speed.plot(steps, rates, linewidth=0.8)
    speed.set_ylabel("tokens a second")
    speed.set_ylim(0, 1.1 * max(rates, default=1.0))
    for axes in (loss, speed):
        _plain(axes)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[key]) for record in metrics if key in record]
    return [step for step, _ in points], [value for _, value in points]


def _plain(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
