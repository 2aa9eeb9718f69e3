"""What the lowered program holds, and where."""

import pytest
import torch
from torch import nn

import funcacc
from tests.hlo import loop_bodies, reachable


def program_text(model, loss_fn, batches, **options):
    model = model.to(funcacc.device("xla"))
    step = funcacc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)
    step(batches)
    (program,) = step.programs
    return program.text()


def two_terms(weight):
    def loss_fn(model, b):
        out = model(b["x"])
        total = (out.square().mean(1) * b["mask"]).sum()
        return funcacc.Loss(total, weight(out, b)) + 0.1 * funcacc.Loss.mean(out.abs().mean())

    return loss_fn


def masked(k=2):
    return [{"x": torch.randn(5, 11), "mask": torch.ones(5)} for _ in range(k)]


@pytest.mark.xla
def test_the_pass_over_the_weights_holds_no_matrix_product():
    loss_fn = two_terms(lambda out, b: b["mask"].sum())
    text = program_text(nn.Linear(11, 13), loss_fn, masked())
    dots = [sum(" dot(" in x for x in reachable(text, body)) for body in loop_bodies(text)]
    assert len(dots) == 2 and sorted(dots)[0] == 0 and sorted(dots)[1] > 0
    # The same look finds the product when the weights do depend on the model.
    loss_fn = two_terms(lambda out, b: (out > 0).sum())
    text = program_text(nn.Linear(11, 13), loss_fn, masked())
    assert all(any(" dot(" in x for x in reachable(text, body)) for body in loop_bodies(text))


@pytest.mark.xla
def test_parameters_are_cast_once_for_a_window():
    text = program_text(
        nn.Linear(11, 13),
        lambda m, b: m(b["x"].to(m.weight.dtype)).float().square().mean(),
        masked(),
        compute_dtype=torch.bfloat16,
    )
    (body,) = loop_bodies(text)
    inside = reachable(text, body)

    def casts(lines):
        return [x for x in lines if "bf16[13,11]" in x.split("convert(")[0] and "convert(" in x]

    assert any("bf16" in x and " dot(" in x for x in inside)
    assert not casts(inside)
    assert len(casts(text.splitlines())) == 1
