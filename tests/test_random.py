"""Random operations inside a step: distributions, freshness, reproducibility."""

import math
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcacc
from tests.engines import ENGINES

N = 4096


def dropped_attention(x):
    """Attention weights after dropout, read off by values that are the identity."""
    q = torch.zeros(1, 64, 4, device=x.device)
    eye = torch.eye(64, device=x.device).unsqueeze(0)
    weights = F.scaled_dot_product_attention(q, q, eye, dropout_p=0.25)
    return (weights * 64).reshape(-1)


def draws(x):
    """All the functions that a user draws by, and for each what a numbers of it look like."""
    p = torch.linspace(0.1, 0.4, 4, device=x.device)
    fresh = torch.empty(N, device=x.device)
    return {
        "rand": torch.rand(N),
        "rand_like": torch.rand_like(x.expand(N)),
        "randn": torch.randn(N),
        "randn_like": torch.randn_like(x.expand(N)),
        "normal": torch.normal(1.0, 2.0, (N,)),
        "normal_": fresh.clone().normal_(1.0, 2.0),
        "uniform_": fresh.clone().uniform_(-1.0, 1.0),
        "randint": torch.randint(2, 7, (N,)).float(),
        "random_": torch.empty(N, dtype=torch.int64).random_(2, 7).float(),
        "bernoulli": torch.bernoulli(torch.full((N,), 0.3)),
        "bernoulli_": fresh.clone().bernoulli_(0.3),
        "exponential_": fresh.clone().exponential_(2.0),
        "log_normal_": fresh.clone().log_normal_(0.0, 0.25),
        "geometric_": fresh.clone().geometric_(0.5),
        "multinomial": torch.multinomial(p, N, replacement=True).float(),
        "dropout": F.dropout(torch.ones(N), 0.25),
        "alpha_dropout": F.alpha_dropout(torch.ones(N), 0.25, training=True),
        "feature_dropout": F.dropout2d(torch.ones(N // 4, 4, 1, 1), 0.25).reshape(-1),
        "attention": dropped_attention(x),
        "gumbel": F.gumbel_softmax(torch.zeros(N, 2), hard=True)[:, 0],
        "module": nn.Dropout(0.25)(torch.ones(N)),
    }


_B = 1.7580993408473766  # -selu's scale * alpha
_A = 1 / math.sqrt(0.75 * (1 + 0.25 * _B**2))
MOMENTS = {
    "rand": (0.5, 1 / 12),
    "rand_like": (0.5, 1 / 12),
    "randn": (0, 1),
    "randn_like": (0, 1),
    "normal": (1, 4),
    "normal_": (1, 4),
    "uniform_": (0, 1 / 3),
    "randint": (4, 2),
    "random_": (4, 2),
    "bernoulli": (0.3, 0.21),
    "bernoulli_": (0.3, 0.21),
    "exponential_": (0.5, 0.25),
    "log_normal_": (
        math.exp(0.5 / 16),
        (math.exp(1 / 16) - 1) * math.exp(1 / 16),
    ),
    "geometric_": (2, 2),
    "multinomial": (2, 1),
    "dropout": (1, 1 / 3),
    # Kept: A + B', dropped: A * -scale * alpha + B', both affine so that (0, 1) stays (0, 1).
    "alpha_dropout": (0.75 * _A - 0.25 * _A * _B + _A * 0.25 * _B, _A**2 * (1 + _B) ** 2 * 3 / 16),
    "feature_dropout": (1, 1 / 3),
    "attention": (1, 1 / 3),
    "gumbel": (0.5, 0.25),
    "module": (1, 1 / 3),
}


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))


def drawing(model, x):
    drawn = draws(x)
    drawn = {**drawn, "randperm": torch.randperm(N).float()}
    drawn["without_replacement"] = torch.multinomial(torch.rand(9), 9).float()
    return model.w * x.sum(), {k: funcacc.Stack(v) for k, v in drawn.items()}


