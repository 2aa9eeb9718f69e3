"""A resumed run equals the uninterrupted one bit for bit, dropout included."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import funcacc
from funcacc.errors import StateError
from tests.test_optimizers import Momentum


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))


def loss_fn(model, x):
    return model(x).square().mean()


BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "init/update": lambda m: Momentum(),
}


class Run:
    def __init__(self, engine, name, seed=7):
        self.model = net().to(funcacc.device(engine))
        self.opt = OPTIMIZERS[name](self.model)
        self.step = funcacc.TrainStep(self.model, self.opt, loss_fn, engine=engine, seed=seed)

    def parts(self):
        parts = {"model": self.model, "step": self.step}
        return {**parts, "opt": self.opt} if hasattr(self.opt, "state_dict") else parts

    def state(self):
        return {k: v.state_dict() for k, v in self.parts().items()}

    def advance(self, steps=2):
        for _ in range(steps):
            self.step(BATCHES)


def through_file(suffix):
    def way(run, other, path):
        file = path.with_suffix(suffix)
        funcacc.save(file, **run.parts())
        assert funcacc.load(file, **other.parts()) == {}

    way.__name__ = suffix
    return way


def by_hand(run, other, path):
    torch.save(run.state(), path)
    saved = torch.load(path, weights_only=True, map_location="cpu")
    for key, part in other.parts().items():
        part.load_state_dict(saved[key])


def through_dcp(run, other, path):
    dcp.save(run.parts(), checkpoint_id=path, no_dist=True)
    # It loads into what is there: the optimizer's state has to be.
    other.step.compile(BATCHES)
    dcp.load(other.parts(), checkpoint_id=path, no_dist=True)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            assert_equal(a[key], b[key])
        elif isinstance(a[key], torch.Tensor):
            assert torch.equal(a[key].cpu(), b[key].cpu()), key
        else:
            assert a[key] == b[key], key


WAYS = [
    ("adamw", through_file(".pt")),
    ("adamw", through_dcp),
    ("momentum", by_hand),
    ("momentum", through_dcp),
    ("init/update", through_file(".safetensors")),
    ("init/update", through_dcp),
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name, way", WAYS)
def test_resume_is_exact(engine, name, way, tmp_path):
    run = Run(engine, name)
    run.advance()
    other = Run(engine, name, seed=8)
    way(run, other, tmp_path / "checkpoint")
    assert_equal(run.state(), other.state())
    run.advance()
    other.advance()
    assert_equal(run.state(), other.state())


def test_another_key_is_another_run():
    """The twin of the test above: dropout would give it away."""
    run, other = Run("eager", "adamw"), Run("eager", "adamw", seed=8)
    run.advance()
    other.model.load_state_dict(run.model.state_dict())
    other.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))
    for r in (run, other):
        r.advance()
    with pytest.raises(AssertionError):
        assert_equal(run.model.state_dict(), other.model.state_dict())


@pytest.mark.parametrize("name, suffix", [("adamw", ".safetensors"), ("init/update", ".pt")])
def test_a_checkpoint_goes_to_another_engine_and_back(engine, name, suffix, tmp_path):
    """The plain run is the eager engine's, which equals it (test_train.py)."""
    run, other, plain = Run(engine, name), Run("eager", name), Run("eager", name)
    plain.model.load_state_dict({k: v.cpu() for k, v in run.model.state_dict().items()})
    run.advance()
    way = through_file(suffix)
    way(run, other, tmp_path / "there")
    other.advance(1)
    way(other, run, tmp_path / "back")
    run.advance(1)
    plain.advance(4)
    for key, value in plain.model.state_dict().items():
        own = run.model.state_dict()[key].cpu()
        torch.testing.assert_close(own, value, rtol=1e-3, atol=1e-5)
    assert run.step.report().compiles == 1


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda s: s.pop("opt_state"), r"opt_state\['trace'\]\['0.bias'\]: None given, float32"),
        (
            lambda s: s["opt_params"].pop(),
            r"'opt_params'\]: \[.*\] given, \[.*'3.bias'\] need",
        ),
        (lambda s: s["opt_state"].update(new=torch.ones(1)), r"new: float32\[1\] given, None need"),
        (lambda s: s.update(step="2"), r"state\['step'\] must be an int"),
        (lambda s: s.update(rng=torch.ones(3)), r"state\['rng'\] must be an int32\[2\] tensor"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(engine, edit, message):
    run = Run(engine, "init/update")
    run.advance(1)
    before, broken = run.step.state_dict(), copy.deepcopy(run.step.state_dict())
    edit(broken)
    with pytest.raises(StateError, match=message):
        run.step.load_state_dict(broken)
    assert_equal(before, run.step.state_dict())
