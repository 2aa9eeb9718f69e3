"""A tiny text, tiny settings, and a way to run a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from funcacc.cli import main

TINY = (
    *("--engine", "eager", "--microbatches", "3", "--microbatch-size", "2", "--context", "16"),
    *("--layers", "1", "--heads", "2", "--width", "8", "--dropout", "0.2"),
    *("--steps", "12", "--eval-every", "6", "--save-every", "4", "--lr", "0.01"),
)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def assert_refused(self, *parts: str) -> None:
        assert self.code == 2
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        for part in parts:
            assert part in self.err


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models this small gain nothing from threads, which wait for each other on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run_command(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Result(code, printed.out, printed.err)

    return run_command


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Arguments of a run that takes well under a second, all but ``--out``."""
    data = tmp_path / "text.txt"
    data.write_text("".join(f"line {i}: the cat sat on mat {i * i}\n" for i in range(200)))
    return ["train", *TINY, "--data", str(data)]
