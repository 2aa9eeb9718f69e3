"""Checks on a mesh of 8 virtual devices, in one process; `test_mesh.py` reports each.

Run alone: ``CPU_NUM_DEVICES=8 python -m tests.mesh_checks [name ...]``.
"""

import copy
import json
import sys
import time
import traceback

import numpy as np
import torch
from torch import nn

import funcacc
from tests import mesh_marks, mesh_saving  # noqa: F401  (registers their checks)
from tests.mesh_support import (
    CHECKS,
    FSDP,
    OPTIONS,
    TENSOR_PARALLEL,
    Block,
    adamw,
    assert_equal,
    check,
    communication,
    mean_loss,
    mesh,
    microbatches,
    momentum,
    one_device,
    plain,
    raises,
    sharded,
    texts,
    token_loss,
    values,
)


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
    # Reading ahead goes by the mesh of the process, the last one made.
    funcacc.sharding.mesh(data=8)
    for moved in funcacc.windows(microbatches(2), 2, device="xla"):
        lies = step._engine.placements([moved.tree["x"], moved.tree["y"]])
        assert list(map(str, lies)) == ["-,data,-"] * 2
        step(moved)
    assert step.report().traces == 1


@check
def what_is_only_read_serves_several_programs():
    ref = Block()
    ref.up.requires_grad_(False)
    model, offset = sharded(ref, mesh(8), {}), torch.ones(3).to("xla")
    opt = momentum(model)

    def loss(model, batch):
        return mean_loss(model, batch) + offset.to(batch["x"].device).sum()

    step = funcacc.TrainStep(model, opt, loss, mesh=mesh(8))
    data = [microbatches(2), microbatches(2), microbatches(3), microbatches(3)]
    for window in data:
        step(window)
    assert [len(p._compiled) for p in step.programs] == [1, 1]
    ref_opt = momentum(ref)
    plain(ref, ref_opt, mean_loss, data)
    assert_equal(values(model, opt), values(ref, ref_opt))


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


LAYOUTS = {
    "data": ((8,), {}, {}),
    "fsdp": ((8,), {"*.weight": ("data", None)}, {}),
    "fsdp, gathered once": ((8,), {"*.weight": ("data", None)}, {"gather": "window"}),
    "data and model": ((4, 2), TENSOR_PARALLEL, {}),
    "all in both": ((4, 2), {"*.weight": ("model", "data")}, {}),
}


@check
def every_mesh_gives_the_numbers_of_one_device():
    from funcacc import trees

    cases = ((torch.float32, adamw, 1e-6), (torch.float64, momentum, 1e-12))
    for dtype, make, tolerance in cases:
        ref = Block(dropout=0.3).to(dtype)
        data = microbatches(8, dtype=dtype)
        windows = list(funcacc.windows(data, 3, prefetch=0))
        assert windows[-1].count == 2
        model, opt, outs = one_device(ref, make, token_loss, windows)
        want = values(model, opt) + [t for out in outs for t in trees.flatten(out)[0]]
        for name, (sizes, rules, options) in LAYOUTS.items():
            if dtype == torch.float64 and name not in ("data", "data and model"):
                continue
            model = sharded(ref, mesh(*sizes), rules)
            opt = make(model)
            both = {**OPTIONS, **options, "mesh": mesh(*sizes)}
            step = funcacc.TrainStep(model, opt, token_loss, **both)
            outs = [step(w) for w in windows]
            got = values(model, opt)
            got += [t.cpu() for out in outs for t in trees.flatten(out)[0]]
            try:
                assert_equal(got, want, tolerance)
            except AssertionError as e:
                raise AssertionError(f"{name}, {dtype}: {e}") from e
            report = step.report()
            assert report.donated_leaves == report.state_leaves and report.compiles == 1


@check
def the_comparison_fails_with_other_dropout_masks():
    ref = Block(dropout=0.3)
    windows = [funcacc.stack(microbatches(2))]
    model, opt, _ = one_device(ref, adamw, token_loss, windows)
    other = sharded(ref, mesh(8), {})
    own = adamw(other)
    step = funcacc.TrainStep(other, own, token_loss, **{**OPTIONS, "seed": 4}, mesh=mesh(8))
    step(windows[0])
    with raises(AssertionError, "not close"):
        assert_equal(values(other, own), values(model, opt))


