"""What a user holds beside the model survives donation; aliases keep following."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import funcacc
from tests.oracle import plain_step


def loss_fn(model, x):
    return model(x).square().mean()


class Setting:
    def __init__(self, engine):
        self.ref = nn.Linear(3, 2)
        self.model = copy.deepcopy(self.ref).to(funcacc.device(engine))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.1, eps=1e-4)
        self.ref_opt = torch.optim.AdamW(self.ref.parameters(), lr=0.1, eps=1e-4)

    def advance(self, steps=2):
        for _ in range(steps):
            batches = [torch.randn(4, 3) for _ in range(2)]
            plain_step(self.ref, self.ref_opt, loss_fn, batches)
            funcacc.train_step(self.model, self.opt, batches, loss_fn)


def another_model(s):
    other = nn.Linear(3, 2).to(s.model.weight.device)
    other.load_state_dict(s.model.state_dict())
    return list(other.parameters())


def written_into(s):
    into = torch.zeros_like(s.model.weight, requires_grad=False)
    into[:] = s.model.weight.detach()
    return [into]


SNAPSHOTS = {
    "clone": lambda s: [p.detach().clone() for p in s.model.parameters()],
    "deepcopy": lambda s: list(copy.deepcopy(s.model).parameters()),
    "deepcopied-state-dict": lambda s: list(copy.deepcopy(s.model.state_dict()).values()),
    "load_state_dict": another_model,
    "slice-assignment": written_into,
    "copy_": lambda s: [torch.empty_like(p).copy_(p) for p in s.model.state_dict().values()],
    "optimizer-state": lambda s: [
        x for e in copy.deepcopy(s.opt.state_dict())["state"].values() for x in e.values()
    ],
    "half": lambda s: [s.model.weight.detach().bfloat16()],
}


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_copies_keep_their_values(engine, name, when):
    s = Setting(engine)
    if when == "between":
        s.advance()
    snapshot = SNAPSHOTS[name](s)
    expected = [copy.deepcopy(x.detach().cpu()) for x in snapshot] if when == "before" else None
    if expected is None:
        # Without a look at the snapshot itself, which would make it real.
        source = Setting("eager")
        source.ref, source.model = s.ref, copy.deepcopy(s.ref)
        source.opt = s.ref_opt
        expected = [copy.deepcopy(x.detach()) for x in SNAPSHOTS[name](source)]
    s.advance()
    for value, want in zip(snapshot, expected, strict=True):
        torch.testing.assert_close(value.detach().cpu(), want, rtol=1e-4, atol=1e-5)


ALIASES = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.detach().view(-1),
    "row": lambda p: p.detach()[0],
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_follow(engine, name):
    s = Setting(engine)
    early = ALIASES[name](s.model.weight)
    s.advance()
    late = ALIASES[name](s.model.weight)
    s.advance()
    want = ALIASES[name](s.ref.weight)
    for alias in (early, late):
        torch.testing.assert_close(alias.cpu(), want, rtol=1e-4, atol=1e-5)


def test_equal_scalars_elsewhere_survive(engine):
    s = Setting(engine)
    device = s.model.weight.device
    scalars = [torch.zeros((), device=device), torch.tensor(0.0, device=device)]
    s.advance()
    assert [x.item() for x in scalars] == [0.0, 0.0]


def test_a_parameter_filled_from_another_model_gives_that_model_back_unharmed(engine):
    s = Setting(engine)
    s.advance(1)
    source = nn.Linear(3, 2).to(s.model.weight.device)
    want = source.weight.detach().cpu().clone()
    with torch.no_grad():
        s.model.weight.copy_(source.weight)
    s.advance(2)
    torch.testing.assert_close(source.weight.detach().cpu(), want)


def test_what_users_hold_through_many_steps(engine):
    """State dicts and rows follow, also what is written to them; averages and files don't."""
    s = Setting(engine)
    model, opt, ref, ref_opt = s.model, s.opt, s.ref, s.ref_opt
    averages = [AveragedModel(m) for m in (model, ref)]
    early = [m.weight.detach()[1] for m in (model, ref)]
    s.advance()
    held = [[m.state_dict(), o.state_dict()] for m, o in ((model, opt), (ref, ref_opt))]
    file = io.BytesIO()
    torch.save(model, file)
    saved = copy.deepcopy(ref.state_dict())
    for average, m in zip(averages, (model, ref), strict=True):
        average.update_parameters(m)
    for row in early:
        row.mul_(0.5)
    s.advance()
    for average, m in zip(averages, (model, ref), strict=True):
        average.update_parameters(m)
    s.advance()
    file.seek(0)
    loaded = torch.load(file, weights_only=False).state_dict()
    ours = [held[0], averages[0].state_dict(), early[0], loaded, model.state_dict()]
    wanted = [held[1], averages[1].state_dict(), early[1], saved, ref.state_dict()]
    ours, wanted = (funcacc.trees.flatten(x)[0] for x in (ours, wanted))
    for value, want in zip(ours, wanted, strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(value.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)


def test_a_graph_over_parameters_knows_that_a_step_was_taken(engine):
    """As in plain PyTorch: gradients taken before a step are right, later ones are refused."""
    s = Setting(engine)
    x = torch.randn(4, 3)
    graphs = []
    for m in (s.model, s.ref):
        hidden = m(x.to(m.weight.device)).square()
        graphs.append((hidden.sum(), (hidden @ m.weight).sum(), m.weight))
    (first, late, weight), (ref_first, ref_late, ref_weight) = graphs
    (early,) = torch.autograd.grad(first, [weight], retain_graph=True)
    (want,) = torch.autograd.grad(ref_first, [ref_weight], retain_graph=True)
    s.advance()
    torch.testing.assert_close(early.cpu(), want, rtol=1e-4, atol=1e-5)
    for loss in (late, ref_late):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Following(nn.Module):
    """What it reads besides its weights are those weights: whole, a row, and frozen."""

    def __init__(self, weight):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer.weight = weight
        self.register_buffer("whole", weight.detach())
        self.register_buffer("row", weight.detach()[1])
        self.frozen = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, x):
        # Copies, since the plain loop writes into what it would have saved for its gradient.
        y = torch.tanh(self.layer(x)) @ self.whole.clone() * self.row.clone()
        return torch.tanh(y + x @ self.frozen.clone())


