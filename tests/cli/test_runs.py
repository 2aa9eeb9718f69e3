from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from funcacc.cli import plot
from funcacc.cli.errors import UsageError
from funcacc.cli.runs import RunDir
from funcacc.files import write_atomically

CONFIG = {"steps": 10, "lr": 0.1}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file: BinaryIO) -> None:
        file.write(b"half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda file: file.write(b"new"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert path.read_bytes() == b"new"


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a" / "run", CONFIG)
    assert run.start() is None
    state = {"step": 4, "model": {"w": torch.randn(3)}, "list": [1, 2.5, "x", None]}
    run.save(**state)
    saved = RunDir(run.path, CONFIG).start()
    assert saved is not None and torch.equal(saved["model"]["w"], state["model"]["w"])
    assert saved["list"] == state["list"]


def test_resuming_cuts_the_metrics_back_to_the_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", CONFIG)
    run.start()
    run.append({"step": step, "loss": 1 / step} for step in range(1, 4))
    run.append([{"step": 3, "heldout_loss": 0.5}])
    run.save(step=3)
    run.append({"step": step, "loss": 9.0} for step in (4, 5))
    with run.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    run.start()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3] and lines == run.read_metrics()


def test_without_a_checkpoint_the_metrics_start_anew(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", CONFIG)
    run.start()
    run.append([{"step": 1, "loss": 2.0}])
    assert run.start() is None and run.read_metrics() == []


def test_another_configuration_is_refused_and_named(tmp_path: Path) -> None:
    RunDir(tmp_path, CONFIG).start()
    other = RunDir(tmp_path, {"steps": 20, "lr": 0.1, "new": 1})
    with pytest.raises(UsageError, match="steps is 10 there and 20 here, new is None there"):
        other.check(resume=True)


def test_an_unfinished_run_wants_resume(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", CONFIG)
    run.check(resume=False)
    run.check(resume=True)
    run.start()
    with pytest.raises(UsageError, match="--resume"):
        run.check(resume=False)
    run.check(resume=True)
    run.finish("done\n")
    run.check(resume=False)
    assert run.finished()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(UsageError, match="is a file"):
        RunDir(file, CONFIG).check(resume=True)
    with pytest.raises(UsageError, match="no run"):
        RunDir(tmp_path, CONFIG).check(resume=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    RunDir(empty, CONFIG).check(resume=False)


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_damaged_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        RunDir(tmp_path, CONFIG).check(resume=True)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\3\4 torn"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    run = RunDir(tmp_path, CONFIG)
    run.start()
    run.checkpoint.write_bytes(content)
    with pytest.raises(UsageError, match=r"checkpoint\.pt"):
        run.start()
    assert run.checkpoint.read_bytes() == content


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "metrics.png"
    metrics = [
        {"step": 1, "loss": 5.0, "tokens_per_s": 10.0},
        {"step": 1, "heldout_loss": 5.1},
        {"step": 2, "loss": 4.0, "tokens_per_s": 12.0},
    ]
    for records in (metrics, []):
        plot.draw(records, 3.0, path)
        assert path.read_bytes().startswith(b"\x89PNG")
