"""In-place operations come out pure, also where tensors share memory."""

import pytest
import torch

from funcacc.capture import trace
from funcacc.capture.trace import capture
from funcacc.types import TensorSpec


def accumulates(x, y):
    x.add_(y).mul_(2)
    return [x, y]


def narrows(x, y):
    total = torch.zeros((), dtype=torch.float32)
    total.add_(y.double().sum())
    return [x.eq_(y), total]


def writes_through_a_view(x, y):
    row = x[0]
    row.add_(1)
    return [x * y]


def writes_under_a_view(x, y):
    row = x.view(-1)
    x.copy_(y)
    return [row + 1]


def views_afterwards(x, y):
    x.sub_(y)
    return [x[0], x.t()]


def raises(x, y):
    x.abs_().pow_(2).clamp_(min=0.1)
    return [x.rsqrt_() * y]


def fills(x, y):
    mask = torch.zeros_like(x)
    mask.fill_(3)
    mask[1].zero_()
    return [x * mask, mask.masked_fill_(y > 0, 7)]


@pytest.mark.parametrize(
    "fn",
    [
        accumulates,
        narrows,
        writes_through_a_view,
        writes_under_a_view,
        views_afterwards,
        raises,
        fills,
    ],
)
def test_numbers_are_those_of_the_mutating_code(fn):
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    spec = TensorSpec.of(x)
    graph = capture(lambda _, a, b: fn(a, b), [spec, spec], ["x", "y"])
    before = x.clone(), y.clone()
    got = graph(x, y)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])
    for a, b in zip(got, fn(x.clone(), y.clone()), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    assert not any(trace.mutation.mutates(n) for n in graph.nodes)


def test_plain_accumulation_is_traced_once(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a second trace")

    monkeypatch.setattr(trace, "functionalize", refuse)
    spec = TensorSpec((3, 4), torch.float32)
    capture(lambda _, a, b: accumulates(a, b), [spec, spec], ["x", "y"])
    with pytest.raises(AssertionError, match="a second trace"):
        capture(lambda _, a, b: writes_through_a_view(a, b), [spec, spec], ["x", "y"])
