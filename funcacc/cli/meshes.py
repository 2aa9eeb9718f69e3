"""``--mesh``: a mesh of devices for ``funcacc train``, and where the GPT's parameters lie on it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

import funcacc
from funcacc.cli.gpt import GPT

AXES = {
    "data": "cuts batches",
    "fsdp": "cuts batches and all matrices",
    "model": "cuts the matrices of the MLP, and the embedding",
}


def parse(text: str) -> dict[str, int]:
    """The axes of a mesh from ``data=4,model=2``.

    Raises:
        ArgumentTypeError: For anything else.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in axes or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a mesh like data=4,model=2, of the axes {', '.join(AXES)}"
            )
        axes[name] = int(size)
    return axes


def rows(axes: Mapping[str, int]) -> int:
    """How many parts a batch is cut into."""
    return axes.get("data", 1) * axes.get("fsdp", 1)


def make(axes: Mapping[str, int]) -> None:
    """Make the mesh of the process; on the CPU of as many virtual devices as it needs."""
    count = 1
    for size in axes.values():
        count *= size
    # torch_xla reads it when it first looks for devices.
    os.environ.setdefault("CPU_NUM_DEVICES", str(count))
    funcacc.sharding.mesh(**axes)


def shard(model: GPT, axes: Mapping[str, int]) -> None:
    """Cut the model's parameters over the mesh, where its axes say so."""
    rules: dict[str, tuple[str | None, ...]] = {}
    fsdp, tensor = ("fsdp" if "fsdp" in axes else None), "model" in axes
    if tensor:
        rules |= {
            "blocks.*.mlp.0.weight": ("model", fsdp),
            "blocks.*.mlp.0.bias": ("model",),
            "blocks.*.mlp.2.weight": (fsdp, "model"),
            "tokens.weight": ("model", fsdp),
        }
    if fsdp:
        matrices = [n for n, p in model.named_parameters() if p.ndim == 2]
        rules |= {n: (fsdp, None) for n in matrices if not (tensor and _is_cut(n))}
    funcacc.sharding.shard(model, rules)


def _is_cut(name: str) -> bool:
    return ".mlp." in name or name == "tokens.weight"
