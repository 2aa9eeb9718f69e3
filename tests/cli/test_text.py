from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from funcacc.cli import text
from funcacc.cli.errors import UsageError


def draw(data: torch.Tensor, step: int, seed: int = 0) -> list[torch.Tensor]:
    return text.microbatches(data, seed=seed, step=step, count=3, size=4, context=5)


def test_microbatches_are_a_pure_function_of_seed_and_step() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    first = draw(data, 7)
    torch.manual_seed(123)
    assert [b.shape for b in first] == [(4, 6)] * 3 and first[0].dtype == torch.uint8
    assert all(torch.equal(a, b) for a, b in zip(first, draw(data, 7), strict=True))
    others = [draw(data, 8), draw(data, 7, seed=1)]
    assert all(not torch.equal(torch.stack(first), torch.stack(other)) for other in others)


def test_microbatches_are_windows_and_reach_both_ends() -> None:
    data = torch.arange(9, dtype=torch.uint8)
    rows = torch.cat([row for step in range(30) for row in draw(data, step)])
    assert torch.equal(rows - rows[:, :1], torch.arange(6, dtype=torch.uint8).expand_as(rows))
    assert rows.min() == 0 and rows.max() == 8


def test_heldout_batches_are_the_same_every_time_and_reach_both_ends() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    batches = [list(text.heldout_batches(data, count=3, size=4, context=5)) for _ in range(2)]
    first, second = map(torch.stack, batches)
    assert first.shape == (3, 4, 6) and torch.equal(first, second)
    assert first.min() == 0 and first.max() == 99


def test_entropy() -> None:
    uniform = torch.arange(256, dtype=torch.uint8)
    assert text.unigram_entropy(uniform) == pytest.approx(math.log(256))
    assert text.unigram_entropy(torch.zeros(9, dtype=torch.uint8)) == 0.0


def test_the_standard_library_is_megabytes_and_always_the_same() -> None:
    corpus = text.load(None, 128)
    assert len(corpus.train) > 2_000_000 and len(corpus.heldout) > 100_000
    assert corpus.digest == text.load(None, 128).digest
    assert 2.5 < text.unigram_entropy(corpus.heldout) < 4.0


def test_a_file_gives_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(1, 101)))
    corpus = text.load(path, 5)
    assert corpus.train.tolist() == list(range(1, 91))
    assert corpus.heldout.tolist() == list(range(91, 101))


def test_a_folder_is_read_in_order_and_gives_every_tenth_file(tmp_path: Path) -> None:
    for i in range(20):
        folder = tmp_path / ("b" if i < 10 else "a")
        folder.mkdir(exist_ok=True)
        (folder / f"{i:02}.txt").write_text(f"{i:02}" * 10)
    (tmp_path / ".hidden").write_text("hidden" * 10)
    (tmp_path / "binary").write_bytes(b"\0" * 50)
    corpus = text.load(tmp_path, 5)
    heldout = bytes(corpus.heldout.tolist()).decode()
    assert heldout == "\n".join(["19" * 10, "09" * 10])
    train = bytes(corpus.train.tolist()).decode().split("\n")
    assert train == [f"{i:02}" * 10 for i in [*range(10, 19), *range(9)]]


def test_digest_follows_the_bytes_and_not_the_path(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path, content in zip(paths, ["x" * 100, "x" * 100, "y" * 100], strict=True):
        path.write_text(content)
    a, b, c = (text.load(path, 5).digest for path in paths)
    assert a == b != c


@pytest.mark.parametrize(
    ("content", "context", "part"),
    [(b"", 8, "no text"), (b"\0\1\2" * 9, 8, "no text"), (b"x" * 80, 8, "--context 8 is longer")],
)
def test_too_little_data_is_refused(
    tmp_path: Path, content: bytes, context: int, part: str
) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=part):
        text.load(path, context)


def test_missing_data_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        text.load(tmp_path / "absent", 8)
    with pytest.raises(UsageError, match="no text"):
        text.load(tmp_path, 8)
