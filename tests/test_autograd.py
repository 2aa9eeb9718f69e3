"""Whatever a loss does with autograd: against the plain loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcacc
from tests.oracle import assert_same, plain_step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def squares(model, x):
    return model(x).square().mean()


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.exp() * 0.5


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        (out,) = ctx.saved_tensors
        return g * out * 0.5


def functions(model, x):
    h = OldStyle.apply(model.a(x)) + NewStyle.apply(model.b(x))
    return h.square().mean()


def double_backward(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + 0.3 * (g.norm(dim=1) - 1).square().mean()


def tensor_hooks(model, x):
    h = model.a(x)
    h.register_hook(lambda g: g * 2)
    h.retain_grad()
    return model.b(h).square().mean()


def in_place(model, x):
    x.mul_(2)
    h = model.a(x)
    h[:, 0] += 1
    h.relu_()
    return model.b(h).square().mean()


def batch_that_requires_grad(model, x):
    h = model(x.requires_grad_())
    (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return h.square().mean() + g.square().mean()


def no_grad_parts(model, x):
    with torch.no_grad():
        target = model(x)
    with torch.inference_mode():
        scale = float(target.numel())
    return F.mse_loss(model(x + 1), target) * scale


def per_sample_loss(model, x):
    return torch.func.vmap(lambda row: model(row).square().sum())(x).mean()


def per_sample_gradients(model, x):
    params = dict(model.named_parameters())

    def loss(p, row):
        return torch.func.functional_call(model, p, (row,)).square().mean()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    return model(x).square().mean() + sum(g.square().mean() for g in grads.values())


def forward_mode(model, x):
    y, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return y.square().mean() + tangent.square().mean()


def jacobian_and_hessian(model, x):
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
    hessian = torch.func.hessian(lambda row: model(row).square().sum())(x[0])
    return jacobian.square().mean() + hessian.square().mean()


LOSSES = [
    functions, double_backward, tensor_hooks, in_place, batch_that_requires_grad, no_grad_parts,
    per_sample_loss, per_sample_gradients, forward_mode, jacobian_and_hessian,
]  # fmt: skip


def check(engine, ref, loss, model=None, batches=None, tolerance=2e-6):
    """Two steps of the plain loop and of funcacc."""
    model = (model or copy.deepcopy(ref)).to(funcacc.device(engine))
    ref_opt, opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref, model))
    for _ in range(2):
        given = batches() if batches else [torch.randn(4, 5) for _ in range(2)]
        plain_step(ref, ref_opt, loss, copy.deepcopy(given))
        funcacc.train_step(model, opt, given, loss)
    assert_same(model, opt, ref, ref_opt, tolerance)
    return model


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_equals_the_plain_loop(engine, loss):
    check(engine, Net(), loss)


def hooked(model):
    model.a.register_forward_hook(lambda m, args, out: out * 1.5)
    model.b.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model.b.register_full_backward_hook(lambda m, grads, outs: (grads[0] * 0.5,))
    model.a.weight.register_hook(lambda g: g * 3)
    return model


def test_hooks_of_modules_and_parameters(engine):
    torch.manual_seed(1)
    ref = hooked(Net())
    torch.manual_seed(1)
    check(engine, ref, squares, hooked(Net().to(funcacc.device(engine))))


def test_a_hook_added_later_is_seen(engine):
    model = Net().to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    step = funcacc.TrainStep(model, opt, squares)
    before = step([torch.ones(2, 5)]).grad_norm.cpu()
    handle = model.b.register_forward_hook(lambda m, args, out: out * 0)
    assert step([torch.ones(2, 5)]).grad_norm.cpu() == 0
    handle.remove()
    assert step([torch.ones(2, 5)]).grad_norm.cpu() == before
    assert step.report().reasons == ["first call", "attribute b._forward_hooks changed"]


def test_a_parameter_frozen_in_the_forward_pass(engine):
    class Freezing(Net):
        def forward(self, x):
            self.a.weight.requires_grad_(False)
            return super().forward(x)

    check(engine, Freezing(), squares)


def test_parameters_reached_in_some_configurations_only(engine):
    class Branching(Net):
        def __init__(self):
            super().__init__()
            self.use_a = True

        def forward(self, x):
            return self.a(x) if self.use_a else self.b(x)

    ref = Branching()
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    ref_opt, opt = (
        torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1, eps=1e-4) for m in (ref, model)
    )
    for use_a in (True, False, True):
        ref.use_a = model.use_a = use_a
        batches = [torch.randn(4, 5) for _ in range(2)]
        plain_step(ref, ref_opt, squares, batches)
        funcacc.train_step(model, opt, batches, squares)
    assert_same(model, opt, ref, ref_opt)


# The gradients of the plain loop are rounded to bfloat16 in places, those of XLA's in others.
AUTOCAST_TOLERANCE = 2e-3


@pytest.mark.parametrize("where", ["inside", "around"])
def test_autocast_to_bfloat16(engine, where):
    ref = Net()
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    kind = next(model.parameters()).device.type
    ref_opt, opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref, model))
    seen = []

    def loss(model, x):
        with torch.autocast(kind if model is not ref else "cpu", dtype=torch.bfloat16):
            y = model(x)
        seen.append(y.dtype)
        return y.float().square().mean()

    def bare(model, x):
        y = model(x)
        seen.append(y.dtype)
        return y.float().square().mean()

    chosen = loss if where == "inside" else bare
    batches = [torch.randn(4, 5) for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
        plain_step(ref, ref_opt, chosen, batches)
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=where == "around"):
        funcacc.train_step(model, opt, batches, chosen)
    assert set(seen) == {torch.bfloat16}
    assert_same(model, opt, ref, ref_opt, AUTOCAST_TOLERANCE)


def test_functionalize_for_transforms_outside(engine):
    model = Net().to(funcacc.device(engine))
    pure = funcacc.functionalize(model, squares)
    params, buffers = pure.init()
    x = torch.randn(4, 5).to(funcacc.device(engine))
    grads = torch.func.grad(lambda p: pure.apply(p, buffers, None, x)[0])(params)
    for name, want in zip(
        grads, torch.autograd.grad(squares(model, x), model.parameters()), strict=True
    ):
        torch.testing.assert_close(grads[name].cpu(), want.cpu())
