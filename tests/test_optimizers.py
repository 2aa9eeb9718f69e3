"""Every optimizer against its own plain PyTorch run, every hyperparameter after a change."""

import copy

import pytest
import torch
from torch import nn

import funcacc
from funcacc.errors import OptimizerError
from tests.oracle import assert_same, plain_step

optim = torch.optim
# Larger than the default, where rounding of a small gradient would be a whole step.
EPS = {"eps": 1e-4}
CASES = {
    "sgd": (optim.SGD, dict(lr=0.1)),
    "sgd-nesterov": (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "sgd-dampening": (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.1, maximize=True)),
    "adam": (optim.Adam, dict(lr=0.01, weight_decay=0.1, **EPS)),
    "adam-amsgrad": (optim.Adam, dict(lr=0.01, amsgrad=True, **EPS)),
    "adamw": (optim.AdamW, dict(lr=0.01, **EPS)),
    "adamax": (optim.Adamax, dict(lr=0.01, weight_decay=0.1, **EPS)),
    "nadam": (optim.NAdam, dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, **EPS)),
    "radam": (optim.RAdam, dict(lr=0.01, weight_decay=0.1, **EPS)),
    "rmsprop": (optim.RMSprop, dict(lr=0.01, weight_decay=0.1, **EPS)),
    "rmsprop-centered": (optim.RMSprop, dict(lr=0.01, centered=True, momentum=0.9, eps=1e-2)),
    "rprop": (optim.Rprop, dict(lr=0.01)),
    "adagrad": (optim.Adagrad, dict(lr=0.01, lr_decay=0.1, weight_decay=0.1, **EPS)),
    "adadelta": (optim.Adadelta, dict(lr=0.1, weight_decay=0.1, **EPS)),
    "asgd": (optim.ASGD, dict(lr=0.1, t0=2, weight_decay=0.01)),
    "adafactor": (optim.Adafactor, dict(lr=0.01, weight_decay=0.1)),
    "muon": (optim.Muon, dict(lr=0.01)),
}
# Newton-Schulz in bfloat16 turns the rounding of a gradient into this much of an update.
TOLERANCE = {"muon": 2e-3, "rmsprop-centered": 2e-5}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 6, bias=False)
        self.b = nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.scale


def loss_fn(model, x):
    return model(x).square().mean()


class Pair:
    """A model under funcacc beside the same model in the plain loop."""

    def __init__(self, engine, make, model=None, **options):
        self.ref = model or Net()
        self.model = copy.deepcopy(self.ref).to(funcacc.device(engine))
        self.opt, self.ref_opt = make(self.model), make(self.ref)
        self.step = funcacc.TrainStep(self.model, self.opt, loss_fn, **options)

    @property
    def both(self):
        return self.opt, self.ref_opt

    def advance(self, steps=1):
        for _ in range(steps):
            batches = [torch.randn(5, 4) for _ in range(2)]
            self.step(batches)
            plain_step(self.ref, self.ref_opt, loss_fn, batches)

    def check(self, tolerance=2e-6):
        assert_same(self.model, self.opt, self.ref, self.ref_opt, tolerance)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def pair_of(engine, name):
    cls, kwargs = CASES[name]
    return Pair(engine, lambda m: cls(trainable(m), **kwargs))


@pytest.mark.parametrize("name", CASES)
def test_equals_its_own_run(engine, name):
    """Also the state's keys and dtypes, and lr changed between steps without a new program."""
    pair = pair_of(engine, name)
    for t in range(5):
        for opt in pair.both:
            opt.param_groups[0]["lr"] *= 1 - 0.1 * t
        pair.advance()
    pair.check(TOLERANCE.get(name, 2e-6))
    state, ref_state = (opt.state_dict()["state"] for opt in pair.both)
    for i in ref_state:
        for key, value in ref_state[i].items():
            assert not isinstance(value, torch.Tensor) or state[i][key].dtype == value.dtype
    report = pair.step.report()
    assert (report.compiles, report.traces) == (1, 1)
    assert report.donated_leaves == report.state_leaves == report.in_place_leaves


def hyperparameters():
    for name, (cls, kwargs) in CASES.items():
        group = cls([nn.Parameter(torch.zeros(2, 2))], **kwargs).param_groups[0]
        for key, value in group.items():
            if key not in ("params", "lr", "foreach", "fused", "capturable", "differentiable"):
                yield name, key, value


def changed(name, key, value):
    """Another value that the optimizer accepts, or None."""
    special = {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 4, "etas": (0.4, 1.3), "t0": 3.0}
    if key in special:
        return special[key]
    if isinstance(value, bool):
        # amsgrad and centered add state, which PyTorch itself doesn't make in mid-run.
        return None if key in ("amsgrad", "centered", "decoupled_weight_decay") else not value
    if isinstance(value, tuple):
        return tuple(x * 0.9 if isinstance(x, float) else x for x in value)
    if isinstance(value, (int, float)):
        return value * 0.5 if value else 0.1
    return None


