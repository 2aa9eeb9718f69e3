"""Buffers, attributes and kinds of modules: against the plain loop, or refused by name."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import funcacc
from tests.oracle import assert_same, plain_step
from tests.test_autograd import Net, check, squares


def normalised(conv, *norms):
    return lambda: nn.Sequential(conv(), *(n() for n in norms), nn.Tanh())


def conv(dims):
    kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    return lambda: kinds[dims](1, 3, 2, bias=False)


def bn_in_eval_mode():
    return nn.BatchNorm2d(3).eval()


class IntegerBuffers(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3, dtype=torch.int32), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.table[1] += 2
        return super().forward(x) * self.calls + self.table.sum()


class ReplacedBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x) + self.mean


class Shared(Net):
    """One module, with a buffer, under two names."""

    def __init__(self):
        super().__init__()
        self.bn = self.again = nn.BatchNorm1d(5)

    def forward(self, x):
        return super().forward(self.again(self.bn(x)))


def spectral():
    net = Net()
    parametrizations.spectral_norm(net.a)
    nn.utils.spectral_norm(net.b)
    return net


def weight_norm():
    net = Net()
    parametrizations.weight_norm(net.a)
    return net


ROWS, IMAGES = (4, 5), (3, 1, 5, 5)
MODULES = {
    "batch_norm_1d": (normalised(conv(1), lambda: nn.BatchNorm1d(3)), (4, 1, 6)),
    "batch_norm_2d": (normalised(conv(2), lambda: nn.BatchNorm2d(3, affine=False)), IMAGES),
    "batch_norm_3d": (normalised(conv(3), lambda: nn.BatchNorm3d(3)), (2, 1, 3, 3, 3)),
    "cumulative": (normalised(conv(2), lambda: nn.BatchNorm2d(3, momentum=None)), IMAGES),
    "eval_inside": (
        normalised(conv(2), bn_in_eval_mode, lambda: nn.BatchNorm2d(3)),
        IMAGES,
    ),
    "instance_norm": (
        normalised(conv(2), lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
        IMAGES,
    ),
    "integers": (IntegerBuffers, ROWS),
    "replaced": (ReplacedBuffer, ROWS),
    "shared": (Shared, ROWS),
    "spectral_norm": (spectral, ROWS),
    "weight_norm": (weight_norm, ROWS),
    "lstm": (lambda: First(nn.LSTM(5, 4, batch_first=True)), (2, 3, 5)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0), (3, 2, 8)),
}


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


@pytest.mark.parametrize("name", MODULES)
def test_equals_the_plain_loop(engine, name):
    make, shape = MODULES[name]
    ref = make()
    start = copy.deepcopy(ref)
    model = check(engine, ref, squares, copy.deepcopy(ref), lambda: list(torch.randn(3, *shape)))
    own, wanted = dict(model.named_buffers()), dict(ref.named_buffers())
    assert own.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(own[key].cpu(), wanted[key], rtol=1e-5, atol=1e-6, msg=key)
    moved = [k for k, b in start.named_buffers() if not torch.equal(b, wanted[k])]
    assert moved or name in ("weight_norm", "lstm", "transformer")


def step_of(engine, model, loss=squares, **options):
    model = model.to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return funcacc.TrainStep(model, opt, loss, **options)


class LazyBuffer(Net):
    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(5, device=x.device) * 2)
        return super().forward(x) * self.scale


def test_a_buffer_made_in_the_forward_pass_is_refused_and_leaves_no_trace(engine):
    model = LazyBuffer()
    step = step_of(engine, model)
    with pytest.raises(funcacc.FuncaccError, match=r"makes buffers\['scale'\].*one forward pass"):
        step([torch.randn(4, 5)])
    assert not hasattr(model, "scale")
    model(torch.randn(4, 5).to(funcacc.device(engine)))
    step([torch.randn(4, 5)])


class Growing(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(1, 5))

    def forward(self, x):
        self.queue = torch.cat([self.queue, x.detach()])
        return super().forward(x)


class WritesWeight(Net):
    def forward(self, x):
        self.a.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class WritesAttribute(Net):
    def __init__(self):
        super().__init__()
        self.sum = torch.zeros(5)

    def forward(self, x):
        self.sum.add_(1)
        return super().forward(x) + self.sum


class ReplacesAttribute(WritesAttribute):
    def forward(self, x):
        self.sum = self.sum + 1
        return Net.forward(self, x) + self.sum


class Unfreezes(Net):
    def __init__(self):
        super().__init__()
        self.a.weight.requires_grad_(False)

    def forward(self, x):
        self.a.weight.requires_grad_(True)
        return super().forward(x)


class MakesModule(Net):
    def forward(self, x):
        self.c = nn.Linear(5, 5)
        return self.c(super().forward(x))


def accumulates(model, x):
    model(x).sum().backward()
    return model(x).sum()


REFUSED = {
    Growing: r"buffers\['queue'\] enters as float32\[1,5\] and leaves as float32\[5,5\]",
    WritesWeight: r"writes in place into params\['a.weight'\].*under torch.no_grad",
    WritesAttribute: r"writes in place into a float32\[5\] tensor.*register_buffer",
    ReplacesAttribute: r"replaces 'sum'.*register_buffer\('sum', \.\.\.\)",
    Unfreezes: r"sets requires_grad of params\['a.weight'\].*before the call",
    MakesModule: r"makes params\['c.weight'\].*one forward pass",
    accumulates: r"backward\(\) at .*test_modules\.py:\d+ .*return the loss",
}


@pytest.mark.parametrize("what", REFUSED, ids=lambda w: w.__name__)
def test_what_a_step_would_lose_is_refused(engine, what):
    model, loss = (what(), squares) if isinstance(what, type) else (Net(), what)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    step = step_of(engine, model, loss)
    with pytest.raises(funcacc.FuncaccError, match=REFUSED[what]):
        step([torch.randn(4, 5)])
    now = model.state_dict()
    assert now.keys() == state.keys()
    assert all(torch.equal(v, now[k].cpu()) for k, v in state.items())


def test_hooks_that_wait_for_grad_are_refused(engine):
    model = Net().to(funcacc.device(engine))
    model.a.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        funcacc.FuncaccError, match=r"params\['a.weight'\] has a hook.*grad_transform"
    ):
        step_of(engine, model)([torch.randn(4, 5)])


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale, self.power, self.calls = torch.full((5,), 2.0), 1, 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.scale**self.power


def test_attributes_that_the_user_replaces(engine):
    model, ref = Scaled(), Scaled()
    ref.load_state_dict(model.state_dict())
    step = step_of(engine, model)
    x = torch.randn(4, 5)

    def agrees():
        want = squares(ref, x)
        out = step([x])
        torch.testing.assert_close(out.loss.cpu(), want.detach())
        ref.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})

    agrees()
    model.scale.mul_(3)  # in place: the tensor is read anew at each call
    ref.scale.mul_(3)
    agrees()
    agrees()
    model.scale, ref.scale = torch.full((5,), 0.5), torch.full((5,), 0.5)
    agrees()
    model.power = ref.power = 2
    agrees()
    assert step.report().reasons == [
        "first call", "attribute scale changed", "attribute power changed"
    ]  # fmt: skip
    assert model.calls == 3


def test_lazy_modules_are_refused_until_they_are_made(engine):
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 5))
    model = model.to(funcacc.device(engine))
    opt = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(funcacc.FuncaccError, match=r"'0' is a lazy module.*one forward pass"):
        funcacc.TrainStep(model, opt, squares)
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 5))
    model(torch.randn(2, 5))
    step_of(engine, model)([torch.randn(4, 5)])


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: dict


class Structured(Net):
    def forward(self, x):
        h = self.a(x)
        return Output(self.b(h), {"h": h, "pair": (h, [h + 1])})


def structured(model, x):
    out = model(x)
    h, (more,) = out.hidden["pair"]
    return out.logits.square().mean() + (h * more).mean() + out.hidden["h"].mean()


def test_modules_that_return_structures(engine):
    check(engine, Structured(), structured)


def test_teacher_and_student(engine):
    teacher = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)).eval()
    ref = Net()
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    own_teacher = copy.deepcopy(teacher).to(funcacc.device(engine))
    teachers = {id(ref): teacher, id(model): own_teacher}

    def distil(model, x):
        with torch.no_grad():
            target = teachers[id(model)](x)
        return F.mse_loss(model(x), target)

    ref_opt, opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref, model))
    step = funcacc.TrainStep(model, opt, distil)
    for _ in range(3):
        batches = list(torch.randn(2, 4, 5))
        plain_step(ref, ref_opt, distil, batches)
        step(batches)
        with torch.no_grad():
            # The teacher follows the student, as in self-distillation.
            for t, s in ((teacher, ref), (own_teacher, model)):
                t[0].weight.lerp_(s.a.weight, 0.5)
    assert_same(model, opt, ref, ref_opt)
    assert step.report().compiles == 1


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 5))
        self.d = nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(), nn.Linear(6, 1))


def discriminate(gan, batch):
    fake = gan.g(batch["noise"]).detach()
    return F.softplus(-gan.d(batch["real"])).mean() + F.softplus(gan.d(fake)).mean()


def generate(gan, batch):
    return F.softplus(-gan.d(gan.g(batch["noise"]))).mean()


def test_generator_and_discriminator_with_two_steps_over_shared_modules(engine):
    ref = Gan()
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    opts = [
        [torch.optim.Adam(part.parameters(), lr=1e-2, eps=1e-4) for part in (m.d, m.g)]
        for m in (ref, model)
    ]
    losses = (discriminate, generate)
    steps = [funcacc.TrainStep(model, o, f) for o, f in zip(opts[1], losses, strict=True)]
    for _ in range(3):
        for ref_opt, step, loss in zip(opts[0], steps, losses, strict=True):
            batches = [{"noise": torch.randn(4, 5), "real": torch.randn(4, 5)} for _ in range(2)]
            plain_step(ref, ref_opt, loss, batches)
            step(batches)
    for ref_opt, opt in zip(*opts, strict=True):
        assert_same(model, opt, ref, ref_opt, 1e-5)
    assert [s.report().compiles for s in steps] == [1, 1]
