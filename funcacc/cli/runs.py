"""A RUN_DIR: the configuration, the metrics, the checkpoint and the report of one run.

::

    config.json     what determines the numbers; a RUN_DIR holds one configuration for ever
    metrics.jsonl   one object a line: {"step": 7, "loss": ...} or {"step": 50, "heldout_loss": ...}
    checkpoint.pt   the newest checkpoint
    metrics.png     loss and throughput
    report.txt      what the finished run printed; it is there only when the run is finished

Every file but ``metrics.jsonl`` is replaced as a whole. ``metrics.jsonl`` is on the disk up to
a checkpoint's step before the checkpoint is, and is cut back to it on resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import funcacc
from funcacc.cli.errors import UsageError
from funcacc.errors import StateError
from funcacc.files import write_atomically


class RunDir:
    """One run's folder.

    Args:
        path: The folder, which need not exist.
        config: What determines the run's numbers, JSON values only.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = dict(config)
        self.metrics = path / "metrics.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        self.plot = path / "metrics.png"
        self.report = path / "report.txt"
        self._config_file = path / "config.json"

    def check(self, *, resume: bool) -> None:
        """Refuse a folder that this run must not write into. Writes nothing.

        Raises:
            UsageError: It holds something else, another configuration, or an unfinished run
                of this one and ``resume`` is false.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UsageError(f"--out {self.path}: is a file, not a folder")
        if not self._config_file.exists():
            if any(entry.suffix != ".tmp" for entry in self.path.iterdir()):
                raise UsageError(f"--out {self.path}: holds files, but no run of funcacc train")
            return
        differences = _differences(self._read_config(), self.config)
        if differences:
            raise UsageError(f"--out {self.path}: holds another configuration ({differences})")
        if not self.finished() and not resume:
            raise UsageError(
                f"--out {self.path}: holds an unfinished run; --resume goes on with it"
            )

    def finished(self) -> bool:
        """Whether a run has come to its end here."""
        return self.report.exists()

    def start(self, **parts: Any) -> dict[str, Any] | None:
        """Make the folder ready to write into, and load its checkpoint if there is one.

        Args:
            **parts: What to load into, by the names given to `save`.

        Returns:
            What else the checkpoint holds, or ``None`` at the beginning.

        Raises:
            UsageError: The checkpoint is damaged, or doesn't fit.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._config_file.exists():
            text = json.dumps(self.config, indent=2) + "\n"
            write_atomically(self._config_file, lambda file: file.write(text.encode()))
        saved = None
        if self.checkpoint.exists():
            try:
                saved = funcacc.load(self.checkpoint, **parts)
                int(saved["step"])
            except (StateError, KeyError, TypeError) as error:
                raise UsageError(f"cannot go on from its checkpoint: {error}") from error
        self._cut_metrics(0 if saved is None else int(saved["step"]))
        return saved

    def save(self, *, step: int, **parts: Any) -> None:
        """Replace the checkpoint by one of ``parts``, taken after a step."""
        funcacc.save(self.checkpoint, step=step, **parts)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to the metrics; they are on the disk when this returns."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics, oldest first; a line torn by a kill is left out."""
        return [record for _, record in self._metric_lines()]

    def finish(self, report: str) -> None:
        """Write the report, which marks the run as finished."""
        write_atomically(self.report, lambda file: file.write(report.encode()))

    def _read_config(self) -> dict[str, Any]:
        try:
            config = json.loads(self._config_file.read_text(encoding="utf-8"))
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise UsageError(f"{self._config_file}: is not the configuration of a run")
        return config

    def _metric_lines(self) -> list[tuple[str, dict[str, Any]]]:
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = []
        for line in lines:
            try:
                kept.append((line, json.loads(line)))
            except ValueError:
                continue
        return kept

    def _cut_metrics(self, step: int) -> None:
        kept = [line for line, record in self._metric_lines() if record["step"] <= step]
        text = "".join(kept).encode()
        write_atomically(self.metrics, lambda file: file.write(text))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    missing = object()
    keys = [key for key in {**old, **new} if old.get(key, missing) != new.get(key, missing)]
    return ", ".join(f"{key} is {old.get(key)} there and {new.get(key)} here" for key in keys)