@pytest.mark.parametrize("name, key, value", list(hyperparameters()))
def test_a_changed_hyperparameter_is_used(name, key, value):
    """On the eager engine: which numbers are inputs is decided above the engines."""
    new = changed(name, key, value)
    if new is None:
        pytest.skip("PyTorch itself can't change it in mid-run")
    if (name, key) in {("sgd", "momentum"), ("sgd", "nesterov"), ("rmsprop", "momentum")}:
        pytest.skip("adds state in mid-run")
    if name == "sgd-nesterov" and key in ("momentum", "dampening") and not new:
        pytest.skip("nesterov needs it")
    pair = pair_of("eager", name)
    pair.advance(2)
    for opt in pair.both:
        opt.param_groups[0][key] = new
    pair.advance(2)
    pair.check(TOLERANCE.get(name, 2e-6))


@pytest.mark.parametrize("cls", [optim.LBFGS, optim.SparseAdam])
def test_refused_with_the_reason(engine, cls):
    model = Net().to(funcacc.device(engine))
    opt = cls(trainable(model))
    with pytest.raises(OptimizerError, match=f"{cls.__name__} can't be part of a compiled step"):
        funcacc.TrainStep(model, opt, loss_fn)


ADAPTIVE = [name for name in CASES if not name.startswith(("sgd", "asgd", "muon"))]


@pytest.mark.parametrize("name", ADAPTIVE)
def test_warm_up_from_zero_where_a_gradient_is_zero(name):
    """An embedding's rows that no token has named yet, at a learning rate of 0."""
    pair = pair_of("eager", name)
    schedulers = [optim.lr_scheduler.LambdaLR(opt, lambda t: t / 3) for opt in pair.both]
    for _ in range(3):
        x = torch.randn(5, 4) * torch.tensor([0.0, 1.0, 1.0, 1.0])
        pair.step([x])
        plain_step(pair.ref, pair.ref_opt, loss_fn, [x])
        for s in schedulers:
            s.step()
    pair.check(TOLERANCE.get(name, 2e-6))


def test_groups_have_their_own_hyperparameters(engine):
    def make(m):
        groups = [
            {"params": [m.a.weight], "lr": 0.05, "weight_decay": 0.0},
            {"params": [m.b.weight], "betas": (0.5, 0.9)},
        ]
        return optim.AdamW(groups, lr=0.01, weight_decay=0.1, **EPS)

    pair = Pair(engine, make)
    pair.advance(3)
    pair.check()


def test_one_trace_serves_all_parameters_that_are_alike(monkeypatch):
    from funcacc.optimizers import rules

    traced = []
    original = rules.trace_rule
    monkeypatch.setattr(rules, "trace_rule", lambda *args: traced.append(1) or original(*args))
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    pair = Pair("eager", lambda m: optim.AdamW(m.parameters(), **EPS), model)
    pair.advance()
    pair.check()
    assert len(traced) == 2  # weights, biases


def test_a_list_of_optimizers(engine):
    ref = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model = copy.deepcopy(ref).to(funcacc.device(engine))

    def make(m):
        matrices = [p for p in m.parameters() if p.ndim == 2]
        vectors = [p for p in m.parameters() if p.ndim != 2]
        return [optim.SGD(matrices, lr=0.1, momentum=0.9), optim.AdamW(vectors, lr=0.01, **EPS)]

    opts, ref_opts = make(model), make(ref)
    for _ in range(3):
        batches = [torch.randn(5, 4) for _ in range(2)]
        funcacc.train_step(model, opts, batches, loss_fn)
        ref.zero_grad()
        for b in batches:
            (loss_fn(ref, b) / 2).backward()
        for opt in ref_opts:
            opt.step()
    for opt, ref_opt in zip(opts, ref_opts, strict=True):
        assert_same(model, opt, ref, ref_opt)


def test_post_step_hooks_run_and_see_the_new_parameters(engine):
    seen = {}

    def hook(opt, args, kwargs):
        seen.setdefault(id(opt), []).append(opt.param_groups[0]["params"][0].detach().cpu().clone())

    pair = Pair(engine, lambda m: optim.SGD(trainable(m), lr=0.1))
    for opt in pair.both:
        opt.register_step_post_hook(hook)
    pair.advance(2)
    own, ref = (seen[id(o)] for o in pair.both)
    for a, b in zip(own, ref, strict=True):
        torch.testing.assert_close(a, b)


def test_a_pre_step_hook_is_refused(engine):
    pair = Pair(engine, lambda m: optim.SGD(trainable(m), lr=0.1))
    handle = pair.opt.register_step_pre_hook(lambda *args: None)
    with pytest.raises(OptimizerError, match="SGD has a step pre-hook; gradients exist only"):
        pair.step([torch.randn(5, 4)])
    handle.remove()
    pair.advance()
    pair.check()


