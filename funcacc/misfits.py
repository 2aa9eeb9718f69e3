"""What of a saved state doesn't fit the object that it is for, leaf by leaf."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from funcacc import trees
from funcacc.errors import StateError
from funcacc.optimizers import shadow
from funcacc.parts import is_list
from funcacc.train import TrainStep
from funcacc.types import TensorSpec

COMPARED = (nn.Module, torch.optim.Optimizer, LRScheduler, TrainStep)
"""Objects whose state is compared, so that loading it afterwards can't fail."""


def parameter_names(parts: Mapping[str, Any]) -> dict[int, str]:
    """Id of each parameter of a module -> its name with that of the part."""
    return {
        id(p): f"{name}.{n}"
        for name, part in parts.items()
        if isinstance(part, nn.Module)
        for n, p in part.named_parameters()
    }


def misfits(part: Any, state: Any, root: str, names: dict[int, str]) -> list[str]:
    """What of a state doesn't fit its object, a line each.

    Args:
        part: the object, or a list of objects.
        state: what the file has for it.
        root: name of the part.
        names: of parameters, by id.

    Raises:
        StateError: for an object that nothing can be loaded into.
    """
    if is_list(part):
        if not isinstance(state, list) or len(state) != len(part):
            given = f"{len(state)} states" if isinstance(state, list) else _kind(state)
            return [f"{root}: {given} in the file, {len(part)} objects here"]
        pairs = enumerate(zip(part, state, strict=True))
        return [m for i, (p, s) in pairs for m in misfits(p, s, f"{root}[{i}]", names)]
    if not hasattr(part, "load_state_dict"):
        raise StateError(
            f"{root} is a {type(part).__name__}, which has no load_state_dict; leave it "
            "out and take it from what load returns"
        )
    if not isinstance(part, COMPARED):
        return []
    if not isinstance(state, dict):
        return [f"{root}: {_kind(state)} in the file, the state of a {type(part).__name__} here"]
    if isinstance(part, TrainStep):
        return [f"{root}: {line}" for line in part._misfits(state)]
    if isinstance(part, nn.Module):
        return _differences(part.state_dict(), state, root)
    if isinstance(part, torch.optim.Optimizer):
        return _optimizer_misfits(part, state, root, names)
    # Private ones come and go with PyTorch's versions.
    keys = [k for k in dict.fromkeys([*part.state_dict(), *state]) if not k.startswith("_")]
    return [m for k in keys for m in _lacking(part.state_dict(), state, k, f"{root}[{k!r}]")]


def _differences(own: Mapping[str, Any], given: Mapping[str, Any], root: str) -> list[str]:
    """By key: what only one has, tensors of another shape or dtype."""
    lines = []
    for key in dict.fromkeys([*own, *given]):
        path = f"{root}[{key!r}]"
        missing = _lacking(own, given, key, path)
        if missing or nn.parameter.is_lazy(own[key]):
            lines += missing
        elif _kind(own[key]) != _kind(given[key]):
            lines.append(f"{path}: {_kind(given[key])} in the file, {_kind(own[key])} here")
    return lines


def _lacking(own: Mapping[Any, Any], given: Mapping[Any, Any], key: Any, path: str) -> list[str]:
    if key not in given:
        return [f"{path}: missing in the file, {_kind(own[key])} here"]
    if key not in own:
        return [f"{path}: {_kind(given[key])} in the file, missing here"]
    return []


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(TensorSpec.of(value))
    return "a number" if shadow.is_number(value) else f"a {type(value).__name__}"


