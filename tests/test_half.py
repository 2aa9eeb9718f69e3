"""Half precision: what is cast, what may not be mixed, and sums that don't stop short."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcacc

BF16 = torch.bfloat16


def square(model, batch):
    return (model(batch["x"]).float() - batch["y"]).square().mean()


def make():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_compute_dtype_casts_what_the_model_is_called_with(engine, dtype):
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    model = model.to(funcacc.device(engine))
    batches = [{"x": torch.randn(5, 3, dtype=dtype), "y": torch.randn(5, 2)} for _ in range(2)]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    out = funcacc.train_step(model, opt, batches, square, compute_dtype=BF16)

    half = make()
    half.load_state_dict(plain.state_dict())
    half = half.to(BF16)
    losses = [square(half, {"x": b["x"].to(BF16), "y": b["y"]}) for b in batches]
    (sum(losses) / 2).backward()
    assert out.loss.item() == pytest.approx(sum(losses).item() / 2, rel=0.02)
    for p, q, g in zip(model.parameters(), plain.parameters(), half.parameters(), strict=True):
        assert p.dtype == torch.float32
        torch.testing.assert_close(
            p.detach().cpu(), q.detach() - 0.1 * g.grad.float(), rtol=0.05, atol=5e-3
        )
    for b, c in zip(model.buffers(), half.buffers(), strict=True):
        assert b.dtype == (torch.float32 if c.is_floating_point() else c.dtype)
        torch.testing.assert_close(b.cpu(), c.to(b.dtype), rtol=0.02, atol=5e-3)


def test_products_of_different_dtypes_are_refused_with_the_line(engine):
    model = nn.Linear(3, 1).to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, x):
        return F.linear(x, model.weight).mean()  # not through the model, so nothing casts x

    match = r"operands of different dtypes \(float32, bfloat16\).*cast one of them"
    with pytest.raises(funcacc.FuncaccError, match=match) as e:
        funcacc.train_step(model, opt, [torch.ones(2, 3)], loss, compute_dtype=BF16)
    assert "test_half.py" in str(e.value) and "F.linear(x, model.weight)" in str(e.value)
    with pytest.raises(funcacc.FuncaccError, match=r"aten.convolution.default at .*float64"):
        funcacc.jit(F.conv1d)(torch.ones(1, 1, 4).double(), torch.ones(1, 1, 2))


SUMS = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "cumsum": lambda x: x.cumsum(0)[-1],
    "softmax": lambda x: x.softmax(0)[0],
    "log_softmax": lambda x: x.log_softmax(0)[0],
    "norm": lambda x: x.norm(dim=0),
    "avg_pool": lambda x: F.avg_pool2d(x.reshape(1, 4, 64, 64), 64),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x.reshape(1, 4, 64, 64), 1),
    "index_add": lambda x: x.new_zeros(2, 4).index_add(0, x.new_zeros(4096).long(), x),
    "bias": lambda x: torch.func.grad(lambda b: (x.sin() * 0 + b).sum())(x.new_zeros(4)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_half_precision_numbers_go_on_past_256(engine, name):
    x = torch.rand(4096, 4) + 0.5
    want = SUMS[name](x.to(BF16).double())
    got = funcacc.jit(SUMS[name])(x.to(BF16).to(funcacc.device(engine))).cpu().double()
    torch.testing.assert_close(got, want, rtol=0.02, atol=1e-3)


def test_rows_of_an_embedding_collect_many_half_precision_gradients():
    # On the CPU PyTorch's own kernel adds them in bfloat16.
    if not funcacc.engines()["xla"].installed:
        pytest.skip("needs the xla engine")
    table = torch.zeros(3, 2, dtype=BF16).to(funcacc.device("xla"))
    rows = torch.zeros(4096, dtype=torch.long).to(table.device)
    grad = funcacc.jit(torch.func.grad(lambda t: F.embedding(rows, t).sum()))(table)
    assert grad.cpu()[:2].tolist() == [[4096, 4096], [0, 0]]
