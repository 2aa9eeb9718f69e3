"""Families of transformers, tiny, with random weights and offline, against the plain loop."""

import copy

import pytest
import torch

import funcacc
from tests.oracle import assert_same, plain_step

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
COMMON = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **COMMON, "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 16,
}  # fmt: skip
ENCODER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def ids():
    return torch.randint(3, VOCABULARY, (2, 6))


def text():
    rows = ids()
    return {"input_ids": rows, "labels": rows}


def padded_sentences():
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    return {"input_ids": ids(), "attention_mask": mask, "labels": torch.randint(0, 2, (2,))}


def pairs():
    return {"input_ids": ids(), "labels": ids()}


def images():
    return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(0, 3, (2,))}


FAMILIES = {
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config", text,
        dict(**COMMON, vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2,
             resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", text, DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", text, DECODER),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", text, DECODER),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig", text,
        dict(**DECODER, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True,
             router_aux_loss_coef=0.5, experts_implementation="batched_mm"),
    ),
    "bert": (
        "BertForSequenceClassification", "BertConfig", padded_sentences,
        dict(**ENCODER, vocab_size=VOCABULARY, max_position_embeddings=16),
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config", pairs,
        dict(**COMMON, vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1,
             num_heads=2, dropout_rate=0.0, decoder_start_token_id=0),
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig", images,
        dict(**ENCODER, image_size=8, patch_size=4, num_labels=3),
    ),
    "mamba": (
        "MambaForCausalLM", "MambaConfig", text,
        dict(**COMMON, vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1),
    ),
}  # fmt: skip

BF16 = torch.bfloat16
# (checkpointed, compute dtype). Traces and programs take seconds, so all four on two families.
MODES = {"eager": [(False, None), (True, BF16)], "xla": [(True, None)]}
MODES["jax"] = MODES["xla"]
MORE = {
    ("eager", "llama"): [(True, None), (False, BF16)],
    ("eager", "mixtral"): [(True, None), (False, BF16)],
    ("xla", "llama"): [(False, BF16)],
    ("jax", "llama"): [(False, BF16)],
}
# Relative error of the whole update, in the L2 norm, after two steps of SGD.
BFLOAT16_TOLERANCE = 0.1


def loss_fn(model, batch):
    flags = {} if "pixel_values" in batch or "attention_mask" in batch else {"use_cache": False}
    return model(**batch, **flags).loss


def trained(model, batches, dtype, step):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in batches:
        step(model, opt, window, dtype)
    return opt


def plain(model, opt, window, dtype):
    plain_step(model, opt, loss_fn, window)


def ours(model, opt, window, dtype):
    funcacc.train_step(model, opt, window, loss_fn, compute_dtype=dtype)


def switch(model):
    """Renamed in transformers 5."""
    old = model.gradient_checkpointing_enable
    return getattr(model, "activation_checkpointing_enable", old)


def update(model, start):
    now = [p.detach().cpu() for p in model.parameters()]
    return torch.cat([(p - q).reshape(-1) for p, q in zip(now, start, strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_plain_loop(engine, family):
    model_class, config_class, batch, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**settings)
    initial = getattr(transformers, model_class)(config).train()
    start = [p.detach().clone() for p in initial.parameters()]
    batches = [[batch() for _ in range(2)] for _ in range(2)]
    ref = copy.deepcopy(initial)
    ref_opt = trained(ref, batches, None, plain)
    wanted = update(ref, start)
    for checkpointed, dtype in MODES[engine] + MORE.get((engine, family), []):
        model = copy.deepcopy(initial).to(funcacc.device(engine))
        model.tie_weights()
        if checkpointed:
            switch(model)({"use_reentrant": family == "gpt2"})
        opt = trained(model, batches, dtype, ours)
        if dtype is None:
            assert_same(model, opt, ref, ref_opt, 1e-5)
        else:
            error = (update(model, start) - wanted).norm() / wanted.norm()
            assert 1e-5 < error < BFLOAT16_TOLERANCE, (checkpointed, error)
