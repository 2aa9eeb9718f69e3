"""Tracing an optimizer's `step` into a `Rule`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc import trees
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph, uses
from funcacc.capture.numbers import Guard, HostNumbers
from funcacc.capture.trace import capture
from funcacc.errors import CaptureError, OptimizerError, package_line
from funcacc.optimizers.asked import Asked
from funcacc.optimizers.shadow import NUMBER, Group, Role, is_number, run
from funcacc.optimizers.update import Move, Rule
from funcacc.types import TensorSpec


class _Inputs:
    """The flat inputs of a rule, by kind."""

    def __init__(
        self, flat: Sequence[Tensor], groups: Sequence[Group], roles: Sequence[Role]
    ) -> None:
        it = iter(flat)
        self.params = [next(it).clone() for _ in roles]
        self.grads = [next(it).clone() for _ in roles]
        self.hypers = [[next(it) for _ in g.numeric] for g in groups]
        self.counts = [[next(it) for _ in range(r.numbers)] for r in roles]
        self.flags = {i: next(it) for i, r in enumerate(roles) if r.born}
        self.state = [[next(it).clone() for _ in r.tensors] for r in roles]

    def entries(self, roles: Sequence[Role]) -> list[dict[str, Any]]:
        """State dicts of the roles, on copies of the tensors."""
        out = []
        for r, tensors, counts in zip(roles, self.state, self.counts, strict=True):
            t, n = iter(tensors), iter(counts)
            leaves = [
                next(t).clone() if isinstance(x, TensorSpec) else next(n) if x is NUMBER else x
                for x in r.leaves
            ]
            out.append(trees.unflatten(r.tree, leaves))
        return out


def _signature(
    groups: Sequence[Group], roles: Sequence[Role]
) -> tuple[list[TensorSpec], list[str]]:
    number = TensorSpec((), torch.float64)
    named = [
        *((f"params[{r.name!r}]", r.spec) for r in roles),
        *((f"grads[{r.name!r}]", r.spec) for r in roles),
        *((g.paths()[i], number) for g in groups for i in g.numeric),
        *((f"opt_state[{r.name!r}] number", number) for r in roles for _ in range(r.numbers)),
        *((f"first step of {r.name!r}", number) for r in roles if r.born),
        *((f"opt_state[{r.name!r}]", s) for r in roles for s in r.tensors),
    ]
    return [s for _, s in named], [n for n, _ in named]


class Traced(NamedTuple):
    """What came of tracing a rule.

    Attributes:
        rule: the rule.
        counters: (group index, path) of static hyperparameters that the step changes, which
            must become inputs before the rule is of use.
    """

    rule: Rule
    counters: set[tuple[int, str]]


def trace_rule(
    opt: torch.optim.Optimizer,
    groups: Sequence[Group],
    roles: Sequence[Role],
    numbers: Sequence[float],
) -> Traced:
    """Trace `opt.step` for some of its parameters.

    Hyperparameters are inputs where the optimizer's arithmetic allows that. Where it
    doesn't, all but the learning rate are fixed, with a guard each.

    Args:
        opt: the optimizer.
        groups: the groups of the parameters.
        roles: the parameters.
        numbers: values of the numeric hyperparameters and state numbers.

    Raises:
        CaptureError: when the step looks at values that only the device has.
        OptimizerError: when it changes the structure of its state.
    """
    everything = frozenset(range(len(numbers)))
    try:
        return _trace(opt, groups, roles, numbers, everything)
    except Exception as first:
        paths = [g.paths()[i] for g in groups for i in g.numeric]
        live = {i for i, p in enumerate(paths) if p.endswith("['lr']")}
        live |= set(range(len(paths), len(numbers)))
        if isinstance(first, OptimizerError):
            raise
        if live == everything:
            raise _located(first, opt, roles) from first
        try:
            return _trace(opt, groups, roles, numbers, frozenset(live))
        except Exception:
            raise _located(first, opt, roles) from first


def _located(error: Exception, opt: torch.optim.Optimizer, roles: Sequence[Role]) -> Exception:
    """The error with the optimizer's own line, which may be in an installed package."""
    if not isinstance(error, CaptureError):
        odd = [
            f"opt_state[{r.name!r}]{path} is {x}, for a parameter {r.spec}"
            for r in roles
            for path, x in zip(trees.spec_paths(r.tree, ""), r.leaves, strict=True)
            if isinstance(x, TensorSpec) and x.shape not in ((), r.spec.shape)
        ]
        if not odd:
            return error
        text = str(error).partition("\n")[0]
        return OptimizerError(
            f"{type(opt).__name__}'s step fails ({text}) with this state, which may belong to "
            f"another parameter: {'; '.join(odd)}. Load a state of this optimizer for this model, "
            "or empty opt.state"
        )
    where = package_line(error.__traceback__)
    return OptimizerError(
        f"{type(opt).__name__} can't be part of a compiled step: at {where} it needs a value on "
        "the host that only the device has, and what it does next depends on it. Use an optimizer "
        "whose step is the same for all values, such as those of torch.optim"
    )


