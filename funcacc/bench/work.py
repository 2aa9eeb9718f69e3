"""The models, data and losses that peers are compared on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]


class Work(NamedTuple):
    """One model with its data.

    Attributes:
        what: in words.
        model: makes the module, on the CPU.
        batch: one microbatch, random.
        shape: what the hand-written JAX step needs to know, where there is one.
    """

    what: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    shape: dict[str, Any] | None = None


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy over the microbatch, for every kind of model here."""
    logits = model(batch["x"])
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten())


def window(work: Work, count: int) -> Batch:
    """`count` microbatches, stacked, the same in every process."""
    torch.manual_seed(1)
    batches = [work.batch() for _ in range(count)]
    return {k: torch.stack([b[k] for b in batches]) for k in batches[0]}


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _perceptron(what: str, rows: int, *widths: int) -> Work:
    def batch() -> Batch:
        return {"x": torch.randn(rows, widths[0]), "y": torch.randint(widths[-1], (rows,))}

    return Work(what, lambda: _mlp(*widths), batch, {"rows": rows, "widths": widths})


def _tokens(rows: int, length: int, words: int) -> Batch:
    return {"x": torch.randint(words, (rows, length)), "y": torch.randint(words, (rows, length))}


_GPT = {"context": 64, "layers": 4, "heads": 4, "width": 128}


def _gpt() -> nn.Module:
    from funcacc.cli.gpt import GPT, GPTConfig

    return GPT(GPTConfig(**_GPT))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


WORK = {
    "small-mlp": _perceptron("MLP 16-32-32-8, 8 rows", 8, 16, 32, 32, 8),
    "wide-mlp": _perceptron("MLP 512-1024-1024-512, 32 rows", 32, 512, 1024, 1024, 512),
    "gpt": Work(
        "the demo's GPT, 4 layers of 128, 4 x 64 bytes",
        _gpt,
        lambda: _tokens(4, 64, 256),
        {"rows": 4, "words": 256, **_GPT},
    ),
    "llama": Work("Llama, 2 layers of 32, 2 x 16 tokens", _llama, lambda: _tokens(2, 16, 128)),
    "conv": Work(
        "convolutions with BatchNorm, 8 images of 16 x 16",
        _convolutions,
        lambda: {"x": torch.randn(8, 3, 16, 16), "y": torch.randint(10, (8,))},
    ),
}
