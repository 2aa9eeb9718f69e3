"""Checks of saved and loaded state, on the mesh of `mesh_checks.py`."""

import copy
import tempfile

from torch import nn

import funcacc
from tests.mesh_support import (
    FSDP,
    TENSOR_PARALLEL,
    Block,
    adamw,
    assert_equal,
    check,
    mean_loss,
    mesh,
    microbatches,
    raises,
    sharded,
    texts,
    values,
)


@check
def a_checkpoint_in_shards_restores_on_every_mesh_and_on_one_device():
    ref, data = Block(dropout=0.2), [microbatches(2, seed=i) for i in range(4)]

    def make(sizes, rules):
        model = sharded(ref, mesh(*sizes), rules) if sizes else copy.deepcopy(ref)
        for p in model.parameters():
            p.detach().mul_(0.5)
        opt = adamw(model)
        options = {"mesh": mesh(*sizes)} if sizes else {}
        # Another key, so that a load that forgot it would draw other masks.
        return model, opt, funcacc.TrainStep(model, opt, mean_loss, seed=len(sizes), **options)

    model, opt, step = make((8,), FSDP)
    for window in data[:2]:
        step(window)
    with tempfile.TemporaryDirectory() as folder:
        funcacc.sharding.save(folder, model=model, opt=opt, step=step, epoch=3)
        for window in data[2:]:
            step(window)
        want = values(model, opt)
        cases = (((8,), FSDP, 0.0), ((4, 2), TENSOR_PARALLEL, 1e-6), ((), {}, 1e-6))
        for sizes, rules, tolerance in cases:
            other, own, again = make(sizes, rules)
            with raises(funcacc.FuncaccError, r"opt.state.0.exp_avg is in it.*step.compile"):
                funcacc.sharding.load(folder, model=other, opt=own, step=again)
            again.compile(data[0])
            before = texts(other, own) if sizes else None
            left = funcacc.sharding.load(folder, model=other, opt=own, step=again, epoch=0)
            assert left == {"epoch": 3}
            assert before is None or texts(other, own) == before
            for window in data[2:]:
                again(window)
            assert_equal(values(other, own), want, tolerance)
            assert again.report().traces == 1
        small = nn.Linear(3, 2)
        with raises(funcacc.FuncaccError, r"model.weight is missing in it.*model.up.weight is in"):
            funcacc.sharding.load(folder, model=small)


@check
def loading_a_state_dict_keeps_the_sharding():
    ref, data = Block(), microbatches(2)
    model = sharded(ref, mesh(4, 2), TENSOR_PARALLEL)
    opt = adamw(model)
    step = funcacc.TrainStep(model, opt, mean_loss, mesh=mesh(4, 2))
    step(data)
    before = texts(model, opt)
    saved = {k: v.cpu().clone() for k, v in model.state_dict().items()}
    of_opt = copy.deepcopy(opt.state_dict())
    step(data)
    want = values(model, opt)
    model.load_state_dict(saved)
    opt.load_state_dict(of_opt)
    assert texts(model, opt) == before
    step(data)
    assert_equal(values(model, opt), want, 0.0)
    assert step.report().compiles == 1


@check
def shards_with_copies_are_saved_once():
    for cut in (("model", None), (None, "data"), (("data", "model"), None)):
        model = sharded(nn.Linear(16, 8), mesh(4, 2), {"weight": cut})
        want = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
        with tempfile.TemporaryDirectory() as folder:
            funcacc.sharding.save(folder, model=model)
            for p in model.parameters():
                p.detach().zero_()
            funcacc.sharding.load(folder, model=model)
        for name, p in model.named_parameters():
            assert p.detach().cpu().equal(want[name]), (cut, name)
