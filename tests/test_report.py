"""What a report says of memory, programs and leaves; and what is said when memory runs out."""

import json

import pytest
import torch
from torch import nn

import funcacc
from funcacc.engines import dump
from funcacc.errors import EngineError, StateError
from funcacc.report import Need


class Net(nn.Module):
    """Trained and frozen parameters, buffers that change and one that doesn't."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Linear(60, 2)
        self.register_buffer("scale", torch.full((2,), 0.5))
        self.a.bias.requires_grad_(False)

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x)))) * self.scale


def make(engine, **options):
    model = Net().to(funcacc.device(engine))
    mask = torch.ones(2).to(funcacc.device(engine))

    def loss_fn(model, x):
        y = model(x) * mask
        return y.square().mean(), {"most": funcacc.Stack(y.max()), "last": funcacc.Last(y)}

    opt = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    step = funcacc.TrainStep(model, opt, loss_fn, **options)
    step.opt = opt
    return step


WINDOW = [torch.ones(5, 40) for _ in range(3)]

# Elements, counted by hand.
TRAINED, FROZEN = 60 * 40 + 60 + 60 + 2 * 60 + 2, 60
EXPECTED = {
    "params": 4 * (TRAINED + FROZEN),
    "optimizer state": 4 * (2 * TRAINED + 5),
    "buffers": 4 * (60 + 60 + 2) + 8,
    "key and numbers": 8 + 4 + 4 + 8 * 5,
    "captured constants": 4 * 2,
    "window": 4 * 3 * 5 * 40,
    # Gradients, loss and weight, a stack of three numbers, and a tensor of 5 x 2.
    "accumulators": 4 * (TRAINED + 2 + 3 + 5 * 2),
}


def test_bytes_by_kind_and_the_floor(engine):
    step = make(engine)
    step(WINDOW)
    report = step.report()
    assert report.kinds == EXPECTED
    assert report.floor_bytes == sum(EXPECTED.values())
    text = str(report)
    assert "  window                  1 leaves    2.3 KiB\n" in text
    assert "floor, the sum of these" in text and "compiler's account" not in text
    leaves = {x.path: x for x in report.leaves}
    weight = leaves["opt_state['a.weight']['exp_avg']"]
    assert (weight.kind, weight.donated, weight.in_place) == ("optimizer state", True, True)
    assert report.leaves[weight.output] is weight
    assert f"donated to output {weight.output} in place" in text
    for path, kind in {"params['a.bias']": "params", "buffers['scale']": "buffers"}.items():
        assert (leaves[path].kind, leaves[path].donated, leaves[path].output) == (kind, False, None)
    assert {x.path for x in report.inside} >= {"grads['a.weight']", "totals[0]", "weights[0]"}
    assert json.loads(json.dumps(report.to_dict()))["kinds"] == EXPECTED


def test_accumulators_are_as_wide_as_asked():
    step = make("eager", accumulate_dtype=torch.float64)
    step(WINDOW)
    own = [x.spec.nbytes for x in step.report().inside if x.path.startswith("grads")]
    assert sum(own) == 8 * TRAINED


@pytest.mark.xla
def test_the_compilers_account_of_a_program():
    """Inputs once, and no other memory for the state."""
    step = make("xla")
    step(WINDOW)
    report = step.report(memory=True)
    need = report.need
    assert need.inputs == sum(x.spec.nbytes for x in report.leaves)
    assert need.total == sum(need[1:])
    assert need.temporaries >= report.kinds["accumulators"] - 100
    assert need.outputs < 2000 < report.state_bytes
    assert "the compiler's account" in str(report)
    assert "temporaries" in report._repr_html_()
    # Another program, and one that no compiler tells of.
    step(WINDOW[:2])
    assert step.report().need is None
    eager = make("eager")
    eager(WINDOW)
    assert eager.report(memory=True).need is None


def test_an_assignment_of_buffers_is_read_by_use():
    text = """BufferAssignment:
allocation 0: size 32768, parameter 31, shape |f32[128,64]| at ShapeIndex {}, maybe-live-out:
 value: <1122 p31.32 @0> (size=32768,offset=0): f32[128,64]{1,0}
allocation 1: size 4096, parameter 2, shape |f32[1024]| at ShapeIndex {}:
allocation 2: size 264, output shape is |(f32[])|, maybe-live-out:
allocation 3: size 8, constant:
allocation 4: size 4, thread-local:
allocation 5: size 85000, preallocated-temp:

