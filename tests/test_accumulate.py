"""`accumulate`: gradients only, against ``backward`` in the plain loop."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcacc
from funcacc.errors import OptionError
from tests.oracle import plain_step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 6, bias=False)
        self.bn = nn.BatchNorm1d(6)
        self.b = nn.Linear(6, 3)
        self.unreached = nn.Parameter(torch.ones(2))
        self.b.bias.requires_grad_(False)

    def forward(self, x):
        return self.b(torch.tanh(self.bn(self.a(x))))


def loss_fn(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def microbatches(k):
    return [{"x": torch.randn(5, 4), "y": torch.randn(5, 3)} for _ in range(k)]


def pair(engine):
    ref = Net()
    return ref, copy.deepcopy(ref).to(funcacc.device(engine))


def backward(ref, batches):
    for batch in batches:
        (loss_fn(ref, batch) / len(batches)).backward()


def assert_grads(grads, ref):
    wanted = {n: p.grad for n, p in ref.named_parameters() if p.grad is not None}
    assert list(grads) == list(wanted)
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name].cpu(), grad, rtol=1e-4, atol=1e-6)


def test_gradients_and_buffers_equal_those_of_the_plain_loop(engine):
    ref, model = pair(engine)
    before = copy.deepcopy(ref.state_dict())
    for _ in range(2):
        batches = microbatches(3)
        ref.zero_grad()
        backward(ref, batches)
        out = funcacc.accumulate(model, batches, loss_fn)
        assert_grads(out.grads, ref)
        norm = torch.stack([p.grad.norm() for p in ref.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(out.grad_norm.cpu(), norm)
    assert out.weight.item() == 3
    assert all(p.grad is None for p in model.parameters())
    for name, value in ref.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-6)
        if name.endswith(("weight", "bias", "unreached")):
            assert torch.equal(model.state_dict()[name].cpu(), before[name])
    assert model.bn.num_batches_tracked.item() == 6


def test_into_grad_adds_and_the_users_optimizer_steps(engine):
    ref, model = pair(engine)
    ref_opt, opt = (torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4) for m in (ref, model))
    for _ in range(2):
        first, second = microbatches(2), microbatches(2)
        ref_opt.zero_grad()
        opt.zero_grad()
        for batches in (first, second):
            backward(ref, batches)
            out = funcacc.accumulate(model, batches, loss_fn, into_grad=True)
        model.a.weight.grad.mul_(1)
        assert out.grads["a.weight"] is not model.a.weight.grad
        ref_opt.step()
        opt.step()
    for name, value in ref.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)


def test_later_calls_trace_nothing(engine):
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    _, model = pair(engine)
    for window in funcacc.windows(microbatches(5), 3):
        funcacc.accumulate(model, window, counted)
    assert len(calls) == 1


def test_options_shape_the_gradients(engine):
    ref, model = pair(engine)
    batches = microbatches(2)
    backward(ref, batches)
    torch.nn.utils.clip_grad_norm_(ref.parameters(), 0.01)
    out = funcacc.accumulate(model, batches, loss_fn, clip_norm=0.01)
    assert_grads(out.grads, ref)


def test_bf16_parameters_have_float32_gradients_and_bf16_grad(engine):
    _, model = pair(engine)
    model = model.to(torch.bfloat16)
    batches = [{k: v.bfloat16() for k, v in b.items()} for b in microbatches(2)]
    out = funcacc.accumulate(model, batches, loss_fn, into_grad=True)
    assert {g.dtype for g in out.grads.values()} == {torch.float32}
    assert model.a.weight.grad.dtype == torch.bfloat16


def test_a_train_step_and_accumulate_share_a_model(engine):
    ref, model = pair(engine)
    ref_opt, opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref, model))
    for _ in range(2):
        batches = microbatches(2)
        plain_step(ref, ref_opt, loss_fn, batches)
        funcacc.train_step(model, opt, batches, loss_fn)
        ref.zero_grad()
        backward(ref, batches)
        assert_grads(funcacc.accumulate(model, batches, loss_fn).grads, ref)


def test_skip_nonfinite_is_refused(engine):
    with pytest.raises(OptionError, match="accumulate takes no skip_nonfinite"):
        funcacc.accumulate(pair(engine)[1], microbatches(1), loss_fn, skip_nonfinite=True)


def test_a_model_is_freed_with_its_steps(engine):
    _, model = pair(engine)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    funcacc.train_step(model, opt, microbatches(1), loss_fn)
    funcacc.accumulate(model, microbatches(1), loss_fn)
    alive = weakref.ref(model)
    del model, opt
    gc.collect()
    assert alive() is None
