"""Failures from the field that show over several steps, each beside broken twins.

A twin is a plain PyTorch run with the mistake in question; the comparison that accepts
funcacc must refuse it.
"""

import copy

import pytest
import torch
from torch import nn

import funcacc


def loss_fn(model, b):
    return (model(b["x"]) - b["y"]).square().mean()


def microbatches(k, rows=4):
    return [{"x": torch.randn(rows, 3), "y": torch.randn(rows, 1)} for _ in range(k)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-4)


def everything(model, opt):
    state = [v for entry in opt.state_dict()["state"].values() for v in entry.values()]
    return [v.detach().cpu().clone() for v in [*model.state_dict().values(), *state]]


def identical(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a, b):
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(a, b, strict=True))


# A window that isn't finite -----------------------------------------------------------


def normed():
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))


def optimizer_step_left_out(model, opt, batches):
    for b in batches:
        loss_fn(model, b)


def gradients_set_to_zero(model, opt, batches):
    running = copy.deepcopy(model.state_dict())
    for b in batches:
        loss_fn(model, b).backward()
    model.load_state_dict(running)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()


def step_count_moves(model, opt, batches):
    for entry in opt.state.values():
        entry["step"] += 1


SKIPPING_TWINS = [optimizer_step_left_out, gradients_set_to_zero, step_count_moves]


@pytest.mark.parametrize("spoiled", ["Inf in a microbatch", "overflow in the gradient only"])
def test_the_run_goes_on_as_if_a_bad_window_had_not_been(engine, spoiled):
    bad, *good = [[{**b, "extra": torch.zeros(())} for b in microbatches(3)] for _ in range(4)]

    def loss_fn(model, b):
        out = model(b["x"])
        return (out - b["y"]).square().mean() + b["extra"] * out.mean()

    if spoiled == "Inf in a microbatch":
        bad[1]["x"][0, 0] = float("inf")
    else:
        # The loss is finite, and so is each gradient; the squares in the norm aren't.
        bad[1]["extra"] += 1e25
    start = normed()

    def run(windows):
        model = copy.deepcopy(start).to(funcacc.device(engine))
        opt = adamw(model)
        step = funcacc.TrainStep(model, opt, loss_fn, skip_nonfinite=True, seed=0)
        outs = [step(w) for w in windows]
        return outs, everything(model, opt)

    outs, seen = run([good[0], bad, *good[1:]])
    assert outs[1].loss.isfinite().item() == (spoiled != "Inf in a microbatch")
    skipped = [bool(out.skipped) for out in outs]
    assert skipped == [False, True, False, False]
    assert identical(seen, run(good)[1])


@pytest.mark.parametrize("twin", SKIPPING_TWINS)
def test_a_skip_that_moves_something_would_be_seen(twin):
    model = normed()
    opt = adamw(model)
    (loss_fn(model, microbatches(1)[0])).backward()
    opt.step()
    before = everything(model, opt)
    assert identical(before, everything(model, opt))
    bad = microbatches(3)
    bad[1]["x"][0, 0] = float("inf")
    twin(model, opt, bad)
    assert not identical(before, everything(model, opt))


# Adam over steps ------------------------------------------------------------------------


def plain_adam(model, batches, wrong=None):
    """States after each step of the plain loop; `wrong` is a mistake to make."""
    opt, states = adamw(model), []
    for window in batches:
        opt.zero_grad()
        for b in window:
            (loss_fn(model, b) / len(window)).backward()
            if wrong == "a step for each microbatch":
                opt.step()
        for entry in opt.state.values():
            if wrong == "bias correction frozen at the first step":
                entry["step"].zero_()
        if wrong != "a step for each microbatch":
            opt.step()
        states.append(everything(model, opt))
    return states


def test_adam_equals_the_plain_loop_at_steps_1_2_and_20(engine):
    start, batches = nn.Linear(3, 1), [microbatches(3) for _ in range(20)]
    wanted = plain_adam(copy.deepcopy(start), batches)
    model = copy.deepcopy(start).to(funcacc.device(engine))
    opt, states = adamw(model), []
    step = funcacc.TrainStep(model, opt, loss_fn)
    for window in batches:
        step(window)
        states.append(everything(model, opt))
    assert all(close(states[i - 1], wanted[i - 1]) for i in (1, 2, 20))
    assert step.report().compiles == 1
    for wrong in ("a step for each microbatch", "bias correction frozen at the first step"):
        twin = plain_adam(copy.deepcopy(start), batches, wrong)
        assert not all(close(twin[i - 1], wanted[i - 1]) for i in (1, 2, 20)), wrong


# The curve of a regression ------------------------------------------------------------


def curve(engine, start, batch, k, divide_by=None):
    """Losses of 50 SGD steps on 8 rows in k microbatches."""
    model = copy.deepcopy(start).to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def scaled(model, b):
        loss = loss_fn(model, b)
        return loss if divide_by is None else loss * (k / divide_by)

    step = funcacc.TrainStep(model, opt, scaled)
    window = funcacc.split(batch, k)
    return torch.stack([step(window).loss for _ in range(50)]).cpu()


def test_curves_of_one_and_four_microbatches_are_one(engine):
    start = nn.Linear(3, 1)
    batch = {"x": torch.randn(8, 3), "y": torch.randn(8, 1)}
    whole = curve(engine, start, batch, 1)
    assert whole[-1] < 0.9 * whole[0]
    assert torch.allclose(curve(engine, start, batch, 4), whole, rtol=1e-5, atol=1e-5)
    summed = curve("eager", start, batch, 4, divide_by=1)
    assert not torch.allclose(summed, whole, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(summed / 4, whole, rtol=1e-5, atol=1e-5)
