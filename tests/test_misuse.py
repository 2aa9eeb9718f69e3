"""What a user can get wrong is refused by name, before anything ran."""

import copy
import os
import pickle
import threading

import pytest
import torch
from torch import nn

import funcacc
from funcacc.errors import BatchError, CaptureError, EngineError, ModelError, OptimizerError
from funcacc.errors import StateError as Lost
from tests.engines import ENGINES
from tests.oracle import assert_same, plain_step


def loss_fn(model, x):
    return model(x).square().mean()


BATCHES = [torch.ones(4, 3), torch.zeros(4, 3)]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def linear(engine):
    return nn.Linear(3, 2).to(funcacc.device(engine))


def take(model, opt=None, batches=BATCHES, loss=loss_fn, **options):
    return funcacc.TrainStep(model, opt or sgd(model.parameters()), loss, **options)(batches)


def two_devices(engine):
    model = nn.Sequential(linear(engine), nn.Linear(2, 2, device="meta"))
    take(model)


def another_models_optimizer(engine):
    take(linear(engine), sgd(linear(engine).parameters()))


def not_on_the_engines_device(engine):
    other = "eager" if engine == "xla" else "xla"
    if not funcacc.engines()[other].installed:
        pytest.skip(f"{other} is not installed")
    take(linear(engine), engine=other)


def common_parameter(engine):
    model = linear(engine)
    take(model, [sgd(model.parameters()), sgd([model.bias])])


def closed_loader(engine):
    loader = (x for x in BATCHES)
    loader.close()
    take(linear(engine), batches=loader)


def moved_afterwards(engine):
    model = nn.BatchNorm1d(3).to(funcacc.device(engine))
    step = funcacc.TrainStep(model, sgd(model.parameters()), loss_fn)
    step(BATCHES)
    model.running_var = torch.ones(3, device="meta")
    step(BATCHES)


def made_in_inference_mode(engine):
    with torch.inference_mode():
        model = linear(engine)
    take(model)


def step_inside_a_loss(engine):
    model = linear(engine)
    inner = funcacc.TrainStep(model, sgd(model.parameters()), loss_fn)
    take(model, loss=lambda m, x: (inner(BATCHES), loss_fn(m, x))[1])


def step_inside_a_transform(engine):
    model = linear(engine)
    step = funcacc.TrainStep(model, sgd(model.parameters()), loss_fn)
    torch.func.vmap(lambda x: step([x]).loss)(torch.ones(2, 4, 3))


def state_of_another_model(engine):
    model = linear(engine)
    opt = torch.optim.Adam(model.parameters())
    opt.state[model.weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.zeros(5, 3, device=model.weight.device),
        "exp_avg_sq": torch.zeros_like(model.weight),
    }
    take(model, opt)


def tied_by_memory(engine):
    model = nn.Sequential(*(nn.Linear(3, 3).to(funcacc.device(engine)) for _ in range(2)))
    model[1].weight.data = model[0].weight.data
    take(model)


def frozen(engine):
    take(linear(engine).requires_grad_(False))


def a_loss(loss):
    return lambda engine: take(linear(engine), loss=loss)


