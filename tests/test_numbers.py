"""Exact numbers: weights, terms, windows, aux, clipping, dtypes, skipped windows."""

import math

import pytest
import torch
from torch import nn

import funcacc


class Scalar(nn.Module):
    def __init__(self, value=1.0, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value], dtype=dtype))


def run(engine, loss, batches, model=None, lr=1.0, **options):
    model = (model or Scalar()).to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    out = funcacc.train_step(model, opt, batches, loss, **options)
    return out, model.w.detach().cpu()


def weighted(model, b):
    return funcacc.Loss((model.w * b["total"]).sum(), b["weight"])


def rows(*pairs):
    return [{"total": torch.tensor(float(t)), "weight": torch.tensor(float(w))} for t, w in pairs]


def test_token_weighting_is_exact(engine):
    out, w = run(engine, weighted, rows((10, 5), (10, 2), (9, 9)))
    assert out.loss.item() == pytest.approx(1.8125)
    assert w.item() == pytest.approx(1 - 1.8125)
    assert out.weight.item() == 16


def test_zero_weights_contribute_nothing(engine):
    out, _ = run(engine, weighted, rows((10, 5), (0, 0), (6, 3)))
    assert out.loss.item() == pytest.approx(2.0)
    out, w = run(engine, weighted, rows((0, 0), (0, 0)))
    assert (out.loss.item(), w.item()) == (0.0, 1.0)


def test_each_term_has_its_own_normaliser(engine):
    def loss(model, b):
        return weighted(model, b) + 0.5 * funcacc.Loss.mean((model.w * 0.3).sum())

    out, w = run(engine, loss, rows((10, 5), (10, 2), (9, 9)))
    assert out.loss.item() == pytest.approx(1.8125 + 0.15)
    assert w.item() == pytest.approx(1 - 1.8125 - 0.15)


def test_a_short_window_is_divided_by_what_is_there(engine):
    def loss(model, b):
        return (model.w * b).sum()

    (window,) = funcacc.windows([torch.tensor([1.0]), torch.tensor([3.0])], 4)
    out, w = run(engine, loss, window)
    assert out.loss.item() == pytest.approx(2.0)
    assert w.item() == pytest.approx(-1.0)


def test_clipping_is_of_the_mean_gradient(engine):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

    batches = [torch.tensor([10.0, 0.0]), torch.tensor([0.0, 0.0])]
    out, w = run(engine, lambda m, b: (m.w * b).sum(), batches, Two(), clip_norm=1.0)
    assert out.grad_norm.item() == pytest.approx(5.0)
    assert w.tolist() == pytest.approx([-1.0, 0.0], abs=1e-5)


def test_aux_reductions(engine):
    def loss(model, b):
        aux = {
            "z": b,
            "sum": funcacc.Sum(b > 1),
            "last": funcacc.Last(b),
            "stack": funcacc.Stack(b),
            "mean": (funcacc.Mean(b, b),),
        }
        return (model.w * b).sum(), aux

    out, _ = run(engine, loss, [torch.tensor(float(i)) for i in (1, 2, 3)])
    assert list(out.aux) == ["z", "sum", "last", "stack", "mean"]
    assert out.aux["z"].item() == pytest.approx(2.0)
    assert out.aux["sum"].item() == 2
    assert out.aux["last"].item() == 3.0
    assert out.aux["stack"].tolist() == [1.0, 2.0, 3.0]
    assert out.aux["mean"][0].item() == pytest.approx(14 / 6)


def test_sums_are_kept_in_float32_for_bfloat16(engine):
    model = Scalar(0.0, torch.bfloat16)
    batches = [torch.ones(1, dtype=torch.bfloat16)] * 512

    def loss(model, b):
        return funcacc.Loss((model.w * b).sum(), 1.0)

    _, w = run(engine, loss, batches, model)
    assert w.item() == -1.0
    assert w.dtype == torch.bfloat16
    for twin in (sum_in_bfloat16, mean_in_bfloat16):
        assert twin(torch.stack(batches).flatten()) != 1.0


def sum_in_bfloat16(ones):
    """Stays at 256: the next number is 258."""
    total = torch.zeros((), dtype=torch.bfloat16)
    for x in ones:
        total += x
    return total / len(ones)


