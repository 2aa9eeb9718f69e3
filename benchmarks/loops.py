"""The tables of docs/loops.md: what a loop's body may do, and what scan_layers saves.

    python benchmarks/loops.py cases      # the conformance table, into docs/loops.md
    python benchmarks/loops.py layers     # compile times, printed

funcacc's columns come from its tests (tests/test_loop_cases.py). The same cases run on
torch_xla's own loops, each in a process of its own, since some end it.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "loops.md"
BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"
ENGINES = ("eager", "xla")
UPSTREAM = ("while_loop", "scan")
sys.path.insert(0, str(ROOT))


def _upstream(kind: str) -> SimpleNamespace:
    """torch_xla's loops behind funcacc's signatures, one of the two doing all it can."""
    import torch
    from torch.utils import _pytree as pytree
    from torch_xla.experimental.fori_loop import while_loop
    from torch_xla.experimental.scan import scan

    def by_while(cond: Any, body: Any, init: Any) -> Any:
        leaves, spec = pytree.tree_flatten(init)

        def flat_body(*flat: Any) -> Any:
            return tuple(pytree.tree_leaves(body(pytree.tree_unflatten(list(flat), spec))))

        def flat_cond(*flat: Any) -> Any:
            return cond(pytree.tree_unflatten(list(flat), spec))

        out = while_loop(flat_cond, flat_body, tuple(leaves))
        return pytree.tree_unflatten(list(out), spec)

    def fori_by_while(lower: Any, upper: Any, body: Any, init: Any) -> Any:
        # Counts down beside the index: a bound in the carry would be a carry passed through.
        start = torch.as_tensor(lower, device="xla")
        left = torch.as_tensor(upper - lower, device="xla")

        def step(c: Any) -> Any:
            return c[0] + 1, c[1] - 1, body(c[0], c[2])

        return by_while(lambda c: c[1] > 0, step, (start, left, init))[2]

    def by_scan(f: Any, init: Any, xs: Any, length: Any = None, **options: Any) -> Any:
        if options:
            raise NotImplementedError(f"scan has no {', '.join(options)}")
        if xs is None:
            xs = torch.arange(length, device="xla")
        return scan(f, init, xs)

    def fori_by_scan(lower: Any, upper: Any, body: Any, init: Any) -> Any:
        if not isinstance(lower, int):
            raise NotImplementedError("scan takes no bounds from the device")
        # Floating xs and ys: integers in either raise.
        trips = torch.arange(lower, upper, dtype=torch.float32, device="xla")

        def step(c: Any, x: Any) -> Any:
            after = body(x.to(torch.int64), c)
            return after, pytree.tree_leaves(after)[0] * 1

        return scan(step, init, trips)[0]

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("not what this function is for")

    if kind == "scan":
        return SimpleNamespace(while_loop=missing, fori_loop=fori_by_scan, scan=by_scan)
    return SimpleNamespace(while_loop=by_while, fori_loop=fori_by_while, scan=missing)


def run_upstream_case(kind: str, name: str) -> str:
    """How torch_xla does on one case, in this process."""
    import torch
    import torch_xla

    from tests.loop_cases import CASES, PLAIN

    fn, inputs, check = CASES[name]
    torch_xla.device()
    # Without this private switch, while_loop fails on every body with a number in it.
    torch_xla._XLAC._set_xla_all_numbers_special_scalars(True)
    try:
        values = [x.to("xla") for x in inputs()]
        got = [t.detach().cpu() for t in fn(_upstream(kind), *values)]
    except NotImplementedError:
        return "not offered"
    except Exception as e:
        return f"error: {type(e).__name__}"
    if check:
        return "right" if check(*got) else "wrong"
    want = [t.detach() for t in fn(PLAIN, *inputs())]
    same = len(got) == len(want) and all(
        g.dtype == w.dtype and g.shape == w.shape and torch.allclose(g, w, rtol=1e-5, atol=1e-5)
        for g, w in zip(got, want, strict=True)
    )
    kept = all(torch.equal(v.cpu(), x) for v, x in zip(values, inputs(), strict=True))
    return "right" if same and kept else "wrong"


def _in_child(*args: str, limit: int) -> str:
    command = [sys.executable, __file__, *args]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    lines = [x for x in done.stdout.splitlines() if x.startswith("answer: ")]
    return lines[-1].removeprefix("answer: ") if lines else "crash"


def _answer(kind: str, name: str, answers: Any) -> None:
    answers.put(run_upstream_case(kind, name))


def _in_fork(kind: str, name: str, limit: float = 30.0) -> str:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_answer, args=(kind, name, answers))
    child.start()
    child.join(limit)
    if child.is_alive():
        child.kill()
        child.join()
        return "hangs"
    return "crash" if answers.empty() else answers.get()


def tested() -> dict[str, dict[str, str]]:
    """What the tests say of each case, by engine."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "tests/test_loop_cases.py",
                f"--junitxml={report}",
            ],
            cwd=ROOT,
            check=False,
        )
        found: dict[str, dict[str, str]] = {}
        for item in ElementTree.parse(report).iter("testcase"):
            label = item.get("name", "").removeprefix("test_case[").removesuffix("]")
            engine, _, rest = label.partition("-")
            name = rest.removesuffix("-compiled").removesuffix("-as it stands")
            bad = item.find("failure") is not None or item.find("error") is not None
            row = found.setdefault(name, {})
            row[engine] = "wrong" if bad else row.get(engine, "right")
    return found


