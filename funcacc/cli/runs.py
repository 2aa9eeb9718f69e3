"""A RUN_DIR: the configuration, the metrics, the checkpoint and the report of one run.

::

    config.json     what determines the numbers; a RUN_DIR holds one configuration for ever
    metrics.jsonl   one object a line: {"step": 7, "loss": ...}, {"step": 50, "heldout_loss": ...},
                    or {"step": 0, "program": ...} where one was built after that step
    checkpoint.pt   the newest checkpoint
    metrics.png     loss and throughput
    report.json     the account of the training step in the latest process
    report.html     what `funcacc report` makes of all this
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
        self.account = path / "report.json"
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

    def describe(self, report: Mapping[str, Any]) -> None:
        """Write the account of the training step."""
        text = json.dumps(report, indent=1) + "\n"
        write_atomically(self.account, lambda file: file.write(text.encode()))

    def finish(self, report: str) -> None:
        """Write the report, which marks the run as finished."""
        write_atomically(self.report, lambda file: file.write(report.encode()))

    def _read_config(self) -> dict[str, Any]:
        return _object(self._config_file, "the configuration of a run")

    def _metric_lines(self) -> list[tuple[str, dict[str, Any]]]:
        return _metric_lines(self.metrics)

    def _cut_metrics(self, step: int) -> None:
        kept = [line for line, record in self._metric_lines() if record["step"] <= step]
        text = "".join(kept).encode()
        write_atomically(self.metrics, lambda file: file.write(text))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    missing = object()
    keys = [key for key in {**old, **new} if old.get(key, missing) != new.get(key, missing)]
    return ", ".join(f"{key} is {old.get(key)} there and {new.get(key)} here" for key in keys)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any] | None]:
    """Read a run for looking at it.

    Returns:
        Its configuration, its metrics, and the account of its training step if there is one.

    Raises:
        UsageError: There is no run, or a file of it is damaged.
    """
    if not (path / "config.json").exists():
        raise UsageError(f"{path}: holds no run of funcacc train")
    config = _object(path / "config.json", "the configuration of a run")
    metrics = [record for _, record in _metric_lines(path / "metrics.jsonl")]
    account = path / "report.json"
    report = _object(account, "the report of a run") if account.exists() else None
    return config, metrics, report


def _object(file: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file that may be anything."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{file}: is not {what}")
    return found


def _metric_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines that are records of metrics, each with its record."""
    if not file.exists():
        return []
    kept = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                kept.append((line, record))
    return kept
