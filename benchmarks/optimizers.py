"""Writes docs/optimizers.md from what funcacc finds out about each tested optimizer.

    python benchmarks/optimizers.py

Each optimizer of the tests takes steps beside its own plain run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.test_optimizers import CASES, Pair, trainable  # noqa: E402
from tests.test_other_optimizers import CASES as OTHERS  # noqa: E402

IGNORED = ("params", "foreach", "fused", "capturable", "differentiable")

HEAD = """# Optimizers

An optimizer is traced from its own code, once for all parameters of a group that are alike.
Float hyperparameters are inputs of the program: a new value costs nothing. Everything else is
static: a new value is used too, after one more trace, which the report names. A question that the
code asks about a number (`if weight_decay != 0`) is a guard: when its answer changes, the step is
traced again.

Written by `python benchmarks/optimizers.py`: each row took steps beside the same optimizer in a
plain PyTorch loop, {torch}; the last column is the largest difference of a parameter after 4 steps.

| optimizer | inputs | static | programs in 4 steps | difference |
|---|---|---|---|---|
"""

TAIL = """
Programs: an optimizer of another package that puts its step count into the parameter group needs a
second one, when the count has become an input.

- State is made as the optimizer makes it: two trial steps on the host show its first values, and
  whether they depend on the parameter or on the gradient. Keys and dtypes are PyTorch's.
- Counts that the optimizer keeps in Python (in a group or in its state) go in as inputs and are
  moved on the host by the same formula. With `skip_nonfinite` this reads `skipped` on each step.
- A learning rate that is a tensor on the device is read when it was written to, which waits.
- Post-step hooks run after each step. Pre-step hooks are refused: there are no gradients outside.
- `opt` may also be an object with `init(params)` and `update(grads, state, params)`, optax's
  convention, on dicts by name; its numbers are constants of the program.
- Refused: LBFGS (it calls the loss many times and branches on the results), SparseAdam (sparse
  gradients), and optimizers that branch on values of gradients, each named with its line: Prodigy,
  DAdaptAdam, Lamb.
- Muon orthogonalises in bfloat16: the rounding of a gradient becomes up to 1e-3 of an update, also
  between plain PyTorch on two devices.
"""


def row(name: str, cls: type, kwargs: dict[str, Any]) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    pair = Pair("eager", lambda m: cls(trainable(m), **kwargs))
    for opt in pair.both:
        if hasattr(opt, "train"):
            opt.train()
    pair.advance(4)
    difference = max(
        (a.detach() - b.detach()).abs().max().item()
        for a, b in zip(pair.model.parameters(), pair.ref.parameters(), strict=True)
    )
    adopted = pair.step._adopted
    group = adopted._group(0, 0)
    paths = [p.split("]", 1)[1].strip("[]'").split("'")[0] for p in group.paths()]
    inputs = dict.fromkeys(p for i, p in enumerate(paths) if i in group.numeric)
    static = dict.fromkeys(p for p in paths if p not in inputs and p not in IGNORED)
    programs = pair.step.report().compiles
    return f"| {name} | {', '.join(inputs)} | {', '.join(static)} | {programs} | {difference:.0e} |"


def main() -> None:
    """Write the page."""
    rows = [row(name, *case) for name, case in {**CASES, **OTHERS}.items()]
    page = HEAD.format(torch=f"torch {torch.__version__}") + "\n".join(rows) + "\n" + TAIL
    (ROOT / "docs" / "optimizers.md").write_text(page)


if __name__ == "__main__":
    main()