def _optimizer_misfits(
    opt: torch.optim.Optimizer, given: dict[str, Any], root: str, names: dict[int, str]
) -> list[str]:
    groups, state = given.get("param_groups"), given.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        return [f"{root}: another dict in the file, the state of {type(opt).__name__} here"]
    own = opt.param_groups
    if len(groups) != len(own):
        return [f"{root}['param_groups']: {len(groups)} in the file, {len(own)} here"]
    lines = []
    for i, (g, o) in enumerate(zip(groups, own, strict=True)):
        path = f"{root}['param_groups'][{i}]"
        if len(g["params"]) != len(o["params"]):
            lines.append(
                f"{path}['params']: {len(g['params'])} in the file, {len(o['params'])} here"
            )
        elif "param_names" in g and "param_names" in o:
            pairs = zip(g["param_names"], o["param_names"], strict=True)
            lines += [
                f"{path}['param_names'][{n}]: {a!r} in the file, {b!r} here"
                for n, (a, b) in enumerate(pairs)
                if a != b
            ]
    if lines:
        return lines
    try:
        loaded = _with_groups(opt, given)
    except Exception as e:
        return [f"{root}: {e}"]
    for i, g in enumerate(loaded.param_groups):
        path = f"{root}['param_groups'][{i}]"
        lines += [
            f"{path}[{k!r}]: missing in the file, {opt.defaults[k]!r} here"
            for k in opt.defaults
            if k not in g
        ]
    return lines or _state_misfits(loaded, groups, state, root, names)


def _with_groups(opt: torch.optim.Optimizer, given: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer as it would be with these hyperparameters, without its state."""
    loaded: torch.optim.Optimizer = object.__new__(type(opt))
    loaded.__dict__.update(opt.__dict__)
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    loaded.__dict__.update({h: OrderedDict() for h in hooks})
    loaded.state = defaultdict(dict)
    loaded.param_groups = [dict(g) for g in opt.param_groups]
    loaded.load_state_dict({**given, "state": {}})
    return loaded


def _state_misfits(
    opt: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: dict[Any, Any],
    root: str,
    names: dict[int, str],
) -> list[str]:
    """Compare with what the optimizer itself would make for its parameters."""
    expected = _Expected(opt)
    lines = []
    for given, group in zip(groups, opt.param_groups, strict=True):
        for place, p in zip(given["params"], group["params"], strict=True):
            own = expected(p, group) if state.get(place) else None
            if own is None:
                continue
            what = f" of {names[id(p)]}" if id(p) in names else ""
            path = f"{root}['state'][{place}]"
            found = _flat_differences(own, state[place], path)
            lines += [f"{line}{what}" for line in found]
    return lines


def _flat_differences(own: dict[str, Any], given: dict[str, Any], root: str) -> list[str]:
    mine, theirs = (
        dict(zip(trees.paths(x, root), trees.flatten(x)[0], strict=True)) for x in (own, given)
    )
    lines = [f"{p}: missing in the file, {_kind(mine[p])} here" for p in mine if p not in theirs]
    if lines:
        # An optimizer may add state in a later step; it doesn't do without any.
        lines += [
            f"{p}: {_kind(x)} in the file, missing here" for p, x in theirs.items() if p not in mine
        ]
    for path in (p for p in mine if p in theirs):
        a, b = mine[path], theirs[path]
        # Step counts are numbers or tensors, by the version and by flags.
        if not (_is_count(a) and _is_count(b)) and _kind(a) != _kind(b):
            lines.append(f"{path}: {_kind(b)} in the file, {_kind(a)} here")
    return lines


def _is_count(x: Any) -> bool:
    return x.ndim == 0 if isinstance(x, Tensor) else shadow.is_number(x)


class _Expected:
    """The state that an optimizer makes for a parameter, once for all that are alike."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt
        self.made: dict[Any, dict[str, Any] | None] = {}

    def __call__(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any] | None:
        """The state; `None` where it takes more than a parameter and a gradient to find out."""
        kind = (id(group), TensorSpec.of(param))
        if kind not in self.made:
            self.made[kind] = self._make(param, group)
        return self.made[kind]

    def _make(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any] | None:
        options = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in group.items()}
        del options["params"]
        value = torch.zeros(param.shape, dtype=param.dtype)
        noise = torch.Generator().manual_seed(0)
        try:
            return shadow.first_state(
                self.opt, options, value, torch.randn(value.shape, generator=noise).to(value.dtype)
            )
        except Exception:
            return None
