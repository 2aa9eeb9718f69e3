"""Loops against the Python loop of their docstrings, inside a compiled function."""

import pytest
import torch

import funcacc


def run(engine, fn, *args):
    device = funcacc.device(engine)
    out = funcacc.jit(fn)(*[a.to(device) for a in args])
    return [x.cpu() for x in out]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_carries_come_back_in_their_own_places(engine, n):
    def fn(a, b, flag, stop):
        same = a * 10
        return funcacc.fori_loop(
            0,
            stop,
            lambda i, c: (c[0] + 1, c[1] * 2, torch.zeros_like(c[2]), c[3], c[3] + i, ~c[5]),
            (a, b, a, same, same, flag),
        )

    a, b, flag = torch.tensor([1.0, 2.0]), torch.tensor(3), torch.tensor(True)
    got = run(engine, fn, a, b, flag, torch.tensor(n))
    want = (a, b, a, a * 10, a * 10, flag)
    for i in range(n):
        want = (want[0] + 1, want[1] * 2, want[2] * 0, want[3], want[3] + i, ~want[5])
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


def test_while_with_a_traced_condition_and_in_place_edits(engine):
    def body(c):
        c[0][0] += 1
        return c[0], c[1] + c[0].sum()

    def fn(x, total):
        return *funcacc.while_loop(lambda c: c[1] < 50, body, (x, total)), x

    x, total, kept = run(engine, fn, torch.tensor([1.0, 2.0]), torch.tensor(0.0))
    want, sum_ = torch.tensor([1.0, 2.0]), 0.0
    while sum_ < 50:
        want[0] += 1
        sum_ += float(want.sum())
    assert torch.equal(x, want)
    assert total.item() == sum_
    assert kept.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(engine, reverse):
    def fn(init, xs):
        return funcacc.scan(lambda c, x: (c * 2 + x, c - x), init, xs, reverse=reverse)

    carry, ys = run(engine, fn, torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0]))
    want, rows = 1.0, [0.0] * 3
    for i in reversed(range(3)) if reverse else range(3):
        x = float(i + 1)
        want, rows[i] = want * 2 + x, want - x
    assert carry.item() == want
    assert ys.tolist() == rows


def test_carry_errors_list_every_mismatch(engine):
    def fn(a, b):
        return funcacc.fori_loop(
            0, 2, lambda i, c: {"a": c["a"].double(), "b": c["b"][None]}, {"a": a, "b": b}
        )

    with pytest.raises(funcacc.FuncaccError) as e:
        run(engine, fn, torch.ones(2), torch.ones(3))
    assert "carry['a'] enters as float32[2] and leaves as float64[2]" in str(e.value)
    assert "carry['b'] enters as float32[3] and leaves as float32[1,3]" in str(e.value)
    with pytest.raises(funcacc.FuncaccError, match="must return a boolean scalar"):
        run(
            engine,
            lambda a: (funcacc.while_loop(lambda c: c.sum(), lambda c: c, a),),
            torch.ones(2),
        )


def test_a_gradient_through_a_loop_is_refused(engine):
    model = torch.nn.Linear(2, 2).to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(model, x):
        return funcacc.fori_loop(0, 2, lambda i, c: c * 2, model(x)).sum()

    with pytest.raises(funcacc.FuncaccError, match="loops aren't differentiable"):
        funcacc.train_step(model, opt, [torch.ones(1, 2)], loss)