def _trace(
    opt: torch.optim.Optimizer,
    groups: Sequence[Group],
    roles: Sequence[Role],
    numbers: Sequence[float],
    live: frozenset[int],
) -> Traced:
    guards: list[Guard] = []
    moves: list[Move] = []
    adds: list[tuple[int, str, Move]] = []
    counters: set[tuple[int, str]] = set()
    asked = Asked(len(groups))

    def fn(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
        x = _Inputs(flat, groups, roles)
        slots = [t for part in (*x.hypers, *x.counts) for t in part]
        given = [t if i in live else numbers[i] for i, t in enumerate(slots)]
        it = iter(given)
        options = [g.options([next(it) for _ in g.numeric]) for g in groups]
        values, entries = x.params, x.entries(roles)
        first = _first_variant(x, roles)
        with HostNumbers(slots, numbers) as host:
            after, seen = _step(opt, options, roles, values, x.grads, entries)
            asked.add(seen)
            if first:
                asked.add(_step(opt, options, roles, first.values, first.grads, first.entries)[1])
        guards[:] = host.guards
        guards.extend(
            Guard(itemgetter(i), numbers[i], frozenset({i}))
            for i in sorted(_used(groups, asked, len(numbers)) - live)
        )
        watch = _Watch(type(opt).__name__, host, moves, adds, counters)
        watch.groups(groups, options, after)
        first_count = sum(len(g.numeric) for g in groups)
        tensors = watch.state(roles, entries, x.counts, first_count)
        if first:
            _select_first(x, roles, values, tensors, first)
        return [*values, *(t for part in tensors for t in part)]

    specs, names = _signature(groups, roles)
    moves.clear()
    graph = capture(fn, specs, names)
    return Traced(Rule(graph, guards, moves, adds, asked), counters)


def _used(groups: Sequence[Group], asked: Asked, count: int) -> set[int]:
    """Which of the numbers a step has looked at: not hyperparameters that it doesn't read."""
    found, slot = set(), 0
    for g, keys in zip(groups, asked.keys, strict=True):
        for leaf in g.numeric:
            if keys is None or g.keys()[leaf] in keys:
                found.add(slot)
            slot += 1
    return found | set(range(slot, count))


def _step(
    opt: torch.optim.Optimizer,
    options: Sequence[dict[str, Any]],
    roles: Sequence[Role],
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    entries: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], Asked]:
    for p, g in zip(values, grads, strict=True):
        p.grad = g
    members = [
        [p for p, r in zip(values, roles, strict=True) if r.group == i] for i in range(len(options))
    ]
    state = list(zip(values, entries, strict=True))
    # With counts as tensors Adam divides by the learning rate: NaN at 0 where a gradient is 0.
    capturable = not isinstance(opt, torch.optim.Adam)
    return run(opt, options, members, state, capturable)


class _Variant(NamedTuple):
    """Copies for a step in which the `born` parameters have no state yet."""

    values: list[Tensor]
    grads: list[Tensor]
    entries: list[dict[str, Any]]


def _first_variant(x: _Inputs, roles: Sequence[Role]) -> _Variant | None:
    if not any(r.born for r in roles):
        return None
    entries = [{} if r.born else e for r, e in zip(roles, x.entries(roles), strict=True)]
    return _Variant([t.clone() for t in x.params], [t.clone() for t in x.grads], entries)


def _select_first(
    x: _Inputs,
    roles: Sequence[Role],
    values: list[Tensor],
    tensors: list[list[Tensor]],
    first: _Variant,
) -> None:
    for i, flag in x.flags.items():
        is_first = flag != 0
        made, tree = trees.flatten(first.entries[i])
        if tree != roles[i].tree:
            raise OptimizerError(
                f"the first step of {roles[i].name!r} makes another state than later steps keep:\n"
                + trees.describe_difference(
                    trees.unflatten(roles[i].tree, [0] * len(roles[i].leaves)),
                    first.entries[i],
                    f"opt_state[{roles[i].name!r}]",
                )
            )
        values[i] = torch.where(is_first, first.values[i], values[i])
        fresh = (t for t, kind in zip(made, roles[i].leaves, strict=True) if kind is not NUMBER)
        pairs = zip((t for t in fresh if isinstance(t, Tensor)), tensors[i], strict=True)
        tensors[i] = [torch.where(is_first, a, b) for a, b in pairs]


