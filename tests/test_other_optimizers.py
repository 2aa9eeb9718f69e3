"""Optimizers of other packages, traced as they are: schedulefree and pytorch-optimizer."""

import pytest
import pytorch_optimizer
import schedulefree
import torch

from funcacc.errors import OptimizerError
from tests.test_optimizers import EPS, Pair, trainable

CASES = {
    # Its state starts as a copy of the parameter, and its counts are Python numbers.
    "schedulefree.AdamW": (schedulefree.AdamWScheduleFree, dict(lr=0.01, **EPS)),
    "schedulefree.AdamW-warmup": (
        schedulefree.AdamWScheduleFree,
        dict(lr=0.01, warmup_steps=3, **EPS),
    ),
    "schedulefree.SGD": (schedulefree.SGDScheduleFree, dict(lr=0.1)),
    "schedulefree.RAdam": (schedulefree.RAdamScheduleFree, dict(lr=0.01, **EPS)),
    "AdEMAMix": (pytorch_optimizer.AdEMAMix, dict(lr=0.01, **EPS)),
    "Adan": (pytorch_optimizer.Adan, dict(lr=0.01, **EPS)),
    "ADOPT": (pytorch_optimizer.ADOPT, dict(lr=0.01)),
    "AdaBelief": (pytorch_optimizer.AdaBelief, dict(lr=0.01, **EPS)),
    "CAME": (pytorch_optimizer.CAME, dict(lr=0.01)),
    "Lion": (pytorch_optimizer.Lion, dict(lr=0.01)),
    "StableAdamW": (pytorch_optimizer.StableAdamW, dict(lr=0.01)),
    "Tiger": (pytorch_optimizer.Tiger, dict(lr=0.01)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_its_own_run(engine, name):
    cls, kwargs = CASES[name]
    pair = Pair(engine, lambda m: cls(trainable(m), **kwargs))
    for opt in pair.both:
        if hasattr(opt, "train"):
            opt.train()
    pair.advance(7 if "RAdam" in name else 4)
    pair.check()
    own, ref = ({k: v for k, v in o.param_groups[0].items() if k != "params"} for o in pair.both)
    assert own.keys() == ref.keys()
    for key in ref:
        if is_number(ref[key]):
            assert own[key] == pytest.approx(ref[key]) and type(own[key]) is type(ref[key])
    # The second program has the numbers as inputs that the first step put into the group;
    # RAdam has other rules for its first steps.
    assert pair.step.report().compiles <= (3 if "RAdam" in name else 2)


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def test_averaged_weights_are_swapped_in_and_out(engine):
    """``opt.eval()`` and ``opt.train()`` edit the parameters between steps."""
    pair = Pair(engine, lambda m: schedulefree.SGDScheduleFree(trainable(m), lr=0.1))
    for opt in pair.both:
        opt.train()
    pair.advance(2)
    for opt in pair.both:
        opt.eval()
    pair.check()
    for opt in pair.both:
        opt.train()
    pair.advance(2)
    pair.check()


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "Lamb"])
def test_a_branch_on_gradients_is_refused_with_the_packages_line(engine, name):
    pair = Pair(engine, lambda m: getattr(pytorch_optimizer, name)(trainable(m)))
    with pytest.raises(
        OptimizerError,
        match=rf"{name} can't be part of a compiled step: at .*pytorch_optimizer.*\.py:\d+ \(.*"
        r"needs a value on the host that only the device has",
    ):
        pair.step([torch.randn(5, 4)])
