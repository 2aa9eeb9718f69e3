"""Which versions of PyTorch, torch_xla, jax and jaxlib go together, and the cure where they don't.

Nothing is imported to find out: a wrong pair may fail at import with a message about symbols.
"""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

TORCH_XLA = "2.9"
OLDEST_JAX = "0.6.2"
INSTALL_XLA = "pip install torch==2.9.0 torch_xla==2.9.0"
INSTALL_JAX = f'pip install "jax>={OLDEST_JAX}"'

TESTED = (
    ("2.9.0", "2.9.0", "0.10.2", "constraints/xla.txt with constraints/jax-beside-xla.txt"),
    ("2.13.0", None, "0.10.2", "constraints/jax.txt"),
)
"""Combinations that the whole set of conformance tests has passed with on the jax engine: torch,
torch_xla, jax with jaxlib, and the constraints that install them."""


class Broken(NamedTuple):
    """A pair of packages that doesn't work together.

    Attributes:
        reason: both versions, and what is wrong.
        cure: a command.
    """

    reason: str
    cure: str


def version(package: str) -> str | None:
    """The installed version of a package, without building tags; `None` if there is none."""
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def broken_xla(torch: str, torch_xla: str) -> Broken | None:
    """What is wrong with torch_xla beside this PyTorch, by versions alone."""
    if _minor(torch_xla) != _minor(TORCH_XLA):
        return Broken(f"torch_xla {torch_xla} was not tested; {TORCH_XLA} is", INSTALL_XLA)
    if _minor(torch) != _minor(torch_xla):
        reason = f"torch_xla {torch_xla} loads with torch {TORCH_XLA} only, and this is {torch}"
        return Broken(reason, f"{INSTALL_XLA}  (or, for engine 'jax' alone: {_WITHOUT_XLA})")
    return None


def broken_jax(jax: str, jaxlib: str | None) -> Broken | None:
    """What is wrong with jax and its compiled half, by versions alone."""
    if _numbers(jax) < _numbers(OLDEST_JAX):
        return Broken(f"jax {jax} is too old; {OLDEST_JAX} is the oldest tested", INSTALL_JAX)
    cure = f'pip install "jax=={jax}" "jaxlib=={jax}"'
    if jaxlib is None:
        return Broken(f"jax {jax} is installed without jaxlib", cure)
    if _minor(jax) != _minor(jaxlib):
        return Broken(f"jax {jax} doesn't go with jaxlib {jaxlib}; they need one version", cure)
    return None


_WITHOUT_XLA = "pip uninstall torch_xla"


def _minor(version: str) -> tuple[int, ...]:
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: (0, 7, 0) for ``0.7.0.dev2025``."""
    return tuple(int(n) for n in version.split(".")[:3] if n.isdigit())
