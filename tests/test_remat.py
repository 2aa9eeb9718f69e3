"""Checkpoints of every kind: the same numbers, the same masks, less memory on XLA."""

import copy
import functools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import funcacc
from tests.oracle import assert_same, plain_step


def torch_xla_checkpoint(fn, *args):
    from torch_xla.utils.checkpoint import checkpoint

    return checkpoint(fn, *args)


def selective(fn, *args):
    def policy(ctx, op, *args, **kwargs):
        saved = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)


KINDS = {
    "plain": lambda fn, *args: fn(*args),
    "torch": lambda fn, *args: checkpoint(fn, *args, use_reentrant=False),
    "reentrant": lambda fn, *args: checkpoint(fn, *args, use_reentrant=True),
    "torch_xla": torch_xla_checkpoint,
    "selective": selective,
    "sequential": lambda fn, x, *args: checkpoint_sequential(
        [lambda x: fn(x, *args), nn.Identity()], 2, x, use_reentrant=False
    ),
    "closure": lambda fn, *args: checkpoint(lambda: fn(*args), use_reentrant=False),
    "nested": lambda fn, *args: checkpoint(
        lambda *a: checkpoint(fn, *a, use_reentrant=False), *args, use_reentrant=False
    ),
    "funcacc": funcacc.checkpoint,
}


MASKED = ("torch", "reentrant", "torch_xla", "nested")


class Masked(nn.Module):
    """A loss linear in `w`, through dropout of each kind of checkpoint."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterDict({k: nn.Parameter(torch.rand(40) + 0.5) for k in MASKED})

    def forward(self, x):
        def region(w, x):
            return F.dropout(F.dropout(w * x, 0.5), 0.5)

        return {k: KINDS[k](region, self.w[k] * 1, x) for k in MASKED}


def test_forward_and_recompute_use_the_same_mask(engine):
    pytest.importorskip("torch_xla")
    model = Masked().to(funcacc.device(engine))

    def loss(model, x):
        terms = {k: v.sum() for k, v in model(x).items()}
        return sum(terms.values()), terms

    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    step = funcacc.TrainStep(model, opt, loss, seed=3)
    before = {k: w.detach().cpu().clone() for k, w in model.w.items()}
    out = step([torch.ones(40), torch.rand(40)])
    for kind, w in model.w.items():
        gradient = before[kind] - w.detach().cpu()
        total = (gradient * before[kind]).sum()
        torch.testing.assert_close(total, out.aux[kind].cpu(), rtol=1e-5, atol=1e-5)
        assert 0 < (gradient == 0).float().mean() < 1, kind


class Blocks(nn.Module):
    """One block for each kind of checkpoint."""

    def __init__(self, checkpointed=True):
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleDict({k: self.block() for k in KINDS})

    @staticmethod
    def block():
        return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))

    def forward(self, x):
        x = self.first(x)
        for kind, run in KINDS.items():
            block = self.blocks[kind]
            x = x + (run(block, x) if self.checkpointed else block(x))
        return x


def squares(model, batch):
    return model(batch).square().mean()


def test_gradients_equal_those_without(engine):
    pytest.importorskip("torch_xla")
    ref = Blocks(checkpointed=False)
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    model.checkpointed = True
    ref_opt, opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref, model))
    for _ in range(2):
        batches = [torch.randn(4, 6) for _ in range(3)]
        plain_step(ref, ref_opt, squares, batches)
        funcacc.train_step(model, opt, batches, squares)
    assert_same(model, opt, ref, ref_opt)


def test_batch_statistics_move_twice_as_in_the_plain_loop(engine):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.bn = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

        def forward(self, x):
            return checkpoint(lambda h: torch.tanh(self.bn(h)), self.a(x), use_reentrant=False)

    ref = Net()
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    ref_opt, opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref, model))
    batches = [torch.randn(5, 4) for _ in range(3)]
    plain_step(ref, ref_opt, squares, batches)
    funcacc.train_step(model, opt, batches, squares)
    assert int(ref.bn.num_batches_tracked) == 6
    assert_same(model, opt, ref, ref_opt)


def test_a_reentrant_checkpoint_without_differentiable_inputs_gives_no_gradient(engine):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=True))

    model = Net().to(funcacc.device(engine))
    before = model.a.weight.detach().cpu().clone()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="use_reentrant=False"):
        funcacc.train_step(model, opt, [torch.randn(2, 4)], squares)
    assert torch.equal(model.a.weight.detach().cpu(), before)


def test_outside_a_step(engine):
    x = torch.randn(2, 6).to(funcacc.device(engine)).requires_grad_()
    block = Blocks.block().to(x.device)
    (a,) = torch.autograd.grad(block(x).sum(), x)
    (b,) = torch.autograd.grad(funcacc.checkpoint(block, x).sum(), x)
    torch.testing.assert_close(a.cpu(), b.cpu())


def test_the_recompute_draws_from_a_key_of_its_own():
    # Equal keys would let a compiler keep the random bits of the forward pass.
    w = nn.ParameterList([torch.ones(4)])
    opt = torch.optim.SGD(w.parameters(), lr=0.1)
    step = funcacc.TrainStep(
        w,
        opt,
        lambda w, x: funcacc.checkpoint(lambda a: F.dropout(a * x), w[0] * 1).sum(),
        engine="eager",
    )
    step([torch.ones(4)])
    drawn = re.findall(r"random_bits.default\((\w+),", step.programs[0].text())
    assert len(drawn) == len(set(drawn)) == 2


MEASURE = """
    import glob, os, re, sys
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={sys.argv[1]} --xla_dump_hlo_as_text"
    import torch
    from torch import nn
    import funcacc

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x):
            return x + self.b(torch.tanh(self.a(x)))

    def used(checkpointed):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(4)).to(funcacc.device("xla"))

        def loss(blocks, x):
            x = x * 1
            for block in blocks:
                x = funcacc.checkpoint(block, x) if checkpointed else block(x)
            return x.square().mean()

        opt = torch.optim.SGD(blocks.parameters(), lr=0.1)
        out = funcacc.train_step(blocks, opt, [torch.linspace(0, 1, 8 * 512).view(512, 8)], loss)
        print("loss", float(out.loss))
        reports = glob.glob(f"{sys.argv[1]}/*memory-usage-report.txt")
        sizes = [re.search(r"Total bytes used: (\\d+)", open(r).read()) for r in reports]
        print("bytes", max(int(s.group(1)) for s in sizes if s))
        for name in glob.glob(f"{sys.argv[1]}/*"):
            os.remove(name)

    used(False)
    used(True)
"""


@pytest.mark.xla
def test_buffer_assignment_of_xla_shrinks(tmp_path):
    pytest.importorskip("torch_xla")
    env = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(Path(__file__).parents[1])}
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)],
        env=env, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (loss, plain), (again, checkpointed) = (
        [float(line.split()[1]) for line in out.splitlines()[i : i + 2]] for i in (0, 2)
    )
    assert again == pytest.approx(loss, rel=1e-6)
    assert checkpointed < 0.65 * plain, out
