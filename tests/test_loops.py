"""Errors of loops, their gradients' memory and activity, nodes of trees; the cases stand apart."""

from typing import NamedTuple

import optree
import pytest
import torch
from torch import nn

import funcacc
from funcacc import trees
from funcacc.capture import ops
from funcacc.capture.trace import capture
from funcacc.types import TensorSpec

F32 = torch.float32


@pytest.fixture
def device(engine):
    return funcacc.device(engine)


def fails(fn, *args):
    """The text of the error, the same when compiled and as it stands."""
    texts = []
    for run in (funcacc.jit(fn), fn):
        with pytest.raises(funcacc.FuncaccError) as e:
            run(*args)
        texts.append(str(e.value))
    assert texts[0] == texts[1]
    return texts[0]


def test_carry_errors_list_every_mismatch(device):
    a, b = torch.ones(2).to(device), torch.ones(3).to(device)

    def fori(a, b):
        return funcacc.fori_loop(
            0, 2, lambda i, c: {"a": c["a"].double(), "b": c["b"][None]}, {"a": a, "b": b}
        )

    text = fails(fori, a, b)
    assert "carry['a'] enters as float32[2] and leaves as float64[2]" in text
    assert "carry['b'] enters as float32[3] and leaves as float32[1,3]" in text
    assert "cast or reshape inside it" in text

    def scan(a, b):
        return funcacc.scan(lambda c, x: (c[:1], x), a, b)

    assert "carry enters as float32[2] and leaves as float32[1]" in fails(scan, a, b)


def test_another_structure_names_what_is_missing_and_new(device):
    def fn(a):
        return funcacc.while_loop(lambda c: c["a"].sum() < 5, lambda c: {"b": c["a"]}, {"a": a})

    text = fails(fn, torch.ones(2).to(device))
    assert "the body returns another structure than the carry had" in text
    assert "carry['a'] is missing" in text
    assert "carry['b'] is new" in text


def test_conditions_bounds_and_outputs_are_checked(device):
    a = torch.ones(2).to(device)
    text = fails(lambda a: funcacc.while_loop(lambda c: c.sum(), lambda c: c, a), a)
    assert text == "cond_fn returned float32[]; it must return a boolean scalar tensor"
    text = fails(lambda a: funcacc.while_loop(lambda c: c > 0, lambda c: c, a), a)
    assert text == "cond_fn returned bool[2]; it must return a boolean scalar tensor"
    text = fails(lambda a: funcacc.fori_loop(0, -1, lambda i, c: c, a), a)
    assert text == "upper is -1; bounds are 0 or more, shift the index in the body"
    text = fails(lambda a: funcacc.fori_loop(0, a, lambda i, c: c, a), a)
    assert text == "upper is float32[2]; it must be an integer scalar"
    text = fails(lambda a: funcacc.fori_loop(0.5, 2, lambda i, c: c, a), a)
    assert text == "lower is a float; it must be an integer scalar"
    text = fails(lambda a: funcacc.scan(lambda c, x: (c, c), a, None, length=-2), a)
    assert text == "scan's length is -2; give 0 or more"
    text = fails(lambda a: funcacc.scan(lambda c, x: (c, c), a, {"x": a, "y": a[:1]}), a)
    assert "the leading axes of xs are [[2], [1]], length is None" in text
    text = fails(lambda a: funcacc.scan(lambda c, x: c, a, a), a)
    assert "the body of a scan returned a" in text
    assert "it must return (carry, y)" in text
    text = fails(lambda a: funcacc.fori_loop(0, 2, lambda i, c: (c[0], "text"), (a, a)), a)
    assert "carry[1] is a str" in text
    assert "must be tensors, numbers or None" in text
    text = fails(lambda a: funcacc.scan(lambda c, x: (c, {"y": object()}), a, a), a)
    assert "y['y'] is a object" in text


def test_writing_into_a_captured_tensor_is_refused_in_a_trace(device):
    w = torch.ones(2).to(device)

    def fn(a):
        def body(i, c):
            w.add_(1)
            return c + w

        return funcacc.fori_loop(0, 2, body, a)

    with pytest.raises(funcacc.FuncaccError, match=r"writes in place into a float32\[2\] tensor"):
        funcacc.jit(fn)(torch.ones(2).to(device))
    assert w.cpu().tolist() == [1, 1]


