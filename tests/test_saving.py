"""Files of `save`: what they hold, and that whatever doesn't fit is named and changes nothing."""

import json
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

import funcacc
from funcacc.errors import StateError

SUFFIXES = [".pt", ".safetensors"]


def loss_fn(model, x):
    return model(x).square().mean()


class Parts:
    """A run's objects, after some steps, on the eager engine."""

    def __init__(self, width=3, make=None, steps=1):
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.opt = (make or adamw)(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.opt, [1, 1, 5])
        self.step = funcacc.TrainStep(self.model, self.opt, loss_fn, seed=1)
        for _ in range(steps):
            self.step([torch.randn(5, 4) for _ in range(2)])
            self.schedule.step()

    def named(self):
        return dict(vars(self))


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def snapshot(parts):
    """Everything that loading may touch, comparable."""
    states = {k: v.state_dict() for k, v in parts.items() if hasattr(v, "state_dict")}
    return repr(states)


def test_a_step_is_stateful():
    assert isinstance(Parts(steps=0).step, Stateful)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_everything_comes_back(suffix, tmp_path):
    torch.set_printoptions(precision=10)
    run, other = Parts(steps=2), Parts(steps=0)
    rest = {
        "epoch": 3,
        "rate": np.float64(0.25),
        "nested": {"a": [1, 2.5, None, "x"], 7: (True, torch.ones(2, dtype=torch.bfloat16))},
        "dtype": torch.float16,
        "inf": float("inf"),
        "view": torch.arange(100.0)[2:4],
        "both": [run.model[0].weight, run.model[0].weight],
    }
    path = tmp_path / f"run{suffix}"
    funcacc.save(path, **run.named(), **rest)
    loaded = funcacc.load(path, **other.named())
    assert snapshot(run.named()) == snapshot(other.named())
    assert type(other.schedule.milestones) is type(run.schedule.milestones)
    assert repr(loaded) == repr(
        loaded | {k: v for k, v in rest.items() if k not in ("rate", "both")}
    )
    assert loaded["rate"] == 0.25 and type(loaded["rate"]) is float
    assert torch.equal(loaded["both"][1], run.model[0].weight)
    assert loaded["view"].untyped_storage().nbytes() == 8
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_files_are_what_other_programs_read(tmp_path):
    run = Parts()
    funcacc.save(tmp_path / "run.pt", **run.named())
    plain = torch.load(tmp_path / "run.pt", weights_only=True)
    nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).load_state_dict(
        plain["model"]
    )
    funcacc.save(tmp_path / "run.safetensors", **run.named())
    tensors = safetensors.torch.load_file(tmp_path / "run.safetensors")
    assert torch.equal(tensors["model.0.weight"], run.model[0].weight)
    entry = run.opt.state[run.model[0].weight]["exp_avg"]
    assert torch.equal(tensors["opt.state.0.exp_avg"], entry)


def test_lists_of_optimizers(tmp_path):
    def make():
        model = nn.Linear(4, 3)
        opts = [sgd([model.weight]), adamw([model.bias])]
        return {"model": model, "opts": opts, "step": funcacc.TrainStep(model, opts, loss_fn)}

    run, other = make(), make()
    run["step"]([torch.randn(5, 4)])
    path = tmp_path / "run.pt"
    funcacc.save(path, **run)
    funcacc.load(path, **other)
    for a, b in zip(run["opts"], other["opts"], strict=True):
        assert repr(a.state_dict()) == repr(b.state_dict())
    with pytest.raises(StateError, match=r"opts: 2 states in the file, 1 objects here"):
        funcacc.load(path, **{**other, "opts": other["opts"][:1]})