def test_averaged_model_follows(engine):
    pair = Pair(engine, lambda m: optim.SGD(trainable(m), lr=0.1))
    averaged = [optim.swa_utils.AveragedModel(m) for m in (pair.model, pair.ref)]
    for _ in range(3):
        pair.advance()
        for a, m in zip(averaged, (pair.model, pair.ref), strict=True):
            a.update_parameters(m)
    own, ref = (a.state_dict() for a in averaged)
    for key in ref:
        torch.testing.assert_close(own[key].cpu(), ref[key])


class Momentum:
    """``init``/``update`` as optax has them; the oracle below is the formula by hand."""

    def init(self, params):
        return {"trace": {n: torch.zeros_like(p) for n, p in params.items()}, "count": 0}

    def update(self, grads, state, params):
        trace = {n: g.add_(0.9 * state["trace"][n]) for n, g in grads.items()}
        return {n: -0.1 * t for n, t in trace.items()}, {
            "trace": trace,
            "count": state["count"] + 1,
        }


def test_an_object_with_init_and_update(engine):
    ref = Net()
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    step = funcacc.TrainStep(model, Momentum(), loss_fn)
    trace = {n: torch.zeros_like(p) for n, p in ref.named_parameters() if p.requires_grad}
    for _ in range(3):
        batches = [torch.randn(5, 4) for _ in range(2)]
        step(batches)
        ref.zero_grad()
        for b in batches:
            (loss_fn(ref, b) / 2).backward()
        with torch.no_grad():
            for n, p in ref.named_parameters():
                if p.requires_grad:
                    trace[n] = 0.9 * trace[n] + p.grad
                    p -= 0.1 * trace[n]
    for n, p in ref.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[n].detach().cpu(), p.detach())
    state = step.state.opt_state
    assert int(state["count"]) == 3
    for n, t in trace.items():
        torch.testing.assert_close(state["trace"][n].cpu(), t)
    assert step.report().compiles == 1


def test_an_update_of_another_structure_is_refused(engine):
    class Forgetful(Momentum):
        def update(self, grads, state, params):
            updates, state = super().update(grads, state, params)
            return updates, {"trace": state["trace"]}

    step = funcacc.TrainStep(Net().to(funcacc.device(engine)), Forgetful(), loss_fn)
    with pytest.raises(OptimizerError, match=r"opt_state\['count'\] is missing"):
        step([torch.randn(5, 4)])


def test_something_else_is_refused(engine):
    with pytest.raises(OptimizerError, match="opt is a dict; give a torch"):
        funcacc.TrainStep(Net().to(funcacc.device(engine)), {}, loss_fn)


class HostCounter(torch.optim.Optimizer):
    """Counts in the group, as Python's int, and doubles a float; state starts as a reference."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0, "speed": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["speed"] = max(group["speed"], 0.5) * 2
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"] = 0
                    state["slow"] = p.clone()
                state["steps"] += 1
                p.sub_(p.grad, alpha=group["lr"] / group["k"] * group["speed"])
                state["slow"].lerp_(p, 1 / (state["steps"] + 1))


def test_numbers_that_the_optimizer_keeps_on_the_host(engine):
    pair = Pair(engine, lambda m: HostCounter(trainable(m)))
    pair.advance(3)
    pair.check()
    own, ref = (opt.param_groups[0] for opt in pair.both)
    assert (own["k"], own["speed"]) == (ref["k"], ref["speed"]) == (3, 8.0)
    assert isinstance(own["k"], int)
    assert [s["steps"] for s in pair.opt.state.values()] == [3, 3]
    assert pair.step.report().compiles == 1


def test_a_skipped_window_moves_no_host_number(engine):
    pair = Pair(engine, lambda m: HostCounter(trainable(m)), skip_nonfinite=True)
    pair.advance()
    pair.step([torch.full((5, 4), float("inf"))] * 2)
    assert pair.opt.param_groups[0]["k"] == 1
    pair.advance()
    pair.check()


class Coupled(torch.optim.Optimizer):
    """Clips by the norm of all gradients: parameters can't be traced one by one."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            for p in held:
                p.sub_(p.grad / norm, alpha=group["lr"])


def test_parameters_that_depend_on_each_other_are_traced_together(engine):
    pair = Pair(engine, lambda m: Coupled(trainable(m)))
    pair.advance(2)
    pair.check()


