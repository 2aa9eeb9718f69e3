"""What all tests share."""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import pytest
import torch

import funcacc
from tests.engines import ENGINES

if "jax" in ENGINES:
    # Where nobody says engine=, and models are on the CPU as for eager.
    assert ENGINES == ["jax"], "jax is tested in a process of its own"
    os.environ["FUNCACC_ENGINE"] = "jax"
if "xla" in ENGINES:
    # Autograd counts the devices when it is first used, and later ones have no gradients.
    import torch_xla

    torch_xla.device()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """An engine under test; one that is named but missing fails the run."""
    assert funcacc.engines()[request.param].installed, f"engine {request.param} is missing"
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is about XLA alone where that isn't under test."""
    for item in items:
        if item.get_closest_marker("xla") and "xla" not in ENGINES:
            item.add_marker(pytest.mark.skip(reason="the xla engine is not under test"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