MISFITS = {
    "shape": (
        dict(width=2),
        [
            r"  model['0.weight']: float32[3,4] in the file, float32[2,4] here",
            r"  model['1.running_mean']: float32[3] in the file, float32[2] here",
            r"  opt['state'][0]['exp_avg']: float32[3,4] in the file, float32[2,4] here "
            r"of model.0.weight",
        ],
    ),
    "another optimizer": (
        dict(make=sgd),
        ["  opt['param_groups'][0]['momentum']: missing in the file, 0.9 here"],
    ),
    "alike, but with other state": (
        dict(make=torch.optim.NAdam),
        ["  opt['param_groups'][0]['momentum_decay']: missing in the file, 0.004 here"],
    ),
    "only the state differs": (
        dict(make=lambda ps: torch.optim.Adamax(ps, lr=0.1)),
        [
            "  opt['state'][0]['exp_inf']: missing in the file, float32[3,4] here of model.0.w",
            "  opt['state'][0]['exp_avg_sq']: float32[3,4] in the file, missing here of model",
        ],
    ),
    "fewer parameters": (
        dict(make=lambda ps: adamw(list(ps)[:2])),
        ["  opt['param_groups'][0]['params']: 6 in the file, 2 here"],
    ),
    "more groups": (
        dict(make=lambda ps: adamw([{"params": [p]} for p in ps])),
        ["  opt['param_groups']: 1 in the file, 6 here"],
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_and_nothing_is_changed(name, tmp_path):
    kwargs, lines = MISFITS[name]
    path = tmp_path / "run.pt"
    funcacc.save(path, **Parts(steps=1).named())
    for steps in (0, 1):
        other = Parts(**kwargs, steps=steps).named()
        before = snapshot(other)
        with pytest.raises(StateError) as e:
            funcacc.load(path, **other)
        assert "run.pt doesn't fit; nothing was loaded:\n" in str(e.value)
        for line in lines:
            assert line in str(e.value)
        assert snapshot(other) == before


def double(parts):
    parts["model"].double()


def longer(parts):
    parts["model"].append(nn.Linear(1, 1))


def other_schedule(parts):
    parts["schedule"] = torch.optim.lr_scheduler.StepLR(parts["opt"], 2)


def extra(parts):
    parts["average"] = nn.Linear(1, 1)


def not_loadable(parts):
    parts["epoch"] = 0


EDITS = {
    double: r"model['0.weight']: float32[3,4] in the file, float64[3,4] here",
    longer: r"model['3.weight']: missing in the file, float32[1,1] here",
    other_schedule: r"schedule['step_size']: missing in the file, a number here",
    extra: "average: missing in the file, which holds model, opt, schedule, step, epoch",
    not_loadable: "epoch is a int, which has no load_state_dict; leave it out",
}


@pytest.mark.parametrize("edit", EDITS)
def test_more_that_does_not_fit(edit, tmp_path):
    path = tmp_path / "run.safetensors"
    funcacc.save(path, **Parts().named(), epoch=1)
    other = Parts(steps=0).named()
    edit(other)
    before = snapshot(other)
    with pytest.raises(StateError) as e:
        funcacc.load(path, **other)
    assert EDITS[edit] in str(e.value)
    assert snapshot(other) == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_and_damaged_files_are_refused(suffix, tmp_path):
    path = tmp_path / f"run{suffix}"
    run = Parts()
    funcacc.save(path, **run.named(), big=torch.ones(2000))
    whole = path.read_bytes()
    before = snapshot(run.named())
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StateError, match=r"is truncated, or no|is damaged"):
            funcacc.load(path, **run.named())
    # One bit in the middle of the numbers, which PyTorch itself would load.
    at = whole.index(b"\x00\x00\x80\x3f" * 100) + 50
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    with pytest.raises(StateError, match=r"is damaged: the checksum of .* is wrong"):
        funcacc.load(path, **run.named())
    assert snapshot(run.named()) == before


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def test_foreign_files_are_refused(tmp_path):
    parts = Parts().named()
    path = tmp_path / "a.pt"
    with pytest.raises(FileNotFoundError):
        funcacc.load(path, **parts)
    torch.save({"model": Evil()}, path)
    with pytest.raises(StateError, match="doesn't load with weights_only=True"):
        funcacc.load(path, **parts)
    torch.save(parts["model"].state_dict(), path)
    with pytest.raises(StateError, match=r"opt: missing in the file, which holds 0.weight, 0.bias"):
        funcacc.load(path, **parts)
    torch.save([1, 2], path)
    with pytest.raises(StateError, match="holds a list, where a dict by name belongs"):
        funcacc.load(path, **parts)
    weights = tmp_path / "a.safetensors"
    safetensors.torch.save_file(dict(parts["model"].state_dict()), weights)
    with pytest.raises(StateError, match=r"no 'funcacc' entry.* holds 0\.bias, .*load_file"):
        funcacc.load(weights, **parts)
    header = json.dumps({"__metadata__": {"funcacc": "{"}}).encode()
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(StateError, match="the checksum of its 'funcacc' entry is wrong"):
        funcacc.load(weights, **parts)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_cannot_be_saved_is_named_and_the_old_file_stays(suffix, tmp_path):
    path = tmp_path / f"run{suffix}"
    funcacc.save(path, epoch=1)
    with pytest.raises(StateError, match=r"best\['when'\]\[1\] is a object, which a file that"):
        funcacc.save(path, best={"when": [1, object()]})
    with pytest.raises(StateError, match=r"best has the key \(1, 2\); only strings"):
        funcacc.save(path, best={(1, 2): 3})
    with pytest.raises(TypeError):
        funcacc.save(path, epoch=2, other=Unwritable(torch.ones(1)))
    assert funcacc.load(path) == {"epoch": 1}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


class Unwritable(nn.Parameter):
    """Fails in the middle of writing."""

    def detach(self):
        raise TypeError("not this one")


class Fragile:
    """Its state can't be compared beforehand, and the second of two doesn't load."""

    def __init__(self, value, fails=False):
        self.value, self.fails = value, fails

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if self.fails and self.value == 1:
            raise ValueError("no")


def test_objects_that_fail_while_loading_are_put_back(tmp_path):
    path = tmp_path / "run.pt"
    run, other = Parts(), Parts(steps=0)
    funcacc.save(path, **run.named(), a=Fragile(1), b=Fragile(1))
    parts = {**other.named(), "a": Fragile(2), "b": Fragile(3, fails=True)}
    before = snapshot(parts)
    with pytest.raises(ValueError, match="no"):
        funcacc.load(path, **parts)
    assert snapshot(parts) == before


def test_shards_of_a_list_of_optimizers(engine, tmp_path):
    def make():
        model = nn.Linear(3, 3).to(funcacc.device(engine))
        opts = [
            torch.optim.AdamW([model.weight]),
            torch.optim.SGD([model.bias], lr=0.1, momentum=0.9),
        ]
        return model, opts, funcacc.TrainStep(model, opts, lambda m, x: m(x).square().mean())

    (model, opts, step), (other, others, again) = make(), make()
    window = [torch.ones(2, 3)]
    for _ in range(2):
        step(window)
    funcacc.sharding.save(tmp_path, model=model, opts=opts, step=step, epoch=[1, 2])
    again.compile(window)
    found = funcacc.sharding.load(tmp_path, model=other, opts=others, step=again, epoch=[0, 0])
    assert found == {"epoch": [1, 2]}
    step(window)
    again(window)
    for a, b in zip([model, *opts], [other, *others], strict=True):
        left, right = (funcacc.trees.flatten(x.state_dict())[0] for x in (a, b))
        assert all(
            torch.equal(x.cpu(), y.cpu()) if isinstance(x, torch.Tensor) else x == y
            for x, y in zip(left, right, strict=True)
        )
