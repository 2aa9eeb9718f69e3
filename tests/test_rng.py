"""The generator against published vectors, and its statistics."""

import pytest
import torch

from funcacc import rng


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        # Known-answer vectors of the Random123 distribution, threefry2x32 with 20 rounds.
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(counter, key, expected):
    words = [torch.tensor(w) for w in (*key, *counter)]
    assert tuple(int(x) for x in rng.threefry2x32(*words)) == expected


def test_bits_are_balanced_and_streams_are_unrelated():
    k = rng.key(12345)
    a, b = (rng.random_bits(k, s, (20000,)) for s in (0, 1))
    ones = torch.stack([((a >> i) & 1).float().mean() for i in range(32)])
    assert (ones - 0.5).abs().max() < 0.02
    u, v = ((x & 0xFFFFFF).double() / 2**24 for x in (a, b))
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(u.var() - 1 / 12) < 0.005
    assert abs(torch.corrcoef(torch.stack([u, v]))[0, 1]) < 0.03


def test_key_takes_all_64_bits_of_a_seed():
    assert rng.key(0).tolist() == [0, 0]
    assert rng.key(-1).tolist() == [-1, -1]
    assert rng.key(1 << 32).tolist() == [1, 0]


def test_fold_in_gives_different_keys():
    k = rng.key(7)
    made = {tuple(rng.fold_in(k, torch.tensor(i)).tolist()) for i in range(100)}
    assert len(made) == 100