def run(engine, seed, steps=2, microbatches=3):
    """Per name, what was drawn: [step, microbatch, number]."""
    model = Weight().to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    step = funcacc.TrainStep(model, opt, drawing, seed=seed, engine=engine)
    outs = [step([torch.ones(1)] * microbatches).aux for _ in range(steps)]
    return {k: torch.stack([o[k].cpu() for o in outs]) for k in outs[0]}


@pytest.fixture(scope="module", params=["eager", *{*ENGINES} - {"eager"}])
def drawn(request):
    """What two steps of three microbatches draw, and again with other surroundings."""
    torch.manual_seed(0)
    first = run(request.param, seed=7)
    torch.manual_seed(123)
    torch.rand(5)
    return first, run(request.param, seed=7, steps=1), request.param


@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_variance(drawn, name):
    values = drawn[0][name].double()
    mean, variance = MOMENTS[name]
    # Five standard errors; those of the variance for the heaviest of these tails.
    close = 5 * math.sqrt(variance / values.numel())
    assert abs(values.mean() - mean) < close
    assert abs(values.var() - variance) < 0.1 * variance


@pytest.mark.parametrize("name", MOMENTS)
def test_fresh_for_each_microbatch_and_step_without_correlation(drawn, name):
    rows = drawn[0][name].double().flatten(0, 1)
    rows = rows - rows.mean(1, keepdim=True)
    correlation = torch.corrcoef(rows)
    others = correlation[~torch.eye(len(rows), dtype=torch.bool)]
    assert others.abs().max() < 5.5 / math.sqrt(rows.shape[1])


def test_functions_that_draw_alike_draw_differently(drawn):
    first = {k: v[0, 0] for k, v in drawn[0].items()}
    for a, b in (("rand", "rand_like"), ("normal", "normal_"), ("dropout", "module")):
        assert not torch.equal(first[a], first[b])


def test_permutations(drawn):
    for name, size in (("randperm", N), ("without_replacement", 9)):
        rows = drawn[0][name].flatten(0, 1)
        assert torch.equal(rows.sort(1).values, torch.arange(size).expand_as(rows).float())
        assert len({tuple(r.tolist()) for r in rows}) == len(rows)


def test_the_same_seed_draws_the_same_whatever_else_drew(drawn):
    first, again, _ = drawn
    for name, values in first.items():
        assert torch.equal(values[:1], again[name]), name


def test_engines_draw_the_same_numbers(drawn):
    first, _, engine = drawn
    if engine != "eager":
        eager = run("eager", seed=7, steps=1)
        for name, values in eager.items():
            torch.testing.assert_close(first[name][:1], values, rtol=1e-5, atol=1e-6, msg=name)


def test_a_step_leaves_the_generators_of_the_host_alone(engine):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = Weight().to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    step = funcacc.TrainStep(model, opt, lambda m, x: m.w * torch.rand_like(x).sum(), seed=1)
    step([torch.ones(2)])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_a_generator_of_the_user_is_refused(engine):
    generator = torch.Generator()
    model = Weight().to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(model, x):
        return model.w * torch.randn(2, generator=generator).sum()

    with pytest.raises(funcacc.FuncaccError, match=r"a torch\.Generator.*leave generator out"):
        funcacc.train_step(model, opt, [torch.ones(2)], loss)


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_numbers_drawn_on_the_host_are_noticed(engine, draw):
    model = Weight().to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.warns(UserWarning, match=r"drew random numbers on the host.*torch\.rand"):
        funcacc.train_step(model, opt, [torch.ones(2)], lambda m, x: m.w * float(draw()))


def test_an_import_that_draws_on_the_host_is_no_draw_of_the_loss(engine, tmp_path, monkeypatch):
    (tmp_path / "draws_at_import.py").write_text("import numpy\nnumpy.random.rand()\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = Weight().to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(model, x):
        import draws_at_import  # noqa: F401

        return model.w * x.sum()

    try:
        funcacc.train_step(model, opt, [torch.ones(2)], loss)
    finally:
        assert sys.modules.pop("draws_at_import")
