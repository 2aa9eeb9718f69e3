"""`torch.optim` steps as pure functions: the optimizer's own code, traced as it is."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcacc import trees
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph, uses
from funcacc.capture.numbers import Guard, HostNumbers
from funcacc.capture.trace import capture
from funcacc.errors import OptimizerError
from funcacc.types import TensorSpec

State = dict[str, dict[str, Tensor]]
"""Optimizer state: parameter name -> key -> tensor."""


@dataclass
class Update:
    """A traced optimizer step.

    Attributes:
        graph: inputs params, grads, state leaves, ``numbers``; outputs params, state leaves.
        guards: answers about hyperparameters that the trace depends on.
        keys: (parameter name, state key) of each state leaf, in order.
        born: names whose state starts from the first gradient, in order; `numbers` ends
            with a flag for each: 1.0 on its first step.
    """

    graph: Graph
    guards: list[Guard]
    keys: list[tuple[str, str]]
    born: list[str]


class Optimizers:
    """One or several optimizers over named parameters.

    Args:
        optimizers: over disjoint parameters.
        names: the model's parameters: id of the tensor -> name.

    Raises:
        OptimizerError: for a parameter of another model, or one that two optimizers hold.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.optimizers = list(optimizers)
        self.names = names
        seen: dict[str, int] = {}
        for i, opt in enumerate(self.optimizers):
            for p in self._params(opt):
                name = names.get(id(p))
                if name is None:
                    raise OptimizerError(
                        f"{type(opt).__name__} holds a parameter of shape {tuple(p.shape)} that "
                        "the model doesn't have; make the optimizer after moving the model, from "
                        "model.parameters()"
                    )
                if seen.setdefault(name, i) != i:
                    raise OptimizerError(
                        f"params[{name!r}] is in two optimizers; give each its own parameters"
                    )
        if not seen:
            raise OptimizerError("the optimizer has no parameters; pass model.parameters()")
        self.held = seen

    @staticmethod
    def _params(opt: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in opt.param_groups for p in group["params"]]

    # Hyperparameters -------------------------------------------------------------------

    def _hyper_leaves(self) -> tuple[list[Any], Any]:
        groups = [
            [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
            for opt in self.optimizers
        ]
        return trees.flatten(groups)

    def numbers(self) -> list[float]:
        """The float hyperparameters as they are now (lr, betas, eps, ...)."""
        return [float(x) for x in self._hyper_leaves()[0] if _is_number(x)]

    def static(self) -> tuple[Any, ...]:
        """Everything else that a trace depends on: flags, strings, counts, the groups."""
        leaves, spec = self._hyper_leaves()
        fixed = tuple("number" if _is_number(x) else x for x in leaves)
        members = tuple(
            tuple(tuple(id(p) for p in g["params"]) for g in opt.param_groups)
            for opt in self.optimizers
        )
        return (fixed, spec, members, tuple(type(o) for o in self.optimizers))

    # State -----------------------------------------------------------------------------

    def state(self) -> State:
        """The tensors in the optimizers' state now, by parameter name.

        Raises:
            OptimizerError: for state that isn't a tensor.
        """
        out: State = {}
        for opt in self.optimizers:
            for p in self._params(opt):
                entries = opt.state.get(p, {})
                for key, value in entries.items():
                    if not isinstance(value, Tensor) and value is not None:
                        raise OptimizerError(
                            f"{type(opt).__name__} keeps opt_state[{self.names[id(p)]!r}][{key!r}] "
                            f"as a {type(value).__name__}; only tensors can be carried"
                        )
                tensors = {k: v for k, v in entries.items() if isinstance(v, Tensor)}
                if tensors:
                    out[self.names[id(p)]] = tensors
        return out

    def install(self, name: str, key: str, value: Tensor) -> None:
        """Put a state tensor where the optimizer keeps it."""
        opt = self.optimizers[self.held[name]]
        for p in self._params(opt):
            if self.names[id(p)] == name:
                opt.state[p][key] = value

    def group_of(self, name: str) -> tuple[int, int]:
        """Which optimizer and which of its groups a parameter is in."""
        i = self.held[name]
        for g, group in enumerate(self.optimizers[i].param_groups):
            if any(self.names[id(p)] == name for p in group["params"]):
                return i, g
        raise KeyError(name)

    # Tracing ---------------------------------------------------------------------------

    def _shadows(
        self, params: dict[str, Tensor], state: dict[str, dict[str, Any]], hypers: Sequence[Tensor]
    ) -> list[torch.optim.Optimizer]:
        """Optimizers of the same classes over traced tensors."""
        leaves, spec = self._hyper_leaves()
        numbers = iter(hypers)
        groups = trees.unflatten(spec, [next(numbers) if _is_number(x) else x for x in leaves])
        return [
            self._shadow(opt, hyper_groups, params, state)
            for opt, hyper_groups in zip(self.optimizers, groups, strict=True)
        ]

    def _shadow(
        self,
        opt: torch.optim.Optimizer,
        hyper_groups: list[dict[str, Any]],
        params: dict[str, Tensor],
        state: dict[str, dict[str, Any]],
    ) -> torch.optim.Optimizer:
        shadow: torch.optim.Optimizer = object.__new__(type(opt))
        shadow.__dict__.update(opt.__dict__)
        # Schedulers patch the instance to count the user's own calls of step().
        shadow.__dict__.pop("step", None)
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        shadow.__dict__.update({h: OrderedDict() for h in hooks})
        shadow.state = defaultdict(dict)
        shadow.param_groups = []
        for group, hypers in zip(opt.param_groups, hyper_groups, strict=True):
            # One tensor at a time: lists would be split again by most engines, and the
            # fused kernels exist on few devices.
            flags: dict[str, Any] = {k: False for k in ("foreach", "fused") if k in group}
            members = [
                params[self.names[id(p)]] for p in group["params"] if self.names[id(p)] in params
            ]
            shadow.param_groups.append({**hypers, **flags, "params": members})
            for p in group["params"]:
                name = self.names[id(p)]
                if name in state:
                    shadow.state[params[name]] = state[name]
        return shadow

    def initial_state(
        self, params: dict[str, TensorSpec], reached: Sequence[str]
    ) -> tuple[Graph, list[tuple[str, str]], list[str]]:
        """How the optimizers make their state: the first value that each key is given.

        Args:
            params: specs of the parameters, by name.
            reached: names that have a gradient.

        Returns:
            A graph from (params, grads, numbers) to the state leaves, the name and key of
            each leaf, and the names whose state is made from the first gradient.
        """
        keys: list[tuple[str, str]] = []
        numbers = self.numbers()

        def fn(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
            keys.clear()
            values, grads, hypers = _unpack(flat, params, reached, numbers)
            recorders = {n: _Recorder() for n in reached}
            with HostNumbers(hypers, numbers):
                self._run(values, grads, dict(recorders), hypers)
            out = []
            for name in reached:
                for key, first in recorders[name].first.items():
                    keys.append((name, key))
                    out.append(first)
            return out

        graph = capture(fn, *_signature(params, reached, len(numbers)))
        first_grad = len(params)
        grads = set(range(first_grad, first_grad + len(reached)))
        born = [k for i, k in enumerate(keys) if uses(graph, [i]) & grads]
        return graph, keys, sorted({name for name, _ in born}, key=list(reached).index)

    def _run(
        self,
        params: dict[str, Tensor],
        grads: dict[str, Tensor],
        state: dict[str, dict[str, Any]],
        hypers: Sequence[Tensor],
    ) -> None:
        for name, grad in grads.items():
            params[name].grad = grad
        with torch.no_grad():
            for shadow in self._shadows(params, state, hypers):
                before = [_plain(g) for g in shadow.param_groups]
                type(shadow).step(shadow)
                _check_groups(shadow, before)

    def capture_update(
        self,
        params: dict[str, TensorSpec],
        reached: Sequence[str],
        state: dict[str, dict[str, TensorSpec]],
        born: Sequence[str],
    ) -> Update:
        """Trace one step.

        Args:
            params: specs of the parameters, by name.
            reached: names that have a gradient; the others are skipped.
            state: specs of the state.
            born: names whose state is made from the first gradient: for these, two
                variants are traced, and a flag selects.

        Returns:
            The step as a graph.

        Raises:
            CaptureError: when the optimizer looks at values that only the device has.
            CarryError: when it changes the shape or dtype of its state.
        """
        numbers = self.numbers()
        keys = [(n, k) for n in state for k in state[n]]
        found: list[Guard] = []

        def fn(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
            split = len(flat) - len(keys)
            values, grads, hypers = _unpack(flat[:split], params, reached, numbers)
            flags = dict(zip(born, flat[split - 1][len(numbers) :], strict=True))
            carried: dict[str, dict[str, Any]] = {}
            for (name, key), leaf in zip(keys, flat[split:], strict=True):
                carried.setdefault(name, {})[key] = leaf.clone()
            first = _first_variant(values, carried, born)
            with HostNumbers(hypers, numbers) as host:
                self._run(values, grads, carried, hypers)
                if first:
                    self._run(*first[:1], grads, first[1], hypers)
            found[:] = host.guards
            _check_keys(keys, carried)
            if first:
                _select_first(values, carried, *first, flags)
            return [*values.values(), *(carried[n][k] for n, k in keys)]

        specs, names = _signature(params, reached, len(numbers) + len(born))
        specs += [state[n][k] for n, k in keys]
        names += [f"opt_state[{n!r}][{k!r}]" for n, k in keys]
        return Update(capture(fn, specs, names), found, keys, list(born))


def _is_number(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1
    return isinstance(x, float)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _check_groups(shadow: torch.optim.Optimizer, before: list[dict[str, Any]]) -> None:
    for i, (group, old) in enumerate(zip(shadow.param_groups, before, strict=True)):
        for key, value in _plain(group).items():
            if key not in old or old[key] is not value:
                raise OptimizerError(
                    f"{type(shadow).__name__} changes param_groups[{i}][{key!r}] in its step; "
                    "state outside opt.state isn't carried by a compiled step"
                )


class _Recorder(dict):
    """A state dict that keeps a copy of the first value given to each key."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Tensor] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor) and key not in self.first:
            self.first[key] = value.detach().clone()
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def _signature(
    params: dict[str, TensorSpec], reached: Sequence[str], numbers: int
) -> tuple[list[TensorSpec], list[str]]:
    specs = [*params.values(), *(params[n] for n in reached)]
    names = [f"params[{n!r}]" for n in params] + [f"grads[{n!r}]" for n in reached]
    return [*specs, TensorSpec((numbers,), torch.float64)], [*names, "numbers"]


def _unpack(
    flat: Sequence[Tensor],
    params: dict[str, TensorSpec],
    reached: Sequence[str],
    numbers: Sequence[float],
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    values = {n: t.clone() for n, t in zip(params, flat, strict=False)}
    grads = {n: t.clone() for n, t in zip(reached, flat[len(params) :], strict=False)}
    return values, grads, [flat[-1][i] for i in range(len(numbers))]


_Variant = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]


def _first_variant(
    values: dict[str, Tensor], carried: dict[str, dict[str, Any]], born: Sequence[str]
) -> _Variant | None:
    """Copies for a step in which the `born` parameters have no state yet."""
    if not born:
        return None
    copies = {n: t.clone() for n, t in values.items()}
    state = {n: {} if n in born else {k: v.clone() for k, v in carried[n].items()} for n in carried}
    return copies, state


def _select_first(
    values: dict[str, Tensor],
    carried: dict[str, dict[str, Any]],
    first_values: dict[str, Tensor],
    first_state: dict[str, dict[str, Any]],
    flags: dict[str, Tensor],
) -> None:
    for name, flag in flags.items():
        is_first = flag != 0
        values[name] = torch.where(is_first, first_values[name], values[name])
        for key in carried[name]:
            made = first_state[name][key]
            carried[name][key] = torch.where(is_first, made, carried[name][key])


def _check_keys(keys: Sequence[tuple[str, str]], carried: dict[str, dict[str, Any]]) -> None:
    now = [(n, k) for n in carried for k, v in carried[n].items() if isinstance(v, Tensor)]
    if set(now) != set(keys):
        changed = sorted({f"opt_state[{n!r}][{k!r}]" for n, k in set(now) ^ set(keys)})
        raise OptimizerError(
            "the optimizer adds or drops state in its step, which a loop carry can't: "
            + ", ".join(changed)
        )


_REFUSED: dict[str, str] = {
    "LBFGS": "it calls the loss many times in one step and branches on the results",
    "SparseAdam": "it works on sparse gradients, which an accumulator can't hold",
}


def check_supported(opt: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that a user gave, as a list.

    Raises:
        OptimizerError: for an object that isn't one, or a class that can't be traced.
    """
    items = list(opt) if isinstance(opt, (list, tuple)) else [opt]
    for item in items:
        if not isinstance(item, torch.optim.Optimizer):
            raise OptimizerError(
                f"opt is a {type(item).__name__}; give a torch.optim.Optimizer, or a list of them"
            )
        reason = _REFUSED.get(type(item).__name__)
        if reason:
            raise OptimizerError(
                f"{type(item).__name__} can't be part of a compiled step: {reason}"
            )
    return items
