"""Failures that users met elsewhere, with their right values, and the wrong ways to get there.

Each case is an outcome of funcacc and of broken twins: small functions that make the mistake
in question from the same inputs. One comparison must accept the first and refuse the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import funcacc


class Scalar(nn.Module):
    def __init__(self, *values, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))


def sgd(model, lr=1.0):
    return torch.optim.SGD(model.parameters(), lr=lr)


def outcome(engine, loss_fn, batches, start=(1.0,), **options):
    """Loss, movement of the parameters under SGD with lr 1, and gradient norm."""
    model = Scalar(*start).to(funcacc.device(engine))
    before = model.w.detach().cpu().clone()
    out = funcacc.train_step(model, sgd(model), batches, loss_fn, **options)
    moved = before - model.w.detach().cpu()
    return [out.loss.item(), *moved.tolist(), out.grad_norm.item()]


def agree(a, b):
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-5) for x, y in zip(a, b, strict=True)
    )


@dataclass
class Case:
    """`right` is worked out by hand; `twins` are outcomes of broken implementations."""

    run: Callable[[str], list[float]]
    right: list[float]
    twins: dict[str, Callable[[], list[float]]] = field(default_factory=dict)


# Totals and weights of microbatches: 5, 2 and 9 tokens with mean losses 2, 5 and 1.
TOKENS = [(10.0, 5.0), (10.0, 2.0), (9.0, 9.0)]


def rows(pairs):
    return [{"total": torch.tensor(t), "weight": torch.tensor(w)} for t, w in pairs]


def by_tokens(model, b):
    return funcacc.Loss((model.w * b["total"]).sum(), b["weight"])


def linear(model, b):
    return (model.w * b).sum()


def with_auxiliary(model, b):
    return by_tokens(model, b) + 0.5 * funcacc.Loss.mean((model.w * 0.3).sum())


def short_window(values, capacity):
    (window,) = funcacc.windows([torch.tensor(v) for v in values], capacity)
    return window


def three(x):
    """Of a loss that is linear in w = 1: loss, movement and norm are one number."""
    return [x, x, x]


def norm(*xs):
    return math.hypot(*xs)


CASES = {
    "tokens": Case(
        lambda e: outcome(e, by_tokens, rows(TOKENS)),
        three(29 / 16),
        {
            "mean of means": lambda: three(sum(t / w for t, w in TOKENS) / 3),
            "sum over K": lambda: three(sum(t for t, _ in TOKENS) / 3),
        },
    ),
    "replicas": Case(
        lambda e: outcome(e, by_tokens, rows([(6.0, 3.0), (9.0, 9.0)])),
        three(1.25),
        {"mean of means": lambda: three((6 / 3 + 9 / 9) / 2)},
    ),
    "a microbatch without weight": Case(
        lambda e: outcome(e, by_tokens, rows([(10.0, 5.0), (0.0, 0.0), (6.0, 3.0)])),
        three(2.0),
        {
            "K instead of the weights that are there": lambda: three((10 / 5 + 0 + 6 / 3) / 3),
            "0 / 0": lambda: three(float("nan")),
        },
    ),
    "no weight at all": Case(
        lambda e: outcome(e, by_tokens, rows([(0.0, 0.0), (0.0, 0.0)])),
        three(0.0),
        {"0 / 0": lambda: three(float("nan"))},
    ),
    "two terms": Case(
        lambda e: outcome(e, with_auxiliary, rows(TOKENS)),
        three(29 / 16 + 0.15),
        {
            "one normaliser for both": lambda: three((29 + 0.5 * 0.3 * 3) / 16),
            "auxiliary times K": lambda: three(29 / 16 + 0.5 * 0.3 * 3),
        },
    ),
    "identical microbatches": Case(
        lambda e: outcome(e, linear, [torch.tensor([3.0])] * 4),
        three(3.0),
        {"sum instead of mean": lambda: three(3.0 * 4)},
    ),
    "a short window": Case(
        lambda e: outcome(e, linear, short_window([[1.0], [3.0]], 4)),
        three(2.0),
        {"K instead of count": lambda: three((1 + 3) / 4)},
    ),
    "clipping": Case(
        lambda e: outcome(
            e, linear, [torch.tensor([10.0, 0.0]), torch.zeros(2)], (1.0, 1.0), clip_norm=1.0
        ),
        [5.0, 1.0, 0.0, 5.0],
        {
            "each microbatch clipped": lambda: [5.0, (10 / 10 + 0) / 2, 0.0, 5.0],
            "the sum's norm reported": lambda: [5.0, 1.0, 0.0, norm(10, 0)],
            "the norm after clipping": lambda: [5.0, 1.0, 0.0, 1.0],
        },
    ),
    "clipping elements after the norm": Case(
        lambda e: outcome(
            e, linear, [torch.tensor([3.0, 4.0])], (1.0, 1.0), clip_norm=1.0, clip_value=0.7
        ),
        [7.0, 0.6, 0.7, 5.0],
        {"before the norm": lambda: [7.0, *(x / norm(0.7, 0.7) for x in (0.7, 0.7)), 5.0]},
    ),
    "aux": Case(lambda e: aux_values(e), [2.0, 6.0, 3.0], {
        "the last microbatch's": lambda: [3.0, 6.0, 3.0],
        "the sum": lambda: [6.0, 6.0, 3.0],
    }),
    "512 gradients of 1 for a bf16 model": Case(
        lambda e: bf16_sum(e),
        [512.0],
        {"a bf16 accumulator": lambda: [bf16_accumulator(512)]},
    ),
}  # fmt: skip


def aux_values(engine):
    def loss_fn(model, b):
        aux = {"mean": b.sum(), "sum": funcacc.Sum(b.sum()), "last": funcacc.Last(b.sum())}
        return linear(model, b), aux

    model = Scalar(1.0).to(funcacc.device(engine))
    batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0)]
    aux = funcacc.train_step(model, sgd(model), batches, loss_fn).aux
    assert list(aux) == ["mean", "sum", "last"]
    return [x.item() for x in aux.values()]


def bf16_sum(engine):
    model = Scalar(0.0, dtype=torch.bfloat16).to(funcacc.device(engine))

    def loss_fn(m, b):
        return funcacc.Loss((m.w * b).sum(), 1 / 512)

    window = funcacc.Window(torch.ones(512, 1, dtype=torch.bfloat16))
    out = funcacc.accumulate(model, window, loss_fn)
    return [out.grads["w"].item()]


def bf16_accumulator(n):
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(n):
        total += 1
    return float(total)


@pytest.mark.parametrize("name", CASES)
def test_the_right_value_and_no_wrong_one(engine, name):
    case = CASES[name]
    assert agree(case.run(engine), case.right), case.run(engine)
    for twin, wrong in case.twins.items():
        assert not agree(wrong(), case.right), f"the twin {twin!r} isn't caught"


@pytest.mark.parametrize("make", ["AdamW", "SGD"])
def test_six_rows_cut_in_any_way_are_the_same_update(engine, make):
    """With weight decay: decay, moments and step counts move once for a window."""
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    start = torch.randn(1, 3)
    results = []
    for k in (1, 2, 3, 6):
        model = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(start)
        model = model.to(funcacc.device(engine))
        more = {"eps": 1e-4} if make == "AdamW" else {"momentum": 0.9}
        opt = getattr(torch.optim, make)(model.parameters(), lr=0.1, weight_decay=0.1, **more)

        def loss_fn(m, b):
            return funcacc.losses.mse(m(b["x"]), b["y"])

        for _ in range(5):
            out = funcacc.train_step(model, opt, funcacc.split({"x": x, "y": y}, k), loss_fn)
        results.append([out.loss.cpu(), out.grad_norm.cpu(), model.weight.detach().cpu()])
        if make == "AdamW":
            assert opt.state[model.weight]["step"].item() == 5
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_ten_microbatches_are_three_updates_and_three_scheduler_steps(engine):
    model = Scalar(1.0).to(funcacc.device(engine))
    opt = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    updates = 0
    for window in funcacc.windows([torch.tensor([1.0])] * 10, 4):
        funcacc.train_step(model, opt, window, linear)
        schedule.step()
        updates += 1
    assert updates == schedule.last_epoch == 3
    assert model.w.item() == pytest.approx(scheduled(lambda done: done // 4))
    for wrong in SCHEDULE_TWINS.values():
        assert model.w.item() != pytest.approx(scheduled(wrong))


def scheduled(halvings):
    """A plain run of ten gradients of 1; `halvings` of the rate after so many microbatches."""
    return 1.0 - sum(0.5 ** halvings(done) for done in (0, 4, 8))


SCHEDULE_TWINS = {
    "a step of the schedule for each microbatch": lambda done: done,
    "the rate of the first step, for ever": lambda done: 0,
    "the rate of the step after": lambda done: done // 4 + 1,
    "the rate of the step before": lambda done: max(0, done // 4 - 1),
}


class Norms(nn.Module):
    """Two buffers that move, and a square root, whose gradient at 0 isn't finite."""

    def __init__(self):
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, b):
        y = self.b(self.bn(self.a(b["x"])))
        return y.square().mean() + (self.b.bias * b["zero"]).sqrt().sum() + b["more"]


