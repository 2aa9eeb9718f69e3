"""Where the leaves of a step lie on a mesh of devices, and the operations that keep them there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from funcacc.capture import ops
from funcacc.engines.base import Engine
from funcacc.errors import BatchError, EngineError, OptionError
from funcacc.placement import Mesh, Placement
from funcacc.types import TensorSpec

BATCH_AXES = ("data", "fsdp")
"""Axes that batches are cut over unless an option says otherwise."""


class Plan(NamedTuple):
    """Where the inputs of a step lie; on one device nothing is said.

    Attributes:
        mesh: of devices, or None for one device.
        leaves: by path; what isn't there is whole on each device.
        gather: how often parameters are put together that are cut over the batch axes: for each
            ``"microbatch"`` or once for the ``"window"``.
    """

    mesh: Mesh | None = None
    leaves: Mapping[str, Placement] = {}
    gather: str = "microbatch"

    def of(self, path: str, rank: int) -> Placement:
        """Where a leaf lies, or one for each of several steps stacked."""
        found = self.leaves.get(path)
        if found is None:
            return Placement.whole(rank)
        return found if len(found.dims) == rank else found.behind(())

    def account(self, path: str, rank: int) -> dict[str, Any]:
        """What a report says of a leaf."""
        if self.mesh is None:
            return {}
        found = self.of(path, rank)
        return {"placement": str(found), "parts": found.parts(self.mesh.sizes)}

    def pin(self, path: str, x: Tensor) -> Tensor:
        """`x`, lying where the leaf of this path does.

        Without it the partitioner chooses, and state would come out of a step otherwise than it
        went in.
        """
        if self.mesh is None:
            return x
        pinned: Tensor = ops.pin(x, str(self.of(path, x.ndim)))
        return pinned

    def scattered(self, path: str) -> bool:
        """Whether a leaf is cut over an axis that batches are cut over too."""
        if self.mesh is None or path not in self.leaves:
            return False
        return bool(set(self.leaves[path].axes) & set(self.mesh.batch))

    def cut_by_rows(self, path: str) -> bool:
        """Whether each microbatch of a window's leaf has its rows cut over the batch axes."""
        if self.mesh is None or path not in self.leaves:
            return False
        return self.leaves[path].dims[1:2] == (self.mesh.batch,)

    def opens(self, path: str) -> bool:
        """Whether the gradient of this parameter is added up only after the microbatches.

        Each device then accumulates a gradient of its own for what it has of the parameter while
        it computes.
        """
        if self.mesh is None or self.mesh.rows == 1:
            return False
        return self.gather == "window" or not self.scattered(path)

    def pin_gathered(self, path: str, x: Tensor) -> Tensor:
        """`x`, whole along the batch axes."""
        if self.mesh is None:
            return x
        place = self.of(path, x.ndim).without(self.mesh.batch)
        pinned: Tensor = ops.pin(x, str(place))
        return pinned

    def pin_parts(self, path: str, x: Tensor) -> Tensor:
        """`x`, one part for each group of rows of a sum that is like the leaf of this path."""
        pinned: Tensor = ops.pin(x, str(self.opened(path, x.ndim)))
        return pinned

    def opened(self, path: str, rank: int) -> Placement:
        """Where the parts of a sum lie that is like the leaf of this path."""
        assert self.mesh is not None
        return self.of(path, rank - 1).without(self.mesh.batch).behind(self.mesh.batch)

    def pin_batch(self, x: Tensor, path: str) -> Tensor:
        """`x`, one microbatch of the window's leaf of this path."""
        if self.mesh is None:
            return x
        pinned: Tensor = ops.pin(x, str(Placement(self.of(path, x.ndim + 1).dims[1:])))
        return pinned

    def putting(self, engine: Engine) -> Callable[[str, Tensor], Tensor]:
        """A function that puts a leaf, given by its path, where it belongs."""
        return lambda path, x: engine.put(x, self.of(path, x.ndim) if self.mesh else None)


def default_axes(engine: Engine) -> tuple[str, ...]:
    """The axes of an engine's mesh that batches are cut over unless an option says otherwise."""
    return tuple(a for a in engine.axes if a in BATCH_AXES)


