"""What the checks on a mesh of 8 virtual devices share."""

import contextlib
import copy
import re

import torch
from torch import nn

import funcacc

CHECKS = {}


def check(fn):
    CHECKS[fn.__name__] = fn
    return fn


@contextlib.contextmanager
def raises(error, text):
    try:
        yield
    except error as e:
        assert re.search(text, str(e), re.DOTALL), f"{text!r} isn't in: {e}"
    else:
        raise AssertionError(f"no {error.__name__} was raised")


class Block(nn.Module):
    """An MLP block with dropout, whose two matrices tensor parallelism cuts in two ways."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.drop(torch.tanh(self.up(x))))


def mean_loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def microbatches(k, rows=8, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(rows, 16, generator=g, dtype=dtype),
            "y": torch.randn(rows, 8, generator=g, dtype=dtype),
        }
        for _ in range(k)
    ]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def plain(model, opt, loss_fn, data):
    """The plain loop on the CPU."""
    for window in data:
        opt.zero_grad()
        for batch in window:
            (loss_fn(model, batch) / len(window)).backward()
        opt.step()


def values(model, opt):
    state = [v for s in opt.state.values() for v in s.values()]
    tensors = [*model.parameters(), *model.buffers(), *state]
    return [t.detach().cpu() for t in tensors]


def assert_equal(a, b, tolerance=1e-6):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


MESHES = {}
TENSOR_PARALLEL = {
    "up.weight": ("model", None),
    "up.bias": ("model",),
    "down.weight": (None, "model"),
}
FSDP = {"*.weight": ("data", None)}


def mesh(*sizes):
    """One mesh for each shape; making one makes it global."""
    names = ("data", "model")[: len(sizes)]
    if sizes not in MESHES:
        MESHES[sizes] = funcacc.sharding.mesh(**dict(zip(names, sizes, strict=True)))
    return MESHES[sizes]


def sharded(ref, devices, rules):
    model = copy.deepcopy(ref).to(funcacc.device("xla"))
    funcacc.sharding.shard(model, rules, devices)
    return model


def texts(model, opt):
    from funcacc.engines.xla import private

    state = [v for s in opt.state.values() for v in s.values()]
    return private.sharding_texts([*model.parameters(), *model.buffers(), *state])


def communication(step):
    """Kind -> (how often in the loop, how often outside, bytes outside)."""
    found = {}
    for c in step.report(collectives=True).collectives:
        inside, outside, size = found.get(c.kind, (0, 0, 0))
        found[c.kind] = inside + c.in_loop, outside + (not c.in_loop), size + c.nbytes
    return found


def token_loss(model, batch):
    """Three terms in their weights, with every kind of aux value."""
    out = model(batch["x"])
    kept = (batch["y"][:, :1] > 0).float()
    squares = ((out - batch["y"]).square() * kept).sum()
    main = funcacc.Loss(squares, kept.sum() * 8)
    aux = {
        "mean": out.abs().mean(),
        "weighted": funcacc.Mean(out.square().mean(), kept.sum()),
        "count": funcacc.Sum((out > 0).sum()),
        "last": funcacc.Last(out.detach()),
        "stack": funcacc.Stack(out.mean()),
    }
    return main + 0.1 * funcacc.Loss.mean(out.square().mean()) + 0.01 * l2(model), aux


def l2(model):
    return funcacc.Loss.mean(sum(p.square().sum() for p in model.parameters()))


OPTIONS = {"clip_norm": 0.5, "clip_value": 0.05, "skip_nonfinite": True, "seed": 3}


def one_device(ref, make, loss, windows):
    """The same steps by the eager engine, which knows no mesh."""
    model = copy.deepcopy(ref)
    opt = make(model)
    step = funcacc.TrainStep(model, opt, loss, **OPTIONS)
    return model, opt, [step(w) for w in windows]


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
