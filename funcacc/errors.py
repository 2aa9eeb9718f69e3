"""Every error that a user of funcacc can cause, in one family."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch


class FuncaccError(Exception):
    """Base of all errors that funcacc raises on purpose."""


class BatchError(FuncaccError, ValueError):
    """A window that can't be built: its microbatches disagree, or it isn't a window."""


class CaptureError(FuncaccError, RuntimeError):
    """User code that can't become a pure graph; the message names the user's line."""


class CarryError(FuncaccError, TypeError):
    """A loop carry or a state leaf leaves with another structure, shape or dtype."""


class ModelError(FuncaccError, ValueError):
    """A model or a loss function that a training step can't be made of."""


class OptimizerError(FuncaccError, ValueError):
    """An optimizer that a training step can't be made of."""


class OptionError(FuncaccError, ValueError):
    """An option that doesn't exist, or a value that it can't have."""


class EngineError(FuncaccError, RuntimeError):
    """An engine that is missing, or that can't run an operation of the graph."""


class StateError(FuncaccError, RuntimeError):
    """A state that doesn't fit the step, or that no longer exists."""


_LIBRARY_ROOTS = tuple(
    {
        str(Path(__file__).resolve().parent),
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        # Elsewhere when packages are of the user's site, or of another environment.
        str(Path(torch.__file__).parents[1]),
    }
)

_TRACING_ROOTS = (
    str(Path(__file__).resolve().parent),
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"] + "/contextlib",
)


def user_line(tb: TracebackType | None = None) -> str:
    """The innermost line of the user's own code, as ``file:line (code)``.

    Args:
        tb: the traceback of an exception; `None` looks at the running stack.

    Returns:
        The place, or ``"an unknown line"`` when no frame belongs to the user.
    """
    return _innermost_line(tb, _LIBRARY_ROOTS)


def package_line(tb: TracebackType | None) -> str:
    """The innermost line that is neither torch's nor ours: an installed package counts.

    Args:
        tb: the traceback of an exception.
    """
    return _innermost_line(tb, _TRACING_ROOTS)


def _innermost_line(tb: TracebackType | None, excluded: tuple[str, ...]) -> str:
    if tb is None:
        frames = list(traceback.extract_stack(sys._getframe(2)))
    else:
        frames = list(traceback.extract_stack(tb.tb_frame)) + list(traceback.extract_tb(tb))
    for frame in reversed(frames):
        path = frame.filename
        if path.startswith("<") and not path.startswith("<ipython"):
            continue
        if not path.startswith(excluded):
            return f"{path}:{frame.lineno} ({(frame.line or '').strip()})"
    return "an unknown line"