def mesh_of(engine: Engine, asked: str | Sequence[str] | None) -> Mesh | None:
    """The mesh of an engine, with the axes that batches are cut over.

    Args:
        engine: which knows the axes.
        asked: their names; `None` takes those called ``data`` and ``fsdp``.

    Raises:
        OptionError: when there are no such axes.
    """
    names = (asked,) if isinstance(asked, str) else asked
    if not engine.axes:
        if names:
            raise OptionError(
                f"batch_axis is {asked!r}, but the model is on one device; give TrainStep a mesh, "
                "or leave batch_axis out"
            )
        return None
    mesh = Mesh(tuple(engine.axes.items()), ())
    if names is None:
        names = default_axes(engine)
        if not names:
            raise OptionError(
                f"the mesh has the axes {mesh}, none of which is called {' or '.join(BATCH_AXES)}; "
                "say which of them batches are cut over by batch_axis=..., or batch_axis=() to "
                "give each device the whole batch"
            )
    unknown = [a for a in names if a not in engine.axes]
    if unknown:
        raise OptionError(f"batch_axis names {unknown[0]!r}, but the mesh has the axes {mesh}")
    return mesh._replace(batch=tuple(names))


def placed(engine: Engine, tensors: Mapping[str, Tensor]) -> dict[str, Placement]:
    """Where tensors lie, by path.

    Raises:
        EngineError: for one that lies over another mesh, or whose size an axis doesn't divide;
            it names the path.
    """
    found = {}
    for path, t in tensors.items():
        try:
            (found[path],) = engine.placements([t])
        except EngineError as e:
            raise EngineError(f"{path}: {e}") from e
        check_even(path, t.shape, found[path], engine.axes)
    return found


def check_even(
    path: str, shape: Sequence[int], placement: Placement, sizes: Mapping[str, int]
) -> None:
    """Refuse a cut into unequal parts.

    Raises:
        EngineError: naming the leaf, the dimension, its size and the axis.
    """
    for i, (size, axes) in enumerate(zip(shape, placement.dims, strict=True)):
        parts = Placement((axes,)).parts(sizes)
        if size % parts:
            raise EngineError(
                f"{path} has {size} elements along dimension {i}, which {_axes(axes, sizes)} "
                f"cuts into {parts} unequal parts; pad it to a multiple of {parts}, or cut another "
                "dimension"
            )


def place_window(
    mesh: Mesh, leaves: Mapping[str, TensorSpec], given: Mapping[str, Placement]
) -> dict[str, Placement]:
    """Where the leaves of a window are to lie.

    Args:
        mesh: with the axes for batches.
        leaves: ``[K, B, ...]`` each, cut along B; what has no second dimension, or one of size
            1, is whole.
        given: where those lie that the user has cut; they stay as they are.

    Raises:
        BatchError: when a batch can't be cut into equal parts; it names the leaf and both numbers.
    """
    found = {}
    for path, (shape, _) in leaves.items():
        if path in given:
            found[path] = given[path]
        elif len(shape) < 2 or shape[1] == 1 or not mesh.batch:
            found[path] = Placement.whole(len(shape))
        elif shape[1] % mesh.rows:
            raise BatchError(
                f"{path} has {shape[1]} rows in each microbatch, which "
                f"{_axes(mesh.batch, mesh.sizes)} can't cut into {mesh.rows} equal parts; use a "
                f"multiple of {mesh.rows} rows, or another batch_axis"
            )
        else:
            cut = Placement((mesh.batch, *((),) * (len(shape) - 2)))
            found[path] = cut.behind(())
    return found


def follow(
    paths: Mapping[str, TensorSpec],
    params: Mapping[str, TensorSpec],
    placements: Mapping[str, Placement],
) -> dict[str, Placement]:
    """Where optimizer state lies: as the parameter that its path names.

    Args:
        paths: spec of each state leaf, e.g. of ``opt_state['fc.weight']['exp_avg']``.
        params: specs by name.
        placements: of the parameters, by path.
    """
    names = {f"[{n!r}]": n for n in params}
    found = {}
    for path, spec in paths.items():
        token = next((t for t in re.findall(r"\[.*?\](?=\[|$)", path) if t in names), None)
        if token is not None:
            own = placements[f"params{token}"]
            found[path] = own.following(params[names[token]].shape, spec.shape)
    return found


def _axes(names: Iterable[str], sizes: Mapping[str, int]) -> str:
    return "the mesh axis " + " and ".join(f"{n}={sizes[n]}" for n in names)