def labelled(model, x):
    """PyTorch's own mean over the rows that have a label."""
    labels = torch.where(x[:, 0] > 0.5, -100, 1)
    return torch.nn.functional.cross_entropy(model(x), labels)


@check
def data_parallel_reduces_once_a_window_whatever_the_layers():
    from tests.test_open_sums import Attention, Convolutions, Sequence, Stack, squares, tokens

    cases = (
        (Attention, tokens, lambda: torch.randint(0, 20, (8, 5))),
        # Convolutions in groups are gathered by the partitioner.
        (lambda: Convolutions(groups=1), squares, lambda: torch.randn(8, 2, 6, 6)),
        (Sequence, squares, lambda: torch.randn(8, 3, 3)),
        (Stack, squares, lambda: torch.randn(8, 3)),
        # The number of labels that the mean divides by is found before the loop.
        (lambda: nn.Linear(4, 3), labelled, lambda: torch.randn(8, 4)),
    )
    for make, loss, batch in cases:
        ref, data = make(), [batch() for _ in range(2)]
        model, opt, _ = one_device(ref, adamw, loss, [funcacc.stack(data)])
        mine = sharded(ref, mesh(8), {})
        own = adamw(mine)
        step = funcacc.TrainStep(mine, own, loss, mesh=mesh(8), **OPTIONS)
        step(data)
        assert_equal(values(mine, own), values(model, opt), 2e-6)
        found = communication(step)
        assert found.keys() == {"all-reduce"} and found["all-reduce"][0] == 0, found
        if loss is tokens:
            # One for each gradient, one each for total and weight.
            size = sum(p.nbytes for p in mine.parameters())
            leaves = len(list(mine.parameters()))
            assert found["all-reduce"] == (0, leaves + 2, size + 4 + 8)
            text = f"in the loop, each trip: no communication\noutside the loop: {leaves + 2} all-"
            assert text in str(step.report())


@check
def a_llama_is_tensor_parallel_and_every_leaf_is_donated():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ref = transformers.LlamaForCausalLM(config)
    rules = {
        "*embed_tokens.weight": ("model", None),
        "*.[qkv]_proj.weight": ("model", None),
        "*.o_proj.weight": (None, "model"),
        "*.gate_proj.weight": ("model", None),
        "*.up_proj.weight": ("model", None),
        "*.down_proj.weight": (None, "model"),
        "lm_head.weight": ("model", None),
    }
    model = sharded(ref, mesh(4, 2), rules)
    opt, ref_opt = adamw(model), adamw(ref)
    step = funcacc.TrainStep(model, opt, clip_norm=1.0, mesh=mesh(4, 2))
    data = [[torch.randint(0, 64, (4, 6)) for _ in range(2)] for _ in range(2)]
    for window in data:
        step([{"input_ids": x, "labels": x} for x in window])
        ref_opt.zero_grad()
        for x in window:
            (ref(input_ids=x, labels=x).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(ref.parameters(), 1.0)
        ref_opt.step()
    assert_equal(values(model, opt), values(ref, ref_opt), 2e-6)
    report = step.report(collectives=True)
    assert report.donated_leaves == report.state_leaves == 4 * len(list(ref.parameters())) + 2
    # Heads stay where they are: what is sent are sums over the model axis.
    assert {c.kind for c in report.collectives} == {"all-reduce"}


@check
def fsdp_gathers_for_each_microbatch_or_once():
    state = {}
    for gather, inside, outside in (("microbatch", 2, 0), ("window", 0, 2)):
        ref = Block()
        model = sharded(ref, mesh(8), FSDP)
        step = funcacc.TrainStep(model, adamw(model), mean_loss, mesh=mesh(8), gather=gather)
        step(microbatches(3))
        found = communication(step)
        assert found["all-gather"][:2] == (inside, outside), found
        # Biases are whole: their gradients and the loss wait in any case.
        assert found["all-reduce"][0] == inside, found
        assert found.keys() <= {"all-gather", "all-reduce", "reduce-scatter"}, found
        state[gather] = step.report().device_state_bytes
    # Three of each: parameter and two moments.
    cut, whole = (16 * 32 + 32 * 8) * 4 * 3 // 8, (32 + 8) * 4 * 3
    assert set(state.values()) == {cut + whole + 4 * 4 + 8 + 4}


@check
def batch_norm_is_synchronised_or_local():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, bias=False)
            self.norm = nn.BatchNorm2d(3)
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))

    def loss(model, x):
        return model(x).square().mean()

    ref, data = Net(), [torch.randn(8, 2, 5, 5) for _ in range(3)]
    for kind in ("synchronised", "local"):
        model, own = sharded(ref, mesh(4, 2), {}), copy.deepcopy(ref)
        opt, own_opt = momentum(model), momentum(own)
        step = funcacc.TrainStep(model, opt, loss, mesh=mesh(4, 2), batch_norm=kind)
        step(data)
        if kind == "synchronised":
            plain(own, own_opt, loss, [data])
        else:
            # Replicas with statistics of their own, whose gradients and buffers are averaged.
            replicas = [copy.deepcopy(own) for _ in range(4)]
            for x in data:
                for i, replica in enumerate(replicas):
                    (loss(replica, x[2 * i : 2 * i + 2]) / 3 / 4).backward()
                for name, b in own.named_buffers():
                    each = [dict(r.named_buffers())[name] for r in replicas]
                    mean = torch.stack(each).double().mean(0).to(b.dtype)
                    for t in (b, *each):
                        t.copy_(mean)
            for name, p in own.named_parameters():
                p.grad = sum(dict(r.named_parameters())[name].grad for r in replicas)
            own_opt.step()
        assert_equal(values(model, opt), values(own, own_opt), 2e-6)
        inside = [c for c in step.report(collectives=True).collectives if c.in_loop]
        if kind == "local":
            # Only the running statistics meet.
            assert sum(c.nbytes for c in inside) == 2 * 3 * 4, inside
        else:
            assert inside


