"""Without a loss function, transformers models weigh by tokens, exactly over the window."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
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


def bart():
    """A causal model that shifts no labels and knows no `num_items_in_batch`."""
    config = BartConfig(
        vocab_size=WORDS, d_model=16, decoder_layers=1, decoder_attention_heads=2,
        decoder_ffn_dim=16, max_position_embeddings=16, dropout=0.0,
    )  # fmt: skip
    return BartForCausalLM(config)


def xlnet():
    """Another one, which takes any keyword."""
    config = XLNetConfig(
        vocab_size=WORDS, d_model=16, n_layer=1, n_head=2, d_inner=16, dropout=0.0
    )  # fmt: skip
    return XLNetLMHeadModel(config)


class Wrapped(nn.Module):
    """As adapters wrap a model: no class of transformers, but its output."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch)

    def tie_weights(self):
        self.inner.tie_weights()


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


def test_a_microbatch_without_labels_contributes_nothing(engine):
    ref, microbatches = llama().train(), ragged()
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


# The weights are found while tracing, before there is an engine: two on each, the rest once.
OTHERS = {
    "t5": t5,
    "bart": bart,
    "xlnet": xlnet,
    "masked": lambda: bert(BertForMaskedLM),
    "tokens": lambda: bert(BertForTokenClassification, num_labels=WORDS),
    "wrapped": lambda: Wrapped(llama()),
}


@pytest.mark.parametrize("name", ["t5", "xlnet"])
def test_other_models_weigh_by_the_labels_that_they_count(engine, name):
    check_with_a_microbatch_without_labels(engine, OTHERS[name])


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - {"t5", "xlnet"}))
def test_yet_other_models(name):
    check_with_a_microbatch_without_labels("eager", OTHERS[name])


def check_with_a_microbatch_without_labels(engine, make):
    """Its own mean would be NaN."""
    ref, microbatches = make().train(), ragged()
    microbatches.append({k: v.clone() for k, v in microbatches[0].items()})
    microbatches[-1]["labels"].fill_(-100)
    full = whole(microbatches)
    assert_equals_the_full_batch(engine, ref, microbatches, lambda m: m(**full).loss)


# Labels of three microbatches of two samples.
SAMPLES = {
    "classes": (torch.tensor([[0, 1], [2, 0], [1, 1]]), 6),
    "ignored": (torch.tensor([[0, -100], [2, 0], [-100, -100]]), 3),
    "several": (torch.tensor([[[0.0, 1.0, 0.0]] * 2, [[1.0, 1.0, 0.0]] * 2]), 2),
}


def check_samples(engine, name):
    labels, weight = SAMPLES[name]
    ref = bert(BertForSequenceClassification, num_labels=3).train()
    microbatches = [
        {"input_ids": torch.randint(1, WORDS, (2, 6)), "labels": some} for some in labels
    ]
    full = whole(microbatches)
    assert_equals_the_full_batch(engine, ref, microbatches, lambda m: m(**full).loss)
    assert funcacc.accumulate(ref, microbatches).weight.item() == weight


def test_classification_is_the_mean_over_samples(engine):
    check_samples(engine, "ignored")


@pytest.mark.parametrize("name", ["classes", "several"])
def test_classification_with_all_labels_and_with_several(name):
    check_samples("eager", name)


def test_a_loss_of_several_cross_entropies_is_left_as_it_is():
    class Two(Wrapped):
        def forward(self, **batch):
            first, second = self.inner(**batch), self.inner(**batch)
            first.loss = first.loss + second.loss
            return first

    model, microbatches = Two(llama()).train(), ragged()
    out = funcacc.accumulate(model, microbatches)
    means = torch.stack([model(**b).loss.detach() for b in microbatches])
    torch.testing.assert_close(out.loss, means.mean())
    assert out.weight.item() == 3
