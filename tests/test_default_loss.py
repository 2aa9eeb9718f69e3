"""Without a loss function, transformers models weigh by tokens, exactly over the window."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import funcacc

WORDS = 30


def gpt2():
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(cls=LlamaForCausalLM, config=LlamaConfig, **more):
    made = config(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16, **more,
    )  # fmt: skip
    return cls(made)


def mixtral():
    def make(config):
        # The default groups tokens by expert, with an operation that XLA lacks.
        return AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm")

    return llama(
        make, MixtralConfig, num_local_experts=2, num_experts_per_tok=1,
        output_router_logits=True, router_aux_loss_coef=0.1,
    )  # fmt: skip


def t5():
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def bert(cls, **more):
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **more,
    )  # fmt: skip
    return cls(config)


def ragged(k=3):
    """Microbatches with 9, 3 and 1 labels, about."""
    rows = [torch.randint(1, WORDS, (2, 6)) for _ in range(k)]
    labels = [r.clone() for r in rows]
    labels[1][:, 3:] = -100
    labels[2][:, 2:] = -100
    labels[2][0] = -100
    return [{"input_ids": r, "labels": t} for r, t in zip(rows, labels, strict=True)]


def whole(microbatches):
    return {k: torch.cat([b[k] for b in microbatches]) for k in microbatches[0]}


def assert_equals_the_full_batch(engine, ref, microbatches, wanted):
    """J and the gradients are those of `wanted(ref)`, a loss over all rows."""
    model = copy.deepcopy(ref).to(funcacc.device(engine))
    model.tie_weights()
    out = funcacc.accumulate(model, microbatches)
    loss = wanted(ref)
    loss.backward()
    torch.testing.assert_close(out.loss.cpu(), loss.detach(), rtol=1e-5, atol=1e-6)
    grads = {n: p.grad for n, p in ref.named_parameters() if p.grad is not None}
    assert set(out.grads) == set(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(out.grads[name].cpu(), grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_causal_models_equal_num_items_in_batch(engine, make):
    ref, microbatches = make().train(), ragged()
    full = whole(microbatches)
    count = (full["labels"][:, 1:] != -100).sum()
    assert_equals_the_full_batch(
        engine, ref, microbatches, lambda m: m(**full, num_items_in_batch=count).loss
    )


def test_the_mean_of_means_would_fail():
    ref, microbatches = llama().train(), ragged()
    out = funcacc.accumulate(ref, microbatches)
    means = torch.stack([ref(**b).loss.detach() for b in microbatches])
    assert abs(means.mean() - out.loss) > 1e-3


@pytest.mark.parametrize("make", [llama, t5, lambda: bert(BertForMaskedLM)])
def test_a_microbatch_without_labels_contributes_nothing(engine, make):
    """Its own mean is 0 / 0."""
    ref, microbatches = make().train(), ragged()
    full = whole(microbatches)
    microbatches.append({k: v.clone() for k, v in microbatches[0].items()})
    microbatches[-1]["labels"].fill_(-100)
    assert_equals_the_full_batch(engine, ref, microbatches, lambda m: m(**full).loss)


def test_the_router_loss_is_averaged_over_microbatches(engine):
    ref, microbatches = mixtral().train(), ragged()
    count = (whole(microbatches)["labels"][:, 1:] != -100).sum()

    def wanted(m):
        outs = [m(**b, num_items_in_batch=count) for b in microbatches]
        router = sum(0.1 * o.aux_loss for o in outs)
        return sum(o.loss for o in outs) - router + router / len(outs)

    assert_equals_the_full_batch(engine, ref, microbatches, wanted)


@pytest.mark.parametrize("make", [t5, lambda: bert(BertForMaskedLM)])
def test_other_models_weigh_by_label(engine, make):
    ref, microbatches = make().train(), ragged()
    full = whole(microbatches)
    assert_equals_the_full_batch(engine, ref, microbatches, lambda m: m(**full).loss)


def test_classification_is_the_mean_over_samples(engine):
    ref = bert(BertForSequenceClassification, num_labels=3).train()
    microbatches = [
        {"input_ids": torch.randint(1, WORDS, (2, 6)), "labels": torch.randint(0, 3, (2,))}
        for _ in range(3)
    ]
    full = whole(microbatches)
    assert_equals_the_full_batch(engine, ref, microbatches, lambda m: m(**full).loss)
    out = funcacc.accumulate(ref, microbatches)
    assert out.weight.item() == 6
