from __future__ import annotations

import pytest
import torch

from funcacc.cli import options
from funcacc.cli.gpt import GPT, GPTConfig, generate

SMALL = GPTConfig(context=8, layers=2, heads=2, width=16, dropout=0.0)


def test_the_default_model_has_one_to_three_million_parameters() -> None:
    count = sum(p.numel() for p in GPT(options.parse([]).model).parameters())
    assert 1_000_000 <= count <= 3_000_000


def test_no_position_sees_a_later_one() -> None:
    model = GPT(SMALL).eval()
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5:] = 0
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 256)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_the_head_is_the_embedding() -> None:
    names = [name for name, p in GPT(SMALL).named_parameters() if p.shape == (256, 16)]
    assert names == ["tokens.weight"]


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    model = GPT(SMALL)
    decayed, kept = model.parameter_groups(0.1)
    grouped = [*decayed["params"], *kept["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 1 for p in kept["params"])


def test_dropout_acts_in_training_only() -> None:
    model = GPT(GPTConfig(context=8, layers=1, heads=2, width=16, dropout=0.5))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("prompt", [b"a", b"longer than the context"])
def test_generate_continues_the_prompt_and_follows_its_seed(prompt: bytes) -> None:
    model = GPT(SMALL)
    one, again = (generate(model, prompt, 20, seed=1) for _ in range(2))
    assert one == again and one.startswith(prompt) and len(one) == len(prompt) + 20
    assert one != generate(model, prompt, 20, seed=2)
    assert model.training
