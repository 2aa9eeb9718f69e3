"""transformers' own Trainer against the one that runs its windows through funcacc."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engines import ENGINES

pytest.importorskip("accelerate", reason="accelerate isn't installed: pip install '.[trainer]'")
pytest.importorskip("transformers", minversion="5")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each run logged: the plain trainer's and those of each engine, by two processes."""
    out = tmp_path_factory.mktemp("trainers")

    def child(folder, on_xla, *names):
        (out / folder).mkdir()
        command = [sys.executable, "-m", "tests.trainer_runs", str(out / folder), *names]
        env = {**os.environ, "USE_TORCH_XLA": str(int(on_xla))}
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[1]
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return {name: torch.load(out / folder / f"{name}.pt") for name in names}

    smooth = ("smooth-plain", "smooth-window")
    found = {"eager": child("eager", False, "plain", "window", *smooth, "ragged", "bf16")}
    if "xla" in ENGINES:
        found["xla"] = child("xla", True, "window", "whole", "resumed")
    return found


def test_losses_norms_rates_and_weights_are_the_plain_trainers(runs, engine):
    expected, own = runs["eager"]["plain"], runs[engine]["window"]
    assert own["device"] == ("xla" if engine == "xla" else "cpu")
    assert expected["logs"].shape == own["logs"].shape == (20, 3)
    torch.testing.assert_close(own["logs"][:, :2], expected["logs"][:, :2], rtol=1e-4, atol=1e-4)
    assert torch.equal(own["logs"][:, 2], expected["logs"][:, 2])
    assert own["logs"][:, 1].max() > 0.5, "nothing was clipped"
    for name, value in expected["weights"].items():
        torch.testing.assert_close(own["weights"][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_one_program_for_full_and_short_windows(runs, engine):
    assert runs[engine]["window"]["compiles"] == 1


@pytest.mark.xla
def test_resumes_bit_for_bit_with_dropout(runs):
    whole, resumed = runs["xla"]["whole"], runs["xla"]["resumed"]
    assert not torch.equal(whole["logs"], runs["xla"]["window"]["logs"])
    assert torch.equal(resumed["logs"], whole["logs"][10:])
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name


def test_the_trainers_own_loss_is_used_and_no_clipping_means_none(runs):
    expected, own = runs["eager"]["smooth-plain"], runs["eager"]["smooth-window"]
    torch.testing.assert_close(own["logs"], expected["logs"], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(own["logs"], runs["eager"]["window"]["logs"][:3], rtol=1e-2)


def test_what_cannot_be_one_window_is_refused(runs):
    ragged, bf16 = runs["eager"]["ragged"], runs["eager"]["bf16"]
    assert ragged.startswith("BatchError: ")
    assert "dataloader_drop_last=True" in ragged
    assert bf16.startswith("OptionError: mixed_precision='bf16'")
    assert "compute_dtype" in bf16
