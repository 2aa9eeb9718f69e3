"""Options of a step, and what each may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch

from funcacc.errors import OptionError


class Options(NamedTuple):
    """Options of a step; docs/architecture.md and `funcacc.TrainStep` explain them."""

    clip_norm: float | None = None
    clip_value: float | None = None
    grad_transform: Callable[..., Any] | None = None
    accumulate_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    skip_nonfinite: bool = False
    steps_per_call: int = 1
    batch_axis: str | tuple[str, ...] | None = None
    gather: str = "microbatch"
    batch_norm: str = "synchronised"

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """The options in `given`, checked, and defaults for the rest.

        Raises:
            OptionError: naming the option, its value and what it may be.
        """
        for name, value in given.items():
            if name not in _CHECKS:
                raise OptionError(
                    f"there is no option {name!r}; choose from {', '.join(sorted(_CHECKS))}, "
                    "engine, mesh, seed, donate"
                )
            holds, wanted = _CHECKS[name]
            if not holds(value):
                raise OptionError(f"{name} is {value!r}; give {wanted}")
        return cls(**given)


def _is_limit(value: Any) -> bool:
    # Numbers of a tensor would be fixed when the step is traced.
    usable = isinstance(value, Real) and not isinstance(value, bool)
    return value is None or (usable and not math.isnan(value) and value > 0)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


_LIMIT = "a positive Python number, or None not to clip"

_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "clip_norm": (_is_limit, _LIMIT),
    "clip_value": (_is_limit, _LIMIT),
    "grad_transform": (
        lambda value: value is None or callable(value),
        "a function (grads, params) -> grads, or None",
    ),
    "accumulate_dtype": (_is_float, "a floating dtype, e.g. torch.float32"),
    "compute_dtype": (
        lambda value: value is None or _is_float(value),
        "a floating dtype, e.g. torch.bfloat16, or None not to cast",
    ),
    "skip_nonfinite": (lambda value: isinstance(value, bool), "True or False"),
    "steps_per_call": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        "how many optimizer steps TrainStep.run puts into one dispatch, 1 or more",
    ),
    "batch_norm": (
        lambda value: value in ("synchronised", "local"),
        "'synchronised' or 'local': whether statistics are of the whole batch or of each part "
        "that a mesh cuts it into",
    ),
    "gather": (
        lambda value: value in ("microbatch", "window"),
        "'microbatch' or 'window': how often parameters are gathered that lie in parts over the "
        "batch axes",
    ),
    "batch_axis": (
        lambda value: value is None or isinstance(value, str) or _is_names(value),
        "the name of a mesh axis, a tuple of names, or None for those called data and fsdp",
    ),
}


def checked_seed(seed: Any) -> int:
    """`seed`, or PyTorch's own where it is None.

    Raises:
        OptionError: when it is no whole number.
    """
    if seed is None:
        return torch.initial_seed()
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptionError(f"seed is {seed!r}; give an int, or None for torch.initial_seed()")
    return seed
