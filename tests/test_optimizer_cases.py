"""State of optimizers over several steps: dtypes in bf16, and frozen parameters."""

import copy

import pytest
import torch
from torch import nn

import funcacc
from tests.oracle import plain_step
from tests.test_optimizers import CASES, loss_fn


def dtypes(model, opt):
    state = [v for e in opt.state_dict()["state"].values() for v in e.values()]
    values = [*model.state_dict().values(), *state]
    return [v.dtype for v in values if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("name", CASES)
def test_bf16_state_keeps_its_dtypes(name):
    """As PyTorch's own optimizer makes them; the eager engine, for specs are found above it."""
    cls, kwargs = CASES[name]
    ref = nn.Linear(4, 4, bias=False).bfloat16()
    model = copy.deepcopy(ref)
    ref_opt, opt = (cls(m.parameters(), **kwargs) for m in (ref, model))
    for _ in range(3):
        batches = [torch.randn(5, 4, dtype=torch.bfloat16) for _ in range(2)]
        plain_step(ref, ref_opt, loss_fn, batches)
        funcacc.train_step(model, opt, batches, loss_fn)
        assert dtypes(model, opt) == dtypes(ref, ref_opt)


def test_bf16_parameters_on_each_engine(engine):
    model = nn.Linear(4, 4, bias=False).bfloat16().to(funcacc.device(engine))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for _ in range(3):
        funcacc.train_step(
            model, opt, [torch.randn(5, 4, dtype=torch.bfloat16) for _ in range(2)], loss_fn
        )
        seen.append(dtypes(model, opt))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0].count(torch.bfloat16) == 3


def test_a_frozen_parameter_keeps_every_bit_for_ten_steps(engine):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(funcacc.device(engine))
    model[0].weight.requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    step = funcacc.TrainStep(model, opt, loss_fn)
    before = model[0].weight.detach().cpu().clone()
    for _ in range(10):
        step([torch.randn(4, 3) for _ in range(2)])
    assert torch.equal(model[0].weight.cpu(), before)
    assert model[0].weight not in opt.state
    # The twin with a gradient of zeros decays it.
    twin = nn.Parameter(before.clone())
    twin.grad = torch.zeros_like(twin)
    torch.optim.AdamW([twin], lr=0.1, weight_decay=0.1).step()
    assert not torch.equal(twin.detach(), before)
