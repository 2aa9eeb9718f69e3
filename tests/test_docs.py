"""Examples in docstrings and in README run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    "batches", "engines", "jit", "layers", "loops", "loss", "model", "one_line", "remat",
    "saving", "train",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"funcacc.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_readme_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
