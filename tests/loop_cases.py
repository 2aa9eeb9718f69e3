"""What a loop's body may do: one case a row of the conformance table.

Each case is a function of (loops, *tensors), where `loops` has `while_loop`, `fori_loop` and
`scan`; run on `PLAIN`, the Python loops of the documentation, it is its own oracle. The
file knows nothing of funcacc, so benchmarks/loops.py runs the same cases on others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

CASES: dict[str, Case] = {}


class Case(NamedTuple):
    """A function, its inputs, and a check of the results where no oracle can give them."""

    fn: Callable[..., Any]
    inputs: Callable[[], list[Tensor]]
    check: Callable[..., bool] | None = None


def case(name: str, *inputs: Any, check: Callable[..., bool] | None = None) -> Any:
    def register(fn: Callable[..., Any]) -> Any:
        CASES[name] = Case(fn, lambda: [torch.as_tensor(x).clone() for x in inputs], check)
        return fn

    return register


def _stack(rows: list[Any]) -> Any:
    first = rows[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.stack(rows)
    if isinstance(first, dict):
        return {k: _stack([r[k] for r in rows]) for k in first}
    return tuple(_stack(list(column)) for column in zip(*rows, strict=True))


def _row(xs: Any, i: int) -> Any:
    if xs is None or isinstance(xs, Tensor):
        return xs if xs is None else xs[i].clone()
    if isinstance(xs, dict):
        return {k: _row(v, i) for k, v in xs.items()}
    return tuple(_row(x, i) for x in xs)


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {k: _copied(v) for k, v in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(_copied, tree))
    return tuple(map(_copied, tree)) if isinstance(tree, (tuple, list)) else tree


def _plain_while(cond: Any, body: Any, carry: Any) -> Any:
    carry = _copied(carry)
    while cond(carry):
        carry = _copied(body(carry))
    return carry


def _plain_fori(lower: Any, upper: Any, body: Any, carry: Any, **options: Any) -> Any:
    carry = _copied(carry)
    for i in range(int(lower), int(upper)):
        carry = _copied(body(torch.tensor(i), carry))
    return carry


def _plain_scan(
    f: Any, carry: Any, xs: Any, length: Any = None, reverse: bool = False, **options: Any
) -> Any:
    leaf = xs
    while leaf is not None and not isinstance(leaf, Tensor):
        leaf = next(iter(leaf.values() if isinstance(leaf, dict) else leaf))
    n = length if leaf is None else leaf.shape[0]
    carry, ys = _copied(carry), [None] * n
    for i in reversed(range(n)) if reverse else range(n):
        carry, ys[i] = f(carry, _row(xs, i))
        carry = _copied(carry)
    return carry, _stack(ys)


PLAIN = SimpleNamespace(while_loop=_plain_while, fori_loop=_plain_fori, scan=_plain_scan)

A, B = torch.tensor([1.0, 2.0]), torch.tensor([[0.5, -1.0], [0.25, 2.0], [1.5, 0.75]])
W = torch.tensor([[0.5, -0.25], [0.75, 0.5]])


@case("five carries in their own places", 1.0, 2.0, 3.0, 4.0, 5.0)
def _five(loops, *xs):
    return loops.fori_loop(0, 5, lambda i, c: tuple(x * 2 + k for k, x in enumerate(c)), xs)


@case("a captured tensor, used twice", A, W)
def _captured(loops, a, w):
    return [loops.fori_loop(0, 3, lambda i, c: c @ w + w[0], a)]


@case("a captured tensor in the condition too", A, 30.0)
def _captured_condition(loops, a, limit):
    out = loops.while_loop(lambda c: c[0].sum() < limit, lambda c: (c[0] + limit / 9,), (a,))
    return [*out, limit + 0]


@case("an ignored carry", A, B)
def _ignored(loops, a, b):
    return loops.fori_loop(0, 3, lambda i, c: (c[0] + 1, torch.ones_like(c[1])), (a, b))


@case("a carry passed through", A, B)
def _through(loops, a, b):
    return loops.fori_loop(0, 3, lambda i, c: (c[0] + 1, c[1]), (a, b))


@case("a carry overwritten by a captured tensor", A, B, A * 3)
def _overwritten(loops, a, b, w):
    return loops.fori_loop(0, 3, lambda i, c: (w, c[1] + c[0]), (a, b))


@case("one tensor in two slots", A)
def _two_slots(loops, a):
    return loops.fori_loop(0, 3, lambda i, c: (c[0] + 1, c[1] * 2), (a, a))


@case("two slots that become one tensor", A, A * 2)
def _become_one(loops, a, b):
    def body(i, c):
        both = c[0] + c[1]
        return both, both

    return loops.fori_loop(0, 3, body, (a, b))


@case("carries that change places", A, A * 5)
def _swapped(loops, a, b):
    return loops.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (a, b))


@case("integers", 3, torch.tensor([1, 2], dtype=torch.int32))
def _integers(loops, a, b):
    return loops.fori_loop(0, 3, lambda i, c: (c[0] * 2 + i, 7 - c[1]), (a, b))


@case("booleans", torch.tensor([True, False]), True)
def _booleans(loops, a, b):
    return loops.fori_loop(0, 3, lambda i, c: (~c[0], c[1] & c[0].any()), (a, b))


@case("bfloat16", A.to(torch.bfloat16))
def _bfloat16(loops, a):
    return [loops.fori_loop(0, 3, lambda i, c: c * 1.5 + 1, a)]


@case("0-d and empty tensors", 2.0, torch.zeros(0, 3))
def _empty(loops, a, b):
    return loops.fori_loop(0, 3, lambda i, c: (c[0] * 2 + c[1].sum(), c[1] * 2), (a, b))


@case("edits in place, the caller's tensors untouched", A, B)
def _in_place(loops, a, b):
    def body(i, c):
        c[0].mul_(2)
        c[1][0] += c[0]
        return c[0], c[1]

    return [*loops.fori_loop(0, 3, body, (a, b)), a, b]


@case("edits in place on slices of xs", A, B)
def _in_place_slices(loops, a, b):
    def f(c, x):
        x.add_(1)
        x[0] = 5
        return c + x, x

    return [*loops.scan(f, a, b), b]


@case("the index, and bounds on the device", A, 2, 5)
def _bounds(loops, a, lower, upper):
    return [loops.fori_loop(lower, upper, lambda i, c: c * 2 + i, a)]


@case("a traced condition", A)
def _condition(loops, a):
    return loops.while_loop(lambda c: c[0].sum() < 50, lambda c: (c[0] * 2, c[1] + 1), (a, a))


@case("zero trips", A, 0)
def _zero(loops, a, n):
    first = loops.fori_loop(n, n, lambda i, c: c + 1, a)
    return [first, loops.fori_loop(3, 3, lambda i, c: c + 1, a)]


@case("scan: several xs, several ys", A, B, B * 2)
def _scan(loops, a, b, d):
    def f(c, x):
        return c * 0.5 + x["b"], (c.sum(), x["b"] * x["d"], None)

    carry, (y, z, _) = loops.scan(f, a, {"b": b, "d": d})
    return [carry, y, z]


@case("scan in reverse", A, B)
def _reverse(loops, a, b):
    return loops.scan(lambda c, x: (c * 0.5 + x, c), a, b, reverse=True)


@case("scan by length, without xs", A)
def _length(loops, a):
    return loops.scan(lambda c, x: (c * 2, c[0]), a, None, length=4)


class Pair(NamedTuple):
    first: Any
    second: Any


@case("named tuples, dicts and None", A, B)
def _trees(loops, a, b):
    def body(i, c):
        return Pair({"b": c.first["b"] + 1, "a": c.first["a"] * 2, "none": None}, c.second)

    out = loops.fori_loop(0, 3, body, Pair({"b": b, "a": a, "none": None}, None))
    assert out.second is None
    assert out.first["none"] is None
    return [out.first["a"], out.first["b"]]


@case("loops in loops in loops", A, W)
def _nested(loops, a, w):
    def inner(i, c):
        return loops.fori_loop(0, 2, lambda j, d: d + w[0] * i + j, c)

    return [loops.fori_loop(0, 2, lambda k, c: loops.fori_loop(0, 3, inner, c) + k, a)]


@case("torch.func transforms in the body", A, W)
def _transforms(loops, a, w):
    def body(i, c):
        g = torch.func.grad(lambda v: ((v @ w) ** 2).sum())(c)
        return c - 0.1 * g + torch.func.vmap(lambda r: (r * c).sum())(w)

    return [loops.fori_loop(0, 3, body, a)]


@case("autograd.grad in the body", A, W)
def _autograd(loops, a, w):
    def body(i, c):
        v = c.detach().requires_grad_()
        (g,) = torch.autograd.grad(((v @ w) ** 2).sum(), v)
        return c - 0.1 * g

    with torch.enable_grad():
        return [loops.fori_loop(0, 3, body, a)]


def _gradients(fn: Callable[..., Tensor], *values: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [v.detach().clone().requires_grad_() for v in values]
        return list(torch.autograd.grad(fn(*leaves), leaves))


def _recurrence(loops: Any, a: Tensor, b: Tensor, w: Tensor, **options: Any) -> Tensor:
    def f(c, x):
        h = torch.tanh(c[0] @ w + x)
        return (h * c[1], c[1] + h.mean()), (h.sum(), h * x)

    one = torch.ones_like(a[0])
    (c, d), (y, z) = loops.scan(f, (a, one), b, **options)
    return c.sum() + d + (y * y).sum() + z[0].sum()


@case("gradient through scan: carry, xs, captured", A, B, W)
def _gradient_scan(loops, *values):
    return _gradients(lambda *v: _recurrence(loops, *v), *values)


@case("gradient through scan, carries kept only", A, B, W)
def _gradient_checkpoint(loops, *values):
    return _gradients(lambda *v: _recurrence(loops, *v, checkpoint=True), *values)


@case("gradient through scan in reverse", A, B, W)
def _gradient_reverse(loops, *values):
    return _gradients(lambda *v: _recurrence(loops, *v, reverse=True), *values)


@case("gradient through fori_loop", A, W)
def _gradient_fori(loops, a, w):
    def fn(a, w):
        return loops.fori_loop(1, 4, lambda i, c: torch.sin(c @ w) * i, a).sum()

    return _gradients(fn, a, w)


@case("gradient where only a captured tensor needs one", A, W)
def _gradient_captured(loops, a, w):
    return _gradients(
        lambda w: (loops.fori_loop(0, 3, lambda i, c: torch.sin(c @ w + a), a) ** 2).sum(), w
    )


@case("gradient beside integers, booleans and in-place edits", A, B, 2)
def _gradient_mixed(loops, a, b, n):
    def f(c, x):
        value, count, flag = c
        scaled = value * x
        scaled[0] *= count
        scaled[1] = torch.where(flag, scaled[0], scaled[1])
        return (scaled + x, count + 1, ~flag), count * 2

    def fn(a, b):
        (value, count, _), ys = loops.scan(f, (a, n, n > 1), b)
        return (value * count).sum() + ys.sum()

    return _gradients(fn, a, b)


@case("gradient through loops in loops in loops", A, B, W)
def _gradient_nested(loops, a, b, w):
    def fn(a, b, w):
        def inner(c, x):
            return loops.fori_loop(0, 2, lambda i, d: torch.sin(d @ w) + x, c), c.sum()

        def outer(c, x):
            c, ys = loops.scan(inner, c, b * x.sum())
            return c, ys.sum()

        c, ys = loops.scan(outer, a, b)
        return c.sum() + (ys * ys).sum()

    return _gradients(fn, a, b, w)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case("gradient of autograd.Function and detach in the body", A, B)
def _gradient_custom(loops, a, b):
    def f(c, x):
        q = _Straight.apply(c * x)
        return c + q + (q - c).detach() * x, q.detach()

    return _gradients(lambda a, b: (loops.scan(f, a, b)[0] ** 2).sum(), a, b)


@case("torch.func.grad around a loop", A, B, W)
def _around(loops, a, b, w):
    return torch.func.grad(lambda v: _recurrence(loops, *v))((a, b, w))


@case(
    "random numbers, fresh on each trip",
    torch.zeros(64),
    check=lambda a, b: len({tuple(r.tolist()) for r in [*a, *b]}) == 6 and 0.3 < a.mean() < 0.7,
)
def _random(loops, a):
    def f(c, x):
        return c, torch.rand_like(c)

    # Two loops: neither repeats the other's numbers.
    return [loops.scan(f, a, None, length=3)[1], loops.scan(f, a, None, length=3)[1]]


@case(
    "random numbers in while_loop",
    torch.zeros(4, 64),
    torch.tensor(0),
    check=lambda a, n: len({tuple(r.tolist()) for r in a}) == 4 and n.item() == 4,
)
def _random_while(loops, a, n):
    def body(c):
        rows, n = c
        here = (torch.arange(4, device=rows.device) == n)[:, None]
        return torch.where(here, torch.rand_like(rows[0]), rows), n + 1

    return loops.while_loop(lambda c: c[1] < 4, body, (a, n))


def _dropout_gradient(loops: Any, a: Tensor, b: Tensor, **options: Any) -> list[Tensor]:
    """The product of all masks, by the forward pass and, the loop being linear, its gradient."""

    def f(c, x):
        return torch.nn.functional.dropout(c, 0.2) + 0 * x.sum(), None

    with torch.enable_grad():
        v = a.detach().clone().requires_grad_()
        out = loops.scan(f, v, b, **options)[0]
        (g,) = torch.autograd.grad(out.sum(), v)
    return [out.detach(), g * a]


def _masks_agree(out: Tensor, back: Tensor) -> bool:
    return torch.allclose(out, back) and 0.3 < (out == 0).float().mean() < 0.7


@case("dropout: one mask forward and back", torch.ones(256) * 1.5, B, check=_masks_agree)
def _dropout(loops, a, b):
    return _dropout_gradient(loops, a, b)


@case("dropout, carries kept only", torch.ones(256) * 1.5, B, check=_masks_agree)
def _dropout_checkpoint(loops, a, b):
    return _dropout_gradient(loops, a, b, checkpoint=True)
