"""Running an optimizer's own `step` over other tensors than the user's."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor

from funcacc import trees
from funcacc.errors import OptimizerError
from funcacc.optimizers.asked import Asked, noted_class, noted_group
from funcacc.types import TensorSpec


class Number(NamedTuple):
    """Stands for a host number that is an input."""


NUMBER = Number()


class Group(NamedTuple):
    """The hyperparameters of one parameter group.

    Attributes:
        position: in the optimizer's `param_groups`.
        leaves: all but the parameters, flat.
        spec: their structure.
        numeric: positions in `leaves` that are inputs of the program.
    """

    position: int
    leaves: list[Any]
    spec: trees.TreeSpec
    numeric: tuple[int, ...]

    def options(self, numbers: Sequence[Any]) -> dict[str, Any]:
        """The hyperparameters with `numbers` in the places of the numeric ones."""
        leaves = list(self.leaves)
        for i, x in zip(self.numeric, numbers, strict=True):
            leaves[i] = x
        out: dict[str, Any] = trees.unflatten(self.spec, leaves)
        return out

    def paths(self) -> list[str]:
        """The path of each leaf."""
        return trees.spec_paths(self.spec, f"param_groups[{self.position}]")

    def keys(self) -> list[Any]:
        """The key that each leaf belongs to."""
        return trees.first_entries(self.spec)


class Role(NamedTuple):
    """A parameter in a rule.

    Attributes:
        name: of the parameter.
        group: position of its group among those of the rule.
        spec: of the parameter.
        leaves: its state: a `TensorSpec`, `NUMBER` or a static value each.
        tree: structure of its state.
        born: whether its state starts from the first gradient.
    """

    name: str
    group: int
    spec: TensorSpec
    leaves: tuple[Any, ...]
    tree: trees.TreeSpec
    born: bool

    @property
    def tensors(self) -> list[TensorSpec]:
        """Specs of the state tensors."""
        return [x for x in self.leaves if isinstance(x, TensorSpec)]

    @property
    def numbers(self) -> int:
        """How many host numbers the state holds."""
        return sum(x is NUMBER for x in self.leaves)


def describe_state(entries: dict[str, Any]) -> tuple[tuple[Any, ...], trees.TreeSpec]:
    """The leaves of a parameter's state as a `Role` has them, and their structure."""
    leaves, tree = trees.flatten(entries)
    return tuple(_kind(x) for x in leaves), tree


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor):
        return TensorSpec.of(x)
    return NUMBER if is_number(x) else x


def is_number(x: Any) -> bool:
    """Whether a value is an int or a float, and not a flag."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)


# One tensor at a time: lists would be split again by most engines, and the fused kernels exist
# on few devices.
REPLACED: dict[str, Any] = {"foreach": False, "fused": False, "capturable": True}
"""Flags that a traced step doesn't take from the user's groups."""


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    with (
        mock.patch.object(optimizer_module, "_global_optimizer_pre_hooks", OrderedDict()),
        mock.patch.object(optimizer_module, "_global_optimizer_post_hooks", OrderedDict()),
    ):
        yield


def run(
    opt: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    members: Sequence[Sequence[Tensor]],
    state: Sequence[tuple[Tensor, dict[str, Any]]],
    capturable: bool,
) -> tuple[list[dict[str, Any]], Asked]:
    """Take one step as `opt` would, over other parameters; their ``.grad`` is set.

    Args:
        opt: whose class and attributes are used; not changed.
        groups: the hyperparameters of each group.
        members: the parameters of each group.
        state: the state of parameters that have one; changed in place.
        capturable: whether step counts stay tensors.

    Returns:
        The hyperparameters after the step, and what it looked at.

    Raises:
        OptimizerError: when the step sets attributes, which would be done once only.
    """
    asked = Asked(len(groups))
    shadow: torch.optim.Optimizer = object.__new__(noted_class(type(opt), asked))
    shadow.__dict__.update(opt.__dict__)
    # Schedulers patch the instance to count the user's own calls of step().
    shadow.__dict__.pop("step", None)
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    shadow.__dict__.update({h: OrderedDict() for h in hooks})
    shadow.state = defaultdict(dict)
    for p, entries in state:
        shadow.state[p] = entries
    flags = {**REPLACED, "capturable": capturable}
    noted = [
        noted_group(
            {**g, **{k: v for k, v in flags.items() if k in g}, "params": list(ps)}, asked, i
        )
        for i, (g, ps) in enumerate(zip(groups, members, strict=True))
    ]
    shadow.param_groups = list(noted)
    kept = [{k: g[k] for k in flags if k in g} for g in groups]
    before = dict(shadow.__dict__)
    with torch.no_grad(), _without_global_hooks():
        type(shadow).step(shadow)
    _check_kept(type(opt).__name__, before, shadow, [p for ps in members for p in ps])
    return [
        {k: old.get(k, v) for k, v in dict.items(g) if k != "params"}
        for g, old in zip(noted, kept, strict=True)
    ], asked


# Set by torch's own step, and of no consequence.
_HARMLESS = {"_warned_capturable_if_run_uncaptured"}


def _check_kept(
    name: str, before: dict[str, Any], shadow: torch.optim.Optimizer, params: Sequence[Tensor]
) -> None:
    now = shadow.__dict__
    changed = sorted(k for k in now if k not in _HARMLESS and before.get(k, now) is not now[k])
    if changed:
        raise OptimizerError(
            f"{name} sets its attribute {', '.join(changed)} in step(), which would happen only "
            "once, when the step is traced: keep it in param_groups or in opt.state[p]"
        )
    own = set(map(id, params))
    foreign = [k for k in shadow.state if id(k) not in own]
    if foreign:
        kinds = [repr(k) if isinstance(k, str) else type(k).__name__ for k in foreign]
        raise OptimizerError(
            f"{name} keeps state under {', '.join(kinds)}, which is none of its parameters: keep "
            "it in param_groups or in opt.state[p]"
        )


class _Recorder(dict):
    """A state dict that keeps a copy of the first value given to each key."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.detach().clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def first_state(
    opt: torch.optim.Optimizer, options: dict[str, Any], value: Tensor, grad: Tensor
) -> dict[str, Any]:
    """The first value that the optimizer gives to each key of a parameter's state.

    Args:
        opt: the optimizer; not changed.
        options: the hyperparameters of the parameter's group, as plain numbers.
        value: the parameter, on the host; overwritten.
        grad: of the same shape.
    """
    recorder = _Recorder()
    value.grad = grad
    run(opt, [options], [[value]], [(value, recorder)], capturable=False)
    first = recorder.first
    for key, later in recorder.items():
        # A number that is a tensor from the first step on.
        if is_number(first[key]) and isinstance(later, Tensor):
            first[key] = torch.full_like(later, first[key])
    return first
