"""Compiling such that each donated input is overwritten by the output of its own position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from funcacc.engines.xla import private


def compile_with_slots(
    outputs: Sequence[Tensor], order: Sequence[int], donated: Sequence[Tensor]
) -> tuple[Any, list[int]]:
    """Compile pending `outputs` such that the first ones take the memory of the donated inputs.

    XLA gives each donor, in the order of the parameters, to the next output of its shape: outputs
    in that same order put every buffer into its own slot.

    Args:
        outputs: the first of them belong to `donated`, one for each.
        order: for each parameter of the program, which input it is.
        donated: the first inputs.

    Returns:
        The hash, and which output each result of the program is.
    """
    first = [i for i in order if i < len(donated)]
    slots = [*first, *range(len(donated), len(outputs))]
    with private.donation(donated):
        return private.compile_cached([outputs[i] for i in slots]), slots
