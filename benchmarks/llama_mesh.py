"""A 4-layer Llama-3 with tensor parallelism and AdamW: is every leaf of the state donated?

Runs it at a tiny width on virtual devices, and works out by arithmetic what the state takes at the
real shapes::

    CPU_NUM_DEVICES=8 PJRT_DEVICE=CPU python benchmarks/llama_mesh.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
import transformers

import funcacc
from funcacc.report import Leaf, Report

RULES = {
    "model.embed_tokens.weight": ("model", None),
    "*.self_attn.[qkv]_proj.weight": ("model", None),
    "*.self_attn.o_proj.weight": (None, "model"),
    "*.mlp.gate_proj.weight": ("model", None),
    "*.mlp.up_proj.weight": ("model", None),
    "*.mlp.down_proj.weight": (None, "model"),
    "lm_head.weight": ("model", None),
}
REAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
DEVICES = 32


def model(**shape: int) -> transformers.LlamaForCausalLM:
    """Four layers of the architecture."""
    config = transformers.LlamaConfig(
        num_hidden_layers=4, tie_word_embeddings=False, rope_theta=500000.0, **shape
    )
    return transformers.LlamaForCausalLM(config)


def run(devices: int) -> Report:
    """Five steps on a mesh; the report of the last program."""
    funcacc.sharding.mesh(data=1, model=devices)
    net = model(**TINY).to(funcacc.device("xla"))
    funcacc.sharding.shard(net, RULES)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    step = funcacc.TrainStep(net, opt, clip_norm=1.0)
    for _ in range(5):
        tokens = [torch.randint(0, TINY["vocab_size"], (2, 16)) for _ in range(4)]
        step([{"input_ids": t, "labels": t} for t in tokens])
    return step.report(collectives=True)


def kind(path: str) -> str:
    """A leaf's path without the number of its layer."""
    return re.sub(r"layers\.\d+", "layers.*", path)


def rows(report: Report) -> Iterable[str]:
    """One line for leaves that are alike."""
    groups: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in report.leaves[: report.state_leaves]:
        groups.setdefault((kind(leaf.path), leaf.placement), []).append(leaf)
    for (path, placement), leaves in groups.items():
        donated = sum(x.donated for x in leaves)
        yield f"| `{path}` | {len(leaves)} | {placement or 'whole'} | {donated} |"


def arithmetic(devices: int) -> str:
    """Bytes on each device at the real shapes: worked out, not measured."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in model(**REAL).named_parameters()}
    whole = share = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        cut = any(fnmatchcase(name, rule) for rule in RULES)
        whole, share = whole + size, share + size // (devices if cut else 1)
    gib = 2**30
    return (
        f"hidden 4096, intermediate 14336, vocabulary 128256, by arithmetic: parameters "
        f"{whole / gib:.2f} GiB in float32, {share / gib:.3f} GiB on each of {devices} devices; "
        f"with two moments and an accumulator {4 * share / gib:.3f} GiB"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    report = run(8)
    print("| leaf | how many | cut over | donated |\n|---|---|---|---|")
    print("\n".join(rows(report)))
    print("\n".join(str(report).splitlines()[:5]))
    print(arithmetic(DEVICES))
