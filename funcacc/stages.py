"""The stages of `jit`: a traced function, and the program that it becomes. Both can be printed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcacc import trees
from funcacc.capture import ops
from funcacc.capture.context import Tracing
from funcacc.capture.graph import Graph
from funcacc.capture.trace import capture
from funcacc.carries import tensors
from funcacc.engines.base import Engine, Program
from funcacc.errors import CarryError, StateError
from funcacc.open_loop import draw_key
from funcacc.types import PyTree, TensorSpec

Fn = Callable[..., PyTree]


class Donated(Tensor):
    """What a tensor becomes when it has been given away: every use of it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse.

        Raises:
            StateError: always, naming the argument that the tensor was.
        """
        found = next((a for a in _flat(args) if isinstance(a, Donated)), None)
        raise StateError(
            f"this tensor no longer exists: it was donated as {vars(found).get('_place', '')}, "
            "and a result has taken its memory; use the result, pass a clone(), or leave the "
            "argument out of donate_argnums"
        )


def _flat(args: Any) -> list[Any]:
    return [x for a in args for x in (a if isinstance(a, (list, tuple)) else [a])]


def _give_away(tensor: Tensor, place: str) -> None:
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor._place = place  # type: ignore[attr-defined]
    tensor.__class__ = Donated


class Signature:
    """What a trace of a function depends on: structure, and shape and dtype or value by leaf.

    Args:
        args: the positional arguments.

    Raises:
        CarryError: for a leaf that is neither tensor nor hashable, or tensors on two devices.
    """

    def __init__(self, args: tuple[PyTree, ...]) -> None:
        leaves, self.tree = trees.flatten(args)
        self.paths = trees.paths(args, "args")
        self.kinds: list[Any] = []
        for leaf, path in zip(leaves, self.paths, strict=True):
            self.kinds.append(TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf)
            if not isinstance(leaf, Tensor) and type(leaf).__hash__ is None:
                raise CarryError(
                    f"{path} is a {type(leaf).__name__}; jit takes tensors, and hashable values "
                    "that it compiles for; make a tensor of it"
                )
        devices = [x.device for x in leaves if isinstance(x, Tensor) and x.device.type != "cpu"]
        if len(set(devices)) > 1:
            raise CarryError(f"the arguments of jit are on several devices: {set(devices)}")
        self.device = devices[0] if devices else torch.device("cpu")

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that one program serves."""
        kinds = tuple(k if _dynamic(k) else (type(k), k) for k in self.kinds)
        return self.tree, kinds, self.device

    @property
    def dynamic(self) -> list[int]:
        """Positions of the leaves that are tensors."""
        return [i for i, k in enumerate(self.kinds) if _dynamic(k)]

    def difference(self, other: Signature) -> str:
        """What of `other` (earlier) has changed, by the name of the argument."""
        if self.tree != other.tree:
            a = dict(zip(other.paths, other.kinds, strict=True))
            lines = [f"{p} is new" for p in self.paths if p not in a]
            lines += [f"{p} is gone" for p in other.paths if p not in self.paths]
            return ", ".join(lines) or f"the structure was {other.tree}, is {self.tree}"
        lines = [
            f"{path} was {_show(b)}, is {_show(a)}"
            for path, a, b in zip(self.paths, self.kinds, other.kinds, strict=True)
            if (type(a), a) != (type(b), b)
        ]
        if self.device != other.device:
            lines.append(f"the device was {other.device}, is {self.device}")
        return ", ".join(lines)


def _dynamic(kind: Any) -> bool:
    return isinstance(kind, TensorSpec)


def _show(kind: Any) -> str:
    return str(kind) if _dynamic(kind) else repr(kind)


