"""``funcacc train --mesh``: in a process of its own, since SPMD can't be switched off again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from funcacc.cli import meshes


def losses(run_dir: Path) -> list[float]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [r[key] for r in records for key in ("loss", "heldout_loss", "grad_norm") if key in r]


def test_a_run_on_a_mesh_has_the_numbers_of_one_device(
    run, tiny: list[str], tmp_path: Path
) -> None:
    arguments = [*tiny, "--microbatch-size", "4"]
    assert run(*arguments, "--out", tmp_path / "one").code == 0
    arguments[arguments.index("eager")] = "xla"
    arguments += ["--mesh", "data=2,fsdp=2,model=2", "--out", str(tmp_path / "mesh")]
    env = {k: v for k, v in os.environ.items() if k != "CPU_NUM_DEVICES"}
    command = [sys.executable, "-m", "funcacc.cli", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "mesh") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    report = (tmp_path / "mesh" / "report.txt").read_text()
    assert "mesh data=2, fsdp=2, model=2" in report and "in the loop, each trip: " in report
    (row,) = (x for x in report.splitlines() if x.startswith("  params['blocks.0.mlp.0.weight']"))
    assert "model,fsdp" in row and "donated to output" in row


def test_the_axes_of_a_mesh() -> None:
    assert meshes.parse("data=4,model=2") == {"data": 4, "model": 2}
    assert meshes.rows({"data": 4, "fsdp": 2, "model": 3}) == 8


@pytest.mark.parametrize("text", ["data", "data=0", "rows=2", "data=2,data=2", "data=x", ""])
def test_what_is_no_mesh(run, tiny: list[str], tmp_path: Path, text: str) -> None:
    result = run(*tiny, "--out", tmp_path / "run", "--mesh", text)
    result.assert_refused("--mesh", f"{text!r} is not a mesh like data=4,model=2")


def test_what_a_mesh_cannot_have(run, tiny: list[str], tmp_path: Path) -> None:
    for name in ("eager", "jax"):
        rest = [a if a != "eager" else name for a in tiny]
        result = run(*rest, "--out", tmp_path / "run", "--mesh", "data=4")
        result.assert_refused(f"--mesh needs --engine xla: the {name} engine runs on one device")
    rest = [a if a != "eager" else "xla" for a in tiny]
    result = run(*rest, "--out", tmp_path / "run", "--mesh", "data=4")
    result.assert_refused("--microbatch-size 2 can't be cut into 4 equal parts")
    assert not (tmp_path / "run").exists()
