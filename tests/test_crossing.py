"""A run that goes from one engine to another and back, each in a process of its own."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import funcacc
from tests.engines import ENGINES
from tests.test_resume import Run

pytestmark = [
    pytest.mark.skipif("jax" not in ENGINES, reason="jax is tested in its own process"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch_xla") is None, reason="needs jax beside torch_xla"
    ),
]

ON_XLA = """
import sys, funcacc
from tests.test_resume import Run
before, after, steps = sys.argv[1:]
run = Run("xla", "adamw", seed=7)
if before:
    funcacc.load(before, **run.parts())
run.advance(int(steps))
assert run.step.report().engine == "xla"
funcacc.save(after, **run.parts())
"""


def on_xla(before, after, steps):
    arguments = [str(before), str(after), str(steps)]
    environment = {k: v for k, v in os.environ.items() if k != "FUNCACC_ENGINE"}
    # Weights of before the first file are those that this seed gives in every process.
    script = "import torch; torch.manual_seed(0)" + ON_XLA
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def continued(path, steps, **options):
    """A new run of the jax engine that goes on from a file."""
    run = Run("jax", "adamw", **options)
    funcacc.load(path, **run.parts())
    run.advance(steps)
    return run


def differences(run, other):
    """The largest of each leaf of model and optimizer, and of the key."""
    pairs = list(zip(tensors(run.state()), tensors(other.state()), strict=True))
    return [(a.double() - b.double()).abs().max().item() for a, b in pairs]


def tensors(state):
    return [x for x in funcacc.trees.flatten(state)[0] if isinstance(x, torch.Tensor)]


def test_xla_to_jax_to_xla_is_one_run(tmp_path):
    """The uninterrupted run is eager's; with dropout, equal keys are part of equal numbers."""
    plain = Run("eager", "adamw")
    files = [tmp_path / name for name in ("0.pt", "1.safetensors", "2.pt")]
    on_xla("", files[0], 2)
    run = continued(files[0], 2, seed=8)
    plain.advance(4)
    assert run.step.report().engine == "jax"
    assert max(differences(run, plain)) < 1e-5
    funcacc.save(files[1], **run.parts())
    on_xla(files[1], files[2], 1)
    plain.advance(1)
    assert max(differences(continued(files[2], 0), plain)) < 1e-5
    run.advance(1)
    assert max(differences(run, plain)) < 1e-5


def test_a_lost_moment_would_be_seen(tmp_path):
    plain, run = Run("eager", "adamw"), Run("eager", "adamw")
    for r in (plain, run):
        r.advance()
    path = tmp_path / "run.pt"
    run.opt.state[run.model[0].weight]["exp_avg"].mul_(0.5)
    funcacc.save(path, **run.parts())
    plain.advance()
    assert max(differences(continued(path, 2), plain)) > 1e-3
