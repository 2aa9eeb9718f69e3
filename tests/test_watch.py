"""The look that spares most calls everything but the dispatch."""

import pytest
import torch
from torch import nn

import funcacc
from funcacc.optimizers import adopt
from funcacc.programs import Programs
from funcacc.watch import Watch


def loss_fn(model, x):
    return model(x).square().mean()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.factor = 1.5
        self.shift = torch.ones(3)

    def forward(self, x):
        return self.norm(self.lin(x)) * self.factor + self.shift


def set_data(tensor, value):
    tensor.data = value


CHANGES = {
    "number": lambda m, o: setattr(m, "factor", 2.5),
    "tensor attribute": lambda m, o: setattr(m, "shift", torch.ones(3)),
    "new attribute": lambda m, o: setattr(m, "other", None),
    "attribute renamed": lambda m, o: setattr(m, "f", m.__dict__.pop("factor")),
    "eval": lambda m, o: m.norm.eval(),
    "parameter": lambda m, o: setattr(m.lin, "bias", nn.Parameter(torch.ones(3))),
    "parameter removed": lambda m, o: setattr(m.lin, "bias", None),
    "frozen": lambda m, o: m.lin.bias.requires_grad_(False),
    "dtype": lambda m, o: set_data(m.lin.bias, torch.ones(3, dtype=torch.float64)),
    "shape": lambda m, o: set_data(m.lin.bias, torch.ones(4)),
    "buffer": lambda m, o: setattr(m.norm, "running_mean", torch.ones(3)),
    "new buffer": lambda m, o: m.register_buffer("more", torch.ones(3)),
    "module": lambda m, o: setattr(m, "norm", nn.Identity()),
    "new module": lambda m, o: m.add_module("more", nn.Identity()),
    "gradient hook": lambda m, o: m.lin.bias.register_hook(lambda g: g),
    "forward hook": lambda m, o: m.lin.register_forward_hook(lambda *a: None),
    "group": lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "group's parameters": lambda m, o: o.param_groups[0]["params"].pop(),
    "state": lambda m, o: o.state[m.lin.bias].update(exp_avg=torch.zeros(3)),
    "all state": lambda m, o: o.load_state_dict(o.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    model = Scaled()
    opt = torch.optim.Adam(model.parameters())
    loss_fn(model, torch.randn(4, 3)).backward()
    opt.step()
    adopted = adopt(opt, {id(p): n for n, p in model.named_parameters()})
    watch = Watch(model, adopted.watched())
    model(torch.randn(4, 3)).sum().backward()
    model.state_dict(), opt.state_dict(), [p.detach().clone() for p in model.parameters()]
    assert watch.unchanged(model, adopted.watched())
    CHANGES[change](model, opt)
    assert not watch.unchanged(model, adopted.watched())


def test_a_tensor_attribute_of_a_subclass_is_compared():
    model = Scaled()
    model.extra = nn.Buffer(torch.ones(1))
    model.__dict__["hidden"] = nn.Parameter(torch.ones(1))
    watch = Watch(model, [])
    model.__dict__["hidden"] = nn.Parameter(torch.ones(1))
    assert not watch.unchanged(model, [])


def test_calls_find_their_program_again_without_a_full_look(engine, monkeypatch):
    looks = []
    find = Programs.find

    def spy(self, *args):
        looks.append(args)
        return find(self, *args)

    monkeypatch.setattr(Programs, "find", spy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(funcacc.device(engine))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    step = funcacc.TrainStep(model, opt, loss_fn)
    for i in range(8):
        step(funcacc.Window(torch.randn(2, 4, 3), 1 + i % 2))
        schedule.step()
        opt.state_dict()
        model.state_dict()
    assert len(looks) == 1
    assert step.report().compiles == 1


def test_two_capacities_in_turn_are_both_known(engine, monkeypatch):
    model = nn.Linear(3, 3).to(funcacc.device(engine))
    step = funcacc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    windows = [funcacc.Window(torch.randn(k, 4, 3)) for k in (1, 2)]
    for window in windows:
        step(window)
    monkeypatch.setattr(Programs, "find", lambda *_: pytest.fail("a full look"))
    for window in windows * 2:
        step(window)


@pytest.mark.parametrize("engine", ["xla"])
@pytest.mark.xla
def test_nothing_is_synced_while_no_tensor_was_made_on_the_device(engine):
    from torch_xla.debug import metrics

    torch.manual_seed(0)
    model = nn.Linear(3, 3).to(funcacc.device(engine))
    step = funcacc.TrainStep(model, torch.optim.Adam(model.parameters()), loss_fn)
    step([torch.randn(4, 3)])
    before = metrics.counter_value("MarkStep")
    for _ in range(3):
        out = step([torch.randn(4, 3)])
    float(out.loss)
    assert metrics.counter_value("MarkStep") == before
    copies = {n: p.detach().clone() for n, p in model.named_parameters()}
    step([torch.randn(4, 3)])
    assert metrics.counter_value("MarkStep") > before
    kept = {n: c.cpu() for n, c in copies.items()}
    step([torch.randn(4, 3)])
    for n, p in model.named_parameters():
        assert torch.equal(copies[n].cpu(), kept[n])
        assert not torch.equal(p.cpu(), kept[n])


@pytest.mark.parametrize(
    "copy",
    [
        lambda p: p.detach().clone(),
        lambda p: p.detach().view(9).clone(),
        lambda p: p.detach() + 0,
        lambda p: torch.empty_like(p).copy_(p),
        lambda p: torch.stack([p.detach(), p.detach()])[0],
        lambda p: torch.clone(p.data),
        lambda p: p.detach()[:, :2].clone(),
        lambda p: p.detach().to(torch.float64),
    ],
)
def test_copies_of_every_kind_outlive_the_next_step(engine, copy):
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False).to(funcacc.device(engine))
    step = funcacc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    x = [torch.randn(4, 3)]
    step(x)
    expected = copy(model.weight.detach().cpu().clone())
    mine = copy(model.weight)
    step(x)
    step(x)
    assert torch.equal(mine.cpu(), expected)


def test_hyperparameters_in_a_list_that_is_written_to():
    def run(take):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        opt = torch.optim.Adam(model.parameters(), betas=[0.9, 0.95], lr=0.1)
        # Newer versions of PyTorch make a tuple of it.
        opt.param_groups[0]["betas"] = [0.9, 0.95]
        step = take(model, opt)
        for beta in (0.9, 0.5, 0.1):
            opt.param_groups[0]["betas"][0] = beta
            step(torch.arange(6.0).view(2, 3))
        return model.weight.detach()

    def plain(model, opt):
        def step(x):
            opt.zero_grad()
            loss_fn(model, x).backward()
            opt.step()

        return step

    def ours(model, opt):
        step = funcacc.TrainStep(model, opt, loss_fn)
        return lambda x: step([x])

    torch.testing.assert_close(run(ours), run(plain), rtol=1e-6, atol=1e-6)
