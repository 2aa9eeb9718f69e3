"""The loops of the docstrings, in Python, on tensors that are at hand.

Each trip gets copies, so that what a body edits in place is nobody else's: not the
caller's, and not another slot of the carry. Copies keep the way of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from funcacc.open_loop import Flat, refuse_gradient


def python_while(cond: Flat, body: Flat, carry: Sequence[Tensor]) -> list[Tensor]:
    """``while cond(*carry): carry = body(*carry)``."""
    refuse_gradient(carry)
    now = [t.clone() for t in carry]
    while bool(cond(*now)[0]):
        now = [t.clone() for t in body(*now)]
        refuse_gradient(now)
    return now


def python_trips(
    body: Callable[..., Sequence[Tensor]],
    trips: range,
    start: int,
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    *,
    checkpoint: bool,
) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """``for i in trips: carry, ys[i] = body(start + i, *carry, *xs[i])``.

    Returns:
        ``(carry, ys)``: the rows of ys by trip.
    """
    now, rows = [t.clone() for t in carry], {}
    n = len(now)
    device = next((t.device for t in [*carry, *xs]), torch.device("cpu"))
    for i in trips:
        index = torch.full((), start + i, dtype=torch.int64, device=device)
        inputs = [index, *now, *(x[i].clone() for x in xs)]
        if checkpoint and torch.is_grad_enabled():
            # Copies again: a recompute must meet what the trip was given, not its edits.
            out = list(recompute(_on_copies(body), *inputs, use_reentrant=False))
        else:
            out = list(body(*inputs))
        now, rows[i] = [t.clone() for t in out[:n]], out[n:]
    return now, rows


def _on_copies(body: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
    return lambda *flat: body(*(t.clone() for t in flat))