class Branching(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.grad.norm() > 1:  # the line
                p.sub_(p.grad)


def test_a_branch_on_the_device_is_refused_with_its_line(engine):
    pair = Pair(engine, lambda m: Branching(trainable(m)))
    before = copy.deepcopy(pair.model.state_dict())
    with pytest.raises(OptimizerError, match=r"test_optimizers.py:\d+ \(if p.grad is not None"):
        pair.step([torch.randn(5, 4)])
    assert all(torch.equal(v, before[k]) for k, v in pair.model.state_dict().items())


def adamw(model):
    return optim.AdamW(trainable(model), lr=0.01, **EPS)


def test_a_group_added_in_mid_run(engine):
    pair = Pair(engine, lambda m: optim.AdamW([m.a.weight], lr=0.01, **EPS))
    pair.advance(2)
    for opt, model in zip(pair.both, (pair.model, pair.ref), strict=True):
        opt.add_param_group({"params": [model.b.weight], "lr": 0.05})
    pair.advance(2)
    pair.check()


def test_freezing_and_unfreezing_in_mid_run(engine):
    pair = Pair(engine, adamw)
    for frozen in (False, True, False):
        for model in (pair.model, pair.ref):
            model.a.weight.requires_grad_(not frozen)
        before = pair.model.a.weight.detach().cpu().clone()
        pair.advance(2)
        assert torch.equal(before, pair.model.a.weight.detach().cpu()) == frozen
    pair.check()
    assert len(pair.step.report().reasons) == 2


def test_states_loaded_in_mid_run(engine):
    pair = Pair(engine, adamw)
    pair.advance(2)
    saved = copy.deepcopy((pair.ref.state_dict(), pair.ref_opt.state_dict()))
    pair.advance(2)
    for opt, model in zip(pair.both, (pair.model, pair.ref), strict=True):
        model.load_state_dict(saved[0])
        opt.load_state_dict(copy.deepcopy(saved[1]))
    pair.advance(2)
    pair.check()
    assert pair.step.report().compiles == 1


def test_the_state_goes_on_in_a_plain_optimizer_and_back(engine):
    pair = Pair(engine, adamw)
    pair.advance(2)
    plain = copy.deepcopy(pair.ref)
    plain.load_state_dict({k: v.cpu() for k, v in pair.model.state_dict().items()})
    plain_opt = adamw(plain)
    plain_opt.load_state_dict(pair.opt.state_dict())
    batches = [torch.randn(5, 4) for _ in range(2)]
    plain_step(plain, plain_opt, loss_fn, batches)
    plain_step(pair.ref, pair.ref_opt, loss_fn, batches)
    pair.model.load_state_dict(plain.state_dict())
    pair.opt.load_state_dict(plain_opt.state_dict())
    pair.advance()
    pair.check()


def test_edits_between_steps_are_seen(engine):
    pair = Pair(engine, lambda m: optim.SGD(trainable(m), lr=0.1, momentum=0.9))
    pair.advance(2)
    for opt, model in zip(pair.both, (pair.model, pair.ref), strict=True):
        model.a.weight.data.mul_(2)
        opt.state[model.b.weight]["momentum_buffer"].zero_()
    pair.advance(2)
    pair.check()
    assert pair.step.report().compiles == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradient_modes_of_the_caller_do_not_matter(engine, mode):
    pair = Pair(engine, adamw)
    for _ in range(2):
        batches = [torch.randn(5, 4) for _ in range(2)]
        with mode():
            pair.step(batches)
        plain_step(pair.ref, pair.ref_opt, loss_fn, batches)
    pair.check()


def dampened(model):
    """Its momentum starts as the first gradient, which zeros wouldn't give."""
    return optim.SGD(trainable(model), lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_state_starts_from_the_first_gradient_that_counts(engine, steps_per_call):
    pair = Pair(engine, dampened, skip_nonfinite=True, steps_per_call=steps_per_call)
    windows = [[torch.randn(5, 4) for _ in range(2)] for _ in range(3)]
    skipped = [torch.full((5, 4), float("inf"))] * 2
    if steps_per_call > 1:
        list(pair.step.run([skipped, *windows]))
    else:
        for window in (skipped, *windows):
            pair.step(window)
    for window in windows:
        plain_step(pair.ref, pair.ref_opt, loss_fn, window)
    pair.check()


def test_state_loaded_before_the_first_step_is_kept(engine):
    pair = Pair(engine, dampened)
    window = [torch.randn(5, 4) for _ in range(2)]
    plain_step(pair.ref, pair.ref_opt, loss_fn, window)
    pair.model.load_state_dict(pair.ref.state_dict())
    pair.step.compile(window)
    pair.opt.load_state_dict(copy.deepcopy(pair.ref_opt.state_dict()))
    pair.advance()
    pair.check()


def test_a_second_program_made_before_the_first_step_starts_state_too():
    pair = Pair("eager", dampened)
    pair.step.compile([torch.randn(5, 4)])
    pair.step.compile([torch.randn(5, 4) for _ in range(2)])
    pair.advance(2)
    pair.check()
