"""How tensors lie over a mesh of devices, in words that every engine understands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Placement(NamedTuple):
    """Over which axes of the mesh each dimension of a tensor is cut.

    A dimension that is cut over no axis is whole on every device. As text, ``data+model,-`` is a
    matrix whose rows are cut over two axes.

    Attributes:
        dims: for each dimension, the names of its axes, outermost first.
    """

    dims: tuple[tuple[str, ...], ...]

    @classmethod
    def whole(cls, rank: int) -> Placement:
        """Every device has all of it."""
        return cls(((),) * rank)

    @classmethod
    def parse(cls, text: str) -> Placement:
        """What `str` gave."""
        cut = text.split(",") if text else []
        return cls(tuple(() if d == "-" else tuple(d.split("+")) for d in cut))

    def __str__(self) -> str:
        """One word a dimension."""
        return ",".join("+".join(axes) or "-" for axes in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that it is cut over."""
        return tuple(a for dim in self.dims for a in dim)

    def without(self, axes: Iterable[str]) -> Placement:
        """The same, whole along these axes."""
        gone = set(axes)
        return Placement(tuple(tuple(a for a in dim if a not in gone) for dim in self.dims))

    def behind(self, axes: Sequence[str]) -> Placement:
        """Of a tensor with one more leading dimension, which is cut over `axes`."""
        return Placement((tuple(axes), *self.dims))

    def following(self, shape: Sequence[int], other: Sequence[int]) -> Placement:
        """Of a tensor of shape `other` that belongs to one of shape `shape` placed like this.

        Dimensions of the same size are cut in the same way; of another rank, none is.
        """
        if len(shape) != len(other):
            return Placement.whole(len(other))
        kept = zip(self.dims, shape, other, strict=True)
        return Placement(tuple(axes if a == b else () for axes, a, b in kept))

    def parts(self, sizes: Mapping[str, int]) -> int:
        """Into how many parts it is cut, on axes of these sizes."""
        return math.prod(sizes[a] for a in self.axes)


class Mesh(NamedTuple):
    """The devices of a step.

    Attributes:
        axes: name and size of each axis.
        batch: the axes that batches are cut over.
    """

    axes: tuple[tuple[str, int], ...]
    batch: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis by name."""
        return dict(self.axes)

    @property
    def rows(self) -> int:
        """Into how many parts a batch is cut."""
        return math.prod(self.sizes[a] for a in self.batch)

    def __str__(self) -> str:
        """As ``data=4, model=2``."""
        return ", ".join(f"{name}={size}" for name, size in self.axes)
