"""Damaged files, one after another, under a limit of memory; run by `test_fuzzing.py`.

``python -m tests.fuzzing FOLDER CASES`` prints one JSON object: how many files of each kind were
refused, how many loaded with what was saved, and what went wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import shutil
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import funcacc
from funcacc.cli import main as command
from funcacc.cli import runs
from funcacc.errors import FuncaccError

HEADROOM = 400 * 2**20


class Parts:
    """A tiny run's objects."""

    def __init__(self, fill: float) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 2)
        self.step = funcacc.TrainStep(self.model, self.opt, lambda m, x: m(x).mean(), seed=1)
        self.step([torch.full((5, 3), fill), torch.randn(5, 3)])
        self.schedule.step()

    def named(self) -> dict[str, Any]:
        return dict(vars(self))

    def seen(self) -> str:
        return repr({k: v.state_dict() for k, v in vars(self).items()})


def flipped(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(out)) if rng.random() < 0.5 else rng.randrange(min(400, len(out)))
        out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def overwritten(data: bytes, rng: random.Random) -> bytes:
    at, n = rng.randrange(len(data)), rng.choice([1, 4, 8, 64])
    filling = rng.choice([b"\x00", b"\xff", rng.randbytes(1)]) * n
    return data[:at] + filling + data[at + n :]


def moved(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:a] + data[b:] if rng.random() < 0.5 else data[:b] + data[a:]


def large_numbers(data: bytes, rng: random.Random) -> bytes:
    """Sizes and offsets of headers become huge."""
    width = rng.choice([4, 8])
    number = struct.pack("<Q", rng.choice([2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))[:width]
    places = [0, *(i for i in range(len(data) - 30) if data[i : i + 2] == b"PK")]
    at = rng.choice(places) + rng.randrange(30)
    return data[:at] + number + data[at + width :]


DAMAGE: list[Callable[[bytes, random.Random], bytes]] = [
    *(flipped, cut, overwritten, moved, large_numbers),
]


def retyped(data: bytes, rng: random.Random) -> bytes:
    """One value of JSON becomes another; text that is no JSON loses a piece."""
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    for start, end in ((0, len(lines)), (at, at + 1)):
        try:
            tree = json.loads(b"\n".join(lines[start:end]))
        except ValueError:
            continue
        node: Any = [tree]
        while True:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], (dict, list)) or not node[key] or rng.random() < 0.2:
                break
            node = node[key]
        node[key] = rng.choice([None, "x", -1, 2**70, 1e400, [], {}, [[]], {"a": {}}, True, 0.5])
        return b"\n".join([*lines[:start], json.dumps(tree).encode(), *lines[end:]])
    return cut(data, rng)


Outcome = Iterator[tuple[str, str]]


def checkpoints(folder: Path, cases: int) -> Callable[[], Outcome]:
    """Damaged files of `save`: refused with everything untouched, or loaded as saved."""
    saved, own = Parts(1.0), Parts(2.0)
    before, want = own.seen(), saved.seen()
    assert before != want

    def run() -> Outcome:
        for suffix in (".pt", ".safetensors"):
            whole, mine = (folder / f"{name}{suffix}" for name in ("whole", "own"))
            funcacc.save(whole, **saved.named())
            funcacc.save(mine, **own.named())
            data, rng, target = whole.read_bytes(), random.Random(7), folder / f"damaged{suffix}"
            for i in range(cases):
                damage = rng.choice(DAMAGE)
                target.write_bytes(damage(data, rng))
                name = f"{suffix} {damage.__name__} {i}"
                try:
                    funcacc.load(target, **own.named())
                except (FuncaccError, OSError):
                    yield name, "refused" if own.seen() == before else "refused, but state changed"
                    continue
                yield name, "loaded" if own.seen() == want else "loaded something else"
                funcacc.load(mine, **own.named())

    return run


def run_directories(folder: Path, cases: int) -> Callable[[], Outcome]:
    """Damaged files of a run: `funcacc report` and resuming say in one line what is wrong."""
    text, whole, broken = (folder / name for name in ("text.txt", "run", "broken"))
    text.write_text("".join(f"line {i}: the cat sat on mat {i * i}\n" for i in range(200)))
    arguments = [
        *("train", "--engine", "eager", "--microbatches", "1", "--microbatch-size", "1"),
        *("--context", "8", "--layers", "1", "--heads", "1", "--width", "4", "--steps", "2"),
        *("--data", str(text), "--out", str(whole)),
    ]
    quiet(arguments)
    quiet(["report", str(whole)])
    config = json.loads((whole / "config.json").read_text())

    def run() -> Outcome:
        rng = random.Random(8)
        for name in ("config.json", "report.json", "metrics.jsonl", "checkpoint.pt"):
            data = (whole / name).read_bytes()
            for i in range(cases):
                damage = rng.choice([*DAMAGE, retyped, retyped, retyped])
                shutil.rmtree(broken, ignore_errors=True)
                shutil.copytree(whole, broken)
                (broken / "report.txt").unlink()
                (broken / name).write_bytes(damage(data, rng))
                if name == "checkpoint.pt":
                    said = attempt(lambda: runs.RunDir(broken, config).start())
                else:
                    attempt(lambda: runs.RunDir(broken, config).check(resume=True))
                    code, err = quiet(["report", str(broken)])
                    said = {0: "loaded", 2: "refused"}.get(code, "failed")
                    said = said if err.count("\n") == (code != 0) else f"{said}: {err}"
                yield f"{name} {damage.__name__} {i}", said

    return run


def attempt(fn: Callable[[], Any]) -> str:
    from funcacc.cli.errors import UsageError

    try:
        fn()
    except (FuncaccError, UsageError, OSError):
        return "refused"
    return "loaded"


def quiet(argv: list[str]) -> tuple[int, str]:
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = command(argv)
    return code, err.getvalue()


def main(folder: Path, cases: int) -> None:
    """Run everything and print what came of it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    wrong = []
    ready = [checkpoints(folder, cases), run_directories(folder, cases // 10)]
    limit_memory()
    for run in ready:
        try:
            for name, what in run():
                counts[f"{name.split()[0]} {what}"] += 1
                if what not in ("refused", "loaded"):
                    wrong.append(f"{name}: {what}")
        except BaseException:
            wrong.append(traceback.format_exc())
    print(json.dumps({"counts": counts, "wrong": wrong}))


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