def write_cases() -> None:
    """Run everything and write the table."""
    rows = tested()
    # Imported once, for the forks; no device is opened here.
    importlib.import_module("torch_xla.experimental.scan")
    importlib.import_module("torch_xla.experimental.fori_loop")
    head = ["case", *(f"funcacc, {e}" for e in ENGINES), *(f"torch_xla `{u}`" for u in UPSTREAM)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        theirs = [_in_fork(kind, name) for kind in UPSTREAM]
        lines.append("| " + " | ".join([name, *(row[e] for e in ENGINES), *theirs]) + " |")
        print(lines[-1], flush=True)
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)


def time_layers(depth: int, how: str) -> str:
    """Seconds to trace, lower and compile loss and gradient of a stack of blocks."""
    import torch
    import torch_xla
    from torch import nn

    import funcacc
    from funcacc import rng

    device = torch_xla.device()
    blocks = nn.ModuleList(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        for _ in range(depth)
    ).to(device)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if how == "scan_layers":
            return funcacc.scan_layers(model, x).square().mean()
        for block in model:
            x = block(x)
        return x.square().mean()

    pure = funcacc.functionalize(blocks, loss)
    params, buffers = pure.init()

    def gradient(params: Any, key: torch.Tensor, x: torch.Tensor) -> Any:
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        value, _ = pure.apply(leaves, buffers, key, x)
        return torch.autograd.grad(value, list(leaves.values()))

    args = params, rng.key(1).to(device), torch.randn(4, 16, 32).to(device)
    warm = funcacc.jit(lambda x: x + 1)
    warm(args[2])
    start = time.perf_counter()
    lowered = funcacc.jit(gradient).lower(*args)
    traced = time.perf_counter() - start
    compiled = lowered.compile()
    took = compiled.seconds
    return f"trace {traced:.1f} s, lower {took['lower']:.1f} s, compile {took['compile']:.1f} s"


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cases")
    commands.add_parser("layers")
    stack = commands.add_parser("stack")
    stack.add_argument("depth", type=int)
    stack.add_argument("how", choices=["scan_layers", "unrolled"])
    args = parser.parse_args()
    if args.command == "cases":
        write_cases()
    elif args.command == "stack":
        print("answer:", time_layers(args.depth, args.how))
    else:
        for how in ("scan_layers", "unrolled"):
            for depth in (2, 8, 32):
                answer = _in_child("stack", str(depth), how, limit=600)
                print(f"{how}, {depth} blocks: {answer}", flush=True)


if __name__ == "__main__":
    main()
