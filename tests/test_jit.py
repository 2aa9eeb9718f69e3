"""`jit`: stages that can be printed, one program a kind of arguments, donation that says so."""

import logging

import pytest
import torch

import funcacc


@pytest.fixture
def device(engine):
    return funcacc.device(engine)


def test_stages_can_be_printed_and_called(engine, device):
    def scale(state, x):
        return {"w": state["w"] * 2 + x}

    args = {"w": torch.ones(3).to(device)}, torch.ones(3).to(device)
    lowered = funcacc.jit(scale, donate_argnums=(0,)).lower(*args)
    assert f"jit(scale), traced for {engine}" in str(lowered)
    assert "args[0]['w']: donated to result 0" in str(lowered)
    assert "float32[3]" in str(lowered)
    compiled = lowered.compile()
    assert f"jit(scale), compiled for {engine}" in str(compiled)
    assert ("HloModule" in compiled.text()) == (engine == "xla")
    assert compiled(*args)["w"].cpu().tolist() == [3, 3, 3]
    with pytest.raises(
        funcacc.FuncaccError, match=r"compiled for other arguments: args\[1\] was float32\[3\]"
    ):
        compiled({"w": torch.ones(3).to(device)}, torch.ones(2).to(device))


@pytest.mark.xla
def test_compiling_ahead_leaves_nothing_for_the_call(device):
    if device.type != "xla":
        pytest.skip("the eager engine compiles nothing")
    import torch_xla.debug.metrics as met

    a = torch.arange(3.0).to(device)
    compiled = funcacc.jit(lambda x: x * 5 - 1).lower(a).compile()
    before = met.metric_data("CompileTime")[0]
    assert compiled(a).cpu().tolist() == [-1, 4, 9]
    assert met.metric_data("CompileTime")[0] == before


def test_programs_are_kept_by_kind_and_a_retrace_names_the_argument(device, caplog):
    traces = []

    def fn(a, options):
        traces.append(1)
        return a["x"] * options["times"] if options["flag"] else a["x"]

    compiled = funcacc.jit(fn)
    x = torch.ones(2).to(device)
    messages = []
    with caplog.at_level(logging.INFO, "funcacc"):
        for a, times, flag in [
            (x, 2, True),
            (x + 1, 2, True),
            (x, 3, True),
            (torch.ones(3).to(device), 3, True),
            (x.to(torch.int32), 3, True),
            (x, 2, True),
        ]:
            out = compiled({"x": a}, {"times": times, "flag": flag})
            assert torch.equal(out.cpu(), a.cpu() * times)
        compiled({"x": x, "y": x}, {"times": 2, "flag": True})
        messages = [r.getMessage() for r in caplog.records if "traced" in r.getMessage()]
    assert len(traces) == 5
    assert messages == [
        "jit(fn): traced: first call",
        "jit(fn): traced: args[1]['times'] was 2, is 3",
        "jit(fn): traced: args[0]['x'] was float32[2], is float32[3]",
        "jit(fn): traced: args[0]['x'] was float32[3], is int32[2]",
        "jit(fn): traced: args[0]['y'] is new",
    ]


def test_donated_inputs_say_so_when_they_are_read(device):
    step = funcacc.jit(lambda s, g: {"w": s["w"] - g, "n": s["n"] + 1}, donate_argnums=(0,))
    other = torch.zeros(()).to(device)
    state = {"w": torch.ones(4).to(device), "n": torch.zeros(()).to(device)}
    kept, g = state["w"].clone(), torch.ones(4).to(device)
    first = state
    for i in range(3):
        before, state = state, step(state, g)
        assert state["w"].cpu().tolist() == [-float(i)] * 4
        assert state["n"].item() == i + 1
    text = r"it was donated as args\[0\]\['w'\] of jit\(<lambda>\).*use the result"
    for use in (lambda t: t + 1, lambda t: t.cpu(), repr, lambda t: t.shape, lambda t: g * t):
        with pytest.raises(funcacc.FuncaccError, match=text):
            use(first["w"])
    with pytest.raises(funcacc.FuncaccError, match="this tensor no longer exists: it was donated"):
        step(before, g)
    # Copies, and equal scalars that a cache may share, keep their values.
    assert kept.cpu().tolist() == [1, 1, 1, 1]
    assert other.item() == 0


def test_donation_is_refused_where_it_would_destroy_or_do_nothing(device):
    x = torch.ones(2).to(device)
    with pytest.raises(funcacc.FuncaccError, match=r"args\[0\] is donated, but no result is left"):
        funcacc.jit(lambda a: a.sum(), donate_argnums=(0,))(x)
    with pytest.raises(funcacc.FuncaccError, match="the same tensor is passed a second time"):
        funcacc.jit(lambda a, b: a + b, donate_argnums=(0,))(x, x)
    assert x.cpu().tolist() == [1, 1]


def test_results_and_arguments_that_are_no_tensors_are_refused(device):
    x = torch.ones(2).to(device)
    with pytest.raises(funcacc.FuncaccError, match=r"result\['b'\] is a str"):
        funcacc.jit(lambda a: {"a": a, "b": "text"})(x)
    with pytest.raises(funcacc.FuncaccError, match=r"args\[1\] is a ndarray; jit takes tensors"):
        funcacc.jit(lambda a, b: a)(x, x.cpu().numpy())


def test_random_operations_draw_from_the_devices_generator(device):
    fn = funcacc.jit(lambda x: x + torch.rand(64))
    x = torch.zeros(64).to(device)
    a, b = fn(x).cpu(), fn(x).cpu()
    assert not torch.equal(a, b)
    assert 0 <= a.min() < a.max() < 1


def test_a_jitted_function_inside_another_is_part_of_it(device):
    inner = funcacc.jit(lambda x: x * 2)
    outer = funcacc.jit(lambda x: inner(x) + 1)
    assert outer(torch.ones(2).to(device)).cpu().tolist() == [3, 3]


def test_views_are_taken_as_what_they_show(device):
    base = torch.arange(6.0).reshape(3, 2).to(device)
    views = [base.t(), base[1:], torch.zeros(3, 2).to(device).fill_(2).t(), base.expand(2, 3, 2)]
    for view in views:
        want = view.cpu() * 2
        assert funcacc.jit(lambda a: a * 2)(view).cpu().equal(want)
    donating = funcacc.jit(lambda a: a * 2, donate_argnums=0)
    assert donating(base.t()).cpu().equal(base.cpu().t() * 2)
    assert base.cpu().equal(torch.arange(6.0).reshape(3, 2))


def test_arguments_that_can_not_be_donated_are_refused(device):
    x = torch.ones(3).to(device)
    with pytest.raises(funcacc.FuncaccError, match=r"args\[0\] is donated, but .* closes over"):
        funcacc.jit(lambda a: a + x, donate_argnums=0)(x)
    with pytest.raises(funcacc.FuncaccError, match="donates argument 2, but was given 1"):
        funcacc.jit(lambda a: a + 1, donate_argnums=(2,))(x)


def test_a_function_may_return_nothing(device):
    assert funcacc.jit(lambda a: None)(torch.ones(2).to(device)) is None


@pytest.mark.xla
def test_complex_numbers_are_refused_by_name_on_xla():
    x = torch.ones(2).to(funcacc.device("xla"))
    with pytest.raises(funcacc.FuncaccError, match=r"no complex numbers, which aten.mul.Tensor"):
        funcacc.jit(lambda a: (a * 1j).abs())(x)
