from __future__ import annotations

from pathlib import Path

import pytest

from funcacc.cli import options
from funcacc.cli.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--nonsense"], ["--nonsense"]),
        (["--steps", "0"], ["--steps", "'0'"]),
        (["--steps", "many"], ["--steps", "'many'"]),
        (["--microbatches", "-1"], ["--microbatches"]),
        (["--microbatch-size", "1.5"], ["--microbatch-size"]),
        (["--context", "0"], ["--context"]),
        (["--layers", "0"], ["--layers"]),
        (["--lr", "0"], ["--lr", "above 0"]),
        (["--lr", "nan"], ["--lr"]),
        (["--lr", "inf"], ["--lr"]),
        (["--clip", "-1"], ["--clip", "from 0"]),
        (["--dropout", "1"], ["--dropout", "below 1"]),
        (["--seed", "-3"], ["--seed"]),
        (["--engine", "abacus"], ["--engine", "abacus"]),
        (["--heads", "3", "--width", "8"], ["--heads 3", "--width 8"]),
        (["--warmup", "11", "--steps", "10"], ["--warmup 11", "--steps 10"]),
        (["--steps"], ["--steps"]),
        (["stray"], ["stray"]),
        (["--resum"], ["--resum"]),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        options.parse(arguments)
    for part in parts:
        assert part in str(error.value)


def test_bad_arguments_exit_with_one_line(run, tmp_path: Path) -> None:
    run("train", "--steps", "0", "--out", tmp_path / "run").assert_refused("funcacc train:")
    run("dance").assert_refused("funcacc:", "dance")
    assert not list(tmp_path.iterdir())


def test_no_command_prints_help(run) -> None:
    result = run()
    assert result.code == 2
    assert "train" in result.err and "doctor" in result.err


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["doctor", "--help"]])
def test_help(run, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 0


def test_warmup_is_a_tenth_of_the_steps_unless_given() -> None:
    assert options.parse(["--steps", "70"]).warmup == 7
    assert options.parse(["--steps", "70", "--warmup", "0"]).warmup == 0


def test_config_holds_what_determines_the_numbers() -> None:
    config = options.parse(["--save-every", "3", "--data", "x"]).config(engine="e", digest="d")
    assert config["engine"] == "e" and config["data_sha256"] == "d"
    assert not {"save_every", "data", "out", "resume"} & set(config)
    assert {"seed", "steps", "lr", "eval_every", "dropout"} <= set(config)