def test_a_gradient_through_an_unknown_number_of_trips_is_refused(device):
    reason = "whose number of trips is known only on the device"
    w = torch.ones(2).to(device).requires_grad_()

    def through_while(a):
        return funcacc.while_loop(lambda c: c.sum() < 9, lambda c: c * w, a)

    def through_bounds(n):
        return funcacc.fori_loop(0, n, lambda i, c: c * 2, w)

    with pytest.raises(funcacc.FuncaccError, match=reason):
        through_while(torch.full((2,), 2.0).to(device))
    with pytest.raises(funcacc.FuncaccError, match=reason):
        through_bounds(torch.tensor(2).to(device))
    with torch.no_grad():
        assert through_bounds(torch.tensor(2).to(device)).cpu().tolist() == [4, 4]

    model = nn.Linear(2, 2).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(model, x):
        return funcacc.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, model(x)).sum()

    with pytest.raises(funcacc.FuncaccError, match=reason):
        funcacc.train_step(model, opt, [torch.ones(1, 2)], loss)


def test_a_second_derivative_says_that_there_is_none(device):
    if device.type == "xla":
        x = torch.ones(2).to(device).requires_grad_()
        y = funcacc.fori_loop(0, 2, lambda i, c: c * c, x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(funcacc.FuncaccError, match="a second derivative through a loop"):
            torch.autograd.grad(g.sum(), x)

    def fn(x):
        x = x.detach().requires_grad_()
        y = funcacc.fori_loop(0, 2, lambda i, c: c * c, x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)

    with pytest.raises(funcacc.FuncaccError, match="a second derivative through a loop"):
        funcacc.jit(fn)(torch.ones(2).to(device))


class Node:
    """A container of the user's own."""

    def __init__(self, left, right):
        self.left, self.right = left, right


optree.register_pytree_node(
    Node,
    lambda n: ((n.left, n.right), None, None),
    lambda _, c: Node(*c),
    namespace=trees.NAMESPACE,
)


class Pair(NamedTuple):
    a: object
    b: object


def test_registered_nodes_named_tuples_and_none_leaves_come_back(device):
    def fn(x):
        init = Node(Pair(x, None), {"k": x * 2, "none": None})

        def f(c, row):
            after = Node(Pair(c.left.a + row, None), {"k": c.right["k"] * 2, "none": None})
            return after, Pair(row, None)

        return funcacc.scan(f, init, torch.ones_like(x))

    for run in (fn, funcacc.jit(fn)):
        carry, ys = run(torch.ones(3).to(device))
        assert isinstance(carry, Node)
        assert carry.left.b is None
        assert carry.right["none"] is None
        assert carry.left.a.cpu().tolist() == [4, 4, 4]
        assert carry.right["k"].cpu().tolist() == [16, 16, 16]
        assert isinstance(ys, Pair)
        assert ys.a.cpu().tolist() == [1, 1, 1]
        assert ys.b is None


def test_numbers_in_the_carry_become_tensors(device):
    def fn(x):
        return funcacc.fori_loop(0, 3, lambda i, c: (c[0] + 1, c[1] * 0.5, c[2]), (2, 1.0, x))

    count, half, _ = funcacc.jit(fn)(torch.ones(2).to(device))
    assert (count.item(), half.item()) == (5, 0.125)


def test_zero_trips_give_empty_ys_and_an_identity_gradient(device):
    def fn(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        carry, ys = funcacc.scan(lambda c, _: (c * w, (c, c.sum() > 0)), x, None, length=0)
        return (carry, *ys, *torch.autograd.grad(carry.sum(), x))

    x = torch.ones(3).to(device)
    carry, y, z, g = funcacc.jit(fn)(x, x)
    assert torch.equal(carry.cpu(), torch.ones(3))
    assert (y.shape, y.dtype, z.shape, z.dtype) == ((0, 3), F32, (0,), torch.bool)
    assert g.cpu().tolist() == [1, 1, 1]


def loops_of(graph):
    return [n for n in graph.nodes if n.target is ops.loop]


def traced(fn, *shapes):
    specs = [TensorSpec(s, F32) for s in shapes]
    return capture(lambda tracing, *v: list(fn(*v)), specs, [f"x[{i}]" for i in range(len(specs))])


def gradients(x, w, **options):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out, _ = funcacc.scan(
        lambda c, _: (torch.tanh(torch.sin(c @ w) * c), None), x, None, length=7, **options
    )
    return torch.autograd.grad(out.sum(), [x, w])


def stacks(graph):
    """Shapes of what the forward loop stacks."""
    forward = loops_of(graph)[0].args[2]
    return [tuple(n.meta["val"].shape) for n in forward if n.meta["val"].shape[:1] == (7,)]


def test_one_loop_forward_and_one_back_and_checkpoint_keeps_carries_only():
    graph = traced(gradients, (3, 3), (3, 3))
    assert len(loops_of(graph)) == 2
    kept = traced(lambda x, w: gradients(x, w, checkpoint=True), (3, 3), (3, 3))
    assert stacks(kept) == [(7, 3, 3)]
    assert len(stacks(graph)) > 1
    # The captured matrix is an input of the loop, once, beside the key.
    consts = [tuple(n.meta["val"].shape) for n in loops_of(graph)[0].args[3]]
    assert sorted(consts) == [(2,), (3, 3)]


def test_a_loop_whose_gradient_nobody_asks_for_keeps_nothing():
    graph = traced(
        lambda x, w: [funcacc.scan(lambda c, _: (torch.sin(c @ w), None), x, None, length=7)[0]],
        (3, 3),
        (3, 3),
    )
    assert len(loops_of(graph)) == 1
    assert stacks(graph) == []


def test_what_the_result_does_not_depend_on_has_no_gradient():
    def fn(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()

        def body(i, c):
            return c[0] * 2, c[1] @ w

        kept, _ = funcacc.fori_loop(0, 3, body, (x, x))
        grads = torch.autograd.grad(kept.sum(), [x, w], allow_unused=True)
        assert grads[1] is None
        return [grads[0]]

    traced(fn, (3, 3), (3, 3))


class Recurrent(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.cell, self.out, self.how = nn.Linear(4, 4), nn.Linear(4, 1), how
        self.unused = nn.Linear(2, 2)

    def forward(self, xs):
        start = torch.zeros_like(xs[0])

        def f(c, x):
            return torch.tanh(self.cell(c) + x), c.mean()

        if self.how == "plain":
            c, ys = start, []
            for x in xs:
                c, y = f(c, x)
                ys.append(y)
            return self.out(c).sum() + torch.stack(ys).sum()
        c, ys = funcacc.scan(f, start, xs, checkpoint=self.how == "checkpoint")
        return self.out(c).sum() + ys.sum()


@pytest.mark.parametrize("how", ["scan", "checkpoint"])
def test_a_recurrent_model_trains_like_the_plain_loop(device, how):
    from tests.oracle import assert_same, plain_step

    torch.manual_seed(3)
    model, plain = Recurrent(how), Recurrent("plain")
    plain.load_state_dict(model.state_dict())
    model = model.to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-4)
    for seed in range(2):
        torch.manual_seed(seed)
        batches = [torch.randn(5, 2, 4) for _ in range(3)]
        funcacc.train_step(model, opt, batches, _call)
        plain_step(plain, plain_opt, _call, batches)
    assert_same(model, opt, plain, plain_opt, 1e-5)


def _call(model, batch):
    return model(batch)


def quartic_by_fori(w, x):
    return funcacc.fori_loop(
        0, 2, lambda i, c: funcacc.fori_loop(0, 2, lambda j, e: e * w, c), x
    ).sum()


def quartic_by_scan(w, x):
    def inner(c):
        return funcacc.scan(lambda e, t: (e * w, None), c, x.expand(2, 3))[0]

    return funcacc.scan(lambda c, s: (inner(c), None), x, None, length=2)[0].sum()


@pytest.mark.parametrize("fn", [quartic_by_fori, quartic_by_scan])
def test_transforms_reach_what_loops_in_loops_close_over(device, fn):
    w, x = torch.tensor([0.5, 2.0, 3.0]).to(device), torch.ones(3).to(device)
    want = [0.5, 32.0, 108.0]  # 4 w**3
    grad = torch.func.grad(fn)
    for run in (grad, funcacc.jit(grad)):
        assert run(w, x).cpu().tolist() == want

    def pulled(w, x):
        out, pull = torch.func.vjp(lambda q: fn(q, x), w)
        return pull(torch.ones_like(out))[0]

    assert funcacc.jit(pulled)(w, x).cpu().tolist() == want


def test_an_index_is_wide_enough_for_both_bounds(device):
    def trips(lower, upper):
        count = funcacc.fori_loop(lower, upper, lambda i, c: c + 1, torch.zeros(()).to(device))
        return int(count)

    small = torch.tensor(100, dtype=torch.int8).to(device)
    assert trips(small, 200) == 100
    assert trips(small, torch.tensor(130, dtype=torch.int32).to(device)) == 30
    assert trips(0, torch.tensor(200, dtype=torch.uint8).to(device)) == 200
    seen = funcacc.fori_loop(0, small, lambda i, c: i, torch.zeros((), dtype=torch.int8))
    assert (seen.dtype, int(seen)) == (torch.int8, 99)
