"""A failure at any point leaves everything at one step, and what follows has the same numbers."""

import copy
import os
import signal
import sys
import threading

import pytest
import torch
from torch import nn

import funcacc
from funcacc import guard, programs
from funcacc.engines import eager
from funcacc.errors import EngineError, StateError
from funcacc.optimizers import rules
from tests.engines import ENGINES
from tests.oracle import assert_same, plain_step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


def loss_fn(model, x):
    return model(x).square().mean()


def other_loss(model, x):
    return model(x).abs().mean()


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-4),
    # Its first state is the first gradient, undamped: an early zero would show.
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.5),
}


class Setting:
    """A model, its plain twin, and an earlier step over both that has run."""

    def __init__(self, engine, name="adamw", start=1):
        self.ref = Net()
        self.model = copy.deepcopy(self.ref).to(funcacc.device(engine))
        self.opt, self.ref_opt = OPTIMIZERS[name](self.model), OPTIMIZERS[name](self.ref)
        self.schedule, self.ref_schedule = (
            torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (self.opt, self.ref_opt)
        )
        self.step = funcacc.TrainStep(self.model, self.opt, loss_fn)
        for _ in range(start):
            self.advance(self.step)

    def advance(self, step, loss=loss_fn):
        batches = [torch.randn(6, 3) for _ in range(2)]
        plain_step(self.ref, self.ref_opt, loss, batches)
        step(batches)
        self.schedule.step()
        self.ref_schedule.step()

    def same(self):
        assert_same(self.model, self.opt, self.ref, self.ref_opt, 1e-5)
        assert self.schedule.state_dict() == self.ref_schedule.state_dict()


class Fault(Exception):
    pass


def failing(stage, real, after):
    """A stand-in that fails; when the real thing is done, or before."""

    def run(*args, **kwargs):
        if after:
            real(*args, **kwargs)
        raise Fault(f"injected: {stage}")

    return run


EVERYWHERE = {
    "trace of the loss": (programs, "trace_microbatch"),
    "first optimizer state": ("opt", "create"),
    "trace of the optimizer": (rules, "trace_rule"),
    "trace of the step": (programs, "trace_step"),
    "upload of the state": ("engine", "put"),
    "upload of the window": ("engine", "move"),
}
STAGES = {"eager": {**EVERYWHERE, "program": (eager, "EagerProgram")}}
if "xla" in ENGINES:
    from funcacc.engines import xla
    from funcacc.engines.xla import private

    STAGES["xla"] = {
        **EVERYWHERE,
        "lowering": (xla, "lower"),
        "lowering halfway": (sys.modules["funcacc.engines.xla.lower"], "_interpret"),
        "HLO": (private, "lower_lazy"),
        "compiling": (private, "compile_cached"),
        "copies": (private, "copies"),
    }
if "jax" in ENGINES:
    from funcacc.engines import jax as on_jax

    STAGES["jax"] = {
        **EVERYWHERE,
        "decomposing": (on_jax, "expanded"),
        "lowering": (on_jax, "lowered"),
        "lowering halfway": (sys.modules["funcacc.engines.jax.lower"], "_interpret"),
        "compiling": (on_jax.JaxProgram, "prepare"),
        "copies": (on_jax.Memory, "copy"),
    }


def inject(patch, step, stage, after):
    owner, name = STAGES[step._engine.name][stage]
    owner = {"opt": step._adopted, "engine": step._engine}.get(owner, owner)
    patch.setattr(owner, name, failing(stage, getattr(owner, name), after))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_failure_while_a_program_is_made_changes_nothing(engine, name, monkeypatch):
    """At each stage: the earlier step, the scheduler and a later try go on as if it hadn't been."""
    s = Setting(engine, name)
    for stage in STAGES[engine]:
        for after in (False, True):
            step = funcacc.TrainStep(s.model, s.opt, other_loss)
            with monkeypatch.context() as patch:
                inject(patch, step, stage, after)
                # A rule that the optimizer has been traced to isn't traced again.
                with pytest.raises(Fault, match=f"injected: {stage}"):
                    step([torch.randn(6, 3) for _ in range(3)])
            s.same()
    s.advance(s.step)
    s.advance(step, other_loss)
    s.advance(s.step)
    s.same()
    assert s.step.report().traces == 1


def test_a_failed_first_call_leaves_no_optimizer_state(engine, monkeypatch):
    for stage in STAGES[engine]:
        s = Setting(engine, "momentum", start=0)
        with monkeypatch.context() as patch:
            inject(patch, s.step, stage, True)
            with pytest.raises(Fault, match=f"injected: {stage}"):
                s.step([torch.randn(6, 3) for _ in range(2)])
        assert not s.opt.state
        s.same()
    s.advance(s.step)
    s.advance(s.step)
    s.same()
    assert s.step.report().compiles == 1


@pytest.mark.xla
def test_a_program_that_fails_on_the_device_leaves_the_state_or_says_what_is_lost(monkeypatch):
    s = Setting("xla")
    with monkeypatch.context() as patch:
        patch.setattr(private, "run_cached", _refuse)
        with pytest.raises(EngineError, match=r"failed to run the step: no memory\. Parameters"):
            s.step([torch.randn(6, 3) for _ in range(2)])
    s.advance(s.step)
    s.same()
    saved = copy.deepcopy(s.ref.state_dict()), copy.deepcopy(s.ref_opt.state_dict())
    own = s.step.state_dict()
    real = private.run_cached
    with monkeypatch.context() as patch:
        patch.setattr(private, "run_cached", lambda h, v: [real(h, v), _refuse()])
        with pytest.raises(StateError, match=r"had taken its state over: no memory.*Load a checkp"):
            s.step([torch.randn(6, 3) for _ in range(2)])
    with pytest.raises(StateError, match=r"failed in an earlier step, and .* no value since then"):
        s.step([torch.randn(6, 3) for _ in range(2)])
    s.model.load_state_dict(saved[0])
    s.opt.load_state_dict(saved[1])
    s.step.load_state_dict(own)
    s.advance(s.step)
    s.same()


def _refuse(*_args):
    raise RuntimeError("no memory\nmore of the same")


def test_interrupts_wait_until_model_and_optimizer_agree(engine, monkeypatch):
    """Ctrl-C in the middle of the dispatch is raised behind it."""
    s = Setting(engine)
    assign = s.step._engine.assign

    def interrupted(targets, values):
        os.kill(os.getpid(), signal.SIGINT)
        assign(targets, values)

    batches = [torch.randn(6, 3) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(s.step._engine, "assign", interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.step(batches)
    plain_step(s.ref, s.ref_opt, loss_fn, batches)
    s.same()
    s.advance(s.step)
    s.same()


def test_handlers_of_signals_are_as_before():
    before = signal.getsignal(signal.SIGINT)
    with guard.deferred():
        assert signal.getsignal(signal.SIGINT) is not before
        with guard.deferred():
            pass
    assert signal.getsignal(signal.SIGINT) is before
    seen = []

    def elsewhere():
        with guard.deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]
