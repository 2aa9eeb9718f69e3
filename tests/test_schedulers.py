"""Every scheduler of `torch.optim`, made in mid-run: one program, and never an old value."""

import inspect

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import funcacc
from tests.oracle import plain_step
from tests.test_optimizers import EPS, Pair, loss_fn, trainable

LR, BETAS = 0.05, (0.9, 0.99)


def sequential(opt):
    first = lr_scheduler.LinearLR(opt, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(opt, [first, lr_scheduler.CosineAnnealingLR(opt, 4)], [2])


def chained(opt):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.5)]
    )


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: (1.0, 1e-8, 0.0, 2)[t % 4]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.7),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": sequential,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 2),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    # These two move betas, too.
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 3),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=2),
}


def test_no_scheduler_is_left_out():
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, x in vars(module).items()
        if inspect.isclass(x) and issubclass(x, lr_scheduler.LRScheduler)
    }
    assert found - {"LRScheduler", "_LRScheduler"} == SCHEDULERS.keys()


def advance(scheduler):
    args = [1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
    scheduler.step(*args)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_one_program_for_all_of_them(engine, tensor_lr):
    """Also two groups, and the keys that a scheduler adds to a group (`initial_lr`, `max_lr`)."""

    def lr(model):
        at = model.a.weight.device
        return torch.tensor(LR, device=at) if tensor_lr else LR

    def make(m):
        groups = [{"params": [m.a.weight]}, {"params": [m.b.weight], "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=lr(m), betas=BETAS, **EPS)

    pair = Pair(engine, make)
    pair.advance()
    seen = set()
    for name, scheduler in SCHEDULERS.items():
        schedulers = [scheduler(opt) for opt in pair.both]
        for _ in range(3):
            pair.advance()
            for s in schedulers:
                advance(s)
            own, ref = ([float(g["lr"]) for g in o.param_groups] for o in pair.both)
            assert own == pytest.approx(ref), name
            seen.update(own)
        pair.check(1e-5)
        for opt, model in zip(pair.both, (pair.model, pair.ref), strict=True):
            for group in opt.param_groups:
                for key in set(group) - set(opt.defaults) - {"params"}:
                    del group[key]
                group.update(lr=lr(model), betas=BETAS)
    assert len(seen) > 20
    report = pair.step.report()
    assert (report.compiles, report.reasons) == (1, ["first call"])


def test_a_learning_rate_written_in_place_is_seen(engine):
    """By an operation, through `.data`, by `fill_` of another tensor's value, and replaced."""
    pair = Pair(
        engine,
        lambda m: torch.optim.SGD(
            trainable(m), lr=torch.tensor(0.1, device=m.a.weight.device), momentum=0.9
        ),
    )
    edits = [
        lambda g: g["lr"].mul_(0.5),
        lambda g: g["lr"].data.fill_(0.2),
        lambda g: g["lr"].copy_(torch.tensor(0.01)),
        lambda g: g.update(lr=g["lr"] * 3),
        lambda g: g.update(lr=0.1),
        lambda g: g.update(lr=0),
        lambda g: g.update(lr=1),
    ]
    for edit in edits:
        pair.advance()
        for opt in pair.both:
            edit(opt.param_groups[0])
        pair.advance()
        pair.check()
    assert pair.step.report().compiles == 1


def test_momentum_that_a_scheduler_moves(engine):
    """SGD's momentum is a plain number of the group, and `cycle_momentum` writes it."""
    pair = Pair(engine, lambda m: torch.optim.SGD(trainable(m), lr=0.1, momentum=0.9))
    schedulers = [SCHEDULERS["OneCycleLR"](opt) for opt in pair.both]
    for _ in range(5):
        pair.advance()
        for s in schedulers:
            s.step()
    assert pair.opt.param_groups[0]["momentum"] != 0.9
    pair.check()
    assert pair.step.report().compiles == 1


def test_a_value_that_is_never_read_would_be_noticed():
    """The twin of the tests above: a scheduler on one of the two optimizers only."""
    pair = Pair("eager", lambda m: torch.optim.SGD(trainable(m), lr=0.1))
    scheduler = lr_scheduler.ExponentialLR(pair.opt, 0.9)
    for _ in range(2):
        batches = [torch.randn(5, 4) for _ in range(2)]
        funcacc.train_step(pair.model, pair.opt, batches, loss_fn)
        plain_step(pair.ref, pair.ref_opt, loss_fn, batches)
        scheduler.step()
    with pytest.raises(AssertionError):
        pair.check()
