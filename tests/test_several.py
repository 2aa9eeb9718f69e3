"""`TrainStep.run`: several optimizer steps in one dispatch."""

import copy

import pytest
import torch
from torch import nn

import funcacc
from funcacc.errors import OptionError


class Net(nn.Module):
    """With all kinds of state where `rich`, else quick to trace."""

    def __init__(self, rich):
        super().__init__()
        inner = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.3)] if rich else []
        self.body = nn.Sequential(*inner, nn.Linear(6 if rich else 4, 2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += x.shape[0]
        return self.body(x)


def loss_fn(model, batch):
    out = model(batch["x"])
    total = (out.sum(1) - batch["y"]).square()
    return funcacc.Loss(
        (total * batch["w"]).sum(),
        batch["w"].sum(),
        aux={"n": funcacc.Sum(batch["w"].sum()), "last": funcacc.Last(batch["y"][0])},
    )


def microbatches(n):
    gen = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(5, 4, generator=gen),
            "y": torch.randn(5, generator=gen),
            "w": torch.rand(5, generator=gen),
        }
        for _ in range(n)
    ]


def make(engine, make_opt, make_schedule, rich=False, **options):
    torch.manual_seed(0)
    model = Net(rich).to(funcacc.device(engine))
    opt = make_opt(model)
    step = funcacc.TrainStep(model, opt, loss_fn, seed=5, **options)
    return model, opt, make_schedule(opt), step


def everything(model, opt, step):
    found = {n: t.cpu() for n, t in model.state_dict().items()}
    for i, entries in opt.state_dict()["state"].items():
        found.update({f"{i} {k}": torch.as_tensor(v).cpu() for k, v in entries.items()})
    groups = opt.state_dict()["param_groups"]
    return found, groups, step.state_dict()


def assert_same(a, b):
    for x, y in zip(everything(*a), everything(*b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


CASES = {
    "AdamW, OneCycleLR": (
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    ),
    "SGD with dampening, StepLR": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    ),
    "NAdam, none": (lambda m: torch.optim.NAdam(m.parameters(), lr=0.01), lambda o: None),
}


@pytest.mark.parametrize(("case", "size"), list(zip(CASES, (3, 1, 3), strict=True)))
def test_the_numbers_are_those_of_single_steps(engine, case, size):
    """Eight steps by threes, the last window shorter: whole groups, and one of two."""
    data = microbatches(15)
    one = make(engine, *CASES[case], rich=True, clip_norm=1.0)
    outs = []
    for window in funcacc.windows(data, 2):
        outs.append(one[3](window))
        if one[2]:
            one[2].step()
    many = make(engine, *CASES[case], rich=True, clip_norm=1.0, steps_per_call=size)
    got = list(many[3].run(funcacc.windows(data, 2), many[2]))
    assert [len(g.loss) for g in got] == ([3, 3, 2] if size == 3 else [1] * 8)
    for name in ("loss", "grad_norm", "weight", "skipped"):
        singles = torch.stack([getattr(o, name).cpu() for o in outs])
        together = torch.cat([getattr(g, name).cpu() for g in got])
        torch.testing.assert_close(together, singles, rtol=1e-6, atol=1e-7)
    for name in ("n", "last"):
        singles = torch.stack([o.aux[name].cpu() for o in outs])
        together = torch.cat([g.aux[name].cpu() for g in got])
        torch.testing.assert_close(together, singles, rtol=1e-6, atol=1e-7)
    assert_same((one[0], one[1], one[3]), (many[0], many[1], many[3]))
    assert many[3].report().compiles == 1
    assert many[3].report().traces == 1


def test_state_stays_in_its_place(engine):
    *_, step = make(engine, *CASES["AdamW, OneCycleLR"], steps_per_call=2)
    list(step.run(funcacc.windows(microbatches(8), 2)))
    state = [leaf for leaf in step.report().leaves if leaf.donated]
    assert len(state) == step.report().num_state
    assert all(leaf.in_place for leaf in state)


def test_a_wrong_order_of_hyperparameters_would_be_noticed():
    """The oracle fails when all steps of a dispatch get the first one's learning rate."""
    data = microbatches(6)
    one = make("eager", *CASES["SGD with dampening, StepLR"])
    for window in funcacc.windows(data, 2):
        one[3](window)
        one[2].step()
    same_rate = make("eager", *CASES["SGD with dampening, StepLR"], steps_per_call=3)
    list(same_rate[3].run(funcacc.windows(data, 2)))
    with pytest.raises(AssertionError):
        assert_same((one[0], one[1], one[3]), (same_rate[0], same_rate[1], same_rate[3]))


def test_skipped_steps(engine):
    data = microbatches(6)
    data[2]["x"][0, 0] = float("inf")
    one = make(engine, *CASES["AdamW, OneCycleLR"], skip_nonfinite=True)
    for window in funcacc.windows(data, 1):
        one[3](window)
    many = make(engine, *CASES["AdamW, OneCycleLR"], skip_nonfinite=True, steps_per_call=4)
    outs = list(many[3].run(funcacc.windows(data, 1)))
    assert torch.cat([o.skipped.cpu() for o in outs]).tolist() == [0, 0, 1, 0, 0, 0]
    assert_same((one[0], one[1], one[3]), (many[0], many[1], many[3]))


def test_another_shape_ends_the_dispatch():
    data = microbatches(4)
    short = [{k: v[:2] for k, v in b.items()} for b in microbatches(2)]
    windows = [[data[0]], [data[1]], [short[0]], [data[2]]]
    one = make("eager", *CASES["AdamW, OneCycleLR"])
    for window in windows:
        one[3](window)
        one[2].step()
    many = make("eager", *CASES["AdamW, OneCycleLR"], steps_per_call=3)
    outs = list(many[3].run(windows, many[2]))
    assert [len(o.loss) for o in outs] == [2, 1, 1]
    assert_same((one[0], one[1], one[3]), (many[0], many[1], many[3]))


def test_a_learning_rate_that_needs_another_program_ends_the_dispatch():
    """weight_decay=0 is another branch of the optimizer's code."""

    def schedule(opt):
        class Off:
            calls = 0

            def step(self):
                self.calls += 1
                if self.calls == 2:
                    opt.param_groups[0]["weight_decay"] = 0.0

        return Off()

    data = microbatches(5)
    case = (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.5), schedule)
    one = make("eager", *case)
    for batch in data:
        one[3]([batch])
        one[2].step()
    many = make("eager", *case, steps_per_call=4)
    outs = list(many[3].run([[b] for b in data], many[2]))
    assert [len(o.loss) for o in outs] == [2, 3]
    assert_same((one[0], one[1], one[3]), (many[0], many[1], many[3]))


