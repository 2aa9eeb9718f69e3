from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import funcacc
from funcacc.cli import doctor


class Engine(NamedTuple):
    installed: bool
    install: str = ""
    reason: str = ""


def test_every_installed_engine_passes(run) -> None:
    result = run("doctor")
    assert result.code == 0, result.out
    lines = result.out.splitlines()
    for word in ("python", "funcacc", "torch", "torch_xla", "cpu"):
        assert any(line.startswith(word) for line in lines)
    for name, engine in funcacc.engines().items():
        (line,) = (line for line in lines if line.startswith(f"{name:8} "))
        assert ("ok" in line) if engine.installed else ("missing" in line)


def test_one_step_is_that_of_plain_pytorch(engine: str) -> None:
    device, difference = doctor.self_check(engine)
    assert difference <= doctor.TOLERANCE
    assert device.type == ("xla" if engine == "xla" else device.type)


def test_a_missing_engine_comes_with_its_command(run, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Engine(False, "pip install nonesuch", "no module nonesuch")
    monkeypatch.setattr(funcacc, "engines", lambda: {"nonesuch": absent})
    result = run("doctor")
    assert result.code == 0
    assert "missing: no module nonesuch" in result.out and "pip install nonesuch" in result.out


def test_an_engine_that_dies_is_reported(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(funcacc, "engines", lambda: {"broken": Engine(True)})
    result = run("doctor")
    assert result.code == 1
    assert "broken   FAILED: exit code 2" in result.out and "failed: broken" in result.out


def test_wrong_numbers_are_a_failure(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "self_check", lambda name: (torch.device("cpu"), 1e-3))
    result = run("doctor", "--engine", "eager")
    assert result.code == 1 and "FAILED" in result.out and "1.0e-03" in result.out


def test_an_exception_is_a_failure(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(name: str) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "self_check", raising)
    result = run("doctor", "--engine", "eager")
    assert result.code == 1 and "FAILED: RuntimeError: two lines" in result.out


def test_an_unknown_engine_is_refused(run) -> None:
    run("doctor", "--engine", "abacus").assert_refused("abacus")
