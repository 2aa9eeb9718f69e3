"""Every engine through the protocol of engines/base.py."""

import pytest
import torch

import funcacc
from funcacc import rng
from funcacc.capture.trace import capture
from funcacc.engines import get_engine, pairs
from funcacc.errors import EngineError
from funcacc.types import TensorSpec

F32, I32 = torch.float32, torch.int32


@pytest.fixture
def made(engine):
    return get_engine(engine, funcacc.device(engine))


def state_graph():
    """Five distinguishable carries, a loop, random bits, a passed-through leaf."""
    specs = [
        TensorSpec((3, 2), F32),
        TensorSpec((), F32),
        TensorSpec((), F32),
        TensorSpec((2,), I32),
        TensorSpec((), torch.bool),
        TensorSpec((), I32),
    ]

    def fn(tracing, a, s, t, key, flag, n):
        a, s, t = funcacc.fori_loop(0, n, lambda i, c: (c[0] + 1, c[1] * 2, c[2] + c[1]), (a, s, t))
        with tracing.random.drawing_from(key):
            noise = torch.rand(4)
        return [a, s, t, key + 1, flag, noise]

    return capture(fn, specs, ["a", "s", "t", "key", "flag", "n"])


def inputs(n):
    return [
        torch.arange(6.0).view(3, 2), torch.tensor(3.0), torch.tensor(5.0),
        rng.key(9), torch.tensor(True), torch.tensor(n, dtype=I32),
    ]  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 4])
def test_programs_compute_the_graph_and_overwrite_donated_inputs(made, n):
    graph = state_graph()
    program = made.compile(graph, 5)
    values = [made.put(x) for x in inputs(n)]
    made.own(values)
    before = made.addresses(values[:5])
    out = program(values)
    assert made.addresses(out[:5]) == before
    if made.name == "xla":
        with pytest.raises(RuntimeError, match="HasValue"):
            values[0].cpu()
    a, s, t = torch.arange(6.0).view(3, 2), 3.0, 5.0
    for _ in range(n):
        a, s, t = a + 1, s * 2, t + s
    assert torch.equal(out[0].cpu(), a)
    assert (out[1].item(), out[2].item()) == (s, t)
    assert torch.equal(out[3].cpu(), rng.key(9) + 1)
    assert out[4].item() is True
    bits = rng.random_bits(rng.key(9), 0, (4,))
    assert torch.equal(out[5].cpu(), (bits & 0xFFFFFF).float() * 2.0**-24)


def test_put_is_a_copy_and_assign_keeps_identity_and_aliases(made):
    source = torch.ones(3)
    target = made.put(source)
    source.add_(1)
    assert target.cpu().tolist() == [1, 1, 1]
    alias = target.detach()
    made.assign([target], [made.put(torch.full((3,), 7.0))])
    assert target.cpu().tolist() == alias.cpu().tolist() == [7, 7, 7]


def test_an_operation_without_a_kernel_is_refused_by_name(made):
    if made.name == "eager":
        pytest.skip("PyTorch has them all")
    graph = capture(
        lambda tracing, x: [torch.linalg.cholesky_ex(x)[0]], [TensorSpec((2, 2), F32)], ["x"]
    )
    with pytest.raises(funcacc.FuncaccError, match=r"engine has no \w+ (for|of) .*cholesky"):
        made.compile(graph, 0)


def test_wrong_engines_are_refused():
    with pytest.raises(funcacc.FuncaccError, match="no engine 'tpu'"):
        get_engine("tpu", torch.device("cpu"))
    if funcacc.engines()["xla"].installed:
        with pytest.raises(funcacc.FuncaccError, match=r"model\.to\(funcacc\.device"):
            get_engine("xla", torch.device("cpu"))
    if funcacc.engines()["jax"].installed:
        with pytest.raises(funcacc.FuncaccError, match=r"on the CPU, and this one is on meta"):
            get_engine("jax", torch.device("meta"))


def test_jit_donates_by_position(engine):
    device = funcacc.device(engine)
    traces = []

    def fn(a, b):
        traces.append(1)
        return {"b": b["x"] * 2, "a": a + 1}

    compiled = funcacc.jit(fn, donate_argnums=(0,))
    for i in range(3):
        a, b = torch.full((2,), float(i)).to(device), {"x": torch.ones(2, 2).to(device)}
        out = compiled(a, b)
        assert out["a"].cpu().tolist() == [i + 1, i + 1]
        assert out["b"].cpu().tolist() == [[2, 2], [2, 2]]
    assert len(traces) == 1
    with pytest.raises(funcacc.FuncaccError, match=r"args\[0\] is donated"):
        funcacc.jit(lambda a: a.sum(), donate_argnums=(0,))(torch.ones(2).to(device))


@pytest.mark.parametrize("torch_, torch_xla, jax, _constraints", pairs.TESTED)
def test_tested_versions_go_together(torch_, torch_xla, jax, _constraints):
    assert torch_xla is None or pairs.broken_xla(torch_, torch_xla) is None
    assert pairs.broken_jax(jax, jax) is None


@pytest.mark.parametrize(
    "broken, reason, cure",
    [
        (
            pairs.broken_xla("2.13.0", "2.9.0"),
            "torch_xla 2.9.0 loads with torch 2.9 only, and this is 2.13.0",
            "pip install torch==2.9.0 torch_xla==2.9.0  (or, for engine 'jax' alone: pip uninstall",
        ),
        (
            pairs.broken_xla("2.8.0", "2.8.1"),
            "torch_xla 2.8.1 was not tested; 2.9 is",
            "pip install torch==2.9.0 torch_xla==2.9.0",
        ),
        (
            pairs.broken_jax("0.7.1", "0.10.2"),
            "jax 0.7.1 doesn't go with jaxlib 0.10.2; they need one version",
            'pip install "jax==0.7.1" "jaxlib==0.7.1"',
        ),
        (
            pairs.broken_jax("0.10.2", None),
            "jax 0.10.2 is installed without jaxlib",
            'pip install "jax==0.10.2" "jaxlib==0.10.2"',
        ),
        (
            pairs.broken_jax("0.5.3", "0.5.3"),
            "jax 0.5.3 is too old; 0.6.2 is the oldest tested",
            'pip install "jax>=0.6.2"',
        ),
    ],
)
def test_broken_pairs_are_named_with_the_cure(broken, reason, cure):
    assert broken.reason == reason and broken.cure.startswith(cure)


def test_a_broken_pair_is_refused_before_it_is_imported(monkeypatch):
    """As `importlib.metadata` tells of it; the module that would be imported isn't there."""
    versions = {"jax": "0.7.1", "jaxlib": "0.10.2"}
    monkeypatch.setattr(pairs, "version", versions.get)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(EngineError, match=r"jaxlib 0\.10\.2; .* install it by: pip install"):
        get_engine("jax", torch.device("cpu"))
