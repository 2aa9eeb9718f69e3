"""J and its gradient equal the closed form of the full batch, for any split and weights."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import funcacc

CAPACITY, TERMS = 4, 3
number = st.floats(-4, 4, width=32)
weight = st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 7.0])


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


def loss_of(terms, model, b):
    found = [
        c * funcacc.Loss((model.w * b["x"][t]).sum() + b["y"][t], b["weight"][t])
        for t, c in enumerate((1.0, 0.5, -2.0)[:terms])
    ]
    return sum(found[1:], start=found[0])


# One program a number of terms: what varies are values and the window's count.
LOSSES = {
    1: lambda model, b: loss_of(1, model, b),
    2: lambda model, b: loss_of(2, model, b),
    3: lambda model, b: loss_of(3, model, b),
}
MODELS = {}


def model_on(engine):
    if engine not in MODELS:
        MODELS[engine] = Line().to(funcacc.device(engine))
    return MODELS[engine]


@st.composite
def windows(draw):
    count = draw(st.integers(1, CAPACITY))
    shape = (count, TERMS)

    def table(of):
        size = count * TERMS
        return torch.tensor(draw(st.lists(of, min_size=size, max_size=size))).view(shape)

    weights = table(weight)
    x = torch.stack([table(number), table(number)], -1) * (weights > 0).unsqueeze(-1)
    return {"x": x, "y": table(number) * (weights > 0), "weight": weights}


def closed_form(batch, terms, w):
    w = w.clone().requires_grad_()
    total = torch.zeros(())
    for t, c in enumerate((1.0, 0.5, -2.0)[:terms]):
        norm = batch["weight"][:, t].sum()
        if norm > 0:
            total = total + c * ((batch["x"][:, t] @ w) + batch["y"][:, t]).sum() / norm
    grad = torch.autograd.grad(total, w)[0] if total.requires_grad else torch.zeros(2)
    return total.detach(), grad


def check(engine, batch, terms):
    model = model_on(engine)
    count = len(batch["weight"])
    rows = [{k: v[i] for k, v in batch.items()} for i in range(count)]
    (window,) = funcacc.windows(rows, CAPACITY, prefetch=0)
    out = funcacc.accumulate(model, window, LOSSES[terms])
    loss, grad = closed_form(batch, terms, model.w.detach().cpu())
    torch.testing.assert_close(out.loss.cpu(), loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.grads["w"].cpu(), grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(windows(), st.integers(1, TERMS))
def test_on_the_eager_engine(batch, terms):
    check("eager", batch, terms)


@settings(max_examples=25, deadline=None)
@given(windows(), st.integers(1, TERMS))
@pytest.mark.xla
def test_on_xla(batch, terms):
    check("xla", batch, terms)
