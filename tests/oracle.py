"""The plain PyTorch loop, which shares no code with funcacc, and comparisons with it."""

import torch

STATE_TOLERANCE = 2e-6


def plain_step(model, opt, loss_fn, batches):
    """One optimizer step with gradient accumulation as everyone writes it."""
    opt.zero_grad()
    for batch in batches:
        (loss_fn(model, batch) / len(batches)).backward()
    opt.step()


def assert_same(model, opt, ref_model, ref_opt, tolerance=STATE_TOLERANCE):
    """Parameters, buffers and optimizer state agree."""
    own, ref = model.state_dict(), ref_model.state_dict()
    assert own.keys() == ref.keys()
    for name in ref:
        torch.testing.assert_close(
            own[name].cpu(), ref[name], rtol=tolerance * 10, atol=tolerance, msg=name
        )
    own_state, ref_state = opt.state_dict()["state"], ref_opt.state_dict()["state"]
    assert own_state.keys() == ref_state.keys()
    for i in ref_state:
        assert own_state[i].keys() == ref_state[i].keys()
        for key, value in ref_state[i].items():
            if not isinstance(value, torch.Tensor):
                assert own_state[i][key] == value
                continue
            torch.testing.assert_close(
                own_state[i][key].cpu(), value, rtol=tolerance * 10, atol=tolerance, msg=key
            )
