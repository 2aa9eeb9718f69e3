"""Models of transformers at tiny size, offline, against the plain loop."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import funcacc
from funcacc.errors import ModelError
from tests.oracle import assert_same, plain_step


def gpt2():
    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama():
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_equals_the_plain_loop(engine, make):
    ref = make().train()
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    model.tie_weights()
    ref_opt, opt = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (ref, model))

    def loss_fn(model, batch):
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    for _ in range(3):
        batches = [torch.randint(0, 40, (2, 8)) for _ in range(3)]
        plain_step(ref, ref_opt, loss_fn, batches)
        out = funcacc.train_step(model, opt, batches, loss_fn)
    assert torch.isfinite(out.loss.cpu())
    assert_same(model, opt, ref, ref_opt, 1e-5)


def test_without_a_loss_function_the_model_gives_its_own(engine):
    ref = llama().train()
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    ref_opt, opt = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (ref, model))
    rows = [torch.randint(0, 40, (2, 8)) for _ in range(2)]
    batches = [{"input_ids": r, "labels": r} for r in rows]
    plain_step(ref, ref_opt, lambda m, b: m(**b).loss, batches)
    funcacc.train_step(model, opt, batches)
    assert_same(model, opt, ref, ref_opt, 1e-5)


def test_weights_that_moving_has_untied_are_found(engine):
    model = gpt2()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model = model.to(funcacc.device(engine))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"Call model\.tie_weights\(\) after moving, before the"):
        funcacc.TrainStep(model, opt)