def mean_in_bfloat16(ones):
    """Each gradient divided first, as by ``(loss / K).backward()``."""
    total = torch.zeros((), dtype=torch.bfloat16)
    for x in ones:
        total += x / len(ones)
    return total


def test_a_window_that_is_not_finite_changes_nothing(engine):
    model = Scalar().to(funcacc.device(engine))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = funcacc.TrainStep(model, opt, lambda m, b: (m.w * b).sum(), skip_nonfinite=True)
    step([torch.ones(1)] * 2)
    before = [model.w.detach().cpu().clone()]
    before += [v.cpu().clone() for v in opt.state[model.w].values()]
    out = step([torch.ones(1), torch.full((1,), math.inf)])
    assert bool(out.skipped)
    after = [model.w.detach().cpu(), *(v.cpu() for v in opt.state[model.w].values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert step.state_dict()["step"] == 1
    assert not bool(step([torch.ones(1)] * 2).skipped)


def test_each_capacity_is_compiled_once_and_its_counts_are_inputs(engine):
    model = Scalar().to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    step = funcacc.TrainStep(model, opt, lambda m, b: (m.w * b).sum())

    def mean_of(values, capacity):
        tree = torch.zeros(capacity, 1)
        tree[: len(values), 0] = torch.tensor(values)
        # Rows past the count are never read.
        tree[len(values) :] = float("nan")
        return step(funcacc.Window(tree, torch.tensor(len(values)))).loss.item()

    for capacity in (4, 2, 4, 2, 1):
        for count in range(1, capacity + 1):
            values = [float(i) for i in range(count)]
            assert mean_of(values, capacity) == pytest.approx(sum(values) / count)
    report = step.report()
    assert (report.compiles, report.traces) == (3, 1)


def test_grad_transform_comes_after_clipping_and_sees_the_parameters(engine):
    def transform(grads, params):
        return {n: g.mul_(2) + 0.1 * params[n] for n, g in grads.items()}

    out, w = run(
        engine,
        lambda m, b: (m.w * b).sum(),
        [torch.tensor([3.0]), torch.tensor([5.0])],
        clip_norm=1.0,
        grad_transform=transform,
    )
    assert out.grad_norm.item() == pytest.approx(4.0)
    assert w.item() == pytest.approx(1.0 - (2.0 + 0.1), rel=1e-5)


def test_a_grad_transform_that_loses_a_gradient_is_refused(engine):
    with pytest.raises(funcacc.FuncaccError, match=r"grads\['w'\] is missing"):
        run(engine, lambda m, b: (m.w * b).sum(), [torch.ones(1)], grad_transform=lambda g, p: {})
    for bad, got in ((None, "None"), (0.5, "0.5"), (torch.ones(2), r"float32\[2\]")):
        with pytest.raises(
            funcacc.FuncaccError, match=rf"returned {got} for grads\['w'\], which is float32\[1\]"
        ):
            run(
                engine,
                lambda m, b: (m.w * b).sum(),
                [torch.ones(1)],
                grad_transform=lambda g, p, bad=bad: {"w": bad},
            )


def test_sums_of_aux_are_wide(engine):
    """In bf16 the first would stop at 256; in its own dtype the second would wrap to 44."""

    def loss(model, b):
        ones = torch.ones(())
        aux = {"bf16": ones.bfloat16(), "uint8": ones.to(torch.uint8), "bool": ones > 0}
        return (model.w * b).sum(), {k: funcacc.Sum(v) for k, v in aux.items()}

    out, _ = run(engine, loss, funcacc.Window(torch.ones(300, 1)))
    assert {k: v.item() for k, v in out.aux.items()} == {"bf16": 300, "uint8": 300, "bool": 300}
    assert [v.dtype for v in out.aux.values()] == [torch.float32, torch.int64, torch.int64]


def test_a_mean_without_weight_may_be_zero_by_zero(engine):
    """Accuracy over the labels of a microbatch that has none."""

    def loss(model, b):
        right, count = b[0], b[1]
        return (model.w * b).sum(), funcacc.Mean(right / count, count)

    rows = [torch.tensor([0.0, 0.0]), torch.tensor([1.0, 4.0]), torch.tensor([3.0, 4.0])]
    out, _ = run(engine, loss, rows)
    assert out.aux.item() == 0.5


def test_a_mean_whose_weight_does_not_fit_is_refused():
    def loss(model, b):
        return (model.w * b).sum(), funcacc.Mean(torch.ones(3), torch.ones(2))

    with pytest.raises(
        funcacc.FuncaccError, match=r"of shape \(3,\) with a weight of shape \(2,\)"
    ):
        run("eager", loss, [torch.ones(1)])


@pytest.mark.parametrize("weight", [3.0, torch.tensor(3.0, dtype=torch.float64), 0.1])
def test_float64_is_kept_through_several_terms(engine, weight):
    """Scales or weights in float32 would give errors of 1e-9 and more."""

    def loss(model, b):
        return funcacc.Loss((model.w * b).sum(), weight) + 0.1 * funcacc.Loss.mean(
            (model.w * 0.3).sum()
        )

    model = Scalar(1.0, torch.float64).to(funcacc.device(engine))
    out = funcacc.accumulate(model, [torch.tensor([0.7], dtype=torch.float64)] * 3, loss)
    wanted = 0.7 / float(weight) + 0.03
    assert out.loss.item() == pytest.approx(wanted, rel=1e-14)
    assert out.grads["w"].item() == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("dtype, weight", [(torch.bfloat16, 257), (torch.float16, 70_000)], ids=str)
def test_the_division_by_the_weights_is_wide(engine, dtype, weight):
    """bf16 has no 257, and float16 nothing past 65504."""

    def loss(model, b):
        return funcacc.Loss((model.w * b).sum(), weight)

    model = Scalar().to(funcacc.device(engine))
    out = funcacc.accumulate(model, [torch.full((1,), 255.0)], loss, accumulate_dtype=dtype)
    wanted = torch.tensor(255 / weight).to(dtype)
    assert torch.equal(out.grads["w"].cpu(), wanted.reshape(1))


@pytest.mark.parametrize(
    "option, message",
    [
        ({"clip_norm": -1.0}, "clip_norm is -1.0; give a positive Python number, or None"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; give a positive Python number, or None"),
        ({"clip_norm": math.nan}, "clip_norm is nan; give a positive"),
        ({"clip_norm": torch.tensor(1.0)}, r"clip_norm is tensor\(1.\); give a positive Python"),
        ({"clip_value": "1"}, "clip_value is '1'; give a positive"),
        ({"grad_transform": 3}, "grad_transform is 3; give a function"),
        ({"accumulate_dtype": torch.int32}, "accumulate_dtype is torch.int32; give a floating"),
        ({"accumulate_dtype": "float32"}, "accumulate_dtype is 'float32'; give a floating dtype"),
        ({"compute_dtype": torch.int64}, "compute_dtype is torch.int64; give a floating dtype"),
        ({"skip_nonfinite": 1}, "skip_nonfinite is 1; give True or False"),
        ({"seed": "a"}, "seed is 'a'; give an int"),
        ({"clip_nrom": 1.0}, "there is no option 'clip_nrom'; choose from accumulate_dtype"),
    ],
)
def test_options_that_mean_nothing_are_refused(option, message):
    """Some would go unnoticed: a negative clip_norm climbs, an integer accumulator rounds."""
    model = Scalar()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(funcacc.FuncaccError, match=message):
        funcacc.TrainStep(model, opt, lambda m, b: (m.w * b).sum(), **option)
    with pytest.raises(funcacc.FuncaccError, match=message):
        funcacc.accumulate(model, [torch.ones(1)], lambda m, b: (m.w * b).sum(), **option)


@pytest.mark.parametrize("engine", ["xla"])
@pytest.mark.xla
def test_metrics_stay_on_the_device_until_they_are_read(engine):
    from torch_xla.debug import metrics

    def transfers():
        found = metrics.metric_data("TransferFromDeviceTime")
        return found[0] if found else 0

    model = Scalar(1.0).to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = funcacc.TrainStep(model, opt, lambda m, b: ((m.w * b).sum(), {"b": b.mean()}))
    step([torch.ones(2)])
    at_each_step, outs = [], []
    for i in range(6):
        before = transfers()
        outs.append(step([torch.full((2,), float(i))]))
        if i % 3 == 2:
            float(outs[-1].loss)
        at_each_step.append(transfers() - before)
    assert at_each_step == [0, 0, 1, 0, 0, 1]
    # Earlier ones can still be read.
    assert [float(o.aux["b"]) for o in outs] == [0, 1, 2, 3, 4, 5]
