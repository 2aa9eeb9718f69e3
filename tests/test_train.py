"""`train_step` against the plain PyTorch loop, on every engine."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcacc
from tests.oracle import assert_same, plain_step


class BatchNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 8, bias=False)
        self.bn = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.bn(self.a(x))))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.bn(self.conv(x))), 2)
        return self.head(x.mean((2, 3)))


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def microbatches(k, shape=(6, 5)):
    return [{"x": torch.randn(shape), "y": torch.randint(0, 3, (shape[0],))} for _ in range(k)]


def on(engine, model):
    return copy.deepcopy(model).to(funcacc.device(engine))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "make, shape", [(mlp, (6, 5)), (BatchNormNet, (6, 5)), (ConvNet, (4, 1, 8, 8))]
)
def test_equals_the_plain_loop(engine, name, make, shape):
    ref = make()
    model = on(engine, ref)
    ref_opt = OPTIMIZERS[name](ref.parameters())
    opt = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        batches = microbatches(5, shape)
        plain_step(ref, ref_opt, loss_fn, batches)
        funcacc.train_step(model, opt, batches, loss_fn)
    assert_same(model, opt, ref, ref_opt)


def test_the_oracle_fails_on_a_wrong_normalisation(engine):
    ref = mlp()
    model = on(engine, ref)
    ref_opt, opt = (OPTIMIZERS["sgd"](m.parameters()) for m in (ref, model))
    batches = microbatches(4)
    plain_step(ref, ref_opt, loss_fn, batches[:3])
    funcacc.train_step(model, opt, batches, loss_fn)
    with pytest.raises(AssertionError):
        assert_same(model, opt, ref, ref_opt)


def test_one_program_for_a_schedule_and_short_windows(engine):
    ref = BatchNormNet()
    model = on(engine, ref)
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    ref_opt, opt = (OPTIMIZERS["adamw"](m.parameters()) for m in (ref, model))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)) for o in (ref_opt, opt)
    ]
    step = funcacc.TrainStep(model, opt, counted)
    data = microbatches(4 * 19 + 2)
    for i, window in enumerate(funcacc.windows(data, 4)):
        plain_step(ref, ref_opt, loss_fn, data[4 * i : 4 * i + 4])
        step(window)
        for s in schedules:
            s.step()
    assert i == 19
    assert_same(model, opt, ref, ref_opt, 1e-5)
    report = step.report()
    assert (report.compiles, report.traces) == (1, 1)
    assert len(calls) == 1
    assert report.donated_leaves == report.state_leaves == report.in_place_leaves
    assert report.donated_bytes == report.state_bytes > 0


@pytest.mark.xla
def test_buffers_lie_in_their_own_slots_and_old_ones_are_gone():
    model = on("xla", BatchNormNet())
    opt = OPTIMIZERS["adamw"](model.parameters())
    step = funcacc.TrainStep(model, opt, loss_fn)
    window = funcacc.stack(microbatches(3))
    step(window)
    from funcacc import trees
    from funcacc.engines.xla import private

    leaves = [t for t in trees.flatten(step.state)[0]]
    private.wait()
    before = private.addresses(leaves)
    for _ in range(3):
        step(window)
    private.wait()
    assert private.addresses(trees.flatten(step.state)[0]) == before


@pytest.mark.xla
def test_one_while_and_the_size_of_the_program_does_not_depend_on_k():
    sizes = {}
    for k in (4, 64):
        model = on("xla", mlp())
        step = funcacc.TrainStep(model, OPTIMIZERS["adamw"](model.parameters()), loss_fn)
        step(microbatches(k))
        (program,) = step.programs
        text = program.text()
        assert text.count(" while(") == 1
        sizes[k] = text.count(" = ")
    assert sizes[4] == sizes[64]


def test_copies_and_aliases_between_steps(engine):
    model = on(engine, BatchNormNet())
    opt = OPTIMIZERS["adamw"](model.parameters())
    step = funcacc.TrainStep(model, opt, loss_fn)
    data = microbatches(3)
    step(data)
    weight = model.a.weight
    copied = copy.deepcopy(model)
    alias, clone = weight.detach(), weight.detach().clone()
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    before = weight.detach().cpu().clone()
    step(data)
    assert model.a.weight is weight
    assert torch.equal(clone.cpu(), before)
    assert torch.equal(saved["a.weight"].cpu(), before)
    assert torch.equal(copied.a.weight.detach().cpu(), before)
    assert torch.equal(alias.cpu(), weight.detach().cpu())
    assert not torch.equal(weight.detach().cpu(), before)


def test_evaluation_between_steps_costs_no_new_program(engine):
    model = on(engine, BatchNormNet())
    step = funcacc.TrainStep(model, OPTIMIZERS["adamw"](model.parameters()), loss_fn)
    data = microbatches(3)
    step(data)
    model.eval()
    with torch.no_grad():
        model(data[0]["x"].to(funcacc.device(engine))).cpu()
    model.train()
    step(data)
    assert step.report().compiles == 1


def test_frozen_and_unreached_parameters_are_left_alone(engine):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(2, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(x) + self.frozen(x)

    ref = Net()
    model = on(engine, ref)
    ref_opt, opt = (
        torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1, eps=1e-4) for m in (ref, model)
    )
    for _ in range(3):
        data = microbatches(2)
        plain_step(ref, ref_opt, loss_fn, data)
        funcacc.train_step(model, opt, data, loss_fn)
    assert_same(model, opt, ref, ref_opt)
    assert torch.equal(model.frozen.weight.cpu(), ref.frozen.weight)
    assert torch.equal(model.unused.weight.detach().cpu(), ref.unused.weight)


def test_dropout_masks_differ_and_repeat_with_the_seed(engine):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return F.dropout(x * self.w, 0.5)

    def loss(model, batch):
        out = model(batch)
        return out.sum(), funcacc.Stack(out.detach())

    def run():
        model = on(engine, Net())
        step = funcacc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, seed=5)
        return [step([torch.ones(64)] * 3).aux.cpu() for _ in range(2)]

    first, again = run(), run()
    rows = [tuple(r.tolist()) for masks in first for r in masks]
    assert len(set(rows)) == 6
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert 0.35 < (torch.stack(first) == 0).float().mean() < 0.65


def test_an_exception_while_tracing_leaves_everything_usable(engine):
    ref = BatchNormNet()
    model = on(engine, ref)
    ref_opt, opt = (OPTIMIZERS["adamw"](m.parameters()) for m in (ref, model))

    def broken(model, batch):
        loss_fn(model, batch)
        raise KeyError("mine")

    data = microbatches(3)
    with pytest.raises(KeyError, match="mine"):
        funcacc.train_step(model, opt, data, broken)
    plain_step(ref, ref_opt, loss_fn, data)
    funcacc.train_step(model, opt, data, loss_fn)
    assert_same(model, opt, ref, ref_opt)


@pytest.mark.parametrize("read", ["item", "if", "numpy", "tolist"])
def test_a_host_read_names_the_line(engine, read):
    model = on(engine, mlp())

    def loss(model, batch):
        value = loss_fn(model, batch)
        if read == "item":
            value.item()
        elif read == "numpy":
            value.detach().numpy()
        elif read == "tolist":
            value.tolist()
        elif value > 0:
            value = value * 2
        return value

    opt = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(funcacc.FuncaccError, match=r"test_train\.py:\d+ .*reads a value"):
        funcacc.train_step(model, opt, microbatches(2), loss)


def test_tied_weights_are_one_leaf(engine):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))[:, :3]

    def tied():
        torch.manual_seed(1)
        net = Net().to(funcacc.device(engine))
        net.b.weight = net.a.weight
        return net

    model = tied()
    torch.manual_seed(1)
    ref = Net()
    ref.b.weight = ref.a.weight
    ref_opt, opt = (OPTIMIZERS["sgd"](m.parameters()) for m in (ref, model))
    data = microbatches(3)
    plain_step(ref, ref_opt, loss_fn, data)
    funcacc.train_step(model, opt, data, loss_fn)
    assert model.b.weight is model.a.weight
    assert_same(model, opt, ref, ref_opt)


def test_key_and_step_are_saved_and_restored(engine):
    def make():
        model = on(engine, nn.Sequential(mlp(), nn.Dropout(0.5)))
        return model, funcacc.TrainStep(
            model, OPTIMIZERS["sgd"](model.parameters()), loss_fn, seed=3
        )

    data = microbatches(2)
    torch.manual_seed(0)
    model, step = make()
    step(data)
    saved, weights = step.state_dict(), {k: v.cpu().clone() for k, v in model.state_dict().items()}
    step(data)
    model2, step2 = make()
    model2.load_state_dict(weights)
    step2.load_state_dict(saved)
    step2(data)
    assert step2.state_dict()["step"] == 2
    for a, b in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(a.detach().cpu(), b.detach().cpu())


def test_loading_an_optimizer_state_between_steps(engine):
    ref = mlp()
    model = on(engine, ref)
    ref_opt, opt = (OPTIMIZERS["adamw"](m.parameters()) for m in (ref, model))
    step = funcacc.TrainStep(model, opt, loss_fn)
    for i in range(4):
        data = microbatches(2)
        plain_step(ref, ref_opt, loss_fn, data)
        step(data)
        if i == 1:
            # Through a plain optimizer on the CPU and back, as a checkpoint would go.
            opt.load_state_dict(copy.deepcopy(ref_opt.state_dict()))
    assert_same(model, opt, ref, ref_opt)
    assert step.report().compiles == 1


def test_a_loss_function_made_anew_is_reported_once(engine):
    model = on(engine, mlp())
    opt = OPTIMIZERS["sgd"](model.parameters())
    data = microbatches(1)

    def advance():
        funcacc.train_step(model, opt, data, lambda m, b: loss_fn(m, b))

    advance()
    advance()
    with pytest.warns(UserWarning, match="train_step was given a new loss function on each call"):
        advance()
    # Warnings are errors here: a second one would fail.
    advance()
