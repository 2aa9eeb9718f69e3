"""Optimizers given as two pure functions, ``init`` and ``update``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from funcacc import trees
from funcacc.capture.context import Tracing
from funcacc.capture.trace import capture
from funcacc.errors import OptimizerError
from funcacc.optimizers.update import Call, Created, NothingKept, Rule, Update
from funcacc.types import PyTree, TensorSpec


@runtime_checkable
class GradientTransformation(Protocol):
    """A pure optimizer.

    A step is ``updates, state = update(grads, state, params)``, then
    ``params[n] += updates[n]`` for each name: the convention of optax.
    """

    def init(self, params: dict[str, Tensor]) -> PyTree:
        """The state for these parameters: any tree of tensors and numbers."""

    def update(
        self, grads: dict[str, Tensor], state: PyTree, params: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], PyTree]:
        """What to add to the parameters, and the next state; all tensors, no side effect."""


_ROOT = "opt_state"
_FOR = "opt_params"


class FunctionalOptimizer(NothingKept):
    """A `GradientTransformation` over all trainable parameters; keeps the state itself.

    Args:
        opt: the two functions.
        names: the model's parameters: id of the tensor -> name.
    """

    updates = True

    def __init__(self, opt: GradientTransformation, names: dict[int, str]) -> None:
        self.opt = opt
        self.state: PyTree = None
        self.reached: list[str] = []
        self.refresh(names)

    def refresh(self, names: dict[int, str]) -> None:
        """Take the model's parameters as they are now."""
        self.held = set(names.values())

    def watched(self) -> list[Any]:
        """The state's tensors."""
        return list(trees.flatten(self.state)[0])

    def numbers(self) -> list[float]:
        """None: numbers in the functions are constants of the program."""
        return []

    def static(self) -> tuple[tuple[str, Any], ...]:
        """The functions themselves."""
        return (("opt", id(self.opt)),)

    def leaves(self) -> dict[str, Tensor]:
        """The state's tensors by path."""
        leaves, _ = trees.flatten(self.state)
        return dict(zip(trees.paths(self.state, _ROOT), leaves, strict=True))

    def replace(self, path: str, value: Tensor) -> None:
        """Put another tensor in the place of a state leaf."""
        leaves, spec = trees.flatten(self.state)
        leaves[trees.paths(self.state, _ROOT).index(path)] = value
        self.state = trees.unflatten(spec, leaves)

    def create(self, params: Mapping[str, Tensor], reached: Sequence[str]) -> Created:
        """`init` of the parameters that have a gradient."""
        if self.state is not None and list(reached) == self.reached:
            return Created({}, [])
        if self.state is not None:
            raise OptimizerError(
                f"{type(self.opt).__name__} was initialised for other parameters; "
                "make a new TrainStep when the trainable parameters change"
            )
        return Created({"state": self._init(reached, params), "reached": list(reached)}, [])

    def install(self, created: Created, put: Callable[[str, Tensor], Tensor]) -> None:
        """Keep the state, on the device."""
        if created.entries:
            leaves, spec = trees.flatten(created.entries["state"])
            paths = trees.paths(created.entries["state"], _ROOT)
            self.state = trees.unflatten(spec, list(map(put, paths, leaves)))
            self.reached = created.entries["reached"]

    def uninstall(self, created: Created) -> None:
        """Be without a state again."""
        if created.entries:
            self.state, self.reached = None, []

    def own_state(self) -> dict[str, Any]:
        """All of it by path, and for which parameters it is."""
        if self.state is None:
            return {}
        leaves = {path: x.detach().cpu().clone() for path, x in self.leaves().items()}
        return {_ROOT: leaves, _FOR: list(self.reached)}

    def own_misfits(self, state: dict[str, Any], params: Mapping[str, Tensor]) -> list[str]:
        """Compare with the state that there is, else with `init` of the same parameters."""
        given, names = state.get(_ROOT, {}), state.get(_FOR, [])
        if self.state is None and not names:
            return []
        if not set(names) <= self.held or (self.state is not None and names != self.reached):
            here = self.reached if self.state is not None else sorted(self.held)
            return [f"state[{_FOR!r}]: {names} given, {here} needed"]
        own = self.state if self.state is not None else self._init(names, params)
        needed = dict(zip(trees.paths(own, _ROOT), map(_spec, trees.flatten(own)[0]), strict=True))
        return [
            f"{p}: {_spec(given.get(p))} given, {needed.get(p)} needed"
            for p in sorted({*needed, *given})
            if _spec(given.get(p)) != needed.get(p)
        ]

    def load_own(
        self,
        state: dict[str, Any],
        params: Mapping[str, Tensor],
        put: Callable[[Tensor], Tensor],
    ) -> None:
        """Take it as it was, with its parameters."""
        if _FOR in state:
            self.reached = list(state[_FOR])
            like = self.state if self.state is not None else self._init(self.reached, params)
            paths, spec = trees.paths(like, _ROOT), trees.flatten(like)[1]
            self.state = trees.unflatten(spec, [put(state[_ROOT][p]) for p in paths])

    def _init(self, names: Sequence[str], params: Mapping[str, Tensor]) -> PyTree:
        made = self.opt.init({n: params[n].detach().cpu().clone() for n in names})
        return trees.map_tree(torch.as_tensor, made)

    def tree(self) -> PyTree:
        """The state."""
        return self.state

    def capture(
        self, params: dict[str, TensorSpec], reached: Sequence[str], created: Created
    ) -> Update:
        """Trace `update`."""
        state = created.entries["state"] if created.entries else self.state
        leaves, spec = trees.flatten(state)
        specs = [TensorSpec.of(x) for x in leaves]
        n = len(reached)

        def fn(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
            values = {k: t.clone() for k, t in zip(reached, flat, strict=False)}
            grads = {k: t.clone() for k, t in zip(reached, flat[n:], strict=False)}
            given = trees.unflatten(spec, [t.clone() for t in flat[2 * n :]])
            with torch.no_grad():
                updates, after = self.opt.update(grads, given, values)
                self._check(values, updates, "updates")
                self._check(given, after, _ROOT)
                new = [t + updates[k].to(t.dtype) for k, t in zip(reached, flat, strict=False)]
            return [*new, *map(torch.as_tensor, trees.flatten(after)[0])]

        paths = trees.paths(state, _ROOT)
        names = [f"params[{k!r}]" for k in reached] + [f"grads[{k!r}]" for k in reached] + paths
        own = [params[k] for k in reached]
        rule = Rule(capture(fn, [*own, *own, *specs], names), [], [])
        call = Call(rule, list(reached), [], paths)
        return Update([call], dict(zip(paths, specs, strict=True)), 0, [])

    def _check(self, expected: PyTree, actual: PyTree, root: str) -> None:
        if trees.flatten(expected)[1] != trees.flatten(actual)[1]:
            raise OptimizerError(
                f"{type(self.opt).__name__}.update returned {root} of another structure:\n"
                + trees.describe_difference(expected, actual, root)
            )


def _spec(value: Any) -> TensorSpec | None:
    return TensorSpec.of(value) if isinstance(value, Tensor) else None


class GradientsOnly(NothingKept):
    """In the place of an optimizer, where the user steps his own: holds, changes nothing."""

    updates = False

    def __init__(self) -> None:
        self.held: set[str] = set()

    def refresh(self, names: dict[int, str]) -> None:
        """All parameters are differentiated that require it."""
        self.held = set(names.values())

    def watched(self) -> list[Any]:
        """Nothing."""
        return []

    def numbers(self) -> list[float]:
        """None."""
        return []

    def static(self) -> tuple[tuple[str, Any], ...]:
        """Nothing."""
        return ()

    def leaves(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def replace(self, path: str, value: Tensor) -> None:
        """There is nothing to replace."""
        raise KeyError(path)

    def create(self, params: Mapping[str, Tensor], reached: Sequence[str]) -> Created:
        """Nothing is missing."""
        return Created({}, [])

    def install(self, created: Created, put: Callable[[str, Tensor], Tensor]) -> None:
        """Nothing to keep."""

    def uninstall(self, created: Created) -> None:
        """Nothing was kept."""

    def tree(self) -> PyTree:
        """No state."""
        return {}

    def capture(
        self, params: dict[str, TensorSpec], reached: Sequence[str], created: Created
    ) -> Update:
        """No update."""
        return Update([], {}, 0, [])
