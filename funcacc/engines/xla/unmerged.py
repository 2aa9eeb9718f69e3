"""Products over several leading dimensions as they are, instead of merged into one.

PyTorch merges batch and heads, or batch and time, before it multiplies. Two dimensions that are
cut over the mesh, or one that isn't the first, can't be merged where they lie: the partitioner
gathers them, and every device computes what all of them have. XLA itself multiplies over any number
of dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


class _Merged(NamedTuple):
    """A value one of whose dimensions is several ones, merged.

    Attributes:
        whole: the same elements with those dimensions apart.
        at: the merged dimension.
        sizes: of the dimensions that it is made of.
    """

    whole: Tensor
    at: int
    sizes: tuple[int, ...]


def _merging(x: Tensor, shape: tuple[int, ...]) -> _Merged | None:
    """How a view of this shape merges dimensions of `x` into one, if it does that."""
    for n in range(2, x.ndim):
        sizes = tuple(x.shape[:n])
        if shape[:1] == (math.prod(sizes),) and 1 not in sizes:
            return _Merged(x.reshape(*sizes, *shape[1:]), 0, sizes)
    count = x.ndim - len(shape) + 1
    for at in range(len(shape) if count > 1 else 0):
        sizes = tuple(x.shape[at : at + count])
        merged = (*x.shape[:at], math.prod(sizes), *x.shape[at + count :])
        if shape == merged and 1 not in sizes:
            return _Merged(x, at, sizes)
    return None


class Unmerged:
    """The values of a graph that are known unmerged, while it is interpreted."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, _Merged] = {}

    def run(self, node: fx.Node, args: Sequence[Any]) -> Tensor | None:
        """The value of a node, if it can be had from unmerged ones.

        Args:
            node: of the graph.
            args: values of its arguments.
        """
        if node.target in _VIEWS:
            return self._view(node, args[0], tuple(node.meta["val"].shape))
        if node.target is aten.cat.default:
            return self._cat(node, *args)
        if node.target is aten.permute.default:
            return self._permute(node, args[1])
        if node.target is aten.clone.default and node.args[0] in self.known:
            self.known[node] = self.known[node.args[0]]
        elif node.target in (aten.mm.default, aten.bmm.default):
            return self._product(node, *args)
        elif node.target is aten.addmm.default and not node.kwargs and args[0].ndim == 1:
            made = self._product(node, args[1], args[2], skip=1)
            return None if made is None else self._plus(node, args[0])
        return None

    def _keep(self, node: fx.Node, found: _Merged) -> Tensor:
        self.known[node] = found
        return found.whole.reshape(node.meta["val"].shape)

    def _view(self, node: fx.Node, x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        source: Any = node.args[0]
        forms = [self.known[source].whole, x] if source in self.known else [x]
        for form in forms:
            found = _merging(form, shape)
            if found is not None:
                self.known[node] = found
                return form.reshape(shape)
        # In one step: the shape between would be what can't be cut.
        return forms[0].reshape(shape)

    def _cat(self, node: fx.Node, pieces: Sequence[Tensor], dim: int = 0) -> Tensor | None:
        """Pieces that are alike, one after the other, are a stack."""
        first = pieces[0]
        alike = all(p.shape == first.shape and p.dtype == first.dtype for p in pieces)
        if dim % first.ndim or not alike or len(pieces) < 2 or first.shape[0] < 2:
            return None
        stack = torch.stack(list(pieces))
        return self._keep(node, _Merged(stack, 0, (len(pieces), first.shape[0])))

    def _permute(self, node: fx.Node, dims: Sequence[int]) -> Tensor | None:
        source: Any = node.args[0]
        if source not in self.known:
            return None
        whole, at, sizes = self.known[source]
        dims = [d % len(dims) for d in dims]
        extra = len(sizes) - 1
        apart: list[int] = []
        for d in dims:
            first = d if d <= at else d + extra
            apart += range(first, first + (len(sizes) if d == at else 1))
        return self._keep(node, _Merged(whole.permute(apart), dims.index(at), sizes))

    def _product(self, node: fx.Node, a: Tensor, b: Tensor, skip: int = 0) -> Tensor | None:
        """`mm` or `bmm` as an einsum in which a merged dimension has several letters."""
        left, right = node.args[skip : skip + 2]
        letters = ("nij", "njk", "nik") if a.ndim == 3 else ("ij", "jk", "ik")
        merged: dict[str, tuple[int, ...]] = {}
        for x, names in ((left, letters[0]), (right, letters[1])):
            if x in self.known:
                found = self.known[x]
                merged.setdefault(names[found.at], found.sizes)
        if not merged or not a.is_floating_point():
            return None
        spare = iter("abcdefgh")
        apart = {k: "".join(next(spare) for _ in sizes) for k, sizes in merged.items()}
        values = [
            self._apart(x, value, names, merged)
            for x, value, names in ((left, a, letters[0]), (right, b, letters[1]))
        ]
        spelled = ["".join(apart.get(c, c) for c in names) for names in letters]
        out = torch.einsum(f"{spelled[0]},{spelled[1]}->{spelled[2]}", *values)
        kept = [c for c in letters[2] if c in merged]
        if len(kept) == 1:
            return self._keep(node, _Merged(out, letters[2].index(kept[0]), merged[kept[0]]))
        return out.reshape(node.meta["val"].shape)

    def _apart(
        self, node: Any, value: Tensor, names: str, merged: dict[str, tuple[int, ...]]
    ) -> Tensor:
        """`value` with the dimensions of these names apart."""
        found = self.known.get(node)
        if found is not None and [names[found.at]] == [c for c in names if c in merged]:
            if merged[names[found.at]] == found.sizes:
                return found.whole
        shape: list[int] = []
        for c, size in zip(names, value.shape, strict=True):
            shape += merged.get(c, (size,))
        return value.reshape(shape)

    def _plus(self, node: fx.Node, bias: Tensor) -> Tensor | None:
        found = self.known.get(node)
        if found is None or found.at != 0:
            self.known.pop(node, None)
            return None
        return self._keep(node, found._replace(whole=found.whole + bias))
