"""The JAX engine's own ways: memory that is shared, types of 64 bits, operations by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcacc
from funcacc.capture.trace import capture
from funcacc.engines import get_engine
from funcacc.errors import EngineError, StateError
from funcacc.types import TensorSpec
from tests.engines import ENGINES

pytestmark = pytest.mark.skipif("jax" not in ENGINES, reason="jax is tested in its own process")


def loss_fn(model, x):
    return model(x).square().mean()


def setting():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, opt, funcacc.TrainStep(model, opt, loss_fn, engine="jax")


def test_all_of_the_state_is_overwritten_and_nothing_else():
    import jax

    _, _, step = setting()
    step([torch.randn(5, 3)])
    report = step.report()
    found = step.programs[0].compiled.memory_analysis()
    assert found.alias_size_in_bytes == report.state_bytes == report.donated_bytes
    assert report.in_place_leaves == report.state_leaves
    assert not jax.config.jax_enable_x64


def test_tensors_stay_where_they_are_from_step_to_step():
    model, opt, step = setting()
    step([torch.randn(5, 3)])
    tensors = [*model.state_dict().values(), *opt.state[model[0].weight].values()]
    before = [t.data_ptr() for t in tensors]
    first = model[0].weight.detach().clone()
    step([torch.randn(5, 3)])
    assert [t.data_ptr() for t in tensors] == before
    assert not torch.equal(model[0].weight, first)


def test_an_early_alias_is_copied_to_and_said_not_to_be_in_place():
    model, _, step = setting()
    alias = model[0].weight.detach()
    step([torch.randn(5, 3)])
    assert torch.equal(alias, model[0].weight)
    report = step.report()
    assert report.in_place_leaves == report.state_leaves - 1


def test_memory_outlives_the_step():
    model, opt, step = setting()
    step([torch.randn(5, 3)])
    want = model[0].weight.detach().clone()
    weight = model[0].weight.detach()
    del model, opt, step
    _ = [torch.randn(4, 3) for _ in range(50)]
    assert torch.equal(weight, want)


def test_what_a_failed_program_took_is_lost_until_it_is_loaded(monkeypatch):
    model, opt, step = setting()
    step([torch.randn(5, 3)])
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    own, opt_state = step.state_dict(), opt.state_dict()
    opt_state = {**opt_state, "state": {i: {k: v.clone() for k, v in s.items()}
                                        for i, s in opt_state["state"].items()}}  # fmt: skip
    program = step.programs[0]
    real = program.compiled

    def failing(*arrays):
        real(*arrays)
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(program, "compiled", failing)
        with pytest.raises(StateError, match="had taken its state over: no memory"):
            step([torch.randn(5, 3)])
    with pytest.raises(StateError, match="failed in an earlier step"):
        step([torch.randn(5, 3)])
    model.load_state_dict(saved)
    opt.load_state_dict(opt_state)
    step.load_state_dict(own)
    assert float(step([torch.randn(5, 3)]).loss) > 0


X = torch.arange(2.0 * 3 * 7 * 8).view(2, 3, 7, 8).sin()
INDEX = torch.tensor([[2, 0, 1], [1, 1, 0]])
OPERATIONS = {
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "amax of scatter": lambda x: x[0, 0].scatter_reduce(0, INDEX, x[0, 1, :2, :3], "amax"),
    "avg": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "bicubic": lambda x: F.interpolate(x, (5, 11), mode="bicubic"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=True),
    "cumsum": lambda x: x.cumsum(2) + x.logcumsumexp(3),
    "division": lambda x: torch.div(x * 9, -2, rounding_mode="trunc") + x.fmod(0.3) + x % -0.3,
    "grid": lambda x: F.grid_sample(
        x.detach(), x[:, :2].movedim(1, -1).detach(), align_corners=False
    ) + x.mean(),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2, ceil_mode=True),
    "mean of scatter": lambda x: x[0, 0].scatter_reduce(
        1, INDEX, x[0, 1, :2, :3], "mean", include_self=False
    ),
    "nearest": lambda x: F.interpolate(x, (4, 13), mode="nearest-exact"),
    "norm": lambda x: torch.linalg.vector_norm(x, 3, (1, 2)),
    "pad": lambda x: F.pad(x, (1, -2, 3, 0), value=2.0) if x.ndim else x,
    "reflect": lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"),
    "sort": lambda x: x.sort(1, descending=True).values * x.topk(3, 1, largest=False).values,
    "std": lambda x: x.std((0, 3)) + x.var(),
    "transposed": lambda x: F.conv_transpose2d(
        x[:, :2], x[:, :2, :3, :2].transpose(0, 1)[:, :1], stride=2, padding=1, output_padding=1,
        groups=1,
    ),
    "dilated groups": lambda x: F.conv2d(
        x[:, :2], x[:, :1, :3, :2], stride=(2, 1), padding=2, dilation=(1, 2), groups=2
    ),
    "unfold": lambda x: x.unfold(2, 3, 2).flip(1, 4).roll(2, 3).tril(),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_and_their_gradients_are_pytorchs(name):
    engine = get_engine("jax", torch.device("cpu"))

    def fn(x):
        x = x.detach().requires_grad_()
        out = OPERATIONS[name](x)
        (grad,) = torch.autograd.grad((out * out.detach().cos()).sum(), x)
        return [out.detach(), grad]

    graph = capture(lambda tracing, x: fn(x), [TensorSpec.of(X)], ["x"])
    found = engine.compile(graph, 0)([X, *graph.captured])
    for a, b in zip(found, fn(X), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_cant_be_lowered_is_refused_before_anything_ran():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with pytest.raises(EngineError, match=r"no form of .*aten\._cdist_forward"):
        funcacc.train_step(model, opt, [torch.randn(3, 2)], lambda m, x: torch.cdist(m(x), x).sum())
    assert torch.equal(model.weight, before)


def test_a_mesh_is_refused_with_the_reason():
    model, opt, _ = setting()
    reason = "engine 'jax' runs on one device, because its state lies where PyTorch reads it"
    with pytest.raises(EngineError, match=f'{reason}; leave mesh out, or use "xla"'):
        funcacc.TrainStep(model, opt, loss_fn, engine="jax", mesh=object())
