"""`torch.optim` optimizers, built in or of other packages, as a training step sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcacc import trees
from funcacc.optimizers import rules, shadow
from funcacc.optimizers.allowed import check_class, check_hooks, post_hooks
from funcacc.optimizers.creation import Maker
from funcacc.optimizers.groups import Groups, fixed, members_of
from funcacc.optimizers.places import Place, call_of, like, moved
from funcacc.optimizers.shadow import NUMBER, Group, Role, is_number
from funcacc.optimizers.update import Call, Created, NothingKept, Rule, Update
from funcacc.types import TensorSpec


class TorchOptimizers(NothingKept):
    """One or several `torch.optim.Optimizer` over named parameters.

    Args:
        optimizers: over disjoint parameters.
        names: the model's parameters: id of the tensor -> name.

    Raises:
        OptimizerError: for an empty optimizer, a parameter of another model or one that two
            optimizers hold, a class that can't be traced, or a pre-step hook.
    """

    updates = True

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.optimizers = list(optimizers)
        self.groups = Groups(self.optimizers)
        self._counting = False
        self._rules: dict[Any, list[Rule]] = {}
        self._seen: Any = None
        self._memberships: dict[Any, int] = {}
        self._found: dict[str, dict[str, Any]] | None = None
        self._counted: dict[str, dict[str, Any]] = {}
        # State that starts from the next gradient: its tensors and their versions.
        self._fresh: dict[str, list[tuple[Tensor, int]]] = {}
        for opt in self.optimizers:
            check_class(opt)
        self.refresh(names)

    def refresh(self, names: dict[int, str]) -> None:
        """Look at the groups and the state again."""
        self._found = None
        for opt in self.optimizers:
            check_hooks(opt)
        ids = [[[id(p) for p in g["params"]] for g in o.param_groups] for o in self.optimizers]
        if self._seen == (ids, names):
            return
        members = members_of(self.optimizers, names)
        self.members = members
        self.held = set(members)
        self._seen = (ids, dict(names))
        places = tuple((n, m.opt, m.group) for n, m in members.items())
        self._membership = self._memberships.setdefault(places, len(self._memberships))

    def watched(self) -> list[Any]:
        """Groups, their parameters and the values in the state."""
        out: list[Any] = []
        for opt in self.optimizers:
            check_hooks(opt)
            out += opt.param_groups
            for group in opt.param_groups:
                out += group["params"]
            out += opt.state
            out += opt.state.values()
            for entries in opt.state.values():
                out += entries.values()
        return out

    # Hyperparameters -------------------------------------------------------------------

    def _numbered(self) -> Iterator[tuple[Place, float]]:
        """Each host number that is an input, with its place."""
        for i, group, part in self.groups.every():
            for n in part.numeric:
                yield Place((i, group.position), n), self.groups.value(group.leaves[n])
        self._entries()
        for name, entries in self._counted.items():
            for n, x in enumerate(trees.flatten(entries)[0]):
                if is_number(x):
                    yield Place(name, n), float(x)

    def numbers(self) -> list[float]:
        """The float hyperparameters as they are now, and what is counted on the host."""
        return [x for _, x in self._numbered()]

    def static(self) -> tuple[tuple[str, Any], ...]:
        """Flags, strings, fixed integers; which parameters are in which group."""
        return (*self.groups.static(), ("parameters of the optimizer", self._membership))

    def name_of(self, number: int) -> str:
        """The path of one of `numbers`."""
        owner, leaf = [place for place, _ in self._numbered()][number]
        if isinstance(owner, str):
            return trees.paths(self._entries()[owner], f"opt_state[{owner!r}]")[leaf]
        return self.groups(*owner).paths()[leaf]

    # State -----------------------------------------------------------------------------

    def _entries(self) -> dict[str, dict[str, Any]]:
        if self._found is None:
            self._found = {}
            for name, m in self.members.items():
                # Not by [], which would make an entry.
                entries = self.optimizers[m.opt].state.get(m.param)
                if entries:
                    self._found[name] = entries
            # Most optimizers keep tensors only.
            self._counted = {
                name: entries
                for name, entries in self._found.items()
                if not all(isinstance(x, Tensor) for x in entries.values())
            }
        return self._found

    def leaves(self) -> dict[str, Tensor]:
        """The state tensors by path, e.g. ``opt_state['fc.weight']['exp_avg']``."""
        out = {}
        for name, entries in self._entries().items():
            root = f"opt_state[{name!r}]"
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    out[f"{root}[{key!r}]"] = value
                elif isinstance(value, (dict, list, tuple)):
                    inner = zip(
                        trees.paths(value, f"{root}[{key!r}]"),
                        trees.flatten(value)[0],
                        strict=True,
                    )
                    out.update({p: x for p, x in inner if isinstance(x, Tensor)})
        return out

    def replace(self, path: str, value: Tensor) -> None:
        """Put another tensor in the place of a state leaf."""
        for name, entries in self._entries().items():
            root = f"opt_state[{name!r}]"
            if path.startswith(root):
                _, tree = trees.flatten(entries)
                at = trees.spec_paths(tree, root).index(path)
                self._set_leaf(name, at, value)

    def _set_leaf(self, name: str, at: int, value: Any) -> None:
        m = self.members[name]
        entries = self.optimizers[m.opt].state[m.param]
        leaves, tree = trees.flatten(entries)
        leaves[at] = value
        entries.update(trees.unflatten(tree, leaves))

    def create(self, params: Mapping[str, Tensor], reached: Sequence[str]) -> Created:
        """What the optimizer itself would put into its state on the first step."""
        present = self._entries()
        makers: dict[Any, Maker] = {}
        entries, born = {}, []
        for name in reached:
            if name in present:
                if self.fresh(name):
                    born.append(name)
                continue
            m = self.members[name]
            opt, group = self.optimizers[m.opt], self.groups(m.opt, m.group)
            plain = group.options([self.groups.value(group.leaves[n]) for n in group.numeric])
            kind = (m.opt, m.group, TensorSpec.of(params[name]))
            if kind not in makers:
                makers[kind] = Maker(opt, plain, params[name])
            made = makers[kind].make(params[name])
            if made:
                entries[name] = made
            if makers[kind].from_gradient:
                born.append(name)
        return Created(entries, born)

    def install(self, created: Created, put: Callable[[str, Tensor], Tensor]) -> None:
        """Give the optimizer the state that was missing."""
        on_device = {
            name: {
                k: put(f"opt_state[{name!r}][{k!r}]", v) if isinstance(v, Tensor) else v
                for k, v in entries.items()
            }
            for name, entries in created.entries.items()
        }
        for name, entries in on_device.items():
            m = self.members[name]
            self.optimizers[m.opt].state[m.param] = entries
        self._found = None
        for name in created.born:
            self._fresh[name] = self._versions(name)

    def uninstall(self, created: Created) -> None:
        """Leave the optimizer without the state that it was given."""
        for name in created.entries:
            m = self.members[name]
            self.optimizers[m.opt].state.pop(m.param, None)
            self._fresh.pop(name, None)
        self._found = None

    def _versions(self, name: str) -> list[tuple[Tensor, int]]:
        m = self.members[name]
        leaves, _ = trees.flatten(dict(self.optimizers[m.opt].state.get(m.param, {})))
        return [(x, x._version) for x in leaves if isinstance(x, Tensor)]

    def fresh(self, name: str) -> bool:
        """Whether nobody has loaded or edited the state since `install`, and no step was taken."""
        if name not in self._fresh:
            return False
        now, then = self._versions(name), self._fresh[name]
        same = len(now) == len(then) and all(
            a is b and v == w for (a, v), (b, w) in zip(now, then, strict=True)
        )
        if not same:
            del self._fresh[name]
        return same

    def stepped(self, update: Update, moved: Callable[[], bool]) -> None:
        """What the step changed is fresh no more, unless the step was skipped."""
        if not self._fresh:
            return
        names = [n for call in update.calls for n in call.names if n in self._fresh]
        if names:
            skipped = not moved()
            for name in names:
                del self._fresh[name]
                if skipped:
                    self._fresh[name] = self._versions(name)

    def tree(self) -> dict[str, dict[str, Any]]:
        """Parameter name -> key -> value."""
        return {name: dict(entries) for name, entries in self._entries().items()}

    # The step --------------------------------------------------------------------------

    def capture(
        self, params: dict[str, TensorSpec], reached: Sequence[str], created: Created
    ) -> Update:
        """Trace the step: once for all parameters of a group that are alike."""
        while True:
            self._counting = False
            update = self._capture(params, reached, created)
            if not self._counting:
                return update

    def _capture(
        self, params: dict[str, TensorSpec], reached: Sequence[str], created: Created
    ) -> Update:
        entries = {**self._entries(), **created.entries}
        # Tracing may find counters, which change what is numeric: that is for the next round.
        groups = {(i, g.position): g for i, g, _ in self.groups.every()}
        roles: dict[int, list[tuple[int, Role]]] = {}
        for name in reached:
            m = self.members[name]
            leaves, tree = shadow.describe_state(entries.get(name, {}))
            role = Role(name, 0, params[name], leaves, tree, name in created.born)
            roles.setdefault(m.opt, []).append((m.group, role))
        ruled = []
        for i, members in roles.items():
            together = [members]
            if self._separable(i, members, groups):
                together = [[member] for member in members]
            ruled += [self._rule(i, part, groups, entries) for part in together]
        places = self._places(created)
        calls = [call_of(*found, places, created.born) for found in ruled]
        state = {}
        for members in roles.values():
            for _, role in members:
                paths = trees.spec_paths(role.tree, f"opt_state[{role.name!r}]")
                pairs = zip(paths, role.leaves, strict=True)
                state.update({p: x for p, x in pairs if isinstance(x, TensorSpec)})
        return Update(calls, state, len(places) + len(created.born), created.born)

    def _places(self, created: Created) -> dict[Place, int]:
        """Index of each number, with the state that is about to be installed."""
        found = [place for place, _ in self._numbered() if not isinstance(place.owner, str)]
        entries = {**self._entries(), **created.entries}
        for name in self.members:
            leaves, _ = trees.flatten(entries.get(name, {}))
            found += [Place(name, n) for n, x in enumerate(leaves) if is_number(x)]
        return {place: i for i, place in enumerate(found)}

    def _rule(
        self,
        i: int,
        members: Sequence[tuple[int, Role]],
        all_groups: Mapping[tuple[int, int], Group],
        entries: Mapping[str, dict[str, Any]],
    ) -> tuple[Rule, list[Role], list[Place]]:
        """The rule for parameters, what it is for, and where its numbers are kept."""
        groups = [all_groups[i, g] for g in sorted({g for g, _ in members})]
        position = {g.position: n for n, g in enumerate(groups)}
        roles = [r._replace(group=position[g]) for g, r in members]
        slots = [Place((i, g.position), n) for g in groups for n in g.numeric]
        numbers = [self.groups.value(g.leaves[n]) for g in groups for n in g.numeric]
        for r in roles:
            values = trees.flatten(entries.get(r.name, {}))[0]
            counted = [n for n, x in enumerate(r.leaves) if x is NUMBER]
            slots += [Place(r.name, n) for n in counted]
            numbers += [float(values[n]) for n in counted]
        kind = (
            i,
            tuple((g.position, g.spec, g.numeric, fixed(g)) for g in groups),
            tuple(r._replace(name=str(n)) for n, r in enumerate(roles)),
        )
        known = self._rules.get((kind, self.groups.attributes(i)), [])
        rule = next((r for r in known if r.holds(numbers)), None)
        if rule is None:
            traced = rules.trace_rule(self.optimizers[i], groups, roles, numbers)
            self._counting |= self.groups.counts(i, traced.counters)
            rule = traced.rule
        self.groups.asked(i, groups, rule.asked)
        if rule not in known:
            self._rules.setdefault((kind, self.groups.attributes(i)), []).append(rule)
        return rule, roles, slots

    def _separable(
        self,
        i: int,
        members: Sequence[tuple[int, Role]],
        all_groups: Mapping[tuple[int, int], Group],
    ) -> bool:
        """Whether parameters can be traced one by one: by a look at a trace of two."""
        opt = self.optimizers[i]
        if type(opt).__module__.startswith("torch.optim") or len(members) < 2:
            return True
        pair = [members[0], next((m for m in members[1:] if m[0] == members[0][0]), members[1])]
        groups = [all_groups[i, g] for g in sorted({g for g, _ in pair})]
        position = {g.position: n for n, g in enumerate(groups)}
        roles = [r._replace(group=position[g]) for g, r in pair]
        numbers = [self.groups.value(g.leaves[n]) for g in groups for n in g.numeric]
        numbers += [0.0 for r in roles for _ in range(r.numbers)]
        traced = rules.trace_rule(opt, groups, roles, numbers)
        return rules.independent(traced.rule.graph, roles)

    def finish(self, update: Update, numbers: Sequence[float], moved: Callable[[], bool]) -> None:
        """Move the host's numbers on, and run the user's post-step hooks."""
        if update.changing and moved():
            self._move(update.changing, numbers)
        for opt in self.optimizers:
            # What a scheduler looks at to see that the optimizer came before it.
            opt._opt_called = True  # type: ignore[attr-defined]
            for hook in post_hooks(opt):
                hook(opt, (), {})

    def hooked(self) -> bool:
        """Whether the user has registered step post-hooks."""
        return any(map(post_hooks, self.optimizers))

    def _move(self, calls: Sequence[Call], numbers: Sequence[float]) -> None:
        places = [place for place, _ in self._numbered()]
        new, added = moved(calls, numbers, places, self.members)
        for place, value in new.items():
            if isinstance(place.owner, str):
                m = self.members[place.owner]
                old = trees.flatten(self.optimizers[m.opt].state[m.param])[0][place.leaf]
                self._set_leaf(place.owner, place.leaf, like(old, value))
            else:
                group = self.groups(*place.owner)
                leaves = list(group.leaves)
                leaves[place.leaf] = like(leaves[place.leaf], value)
                opt = self.optimizers[place.owner[0]]
                opt.param_groups[group.position].update(trees.unflatten(group.spec, leaves))
        for (i, g, key), value in added.items():
            self.optimizers[i].param_groups[g][key] = value