MISUSES = {
    "two devices": (two_devices, ModelError, r"on two devices: '0.weight' on .*, '1.weight' on m"),
    "optimizer": (another_models_optimizer, OptimizerError, r"shape \(2, 3\) that the model does"),
    "engine": (not_on_the_engines_device, EngineError, r"can't run tensors on .*; use "),
    "no parameters": (
        lambda e: take(linear(e), sgd([{"params": []}])),
        OptimizerError,
        r"the optimizer has no parameters; pass model.parameters\(\)",
    ),
    "no optimizers": (
        lambda e: funcacc.TrainStep(linear(e), [], loss_fn),
        OptimizerError,
        "opt is an empty list",
    ),
    "common parameter": (common_parameter, OptimizerError, r"params\['bias'\] is in two optimiz"),
    "closed loader": (closed_loader, BatchError, "a generator that gives nothing: .*, closed"),
    "not scalar": (a_loss(lambda m, x: m(x)), ModelError, r"the loss has shape \(4, 2\); return"),
    "integer": (a_loss(lambda m, x: m(x).sum().long()), ModelError, "dtype torch.int64, which has"),
    "detached": (a_loss(lambda m, x: m(x).detach().sum()), ModelError, "no trainable parameter"),
    "independent": (a_loss(lambda m, x: x.sum()), ModelError, "no trainable parameter.*detach"),
    "frozen": (frozen, ModelError, "no trainable parameter.*requires_grad=False"),
    "not a function": (a_loss(3), ModelError, r"loss_fn is a int; give a function \(model, mi"),
    "not a module": (lambda e: take(len, sgd(linear(e).parameters())), ModelError, "give a torch"),
    "meta batch": (
        lambda e: take(linear(e), batches=[x.to("meta") for x in BATCHES]),
        BatchError,
        r"microbatch\[0\] is on the meta device",
    ),
    "moved": (moved_afterwards, ModelError, r"buffers\['running_var'\] is on meta, but the step"),
    "inference": (made_in_inference_mode, ModelError, "'weight' was made under torch.inference_mo"),
    "transform": (
        step_inside_a_transform,
        CaptureError,
        r"torch.func, at .*misuse.py:\d+",
    ),
    "memory": (
        tied_by_memory,
        ModelError,
        r"params\['0.weight'\] and params\['1.weight'\] are two parameters in the same memory; ",
    ),
    "state": (
        state_of_another_model,
        OptimizerError,
        r"Adam's step fails \(.*\) .*opt_state\['weight'\]\['exp_avg'\] is float32\[5,3\], for a "
        r"parameter float32\[2,3\]. Load a state",
    ),
    "nested": (step_inside_a_loss, CaptureError, r"called while a loss .* at .*test_misuse.py:\d+"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_by_name(engine, name):
    misuse, kind, message = MISUSES[name]
    with pytest.raises(kind, match=message):
        misuse(engine)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_step_is_not_copied(engine, way):
    model = linear(engine)
    step = funcacc.TrainStep(model, sgd(model.parameters()), loss_fn)
    with pytest.raises(Lost, match=r"can't be pickled or copied; save model.state_dict\(\)"):
        way(step)


def pair(engine):
    ref = nn.Linear(3, 2)
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    opts = (torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-4) for m in (model, ref))
    return model, ref, *opts


def test_microbatches_elsewhere_and_with_gradients_are_taken_as_data(engine):
    model, ref, opt, ref_opt = pair(engine)
    for place in ("xla" if "xla" in ENGINES else engine, "eager"):
        batches = [torch.randn(4, 3) for _ in range(2)]
        plain_step(ref, ref_opt, loss_fn, batches)
        moved = [x.to(funcacc.device(place)).requires_grad_() for x in batches]
        out = funcacc.train_step(model, opt, moved, loss_fn)
        assert not out.loss.requires_grad and moved[0].grad is None
    assert_same(model, opt, ref, ref_opt)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_in_a_mode_without_gradients_is_a_step(engine, mode):
    model, ref, opt, ref_opt = pair(engine)
    plain_step(ref, ref_opt, loss_fn, BATCHES)
    with mode():
        step = funcacc.TrainStep(model, opt, loss_fn)
        step(BATCHES)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    plain_step(ref, ref_opt, loss_fn, BATCHES)
    step(BATCHES)
    assert_same(model, opt, ref, ref_opt)


def test_steps_of_several_threads_come_one_after_the_other(engine):
    """Two steps over one model, first calls included: as many updates as calls."""
    model, ref, opt, ref_opt = pair(engine)
    steps = [funcacc.TrainStep(model, opt, loss_fn, seed=i) for i in range(2)]
    together, failures = threading.Barrier(4), []

    def work(step):
        together.wait()
        try:
            for _ in range(5):
                step(BATCHES)
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(steps[i % 2],)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    for _ in range(20):
        plain_step(ref, ref_opt, loss_fn, BATCHES)
    assert_same(model, opt, ref, ref_opt)


def in_a_child(fn):
    """What `fn` returns or raises in a forked child, as text."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = str(fn())
        except BaseException as e:
            text = f"{type(e).__name__}: {e}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.xla
def test_a_fork_after_the_device_was_initialised_is_refused():
    model = linear("xla")
    step = funcacc.TrainStep(model, sgd(model.parameters()), loss_fn)
    step(BATCHES)
    want = rf"EngineError: this process was forked from process {os.getpid()} after its XLA"
    for use in (lambda: step(BATCHES), lambda: funcacc.device("xla")):
        text = in_a_child(use)
        assert text.startswith(want) and "get_context('spawn')" in text
    assert step.report().compiles == 1 and float(step(BATCHES).loss) > 0


@pytest.mark.skipif("jax" in ENGINES, reason="JAX warns of every fork")
def test_an_eager_step_goes_on_in_a_fork():
    model = linear("eager")
    step = funcacc.TrainStep(model, sgd(model.parameters()), loss_fn)
    step(BATCHES)
    twin = copy.deepcopy(model.state_dict())
    inside = in_a_child(lambda: float(step(BATCHES).loss))
    model.load_state_dict(twin)
    assert float(inside) == float(step(BATCHES).loss)
