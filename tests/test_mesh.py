"""Training on a mesh of 8 virtual devices.

The number of devices and SPMD are properties of a process, so the checks run in one of their own;
here each has a test that reports it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("mesh_marks.py", "mesh_saving.py", "mesh_checks.py")
SOURCES = [(ROOT / "tests" / name).read_text() for name in FILES]
NAMES = re.findall(r"^@check\ndef (\w+)", "\n".join(SOURCES), re.MULTILINE)


def child(*args):
    env = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Programs run once or twice: they needn't be fast.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
    return subprocess.run(
        [sys.executable, "-W", "error", *args], env=env, cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def results():
    """What each check said, by name."""
    done = child("-m", "tests.mesh_checks")
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith('{"name"')]
    assert lines, done.stderr
    # A process that crashes takes the checks after it along.
    crash = f"the process ended with {done.returncode}:\n{done.stderr[-3000:]}"
    return {name: crash for name in NAMES} | {x["name"]: x["failure"] for x in lines}


@pytest.mark.parametrize("name", NAMES)
def test_on_8_devices(results, name):
    assert not results[name], results[name]


def test_the_example_trains_with_parameters_in_shards():
    done = child("examples/data_parallel.py", "--fsdp", "--steps", "21")
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and losses[-1] < 0.9 * losses[0], done.stderr
    assert "in the loop, each trip: 2 all-gather (40.0 KiB)" in done.stdout


def test_a_mesh_comes_first():
    code = "import funcacc; funcacc.device('xla'); funcacc.sharding.mesh(data=8)"
    assert "SPMD can't be switched on any more" in child("-c", code).stderr


def test_a_step_made_before_spmd_is_refused():
    code = """
import warnings, torch, funcacc, torch_xla.runtime as xr
model = torch.nn.Linear(2, 2).to(funcacc.device("xla"))
step = funcacc.TrainStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
step([torch.ones(8, 2)])
warnings.simplefilter("ignore")
xr.use_spmd()
step([torch.ones(8, 2)])
"""
    assert (
        "SPMD was switched on after this program was made for one device"
        in child("-c", code).stderr
    )
