"""Text as bytes: where it comes from, what is held out, and which windows a step sees."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from funcacc.cli.errors import UsageError

# Installed packages differ between machines, tests between distributions, and encodings is
# mostly tables of code points.
NOT_STDLIB_TEXT = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test", "encodings"),
}
HELD_OUT = 10  # one part in this many


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes to be tested on.

    Attributes:
        name: What it is, for people.
        train: uint8, one dimension.
        heldout: uint8, one dimension; never trained on.
        digest: A hash of both.
    """

    name: str
    train: Tensor
    heldout: Tensor
    digest: str


def load(source: Path | None, context: int) -> Corpus:
    """Read text and hold a tenth of it out.

    From ten files on, every tenth file is held out; below that, the last tenth of the bytes.

    Args:
        source: A file, or a folder whose text files are read in the order of their paths;
            ``None`` for the Python sources of the running interpreter's standard library.
        context: The windows' length; both parts must hold at least one window.

    Raises:
        UsageError: Nothing there, nothing in it, or less than one window of it.
    """
    if source is None:
        name = "the standard library's Python sources"
        files = _read(_stdlib_paths())
        if not files:
            raise UsageError("this interpreter has no standard library sources; give --data")
    else:
        name = str(source)
        files = _read(_user_paths(source))
        if not any(files):
            raise UsageError(f"--data {source}: no text in it")
    train, heldout = _split(files)
    for part, content in (("held-out", heldout), ("training", train)):
        if len(content) <= context:
            raise UsageError(
                f"--context {context} is longer than the data: it takes {context + 1} bytes of "
                f"{part} text, and {name} gives {len(content)}"
            )
    digest = hashlib.sha256(train + b"\0" + heldout).hexdigest()[:16]
    return Corpus(name, _tensor(train), _tensor(heldout), digest)


def unigram_entropy(data: Tensor) -> float:
    """Return the entropy of single bytes in nats.

    The least loss that any model blind to context can have on ``data``.
    """
    counts = torch.bincount(data.long(), minlength=256).double()
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log()).sum())


def microbatches(
    data: Tensor, *, seed: int, step: int, count: int, size: int, context: int
) -> list[Tensor]:
    """Draw the microbatches of one step.

    A pure function of its arguments: a resumed run sees what the uninterrupted one saw.

    Returns:
        ``count`` tensors, uint8 (size, context + 1); inputs are all but the last column,
        targets all but the first.
    """
    rng = np.random.default_rng([seed, step])
    windows = data.unfold(0, context + 1, 1)
    starts = torch.from_numpy(rng.integers(0, len(windows), size=(count, size)))
    return list(windows[starts].unbind())


def heldout_batches(data: Tensor, *, count: int, size: int, context: int) -> Iterator[Tensor]:
    """Yield ``count`` batches, the same ones every time, spread evenly over ``data``."""
    windows = data.unfold(0, context + 1, 1)
    starts = torch.linspace(0, len(windows) - 1, count * size).long()
    yield from windows[starts.view(count, size)].unbind()


def _stdlib_paths() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    wanted = [path for path in paths if NOT_STDLIB_TEXT.isdisjoint(path.parts)]
    return [root / path for path in sorted(wanted, key=Path.as_posix)]


def _user_paths(source: Path) -> list[Path]:
    if not source.exists():
        raise UsageError(f"--data {source}: no such file or folder")
    if not source.is_dir():
        return [source]
    paths = (path.relative_to(source) for path in source.rglob("*"))
    wanted = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    return [source / path for path in sorted(wanted, key=Path.as_posix)]


def _read(paths: list[Path]) -> list[bytes]:
    contents = (path.read_bytes() for path in paths if path.is_file())
    # A zero byte is how git, too, tells a binary file from text.
    return [content for content in contents if b"\0" not in content[:8000]]


def _split(files: list[bytes]) -> tuple[bytes, bytes]:
    if len(files) >= HELD_OUT:
        heldout = files[HELD_OUT - 1 :: HELD_OUT]
        train = [content for i, content in enumerate(files) if i % HELD_OUT != HELD_OUT - 1]
        return b"\n".join(train), b"\n".join(heldout)
    whole = b"\n".join(files)
    cut = len(whole) - len(whole) // HELD_OUT
    return whole[:cut], whole[cut:]


def _tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
