"""Train a tiny Llama of Hugging Face: a loss exact by token, checkpointing, a cosine, resuming.

A killed run goes on where its last checkpoint was::

    PJRT_DEVICE=CPU python examples/train_llama_hf.py
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import funcacc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", default="auto", help="auto, xla or eager")
parser.add_argument("--steps", type=int, default=60, help="length of the schedule")
parser.add_argument("--stop", type=int, help="stop after this step, as if the run were killed")
parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/llama.pt"))
parser.add_argument("--layers", type=int, default=4)
asked = parser.parse_args()
torch.manual_seed(0)

config = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=asked.layers,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="sdpa",
)
model = LlamaForCausalLM(config)
# Activations inside a block are computed again in the backward pass, in the loop, on XLA too.
model.gradient_checkpointing_enable()
model.config.use_cache = False
model.train()
model.to(funcacc.device(asked.engine))


def loss_fn(model, batch):
    """Sum over labels that aren't -100, with their number.

    Microbatches with few tokens weigh less, as they do in one large batch. `loss_fn=None`
    would do the same: transformers models are weighted by their labels.
    """
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return funcacc.losses.causal_lm(output.logits, batch["labels"])


def microbatch(step, i):
    """Rows that count on in steps of 1 to 5, modulo 62, each of another length.

    A function of its arguments alone, so a resumed run sees what the uninterrupted one saw.
    """
    random = torch.Generator().manual_seed(1000 * step + i)
    first = torch.randint(0, 62, (16, 1), generator=random)
    stride = torch.randint(1, 6, (16, 1), generator=random)
    length = torch.randint(4, 33, (16, 1), generator=random)
    position = torch.arange(32)
    ids = 2 + (first + stride * position) % 62
    there = position < length
    # The first two say how to go on; padding has no label.
    labels = torch.where(there & (position > 1), ids, -100)
    return {"input_ids": ids * there, "attention_mask": there.long(), "labels": labels}


opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
schedule = get_cosine_schedule_with_warmup(opt, asked.steps // 10, asked.steps)
step = funcacc.TrainStep(model, opt, loss_fn, clip_norm=1.0)

done = 0
parts = {"model": model, "opt": opt, "schedule": schedule, "step": step}
if asked.checkpoint.exists():
    # Compared with what is here first: a file that doesn't fit changes nothing.
    done = funcacc.load(asked.checkpoint, **parts)["done"]
    print(f"going on after step {done} of {asked.checkpoint}")
asked.checkpoint.parent.mkdir(parents=True, exist_ok=True)

last = asked.steps if asked.stop is None else asked.stop
while done < last:
    out = step([microbatch(done, i) for i in range(4)])
    schedule.step()
    done += 1
    if done % 10 == 0 or done == last:
        print(f"step {done}: loss {float(out.loss):.4f} over {int(out.weight)} tokens")
    if done % asked.save_every == 0 or done == last:
        funcacc.save(asked.checkpoint, **parts, done=done)

print(str(step.report()).split("\n  ")[0])
