"""Checks on a mesh of 8 virtual devices, in one process; `test_mesh.py` reports each.

Run alone: ``CPU_NUM_DEVICES=8 python -m tests.mesh_checks [name ...]``.
"""

import contextlib
import copy
import json
import re
import sys
import time
import traceback

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import funcacc

CHECKS = {}


def check(fn):
    CHECKS[fn.__name__] = fn
    return fn


@contextlib.contextmanager
def raises(error, text):
    try:
        yield
    except error as e:
        assert re.search(text, str(e), re.DOTALL), f"{text!r} isn't in: {e}"
    else:
        raise AssertionError(f"no {error.__name__} was raised")


class Block(nn.Module):
    """An MLP block with dropout, whose two matrices tensor parallelism cuts in two ways."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.drop(F.gelu(self.up(x))))


def mean_loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def microbatches(k, rows=8, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(rows, 16, generator=g, dtype=dtype),
            "y": torch.randn(rows, 8, generator=g, dtype=dtype),
        }
        for _ in range(k)
    ]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def plain(model, opt, loss_fn, data):
    """The plain loop on the CPU."""
    for window in data:
        opt.zero_grad()
        for batch in window:
            (loss_fn(model, batch) / len(window)).backward()
        opt.step()


def values(model, opt):
    state = [v for s in opt.state.values() for v in s.values()]
    tensors = [*model.parameters(), *model.buffers(), *state]
    return [t.detach().cpu() for t in tensors]


def assert_equal(a, b, tolerance=1e-6):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


MESHES = {}
TENSOR_PARALLEL = {
    "up.weight": ("model", None),
    "up.bias": ("model",),
    "down.weight": (None, "model"),
}
FSDP = {"*.weight": ("data", None)}


def mesh(*sizes):
    """One mesh for each shape; making one makes it global."""
    names = ("data", "model")[: len(sizes)]
    if sizes not in MESHES:
        MESHES[sizes] = funcacc.sharding.mesh(**dict(zip(names, sizes, strict=True)))
    return MESHES[sizes]


def sharded(ref, devices, rules):
    model = copy.deepcopy(ref).to(funcacc.device("xla"))
    funcacc.sharding.shard(model, rules, devices)
    return model


def texts(model, opt):
    from funcacc.engines.xla import private

    state = [v for s in opt.state.values() for v in s.values()]
    return private.sharding_texts([*model.parameters(), *model.buffers(), *state])


@check
def parameters_and_state_keep_their_sharding_and_are_donated_over_5_steps():
    ref = nn.Sequential(nn.BatchNorm1d(16), Block())
    rules = {f"1.{n}": cut for n, cut in TENSOR_PARALLEL.items()}
    model = sharded(ref, mesh(4, 2), rules)
    opt, ref_opt = adamw(model), adamw(ref)
    step = funcacc.TrainStep(model, opt, mean_loss, mesh=mesh(4, 2))
    gone = []
    assign = step._engine.assign

    def watched(targets, new):
        gone.append(step._engine.consumed(targets))
        assign(targets, new)

    step._engine.assign = watched
    data = [microbatches(3, seed=i) for i in range(5)]
    step(data[0])
    before = texts(model, opt)
    for window in data[1:]:
        step(window)
    assert texts(model, opt) == before
    assert len(gone) == 5 and all(map(all, gone))
    cut = [p for p in step._engine.placements(list(model.parameters()))]
    assert list(map(str, cut)) == ["-", "-", "model,-", "model", "-,model", "-"]
    for p, placement in zip(model.parameters(), cut, strict=True):
        of_state = step._engine.placements(list(opt.state[p].values()))
        assert [s == placement or not s.dims for s in of_state] == [True] * 3
    plain(ref, ref_opt, mean_loss, data)
    assert_equal(values(model, opt), values(ref, ref_opt))
    report = step.report()
    assert (report.compiles, report.traces) == (1, 1)
    assert report.donated_leaves == report.state_leaves == len(gone[0])
    assert report.mesh == "data=4, model=2"
    leaf = next(x for x in report.leaves if x.path == "opt_state['1.up.weight']['exp_avg']")
    assert (leaf.placement, leaf.device_bytes) == ("model,-", 32 * 16 * 4 // 2)
    assert "model,-" in str(report) and "of state on each device" in str(report)


@check
def a_batch_on_the_device_and_one_of_the_host_give_the_same_program():
    from funcacc.engines.xla import private

    ref = Block()
    model = sharded(ref, mesh(8), {})
    step = funcacc.TrainStep(model, adamw(model), mean_loss, mesh=mesh(8))
    whole = {k: torch.cat([b[k] for b in microbatches(2)]) for k in ("x", "y")}
    on_device = {k: t.to("xla") for k, t in whole.items()}
    import torch_xla.distributed.spmd as xs

    xs.mark_sharding(on_device["x"], mesh(8), ("data", None))
    window = funcacc.split(on_device, 2)
    assert private.sharding_texts([on_device["x"]]) == ["{devices=[8,1]0,1,2,3,4,5,6,7}"]
    step(window)
    (text,) = private.sharding_texts([window.tree["x"]])
    assert step._engine.placements([window.tree["x"]])[0].axes == ("data",), text
    step(funcacc.split(whole, 2))
    assert step.report().traces == 1


@check
def what_cannot_be_cut_evenly_is_refused_by_name():
    model = sharded(Block(), mesh(4, 2), {})
    odd = nn.Linear(16, 6).to("xla")
    text = r"params\['weight'\] has 6 elements along dimension 0, which the mesh axis data=4 cuts"
    with raises(funcacc.FuncaccError, text):
        funcacc.sharding.shard(odd, {"weight": ("data", None)}, mesh(4, 2))
    step = funcacc.TrainStep(model, adamw(model), mean_loss, mesh=mesh(4, 2))
    text = r"window\['x'\] has 6 rows in each microbatch, which the mesh axis data=4 can't cut"
    with raises(funcacc.FuncaccError, text):
        step(microbatches(2, rows=6))
    for options, text in (
        ({"batch_axis": "rows"}, "batch_axis names 'rows', but the mesh has the axes data=4"),
        ({"batch_axis": 3}, "batch_axis is 3; give the name of a mesh axis"),
    ):
        with raises(funcacc.FuncaccError, text):
            funcacc.TrainStep(model, adamw(model), mean_loss, mesh=mesh(4, 2), **options)
    for rules, text in (
        ({"up.wieght": (None, None)}, "no parameter is called 'up.wieght'"),
        (
            {"up.weight": ("rows", None)},
            r"the rule for params\['up.weight'\] names the axis 'rows'",
        ),
        ({"up.weight": ("data",)}, r"params\['up.weight'\] has 2 dimensions, but its rule"),
    ):
        with raises(funcacc.FuncaccError, text):
            funcacc.sharding.shard(model, rules, mesh(4, 2))
    with raises(funcacc.FuncaccError, "a mesh of data=3 has 3 devices, but there are 8"):
        funcacc.sharding.mesh(data=3)


@check
def a_parameter_on_another_mesh_is_refused_by_name():
    import torch_xla.distributed.spmd as xs

    model = sharded(Block(), mesh(4, 2), {})
    other = xs.Mesh(np.arange(8)[::-1].copy(), (4, 2), ("data", "model"))
    xs.clear_sharding(model.up.weight)
    xs.mark_sharding(model.up.weight, other, ("data", None))
    step = funcacc.TrainStep(model, adamw(model), mean_loss, mesh=mesh(4, 2))
    with raises(funcacc.FuncaccError, r"params\['up.weight'\]: it is sharded as .*isn't a placem"):
        step(microbatches(2))


def main(names):
    mesh(8)
    for name in names or CHECKS:
        torch.manual_seed(0)
        start, failure = time.perf_counter(), ""
        try:
            CHECKS[name]()
        except Exception:
            failure = traceback.format_exc()
        took = time.perf_counter() - start
        print(json.dumps({"name": name, "failure": failure, "seconds": took}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
