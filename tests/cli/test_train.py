from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import funcacc
from funcacc.cli import options, train

VARIES = {"tokens_per_s"}


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics that have to be the same in two runs."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # A resumed run builds its program again.
    records = [record for record in records if "program" not in record]
    return [{k: v for k, v in record.items() if k not in VARIES} for record in records]


def assert_same_state(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    else:
        assert a == b


def assert_same_run(a: Path, b: Path) -> None:
    assert numbers(a) == numbers(b)
    first, second = (torch.load(run / "checkpoint.pt", weights_only=True) for run in (a, b))
    del first["seconds"], second["seconds"]
    assert_same_state(first, second)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the process 'die' in the middle of a run, between two checkpoints."""
    advance = train.Session.advance

    def dying(session: train.Session) -> Any:
        if session.done == step:
            raise KeyboardInterrupt
        return advance(session)

    monkeypatch.setattr(train.Session, "advance", dying)


def test_a_run_writes_everything_and_says_it(run, tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(*tiny, "--out", out)
    assert result.code == 0
    names = {
        *("config.json", "metrics.jsonl", "checkpoint.pt"),
        *("metrics.png", "report.json", "report.txt"),
    }
    assert {path.name for path in out.iterdir()} == names
    report = (out / "report.txt").read_text()
    assert result.out.endswith(report)
    assert "unigram entropy" in report and "a sample:" in report and "held-out loss" in report
    records = numbers(out)
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    assert [r["step"] for r in records if "heldout_loss" in r] == [6, 12]
    assert {"grad_norm", "lr"} <= set(records[0])


def test_a_finished_run_is_printed_again(run, tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(*tiny, "--out", out)
    before = snapshot(tmp_path)
    for more in ([], ["--resume"], ["--save-every", "5"]):
        result = run(*tiny, "--out", out, *more)
        assert result.code == 0 and "finished run" in result.out
        assert (out / "report.txt").read_text() in result.out
    assert snapshot(tmp_path) == before


def test_the_loss_falls(run, tiny: list[str], tmp_path: Path) -> None:
    run(*tiny, "--steps", 60, "--out", tmp_path / "run")
    losses = [r["loss"] for r in numbers(tmp_path / "run") if "loss" in r]
    assert losses[0] > 5.0 and sum(losses[-5:]) / 5 < 3.2


def test_a_run_interrupted_and_resumed_gives_the_same_numbers(
    run, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*tiny, "--out", whole).code == 0
    for step in (2, 7):  # before the first checkpoint, and between two
        with monkeypatch.context() as patch:
            stop_after(step, patch)
            assert run(*tiny, "--out", parts, "--resume").code == 130
    run(*tiny, "--out", parts).assert_refused("--resume")
    result = run(*tiny, "--out", parts, "--resume")
    assert result.code == 0 and "going on after step 4" in result.out
    assert_same_run(whole, parts)


def test_a_killed_process_resumed_gives_the_same_numbers(
    run, tiny: list[str], tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*tiny, "--steps", "200", "--save-every", "25", "--eval-every", "50"]
    command = [sys.executable, "-m", "funcacc.cli", *arguments, "--out", str(parts)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (parts / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (parts / "report.txt").exists()
    result = run(*arguments, "--out", parts, "--resume")
    assert result.code == 0 and "going on after step" in result.out
    assert run(*arguments, "--out", whole).code == 0
    assert_same_run(whole, parts)


def test_on_xla_a_resumed_run_gives_the_same_numbers(
    run, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*tiny, "--engine", "xla"]
    result = run(*arguments, "--out", whole)
    assert result.code == 0 and "xla engine" in result.out
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        assert run(*arguments, "--out", parts).code == 130
    assert run(*arguments, "--out", parts, "--resume").code == 0
    assert_same_run(whole, parts)


def test_xla_and_eager_agree(run, tiny: list[str], tmp_path: Path) -> None:
    for engine in ("eager", "xla"):
        assert run(*tiny, "--engine", engine, "--steps", 3, "--out", tmp_path / engine).code == 0
    eager, xla = (numbers(tmp_path / engine) for engine in ("eager", "xla"))
    for a, b in zip(eager, xla, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_resume_without_a_run_starts_one(run, tiny: list[str], tmp_path: Path) -> None:
    assert run(*tiny, "--steps", 2, "--out", tmp_path / "run", "--resume").code == 0


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--data", "no/such/file"], ["no/such/file", "no such file"]),
        (["--context", "5000"], ["--context 5000", "longer than the data"]),
        (["--heads", "3"], ["--heads 3"]),
    ],
)
def test_refusals_write_nothing(
    run, tiny: list[str], tmp_path: Path, more: list[str], parts: list[str]
) -> None:
    before = snapshot(tmp_path)
    run(*tiny, "--out", tmp_path / "run", *more).assert_refused(*parts)
    assert snapshot(tmp_path) == before and not (tmp_path / "run").exists()


def test_a_folder_that_is_not_this_run_is_left_alone(run, tiny: list[str], tmp_path: Path) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    run(*tiny, "--steps", 2, "--out", out)
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    before = snapshot(tmp_path)
    run(*tiny, "--out", out, "--resume").assert_refused("another configuration", "steps is 2")
    run(*tiny, "--out", other, "--resume").assert_refused("no run of funcacc train")
    run(*tiny, "--out", other / "thesis.tex").assert_refused("is a file")
    run(*tiny, "--out", other / "thesis.tex" / "run").assert_refused("thesis.tex")
    assert snapshot(tmp_path) == before


def test_xla_without_torch_xla_is_refused(
    run, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(engine: str) -> torch.device:
        raise funcacc.FuncaccError(f"no engine {engine!r};\n  pip install 'funcacc[xla]'")

    monkeypatch.setattr(funcacc, "device", missing)
    result = run(*tiny, "--engine", "xla", "--out", tmp_path / "run")
    result.assert_refused("'xla'", "pip install 'funcacc[xla]'")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(
    run, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = train.Session.advance

    def exploding(session: train.Session) -> Any:
        out, lr = advance(session)
        return (out._replace(loss=out.loss * float("nan")) if session.done == 6 else out), lr

    monkeypatch.setattr(train.Session, "advance", exploding)
    result = run(*tiny, "--out", tmp_path / "run")
    assert result.code == 1 and "step 6" in result.err and "--lr" in result.err
    assert result.err.count("\n") == 1
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 4


def test_the_schedule_warms_up_and_ends_at_a_tenth() -> None:
    factor = train.lr_factor(warmup=4, steps=20)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0 and factor(19) == pytest.approx(0.1)
    assert all(factor(step) > factor(step + 1) for step in range(4, 19))
    assert train.lr_factor(warmup=0, steps=1)(0) == 1.0


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("funcacc")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("funcacc 0.")


def test_options_have_defaults_for_everything() -> None:
    asked = options.parse([])
    assert asked.tokens_per_step == asked.microbatches * asked.microbatch_size * asked.context
    assert os.fspath(asked.out) == "runs/train" and asked.data is None
