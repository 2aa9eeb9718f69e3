"""`scan_layers` against the unrolled stack."""

import pytest
import torch
from torch import nn

import funcacc
from funcacc.capture import ops
from funcacc.capture.trace import capture
from funcacc.types import TensorSpec
from tests.oracle import assert_same, plain_step


class Block(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(p)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x) * self.scale))))


class Net(nn.Module):
    def __init__(self, depth, how, p=0.0):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 4), nn.Linear(4, 1), how
        self.blocks = nn.ModuleList(Block(4, p) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        if self.how == "unrolled":
            for block in self.blocks:
                x = block(x)
        else:
            x = funcacc.scan_layers(self.blocks, x, checkpoint=self.how == "checkpoint")
        return self.last(x)


def loss_fn(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("how", ["scan", "checkpoint"])
def test_a_step_equals_that_of_the_unrolled_stack_buffers_included(engine, how):
    model, plain = Net(3, how), Net(3, "unrolled")
    plain.load_state_dict(model.state_dict())
    model = model.to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    step = funcacc.TrainStep(model, opt, loss_fn)
    for seed in range(2):
        torch.manual_seed(seed)
        batches = [torch.randn(6, 3) for _ in range(2)]
        step(batches)
        plain_step(plain, plain_opt, loss_fn, batches)
    assert_same(model, opt, plain, plain_opt, 1e-5)
    assert model.blocks[2].norm.num_batches_tracked.item() == 4
    # A buffer that no block writes stays out of the state.
    donated = [leaf.path for leaf in step.report().leaves if leaf.donated]
    assert any("blocks.1.norm.running_mean" in path for path in donated)
    assert not any("scale" in path for path in donated)


def test_as_it_stands_it_equals_the_stack_too(engine):
    model, plain = Net(3, "scan"), Net(3, "unrolled")
    plain.load_state_dict(model.state_dict())
    model = model.to(funcacc.device(engine))
    x = torch.randn(5, 3)
    out, want = loss_fn(model, x.to(funcacc.device(engine))), loss_fn(plain, x)
    out.backward()
    want.backward()
    torch.testing.assert_close(out.detach().cpu(), want.detach())
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-5, msg=name)
    for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(b.cpu(), c, msg=name)


class Scaled(nn.Module):
    """Linear in its parameter, so that a gradient shows the mask of the forward pass."""

    def __init__(self):
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(64)), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.weight)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_masks_differ_by_layer_and_agree_with_the_gradients(engine, checkpoint):
    layers = nn.ModuleList(Scaled() for _ in range(4)).to(funcacc.device(engine))

    def fn(params, key, x):
        fm = funcacc.functionalize(
            layers, lambda m, x: funcacc.scan_layers(m, x, checkpoint=checkpoint)
        )
        params = {n: p.detach().requires_grad_() for n, p in params.items()}
        out, _ = fm.apply(params, {}, key, x)
        return out, torch.autograd.grad(out.sum(), list(params.values()))

    params = {n: p.detach() for n, p in layers.named_parameters()}
    key = torch.tensor([1, 2], dtype=torch.int32).to(funcacc.device(engine))
    out, grads = funcacc.jit(fn)(params, key, torch.zeros(64).to(funcacc.device(engine)))
    masks = [g.cpu() for g in grads]
    assert torch.equal(sum(masks), out.cpu())
    assert len({tuple(m.tolist()) for m in masks}) == 4
    assert all(set(m.tolist()) == {0.0, 2.0} for m in masks)


def test_the_program_holds_one_block_however_many_there_are():
    def nodes(depth, how):
        model = Net(depth, how)
        graph = capture(lambda tracing, x: [model(x)], [TensorSpec((5, 3), torch.float32)], ["x"])
        own = [n for n in graph.nodes if n.target is torch.ops.aten.tanh.default]
        loops = [n for n in graph.nodes if n.target is ops.loop]
        return len(own), len(loops)

    assert nodes(2, "unrolled") == (2, 0)
    assert nodes(2, "scan") == nodes(8, "scan") == (0, 1)


def test_modules_that_differ_are_refused_with_what_differs():
    stack = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.ReLU()]
    with pytest.raises(funcacc.FuncaccError) as e:
        funcacc.scan_layers(stack, torch.ones(2, 4))
    assert "modules[2] has other parameters: {'weight': 'float32[4,4]'}" in str(e.value)
    assert "modules[3] has other class: ReLU, not Linear" in str(e.value)
    with pytest.raises(funcacc.FuncaccError, match="has other settings"):
        funcacc.scan_layers([nn.Dropout(0.1), nn.Dropout(0.2)], torch.ones(2))
    assert torch.equal(funcacc.scan_layers([], torch.ones(2)), torch.ones(2))


class Multiplied(nn.Module):
    def __init__(self, index, factor):
        super().__init__()
        self.index, self.factor, self.linear = index, factor, nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) * self.factor


def test_attributes_may_differ_unless_forward_reads_them(engine):
    device = funcacc.device(engine)
    x = torch.ones(2, 3).to(device)
    alike = [Multiplied(i, 2.0).to(device) for i in range(3)]
    out = funcacc.jit(lambda x: funcacc.scan_layers(alike, x))(x)
    want = alike[2](alike[1](alike[0](x)))
    torch.testing.assert_close(out.detach().cpu(), want.detach().cpu())
    assert all(type(m) is Multiplied for m in alike)

    other = [Multiplied(i, float(i)).to(device) for i in range(3)]
    match = r"modules\[1\].factor, which forward reads, is 1.0, not 0.0$"
    with pytest.raises(funcacc.FuncaccError, match=match):
        funcacc.jit(lambda x: funcacc.scan_layers(other, x))(x)
    with pytest.raises(funcacc.FuncaccError, match=r"modules\[0\] is a function"):
        funcacc.scan_layers([lambda x: x], x)