def test_what_came_before_an_error_of_the_loader_is_trained():
    def loader():
        yield from ([b] for b in microbatches(4))
        raise ValueError("disk on fire")

    one = make("eager", *CASES["AdamW, OneCycleLR"])
    for batch in microbatches(4):
        one[3]([batch])
        one[2].step()
    many = make("eager", *CASES["AdamW, OneCycleLR"], steps_per_call=3)
    seen = []
    with pytest.raises(ValueError, match="disk on fire"):
        for out in many[3].run(loader(), many[2]):
            seen.append(len(out.loss))
    assert seen == [3, 1]
    assert_same((one[0], one[1], one[3]), (many[0], many[1], many[3]))
    assert many[2].last_epoch == one[2].last_epoch


def test_a_failing_trace_moves_no_schedule():
    torch.manual_seed(0)
    model = Net(False).to(funcacc.device("eager"))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1)

    def bad(model, batch):
        raise RuntimeError("no such layer")

    step = funcacc.TrainStep(model, opt, bad, steps_per_call=2)
    before = copy.deepcopy(schedule.state_dict())
    with pytest.raises(RuntimeError, match="no such layer"):
        next(step.run([[b] for b in microbatches(2)], schedule))
    assert schedule.state_dict() == before


def test_single_calls_and_runs_mix(engine):
    data = microbatches(6)
    one = make(engine, *CASES["NAdam, none"])
    many = make(engine, *CASES["NAdam, none"], steps_per_call=2)
    for batch in data:
        one[3]([batch])
    many[3]([data[0]])
    list(many[3].run([[b] for b in data[1:5]]))
    many[3]([data[5]])
    assert_same((one[0], one[1], one[3]), (many[0], many[1], many[3]))


def test_refusals():
    model, opt, _, step = make("eager", *CASES["NAdam, none"], steps_per_call=2)
    windows = [[b] for b in microbatches(2)]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
    with pytest.raises(OptionError, match=r"scheduler.step\(float\(out.loss\)\)"):
        next(step.run(windows, plateau))
    handle = opt.register_step_post_hook(lambda *a: None)
    with pytest.raises(OptionError, match="steps_per_call=2 would call when the parameters"):
        next(step.run(windows))
    handle.remove()
    next(step.run(windows))
    for bad in (0, 1.5, True, None):
        with pytest.raises(OptionError, match="steps_per_call is"):
            funcacc.TrainStep(model, opt, loss_fn, steps_per_call=bad)
    with pytest.raises(OptionError, match="make a TrainStep and iterate over its run"):
        funcacc.train_step(model, opt, windows[0], loss_fn, steps_per_call=2)
    with pytest.raises(OptionError, match="your own loop takes the steps"):
        funcacc.accumulate(model, windows[0], loss_fn, steps_per_call=2)


def test_counts_in_python_and_skipping_exclude_each_other():
    from schedulefree import SGDScheduleFree

    _, opt, _, step = make(
        "eager",
        lambda m: SGDScheduleFree(m.parameters(), lr=0.1),
        lambda o: None,
        steps_per_call=2,
        skip_nonfinite=True,
    )
    opt.train()
    with pytest.raises(OptionError, match="counts its steps in Python"):
        next(step.run([[b] for b in microbatches(2)]))


def test_counts_in_python_move_with_each_step():
    from schedulefree import SGDScheduleFree

    case = (lambda m: SGDScheduleFree(m.parameters(), lr=0.1, warmup_steps=3), lambda o: None)
    one, many = make("eager", *case), make("eager", *case, steps_per_call=3)
    one[1].train(), many[1].train()
    data = microbatches(5)
    for batch in data:
        one[3]([batch])
    list(many[3].run([[b] for b in data]))
    assert_same((one[0], one[1], one[3]), (many[0], many[1], many[3]))
