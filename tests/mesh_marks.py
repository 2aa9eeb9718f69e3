"""Checks of torch_xla's own annotations in traced code, on the mesh of `mesh_checks.py`."""

import copy
import warnings

import numpy as np
import torch
from torch import nn

import funcacc
from tests.mesh_support import (
    Block,
    adamw,
    assert_equal,
    check,
    communication,
    mean_loss,
    mesh,
    microbatches,
    momentum,
    plain,
    raises,
    sharded,
    values,
)


class Marking(nn.Module):
    """A block that says itself where its activations lie, in each of torch_xla's ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x):
        import torch_xla.distributed.spmd as xs

        if self.way == "none":
            return self.down(torch.tanh(self.up(x)))
        cut = (("data", "model"), None) if self.way == "other cut" else ("data", "model")
        xs.mark_sharding(x, mesh(4, 2), ("data", None))
        x = torch.tanh(self.up(x))
        if self.way == "gradients":
            x = xs.mark_sharding_with_gradients(x, mesh(4, 2), cut)
        elif self.way == "annotate":
            xs.annotate_custom_sharding(x, mesh(4, 2), cut)
        elif self.way == "other cut":
            x = xs.mark_sharding(x, mesh(4, 2), cut)
        else:
            xs.mark_sharding(x, mesh(4, 2), cut)
        return self.down(x)


@check
def activations_may_be_marked_in_every_way_and_numbers_stay():
    ref = Marking("none")
    data = [microbatches(3, seed=i) for i in range(2)]
    oracle = copy.deepcopy(ref)
    ref_opt = adamw(oracle)
    plain(oracle, ref_opt, mean_loss, data)
    inside = {}
    for way in ("none", "other cut", "gradients", "annotate"):
        model = sharded(ref, mesh(4, 2), {})
        model.way = way
        opt = adamw(model)
        step = funcacc.TrainStep(model, opt, mean_loss, mesh=mesh(4, 2))
        for window in data:
            step(window)
        assert_equal(values(model, opt), values(oracle, ref_opt))
        inside[way] = len([c for c in step.report(collectives=True).collectives if c.in_loop])
    # Parameters are whole, so that without marks there is nothing to send.
    assert inside.pop("none") == 0 and all(inside.values()), inside


@check
def a_mark_in_a_loop_and_in_a_loss_is_kept():
    import torch_xla.distributed.spmd as xs

    def loss(model, batch):
        out = model(batch["x"])
        xs.mark_sharding(out, mesh(4, 2), ("data", "model"))

        def body(i, c):
            c = torch.sin(c)
            xs.mark_sharding(c, mesh(4, 2), (None, "model"))
            return c * 2

        return (funcacc.fori_loop(0, 3, body, out) - batch["y"]).square().mean()

    def unmarked(model, batch):
        out = model(batch["x"])
        for _ in range(3):
            out = torch.sin(out) * 2
        return (out - batch["y"]).square().mean()

    ref, data = Block(), microbatches(2)
    model = sharded(ref, mesh(4, 2), {})
    step = funcacc.TrainStep(model, momentum(model), loss, mesh=mesh(4, 2))
    step(data)
    opt = momentum(ref)
    plain(ref, opt, unmarked, [data])
    assert_equal(values(model, opt)[:4], values(ref, opt)[:4])
    assert step.programs[-1].text().count('custom_call_target="Sharding"') > 0
    (traced,) = step._programs._microbatches.values()
    assert str(traced.graph).count("funcacc.pin") >= 2


@check
def marks_in_compiled_functions_and_what_torch_xla_cannot_have():
    import torch_xla.distributed.spmd as xs

    def body(i, c):
        xs.mark_sharding(c, mesh(4, 2), ("data",))
        return c + i

    run = funcacc.jit(lambda x: funcacc.fori_loop(0, 3, body, x))
    assert run(torch.ones(8).to("xla")).tolist() == [4.0] * 8
    assert "Sharding" in run.lower(torch.ones(8).to("xla")).compile().text()

    def outside(x):
        def body(i, c):
            xs.mark_sharding(x, mesh(4, 2), ("data",))
            return c + x

        return funcacc.fori_loop(0, 3, body, x)

    def row(r):
        xs.mark_sharding(r, mesh(4, 2), ("model",))
        return r

    refused = {
        "was made outside": outside,
        "vmap has cut up": torch.func.vmap(row),
        "hands a traced tensor to a function of torch_xla": xs._mark_manual_sharding,
    }
    for text, fn in refused.items():
        x = torch.ones(8, 2) if "vmap" in text else torch.ones(8)
        with raises(funcacc.FuncaccError, text):
            funcacc.jit(fn)(x.to("xla"))


@check
def the_wrapper_of_torch_xla_for_fsdp_trains():
    import torch_xla.distributed.spmd as xs
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
        SpmdFullyShardedDataParallel,
    )

    devices = xs.Mesh(np.arange(8), (8,), ("fsdp",))
    ref, data = Block(), [microbatches(2, seed=i) for i in range(2)]
    model = SpmdFullyShardedDataParallel(copy.deepcopy(ref), mesh=devices)
    opt = adamw(model)
    step = funcacc.TrainStep(model, opt, mean_loss, mesh=devices)
    with warnings.catch_warnings():
        # PyTorch says that the wrapper's hook sees no gradient of the batch.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        for window in data:
            step(window)
    ref_opt = adamw(ref)
    plain(ref, ref_opt, mean_loss, data)
    assert_equal(values(model, opt), values(ref, ref_opt))
    leaf = next(x for x in step.report().leaves if "up.weight" in x.path)
    assert (leaf.placement, leaf.donated) == ("fsdp,-", True)
    assert communication(step)["all-gather"][0] == 4
