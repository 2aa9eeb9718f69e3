"""Optimizer, schedule, dtypes: long runs of the field's cases, each with its broken twin."""

import copy
import math

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


def regression():
    x = torch.randn(12, 3)
    return {"x": x, "y": x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(12, 1)}


def curve(engine, start, batch, k, loss):
    model = copy.deepcopy(start).to(funcacc.device(engine))
    opt = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4)
    window = funcacc.split(batch, k)
    return [funcacc.train_step(model, opt, window, loss).loss.item() for _ in range(50)]


def mse(model, b):
    return funcacc.losses.mse(model(b["x"]), b["y"])


def summed(model, b):
    """Broken: the sum over microbatches, for a bare sum is averaged over them only."""
    return (model(b["x"]) - b["y"]).square().sum()


def test_fifty_steps_of_a_regression_do_not_depend_on_k(engine):
    start, batch = nn.Linear(3, 1), regression()
    one, four = (curve(engine, start, batch, k, mse) for k in (1, 4))
    assert max(abs(a - b) for a, b in zip(one, four, strict=True)) < 1e-5
    assert one[-1] < 0.5 * one[0]
    if engine == "eager":
        wrong = curve(engine, start, batch, 4, summed)
        assert max(abs(a - b) for a, b in zip(one, wrong, strict=True)) > 1e-5


def adam(gradients, lr, frozen_count=False):
    """Adam's formula in plain numbers; the twin's bias correction stays at the first step."""
    w, m, v, path = 0.0, 0.0, 0.0, []
    for t, g in enumerate(gradients, 1):
        n = 1 if frozen_count else t
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= lr * (m / (1 - 0.9**n)) / (math.sqrt(v / (1 - 0.999**n)) + 1e-8)
        path.append(w)
    return path


def test_bias_correction_goes_on_for_twenty_steps(engine):
    model = nn.Linear(1, 1, bias=False).to(funcacc.device(engine))
    with torch.no_grad():
        model.weight.fill_(0.0)
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    step = funcacc.TrainStep(model, opt, lambda m, b: m(b).mean())
    gradients, path = [1.0 + 0.3 * (i % 4) for i in range(20)], []
    for g in gradients:
        # Two microbatches whose mean is g.
        step([torch.tensor([[0.5 * g]]), torch.tensor([[1.5 * g]])])
        path.append(model.weight.item())
    right, twin = adam(gradients, 0.1), adam(gradients, 0.1, frozen_count=True)
    for t in (0, 1, 19):
        assert path[t] == pytest.approx(right[t], rel=1e-4)
    assert twin[19] != pytest.approx(right[19], rel=1e-4)
    assert step.report().compiles == 1


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