Total bytes used: 122140 (119.3KiB)
"""
    assert dump.need(text) == Need(122140, 32768 + 4096, 4 + 85000, 264, 8)


def test_programs_are_listed_with_reasons_times_and_steps(engine):
    step = make(engine)
    step.compile(WINDOW)
    assert step.report().compiles == 0 and step.report().kinds == EXPECTED
    step(WINDOW)
    step(WINDOW)
    step(WINDOW[:2])
    step.model.eval()
    step(WINDOW)
    builds = step.report().builds
    assert [(b.step, b.reason, b.traced) for b in builds] == [
        (0, "first call", True),
        (2, "batch shapes or dtypes changed", False),
        (2 + 1, "batch shapes or dtypes, train() or eval() changed", True),
    ]
    for b in builds:
        assert set(b.seconds) == {"capture", "lower", "compile"} and b.seconds["capture"] > 0
    assert "program after step 2: batch shapes or dtypes changed (found traced; " in str(
        step.report()
    )


def test_html_escapes_what_users_name_and_needs_nothing_from_elsewhere():
    model = nn.ModuleDict({"<script>alert(1)</script>": nn.Linear(2, 1)})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = funcacc.TrainStep(model, opt, lambda m, x: next(iter(m.values()))(x).mean())
    step([torch.ones(3, 2)])
    html = step.report()._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "http" not in html and "url(" not in html and "src=" not in html


@pytest.mark.xla
def test_a_leaf_that_is_copied_is_named(monkeypatch):
    """A donor that the program doesn't take: the step is taken, and it's an error."""
    from funcacc.engines.xla import private

    # Other options, for torch_xla may have compiled the same program before.
    step = make("xla", clip_value=0.5)
    real = private.donation
    with monkeypatch.context() as patch:
        patch.setattr(private, "donation", lambda tensors: real(tensors[1:]))
        with pytest.raises(EngineError, match=r"(?s)their own memory.*\n  params\['a\.weight'\]"):
            step(WINDOW)
    assert int(step.model.norm.num_batches_tracked) == 3
    before = {k: v.cpu().clone() for k, v in step.model.state_dict().items()}
    with pytest.raises(EngineError, match=r"\(float32\[60,40\]\)\nThe step was taken.*donate=Fal"):
        step(WINDOW)
    assert all(torch.equal(v.cpu(), before[k]) for k, v in step.model.state_dict().items())
    other = funcacc.TrainStep(step.model, step.opt, step.loss_fn, donate=False)
    other(WINDOW)
    assert int(step.model.norm.num_batches_tracked) == 6


def test_a_state_without_elements_can_be_donated(engine):
    model = nn.Linear(3, 2).to(funcacc.device(engine))
    model.register_parameter("none", nn.Parameter(torch.empty(0, 3).to(model.weight.device)))
    opt = torch.optim.AdamW(model.parameters())
    step = funcacc.TrainStep(model, opt, lambda m, x: m(x).mean() + m.none.sum())
    step([torch.ones(4, 3)])
    step([torch.ones(4, 3)])


FULL = "RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes.\nmore"


def full(*_args, **_kwargs):
    raise RuntimeError(FULL)


PLACES = {
    "compile": ("compile_cached", "compile"),
    "upload": ("move", "run"),
    "copies": ("copies", "get ready"),
    "run": ("run_cached", "run"),
}


@pytest.mark.xla
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_says_what_takes_it_and_what_to_change(place, monkeypatch):
    from funcacc.engines.xla import private

    step = make("xla")
    name, doing = PLACES[place]
    before = {k: v.cpu().clone() for k, v in step.model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(step._engine if place == "upload" else private, name, full)
        with pytest.raises(EngineError) as e:
            step(WINDOW)
    text = str(e.value)
    assert text.startswith(f"out of memory: the step can't {doing}: RESOURCE_EXHAUSTED: Out of")
    assert "more\n" not in text
    for line in ("  params                  6 leaves ", "  optimizer state        15 leaves "):
        assert line in text
    assert "funcacc.checkpoint" in text and "smaller microbatches" in text
    assert text.endswith("Parameters, buffers and optimizer state are as they were before it")
    assert all(torch.equal(v.cpu(), before[k]) for k, v in step.model.state_dict().items())
    step(WINDOW)


@pytest.mark.xla
def test_out_of_memory_after_the_dispatch_names_the_checkpoint(monkeypatch, tmp_path):
    from funcacc.engines.xla import private

    step = make("xla")
    step(WINDOW)
    parts = {"model": step.model, "opt": step.opt, "step": step}
    path = tmp_path / "run.pt"
    funcacc.save(path, **parts)
    want = {k: v.cpu().clone() for k, v in step.model.state_dict().items()}
    real = private.run_cached
    with monkeypatch.context() as patch:
        patch.setattr(private, "run_cached", lambda h, v: [real(h, v), full()])
        with pytest.raises(StateError) as e:
            step(WINDOW)
    assert f"saved or loaded of this model is {path}\nmemory:\n  params " in str(e.value)
    with pytest.raises(StateError, match=f"Load a checkpoint .* is {path}"):
        step(WINDOW)
    funcacc.load(path, **parts)
    assert all(torch.equal(v.cpu(), want[k]) for k, v in step.model.state_dict().items())
    step(WINDOW)


def test_memory_of_the_host_is_memory_too():
    def loss_fn(model, x):
        return model(x).mean()

    model = nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = funcacc.TrainStep(model, opt, loss_fn, engine="eager")
    step([torch.ones(4, 3)])
    program = step.programs[0]
    program.graph.module.forward = lambda *a: torch.empty(2**60)
    with pytest.raises(EngineError, match=r"can't run: .*allocate memory"):
        step([torch.ones(4, 3)])