@check
def tensor_parallel_blocks_exchange_activations_only():
    model = sharded(Block(), mesh(4, 2), TENSOR_PARALLEL)
    step = funcacc.TrainStep(model, adamw(model), mean_loss, mesh=mesh(4, 2))
    step(microbatches(3))
    inside = [c for c in step.report(collectives=True).collectives if c.in_loop]
    # The sum of the second matrix product's halves: rows of a device x 8.
    assert [(c.kind, c.nbytes) for c in inside] == [("all-reduce", 8 // 4 * 8 * 4)]


@check
def steps_in_one_dispatch_equal_single_ones_on_a_mesh():
    ref = Block(dropout=0.3)
    windows = list(funcacc.windows(microbatches(10), 2, prefetch=0))
    model, opt, outs = one_device(ref, adamw, mean_loss, windows)
    mine = sharded(ref, mesh(4, 2), TENSOR_PARALLEL)
    own = adamw(mine)
    options = {**OPTIONS, "steps_per_call": 2, "mesh": mesh(4, 2)}
    step = funcacc.TrainStep(mine, own, mean_loss, **options)
    before = texts(mine, own)
    got = torch.cat([out.loss.cpu() for out in step.run(windows)])
    assert_equal([got], [torch.stack([out.loss for out in outs])])
    assert_equal(values(mine, own), values(model, opt))
    assert texts(mine, own)[: len(before)] == before
    assert step.report().donated_leaves == step.report().state_leaves


@check
def gradients_alone_lie_as_their_parameters():
    ref = Block()
    model = sharded(ref, mesh(4, 2), TENSOR_PARALLEL)
    data = microbatches(3)
    found = funcacc.accumulate(model, data, mean_loss, mesh=mesh(4, 2))
    for batch in data:
        (mean_loss(ref, batch) / 3).backward()
    grads = {n: p.grad for n, p in ref.named_parameters()}
    assert_equal([found.grads[n].cpu() for n in grads], list(grads.values()))
    from funcacc.engines import get_engine

    engine = get_engine("xla", model.up.weight.device, mesh(4, 2))
    assert engine.placements(list(found.grads.values())) == engine.placements(
        [dict(model.named_parameters())[n] for n in found.grads]
    )


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