class _Watch:
    """Finds what a traced step has changed besides tensors."""

    def __init__(
        self,
        optimizer: str,
        host: HostNumbers,
        moves: list[Move],
        adds: list[tuple[int, str, Move]],
        counters: set[tuple[int, str]],
    ) -> None:
        self.optimizer = optimizer
        self.host = host
        self.moves = moves
        self.adds = adds
        self.counters = counters

    def _move(self, slot: int, value: Any, path: str) -> Move:
        question = self.host.question(value)
        if question is None:
            raise OptimizerError(
                f"{self.optimizer} computes {path} from values that only the device has; a host "
                "number can't follow them: keep it as a tensor in opt.state"
            )
        return Move(slot, question)

    def groups(
        self,
        groups: Sequence[Group],
        before: Sequence[dict[str, Any]],
        after: Sequence[dict[str, Any]],
    ) -> None:
        """Compare the hyperparameters before and after the step."""
        slot = 0
        for position, (g, old, new) in enumerate(zip(groups, before, after, strict=True)):
            for key in new.keys() - old.keys():
                path = f"param_groups[{g.position}][{key!r}]"
                self.adds.append((position, key, self._move(-1, new[key], path)))
            same = {k: new.get(k) for k in old}
            leaves, spec = trees.flatten(same)
            was, _ = trees.flatten(old)
            if spec != g.spec:
                raise OptimizerError(
                    f"{self.optimizer} changes the structure of param_groups[{g.position}] in its "
                    "step:\n" + trees.describe_difference(old, same, f"param_groups[{g.position}]")
                )
            numeric = {i: slot + n for n, i in enumerate(g.numeric)}
            slot += len(g.numeric)
            for i, (a, b, path) in enumerate(zip(was, leaves, g.paths(), strict=True)):
                if a is b:
                    continue
                if i in numeric:
                    self.moves.append(self._move(numeric[i], b, path))
                elif is_number(a) and (is_number(b) or isinstance(b, Tensor)):
                    self.counters.add((g.position, path))
                elif a != b:
                    raise OptimizerError(
                        f"{self.optimizer} changes {path} from {a!r} to {b!r} in its step; only "
                        "numbers can change there: keep it in opt.state as a tensor"
                    )

    def state(
        self,
        roles: Sequence[Role],
        entries: Sequence[dict[str, Any]],
        counts: Sequence[Sequence[Any]],
        first: int,
    ) -> list[list[Tensor]]:
        """Compare the state's structure and numbers; returns its tensors."""
        out = []
        slot = first
        for r, after, before in zip(roles, entries, counts, strict=True):
            root = f"opt_state[{r.name!r}]"
            leaves, tree = trees.flatten(after)
            if tree != r.tree:
                was = trees.unflatten(r.tree, [0] * len(r.leaves))
                raise OptimizerError(
                    f"{self.optimizer} adds or drops state in its step, which a loop carry "
                    "can't:\n" + trees.describe_difference(was, after, root)
                )
            it = iter(before)
            paths = trees.spec_paths(r.tree, root)
            tensors = []
            for kind, x, path in zip(r.leaves, leaves, paths, strict=True):
                if isinstance(kind, TensorSpec):
                    tensors.append(self._tensor(x, path))
                elif kind is NUMBER:
                    if x is not next(it):
                        self.moves.append(self._move(slot, x, path))
                    slot += 1
                elif x is not kind and x != kind:
                    raise OptimizerError(
                        f"{self.optimizer} changes {path} from {kind!r} to {x!r} in its step; "
                        "only tensors and numbers can be carried"
                    )
            out.append(tensors)
        return out

    def _tensor(self, x: Any, path: str) -> Tensor:
        if not isinstance(x, Tensor):
            raise OptimizerError(
                f"{self.optimizer} turns {path} into a {type(x).__name__} in its step; "
                "a carry stays a tensor"
            )
        return x


def independent(graph: Graph, roles: Sequence[Role]) -> bool:
    """Whether the step of each of two parameters ignores the other's values.

    Args:
        graph: of a rule for these two.
        roles: the two.
    """
    n = len(roles)
    sizes = [len(r.tensors) for r in roles]
    end = len(graph.inputs) - len(graph.captured)
    state_in = [range(end - sizes[1] - sizes[0], end - sizes[1]), range(end - sizes[1], end)]
    state_out = [range(n, n + sizes[0]), range(n + sizes[0], n + sum(sizes))]
    for i in range(n):
        other = 1 - i
        foreign = {other, n + other, *state_in[other]}
        if uses(graph, [i, *state_out[i]]) & foreign:
            return False
    return True
