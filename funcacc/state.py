"""`TrainState`: what a step carries, and whether another state fits it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcacc import model as models
from funcacc import trees
from funcacc.errors import StateError
from funcacc.optimizers.update import Adopted
from funcacc.types import TensorSpec


class TrainState(NamedTuple):
    """The state that a step carries; the user's own tensors.

    Attributes:
        params: parameters by name.
        buffers: buffers by name.
        opt_state: optimizer state, parameter name -> key -> tensor.
        rng: ``int32[2]`` key.
        step: ``int32`` 0-d, optimizer steps taken.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    opt_state: dict[str, dict[str, Tensor]]
    rng: Tensor
    step: Tensor


def by_path(model: nn.Module, opt: Adopted, rng: Tensor, step: Tensor) -> dict[str, Tensor]:
    """The leaves of a state under the paths that errors and the report use."""
    return {
        **{f"params[{n!r}]": p for n, p in models.parameters(model).items()},
        **{f"buffers[{n!r}]": b for n, b in models.buffers(model).items()},
        **opt.leaves(),
        "rng": rng,
        "step": step,
    }


def matching(mine: TrainState, other: TrainState) -> list[tuple[Tensor, Tensor]]:
    """Pairs of leaves of two states of one structure; `StateError` names what differs."""
    a, spec = trees.flatten(mine)
    b, other_spec = trees.flatten(other)
    if spec != other_spec:
        raise StateError(
            "the state has other leaves than this step:\n"
            + trees.describe_difference(mine, other, "state")
        )
    paths = trees.paths(mine, "state")
    lines = [
        f"  {p}: {TensorSpec.of(y)} given, {TensorSpec.of(x)} needed"
        for p, x, y in zip(paths, a, b, strict=True)
        if TensorSpec.of(x) != TensorSpec.of(y)
    ]
    if lines:
        raise StateError("the state doesn't fit this step:\n" + "\n".join(lines))
    return list(zip(a, b, strict=True))


def key_misfits(state: dict[str, Any]) -> list[str]:
    """What is wrong with the random key and the step count of a step's state dict."""
    lines = []
    key = state.get("rng")
    if not isinstance(key, Tensor) or TensorSpec.of(key) != TensorSpec((2,), torch.int32):
        lines.append("state['rng'] must be an int32[2] tensor, as TrainStep.state_dict gives")
    if not isinstance(state.get("step"), int):
        lines.append("state['step'] must be an int, as TrainStep.state_dict gives")
    return lines