class Lowered:
    """A function traced for one kind of arguments; printed, it shows its operations.

    Attributes:
        graph: the program: donated leaves in, then the others, the key, closed-over tensors;
            the results that take donated memory out, then the others.
        donated: paths of the donated leaves.
    """

    def __init__(
        self,
        name: str,
        fn: Fn,
        args: tuple[PyTree, ...],
        donate: Sequence[int],
        engine: Engine,
    ) -> None:
        self.name = name
        self.signature = Signature(args)
        self.engine = engine
        graph = self._trace(fn, args)
        self.captured = graph.captured
        wrong = [a for a in donate if not 0 <= a < len(args)]
        if wrong:
            raise CarryError(f"{name} donates argument {wrong[0]}, but was given {len(args)}")
        given = tuple(f"args[{a}]" for a in donate)
        donated = [i for i, n in enumerate(graph.names) if given and n.startswith(given)]
        self.slots = _slots(graph, donated)
        self.order = [*donated, *(i for i in range(len(graph.inputs)) if i not in donated)]
        self.donated = [graph.names[i] for i in donated]
        self.graph = _arranged(graph, self.order, self.slots)

    def _trace(self, fn: Fn, args: tuple[PyTree, ...]) -> Graph:
        leaves, tree = trees.flatten(args)
        places = self.signature.dynamic

        def traced(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
            values = list(leaves)
            for i, t in zip(places, flat, strict=False):
                values[i] = t
            with tracing.random.drawing_from(flat[-1]) as source:
                out, self.out = tensors(fn(*trees.unflatten(tree, values)), "result")
            self.draws = source.draws > 0
            return [x.clone() for x in out]

        specs = [*(self.signature.kinds[i] for i in places), TensorSpec((2,), torch.int32)]
        names = [*(self.signature.paths[i] for i in places), "key"]
        return capture(traced, specs, names, device_type=self.signature.device.type)

    def compile(self) -> Compiled:
        """Build the program, without running it."""
        return Compiled(self)

    def __str__(self) -> str:
        """Donated leaves, results, operations."""
        lines = [f"{self.name}, traced for {self.engine.name}"]
        lines += [
            f"  {p}: donated to result {i}" for p, i in zip(self.donated, self.slots, strict=False)
        ]
        return "\n".join([*lines, str(self.graph)])


def _slots(graph: Graph, donated: Sequence[int]) -> list[int]:
    """The order of the results: those that take a donated leaf's memory, then the others."""
    free = list(range(len(graph.outputs)))
    slots = []
    for i in donated:
        match = [o for o in free if graph.outputs[o] == graph.inputs[i]]
        if not match:
            raise CarryError(
                f"{graph.names[i]} is donated, but no result is left that is {graph.inputs[i]}; "
                "don't donate it"
            )
        slots.append(match[0])
        free.remove(match[0])
    return slots + free


def _arranged(graph: Graph, order: Sequence[int], slots: Sequence[int]) -> Graph:
    def fn(tracing: Tracing, *flat: Tensor) -> list[Tensor]:
        values = [flat[order.index(i)] for i in range(len(order))]
        out = list(ops.call(graph.serial, values))
        return [out[i] for i in slots]

    return capture(fn, [graph.inputs[i] for i in order], [graph.names[i] for i in order])


class Compiled:
    """A program; call it with arguments like those that it was built for.

    Attributes:
        seconds: what building took, by stage: ``lower`` and ``compile``.
        donated: paths of the donated leaves.
    """

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._program: Program = lowered.engine.compile(lowered.graph, len(lowered.donated))
        self._program.prepare()
        self.seconds = self._program.seconds
        self.donated = lowered.donated
        self._results: list[weakref.ref[Tensor]] = []

    def text(self) -> str:
        """The program as the engine sees it, e.g. HLO."""
        return self._program.text()

    def __str__(self) -> str:
        """Engine, times, donated leaves, and what `text` gives."""
        took = ", ".join(f"{k} {v:.2f} s" for k, v in self.seconds.items())
        low = self._lowered
        lines = [f"{low.name}, compiled for {low.engine.name}: {took}"]
        lines += [f"  {path}: donated" for path in self.donated]
        return "\n".join([*lines, self.text()])

    def __call__(self, *args: PyTree) -> PyTree:
        """Run.

        Raises:
            CarryError: for arguments of another structure, shape, dtype or static value.
            StateError: for an argument that was donated before.
        """
        signature = Signature(args)
        low = self._lowered
        if signature.key != low.signature.key:
            raise CarryError(
                f"{low.name} was compiled for other arguments: "
                f"{signature.difference(low.signature)}"
            )
        return self.run(signature, trees.flatten(args)[0])

    def run(self, signature: Signature, leaves: list[Any]) -> PyTree:
        """As a call, with arguments that were looked at already."""
        low = self._lowered
        engine = low.engine
        given: list[Tensor] = [leaves[i] for i in signature.dynamic]
        n = len(low.donated)
        state = [given[i] for i in low.order[:n]]
        self._check_donated(state, given)
        owned = self._own(state)
        key = draw_key(low.draws, given)
        values = [*given, key, *low.captured]
        rest = [engine.move(values[i]) for i in low.order[n:]]
        engine.settle()
        outputs = self._program([*owned, *rest])
        # The eager engine writes into the donated tensor and returns it; the caller gets
        # another object for it.
        outputs = [o.detach() if i < n else o for i, o in enumerate(outputs)]
        for tensor, path in zip(state, low.donated, strict=True):
            _give_away(tensor, f"{path} of {low.name}")
        self._results = [weakref.ref(o) for o in outputs[:n]]
        placed = [outputs[low.slots.index(i)] for i in range(len(outputs))]
        return trees.unflatten(low.out, placed)

    def _check_donated(self, state: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        low = self._lowered
        for tensor, path in zip(state, low.donated, strict=True):
            if sum(t is tensor for t in given) > 1:
                raise CarryError(
                    f"{path} is donated, but the same tensor is passed a second time; pass a "
                    "clone() in one of the places"
                )
            if any(t is tensor for t in low.captured):
                raise CarryError(
                    f"{path} is donated, but {low.name} closes over the same tensor; pass it as "
                    "an argument only"
                )
            if tensor.device != low.engine.device:
                raise CarryError(
                    f"{path} is donated, but it is on {tensor.device} and the program runs on "
                    f"{low.engine.device}; move it there before"
                )

    def _own(self, state: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that may be overwritten: copies where the memory is somebody else's too."""
        # A view is no buffer that could be given away.
        own = [t.detach().clone() if t._is_view() else t for t in state]
        own = [t.detach() if t.requires_grad else t for t in own]
        fresh = {id(r()) for r in self._results}
        if not all(id(t) in fresh for t in state):
            self._lowered.engine.own(own)
        return own
