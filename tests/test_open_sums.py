"""`open_sums`: parts of a sum over rows, against the sum itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcacc
from funcacc.capture import open_sums as module
from funcacc.capture.early import split_early
from funcacc.capture.open_loops import open_loops
from funcacc.capture.open_sums import open_sums
from funcacc.capture.rows import Rows
from funcacc.cli.gpt import GPT, GPTConfig

GROUPS = 4


class Attention(nn.Module):
    """Looks up, attends, normalises, counts: the operations of a small transformer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)))


class Convolutions(nn.Module):
    def __init__(self, groups=2):
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, stride=2, groups=groups)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(self.b(F.gelu(self.a(x))))
        return self.head(x.mean((2, 3)))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Stack(nn.Module):
    """Layers in one loop, and a loop in each of them that shares a weight."""

    def __init__(self, checkpoint=False):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )
        self.again = nn.Linear(3, 3)
        self.checkpoint = checkpoint

    def forward(self, x):
        x = funcacc.scan_layers(self.layers, x)
        return funcacc.fori_loop(
            0, 2, lambda i, c: torch.sin(self.again(c)), x, checkpoint=self.checkpoint
        )


def tokens(model, x):
    return funcacc.losses.cross_entropy(model(x).flatten(0, 1), x.flatten())


def squares(model, x):
    out = model(x)
    penalty = sum(p.square().sum() for p in model.parameters())
    return out.square().mean() + 0.1 * penalty, {
        "positive": funcacc.Sum((out > 0).sum()),
        "mean": out.mean().detach(),
        "each": funcacc.Stack(out.detach().sum()),
    }


CASES = {
    "attention": (Attention, lambda: torch.randint(0, 20, (8, 5)), tokens),
    "gpt": (lambda: GPT(GPTConfig(5, 1, 2, 8, 0.1)), lambda: torch.randint(0, 99, (8, 5)), tokens),
    "convolutions": (Convolutions, lambda: torch.randn(8, 2, 6, 6), squares),
    "sequence": (Sequence, lambda: torch.randn(8, 5, 3), squares),
    "stack": (Stack, lambda: torch.randn(8, 3), squares),
    "stack, carries kept only": (lambda: Stack(True), lambda: torch.randn(8, 3), squares),
}


def traced(name):
    make, batch, loss = CASES[name]
    model, x = make(), batch()
    step = funcacc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    step.compile([x])
    (m,) = step._programs._microbatches.values()
    values = [torch.randn(s.shape) if s.dtype.is_floating_point else None for s in m.graph.inputs]
    first = len(m.trainable) + len(m.frozen) + len(m.buffers)
    values[first] = torch.tensor([1, 2], dtype=torch.int32)
    values[first + 2] = x
    return m, first + 2, values


def compare(m, at, values):
    wanted = range(m.slices()["aux"].stop)
    loops = open_loops(m.graph, {at: Rows(0, 1)}, GROUPS)
    graph, opened = open_sums(loops, {at}, GROUPS, wanted)
    old, new = m.graph(*values), graph(*values)
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        if i in opened:
            assert b.shape == (GROUPS, *a.shape)
            b = b.sum(0)
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    names = [*m.reached, *["total"] * len(m.coefficients), *["weight"] * len(m.coefficients)]
    return [n for i, n in enumerate(names) if i not in opened]


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_all_gradients_add_up_to_them(name):
    closed = compare(*traced(name))
    # The weight of a plain loss is the constant 1.
    assert closed == ([] if CASES[name][2] is tokens else ["weight"])


def test_a_part_comes_from_its_own_rows():
    m, at, values = traced("attention")
    graph, opened = open_sums(m.graph, {at}, GROUPS, [0])
    assert opened == {0}
    before = graph(*values)[0]
    values[at] = values[at].clone()
    values[at][2] = 0
    changed = (graph(*values)[0] != before).flatten(1).any(1)
    assert changed.tolist() == [False, True, False, False]


def test_the_comparison_fails_where_groups_are_mixed_up(monkeypatch):
    def first_rows(self, x, at):
        part = module.Opening._right_groups(self, x, at)
        return part[:1].expand(part.shape)

    monkeypatch.setattr(module.Opening, "_right_groups", module.Opening._groups, raising=False)
    monkeypatch.setattr(module.Opening, "_groups", first_rows)
    with pytest.raises(AssertionError):
        compare(*traced("convolutions"))


def test_what_is_no_sum_over_rows_stays_closed():
    model = nn.Linear(3, 2)
    step = funcacc.TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda m, x: (m(x).sum().square(), {"max": funcacc.Last(m(x).max())}),
    )
    step.compile([torch.ones(8, 3)])
    (m,) = step._programs._microbatches.values()
    graph, opened = open_sums(m.graph, {4}, GROUPS, range(5))
    # The bias (every row has the same gradient), the square of a sum, its weight, a maximum.
    assert [i for i in range(5) if i not in opened] == [1, 2, 3, 4]
    assert [s.shape for s in graph.outputs][:2] == [(GROUPS, 2, 3), (2,)]


def test_what_is_not_linear_in_sums_stays_closed():
    def loss(m, x):
        s = m(x).sum()
        cases = {
            "number": s + 1,
            "quotient": s / s,
            "square": s * s,
            "whole": s.to(torch.int64),
            "truth": (x > 0).sum().to(torch.bool),
            "other way": 1 - s,
            "linear": -(s / 3 + m.weight.sum()) * m.bias[0],
        }
        return s, {k: funcacc.Last(v) for k, v in cases.items()}

    model = nn.Linear(3, 2)
    step = funcacc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    step.compile([torch.ones(8, 3)])
    (m,) = step._programs._microbatches.values()
    values = [torch.randn(s.shape) for s in m.graph.inputs]
    values[2] = torch.tensor([1, 2], dtype=torch.int32)
    at = m.slices()["aux"]
    graph, opened = open_sums(m.graph, {4}, GROUPS, range(at.start, at.stop))
    # Keys of a dict are sorted: "linear" is the first.
    assert opened == {at.start}
    old, new = m.graph(*values), graph(*values)
    torch.testing.assert_close(new[at.start].sum(0), old[at.start])


def test_what_the_batch_alone_determines_is_taken_out():
    def loss(m, x):
        labels = torch.where(x[:, 0] > 0.5, -100, 1)
        scaled = m(x) / (1 + x.square().sum())
        return F.cross_entropy(scaled, labels)

    model = nn.Linear(3, 2)
    step = funcacc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    step.compile([torch.ones(8, 3)])
    (m,) = step._programs._microbatches.values()
    values = [torch.randn(s.shape) for s in m.graph.inputs]
    values[2] = torch.tensor([1, 2], dtype=torch.int32)
    early, late = split_early(m.graph, {4}, {4}, GROUPS)
    # The number of labels, and the sum of squares.
    assert [s.shape for s in early.outputs] == [(GROUPS,), (GROUPS,)]
    given = [part.sum(0) for part in early(*values)]
    for a, b in zip(m.graph(*values), late(*values, *given), strict=True):
        torch.testing.assert_close(a, b)
    assert split_early(late, {4}, {4}, GROUPS) is None
