"""The conformance table: every case on every engine, compiled and as it stands."""

import pytest
import torch

import funcacc
from tests.loop_cases import CASES, PLAIN


@pytest.mark.parametrize("how", ["compiled", "as it stands"])
@pytest.mark.parametrize("name", CASES)
def test_case(engine, name, how):
    fn, inputs, check = CASES[name]
    device = funcacc.device(engine)

    def run(*values):
        return list(fn(funcacc, *values))

    values = [x.to(device) for x in inputs()]
    got = [t.detach().cpu() for t in (funcacc.jit(run) if how == "compiled" else run)(*values)]
    if check:
        assert check(*got)
        return
    want = [t.detach() for t in fn(PLAIN, *inputs())]
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
    for v, x in zip(values, inputs(), strict=True):
        assert torch.equal(v.cpu(), x), "a tensor of the caller has changed"
