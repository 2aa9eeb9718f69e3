"""What all tests share."""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import pytest
import torch

import funcacc

ENGINES = os.environ.get("FUNCACC_TEST_ENGINES", "eager,xla").split(",")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """An engine under test; one that is named but missing fails the run."""
    assert funcacc.engines()[request.param].installed, f"engine {request.param} is missing"
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