def norm_batches(**last):
    plain = {"zero": torch.ones(1), "more": torch.tensor(0.0)}
    made = [{"x": torch.randn(4, 3), **plain} for _ in range(2)]
    made[1].update(last)
    return made


BAD = {
    "an input": {"x": torch.full((4, 3), math.inf)},
    "the loss alone": {"more": torch.tensor(math.nan)},
    "the gradient alone": {"zero": torch.zeros(1)},
}


class NormRun:
    """Steps over windows, with all that they change."""

    def __init__(self, engine):
        torch.manual_seed(3)
        model = Norms()
        with torch.no_grad():
            model.b.bias.fill_(2.0)
        self.model = model.to(funcacc.device(engine))
        self.opt = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-4, weight_decay=0.1)
        self.step = funcacc.TrainStep(self.model, self.opt, forward, skip_nonfinite=True, seed=1)

    def everything(self):
        state = self.opt.state_dict()["state"]
        moments = [v for entry in state.values() for v in entry.values()]
        values = [*self.model.state_dict().values(), *moments, self.step.state.step]
        return [v.detach().cpu().clone() for v in values]

    def key(self):
        return self.step.state.rng.cpu().clone()


def forward(model, b):
    return model(b)


def same_bits(a, b):
    return all(
        x.numpy().tobytes() == y.numpy().tobytes() and x.dtype == y.dtype
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("kind", BAD)
def test_a_window_that_is_not_finite_changes_no_bit(engine, kind):
    run, spared = NormRun(engine), NormRun(engine)
    first, bad, last = norm_batches(), norm_batches(**BAD[kind]), norm_batches()
    for r in (run, spared):
        assert not bool(r.step(first).skipped)
    before, key = run.everything(), run.key()
    out = run.step(bad)
    assert bool(out.skipped)
    assert bool(out.loss.isfinite()) == (kind == "the gradient alone")
    assert bool(out.grad_norm.isfinite()) == (kind == "the loss alone")
    assert same_bits(before, run.everything())
    assert not torch.equal(key, run.key())
    # The next window is as if nothing had been.
    for r in (run, spared):
        assert not bool(r.step(last).skipped)
    assert same_bits(run.everything(), spared.everything())
    assert not same_bits(run.everything(), before)