def test_a_program_may_read_what_lies_in_the_memory_of_the_state(engine):
    """Buffers, frozen parameters, closures and windows: as they are before each step."""
    weights = torch.randn(3, 3)
    pairs = []
    for device in (funcacc.device(engine), torch.device("cpu")):
        model = Following(nn.Parameter(weights.to(device)))
        model.layer.bias = nn.Parameter(torch.zeros(3, device=device))
        opt = torch.optim.SGD([model.layer.weight], lr=0.02, momentum=0.9)
        pairs.append((model, opt))
    (model, opt), (ref, ref_opt) = pairs

    def closing_over(weight):
        closed = weight.detach()
        return lambda m, x: (m(x).square() + (m.layer.weight * closed.clone()).sum()).mean()

    def by_rows(m, x):
        return m(x[None]).square().mean()

    step = funcacc.TrainStep(model, opt, closing_over(model.layer.weight))
    rows = funcacc.TrainStep(model, opt, by_rows)
    ref_loss = closing_over(ref.layer.weight)
    for _ in range(3):
        batches = [torch.randn(4, 3) for _ in range(2)]
        plain_step(ref, ref_opt, ref_loss, batches)
        step(batches)
        plain_step(ref, ref_opt, by_rows, list(ref.layer.weight.detach().clone()))
        rows(funcacc.Window(model.layer.weight.detach(), 3))
        momentum = ref_opt.state[ref.layer.weight]["momentum_buffer"].clone()
        plain_step(ref, ref_opt, by_rows, list(momentum))
        rows(funcacc.Window(opt.state[model.layer.weight]["momentum_buffer"], 3))
    for key, want in ref.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key].cpu(), want, rtol=1e-4, atol=1e-5)
    assert step.report().donated_leaves == step.report().state_leaves


def test_two_models_with_a_common_module(engine):
    """Each with an optimizer of its own, in turns: a step of one isn't lost on the other."""
    shared, heads = nn.Linear(3, 4), [nn.Linear(4, n) for n in (2, 1)]
    refs = [nn.Sequential(shared, h) for h in heads]
    models = [m.to(funcacc.device(engine)) for m in copy.deepcopy(refs)]
    assert models[0][0] is models[1][0]
    opts, ref_opts = (
        [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in pair]
        for pair in (models, refs)
    )
    steps = [funcacc.TrainStep(m, o, loss_fn) for m, o in zip(models, opts, strict=True)]
    for _ in range(3):
        for step, ref, opt in zip(steps, refs, ref_opts, strict=True):
            batches = [torch.randn(4, 3) for _ in range(2)]
            plain_step(ref, opt, loss_fn, batches)
            step(batches)
    for step, model, ref in zip(steps, models, refs, strict=True):
        assert step.report().compiles == 1
        for p, q in zip(model.parameters(), ref.parameters(), strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


def test_without_donation_the_numbers_are_the_same(engine):
    s = Setting(engine)
    step = funcacc.TrainStep(s.model, s.opt, loss_fn, donate=False)
    for _ in range(2):
        batches = [torch.randn(4, 3) for _ in range(2)]
        plain_step(s.ref, s.ref_opt, loss_fn, batches)
        step(batches)
    for p, q in zip(s.model.parameters(), s.ref.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)
    assert step.report().donated_leaves == 0
