"""What XLA makes of the benchmarks' programs: one each, aliases, copies, size. Nothing is timed."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from funcacc.engines.dump import need

RUN = """
import sys
import torch, funcacc
from funcacc.bench.work import WORK, loss_fn, window

work, count = WORK[sys.argv[1]], int(sys.argv[2])
model = work.model().to(funcacc.device("xla"))
step = funcacc.TrainStep(model, torch.optim.AdamW(model.parameters()), loss_fn, clip_norm=1.0)
for part in (count, count - 1):
    step(funcacc.Window(window(work, count), part))
report = step.report()
print(report.state_leaves, report.donated_leaves, report.in_place_leaves, len(step.programs))
print(*(p.numel() for p in model.parameters() if p.ndim > 1))
"""
WORK = [("wide-mlp", 4), ("wide-mlp", 64), ("gpt", 4)]


class Program:
    """What the compiler wrote of the only large program of a process."""

    def __init__(self, folder, work, count):
        # The CPU's default order computes all gradients' squares for the norm at the same time.
        order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text {order}"
        done = subprocess.run(
            [sys.executable, "-c", RUN, work, str(count)],
            env={**os.environ, "XLA_FLAGS": flags},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        report, sizes = done.stdout.splitlines()
        self.leaves, self.donated, self.in_place, self.programs = map(int, report.split())
        self.smallest = min(map(int, sizes.split()))
        texts = {p: p.read_text() for p in Path(folder).glob("*cpu_after_optimizations.txt")}
        file = max(texts, key=lambda p: len(texts[p]))
        self.text = texts[file]
        self.before = Path(str(file).replace(".cpu_after_", ".before_")).read_text()
        assignment = Path(str(file).replace(".txt", "-buffer-assignment.txt"))
        self.need = need(assignment.read_text())

    def aliases(self):
        """Output -> the parameter whose buffer it takes."""
        found = re.findall(r"\{(\d+)\}: \((\d+), \{\}, may-alias\)", self.text.split("\n")[0])
        return {int(a): int(b) for a, b in found}

    def copied(self):
        """What is copied or transposed to memory, as large as a matrix of the model."""
        made = dict(re.findall(r"%?([\w.\-]+) = \S+ ([\w\-]+)\(", self.text))
        found = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(%?([\w.\-]+)\)", self.text)
        return {
            (shape, made.get(operand, "parameter"))
            for shape, operand in found
            if math.prod(map(int, shape.split(","))) >= self.smallest
        }


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return {w: Program(tmp_path_factory.mktemp("dump"), *w) for w in WORK}


def test_every_leaf_is_donated_to_its_own_output_in_one_program(programs):
    for p in programs.values():
        assert (p.donated, p.in_place, p.programs) == (p.leaves, p.leaves, 1)
        aliases = p.aliases()
        assert len(aliases) == p.leaves
        assert len({b - a for a, b in aliases.items()}) == 1, "an output took another's buffer"


def test_no_parameter_is_copied(programs):
    for work in WORK[:2]:
        # What remains fills accumulators with zeros.
        assert {how for _, how in programs[work].copied()} <= {"broadcast"}
    # The GPT's attention transposes activations, [4, 4, 64, 32].
    shapes = {s for s, how in programs["gpt", 4].copied() if how != "broadcast"}
    assert all(len(s.split(",")) == 4 for s in shapes)


def test_more_microbatches_make_no_larger_program(programs):
    few, many = programs["wide-mlp", 4], programs["wide-mlp", 64]
    assert len(few.before.splitlines()) == len(many.before.splitlines())
    assert few.need.temporaries == many.need.temporaries
    row = 32 * 512 * 4 + 32 * 8  # a microbatch of the window: float32 inputs, int64 targets
    assert many.need.inputs - few.need.inputs == 60 * row


def test_memory_is_state_accumulators_activations_and_window(programs):
    p = programs["wide-mlp", 4]
    params = 4 * sum((a + 1) * b for a, b in ((512, 1024), (1024, 1024), (1024, 512)))
    window = 4 * (32 * 512 * 4 + 32 * 8)
    # Of each layer the output of its activation, and one gradient of that size.
    activations = 4 * 32 * (1024 + 1024 + 512) * 2
    floor = 3 * params + params + activations + window
    # XLA:CPU can't add a product to what is there: one gradient at a time stands beside.
    assert p.need.total <= 1.01 * (floor + 4 * 1024 * 1024), (p.need, floor)
