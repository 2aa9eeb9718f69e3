"""The random generator: Threefry-2x32 with 20 rounds, driven by one explicit key.

A key is an ``int32[2]`` tensor whose bits are the generator's 64-bit key. It is never
advanced behind the user's back: new keys come from `fold_in`, numbers from `random_bits`,
both pure functions. The numbers equal those of JAX's default generator (``fold_in`` and
``bits`` with partitionable Threefry), which is what makes a second engine cheap.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
_MASK = 0xFFFFFFFF


def key(seed: int) -> Tensor:
    """The key of a seed.

    Args:
        seed: any Python integer; its low 64 bits are used.

    Returns:
        ``int32[2]`` on the CPU: the high and the low word.
    """
    words = [(seed >> 32) & _MASK, seed & _MASK]
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)


def threefry2x32(key0: Tensor, key1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Twenty rounds of Threefry-2x32 on 32-bit words held in ``int64`` tensors.

    Args:
        key0: first key word, 0 <= value < 2**32, ``int64``, broadcastable.
        key1: second key word, likewise.
        x0: first counter word, likewise.
        x1: second counter word, likewise.

    Returns:
        Two ``int64`` tensors of words.
    """
    keys = (key0, key1, key0 ^ key1 ^ PARITY)
    x0, x1 = (x0 + keys[0]) & _MASK, (x1 + keys[1]) & _MASK
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = (((x1 << r) | (x1 >> (32 - r))) & _MASK) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & _MASK
        x1 = (x1 + keys[(group + 2) % 3] + group + 1) & _MASK
    return x0, x1


def _words(k: Tensor) -> tuple[Tensor, Tensor]:
    wide = k.to(torch.int64) & _MASK
    return wide[0], wide[1]


def fold_in(k: Tensor, data: Tensor) -> Tensor:
    """A new key from a key and a number.

    Args:
        k: ``int32[2]``.
        data: integer, 0-d; its low 32 bits are used.

    Returns:
        ``int32[2]``: ``threefry2x32(k, (0, data))``.
    """
    low = data.to(torch.int64) & _MASK
    return torch.stack(threefry2x32(*_words(k), torch.zeros_like(low), low)).to(torch.int32)


def random_bits(k: Tensor, stream: int, shape: Sequence[int]) -> Tensor:
    """32 random bits for each element of `shape`.

    Element n is ``a ^ b`` with ``(a, b) = threefry2x32(fold_in(k, stream), (n >> 32, n))``,
    so it doesn't depend on how an array is split over devices.

    Args:
        k: ``int32[2]``.
        stream: which draw of this key.
        shape: shape of the result.

    Returns:
        ``int32`` of `shape`.
    """
    sub = fold_in(k, torch.tensor(stream, dtype=torch.int64, device=k.device))
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=k.device)
    a, b = threefry2x32(*_words(sub), count >> 32, count & _MASK)
    return (a ^ b).to(torch.int32).reshape(tuple(shape))
