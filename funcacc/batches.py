"""Windows: what one optimizer step consumes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcacc import trees
from funcacc.errors import BatchError
from funcacc.types import PyTree, TensorSpec


class Window:
    """K microbatches as one tree, and how many of them are real.

    A registered tree node.

    Attributes:
        tree: leaves have a leading axis of K, the capacity.
        count: how many of the K are there, 1 <= count <= K: an ``int`` or an integer
            0-d tensor. Rows past it are never read. On a device it isn't checked, which would
            wait: more than K count as K, and less than 1 as no microbatch at all.

    Example:
        >>> import torch, funcacc
        >>> funcacc.stack([{"x": torch.zeros(2)}, {"x": torch.ones(2)}])
        Window(capacity=2, count=2, {"['x']": float32[2,2]})
    """

    __slots__ = ("count", "tree")

    def __init__(self, tree: PyTree, count: int | Tensor | None = None) -> None:
        self.tree = tree
        self.count: int | Tensor = self.capacity if count is None else count

    @property
    def capacity(self) -> int:
        """K: the length of the leading axis.

        Raises:
            BatchError: when the leaves disagree about it, or there are none.
        """
        leaves, _ = trees.flatten(self.tree)
        if not leaves:
            raise BatchError("a window needs at least one tensor; its tree has no leaves")
        sizes = {tuple(getattr(leaf, "shape", ()))[:1] for leaf in leaves}
        if len(sizes) > 1 or () in sizes:
            self._refuse(leaves)
        return int(sizes.pop()[0])

    def _refuse(self, leaves: list[Any]) -> None:
        paths = trees.paths(self.tree, "window")
        tensors = {p: _tensor(x, p) for p, x in zip(paths, leaves, strict=True)}
        for path, t in tensors.items():
            if not t.ndim:
                raise BatchError(f"{path} is 0-d; each leaf of a window has a leading axis of K")
        listed = ", ".join(f"{p}: {t.shape[0]}" for p, t in tensors.items())
        raise BatchError(f"the leaves of a window have different leading axes: {listed}")

    def __repr__(self) -> str:
        """Capacity, count and the specs of the leaves."""
        leaves, _ = trees.flatten(self.tree)
        specs = {
            p: str(TensorSpec.of(x))
            for p, x in zip(trees.paths(self.tree, ""), leaves, strict=True)
        }
        body = ", ".join(f'"{p}": {s}' for p, s in specs.items())
        return f"Window(capacity={self.capacity}, count={self.count}, {{{body}}})"


trees.register_node(
    Window,
    lambda w: ((w.tree, w.count), None, ("tree", "count")),
    lambda _, children: Window(*children),
)


def _tensor(leaf: Any, path: str) -> Tensor:
    if isinstance(leaf, Tensor):
        if leaf.is_meta:
            raise BatchError(f"{path} is on the meta device, without values; give real tensors")
        return leaf.detach()
    if isinstance(leaf, (np.ndarray, np.generic)):
        try:
            # PyTorch takes neither read-only arrays nor other byte orders.
            native = leaf.dtype.newbyteorder("=")
            return torch.from_numpy(np.require(leaf, native, ["C", "W"]))
        except TypeError as e:
            raise BatchError(
                f"{path} is a NumPy array of {leaf.dtype}, which no tensor can hold; "
                "turn it into numbers"
            ) from e
    if isinstance(leaf, (bool, int, float)):
        return torch.tensor(leaf)
    raise BatchError(
        f"{path} is a {type(leaf).__name__}; a microbatch holds tensors, NumPy arrays and "
        "numbers: take it out, or close over it in the loss function"
    )


def stack(microbatches: Iterable[PyTree]) -> Window:
    """Stack microbatches into a window.

    Args:
        microbatches: trees of tensors, NumPy arrays or numbers, equal in structure,
            shapes and dtypes.

    Returns:
        A window whose capacity and count are their number.

    Raises:
        BatchError: when there are none or they disagree; the message names the
            microbatch, the leaf and both sides.
    """
    items = list(microbatches)
    if not items:
        raise BatchError("a window of 0 microbatches; give at least 1")
    _, spec = trees.flatten(items[0])
    rows = [_checked_leaves(item, i, items[0], spec) for i, item in enumerate(items)]
    return Window(
        trees.unflatten(spec, [torch.stack(column) for column in zip(*rows, strict=True)])
    )


def _checked_leaves(item: PyTree, i: int, first: PyTree, spec: trees.TreeSpec) -> list[Tensor]:
    leaves, own = trees.flatten(item)
    root = f"microbatch[{i}]"
    if isinstance(item, Window):
        raise BatchError(
            f"{root} is a Window, which holds microbatches itself; pass one window to each call"
        )
    if own != spec:
        raise BatchError(
            f"{root} has another structure than microbatch[0]:\n"
            + trees.describe_difference(first, item, root)
        )
    tensors = [_tensor(x, p) for x, p in zip(leaves, trees.paths(item, root), strict=True)]
    for t, x, p in zip(tensors, trees.flatten(first)[0], trees.paths(item, root), strict=True):
        other = _tensor(x, p)
        if t.device != other.device:
            raise BatchError(
                f"{p} is on {t.device}, but in microbatch[0] it is on {other.device}; leave all "
                "microbatches on the host, or move all of them"
            )
        want, got = TensorSpec.of(other), TensorSpec.of(t)
        if want != got:
            raise BatchError(
                f"{p} is {got}, but in microbatch[0] it is {want}; all microbatches of a window "
                "need equal shapes and dtypes: pad, or drop the last batch of the loader"
            )
    return tensors


def as_window(batches: Any) -> Window:
    """What a user gave as `batches`, as a window.

    Raises:
        BatchError: for a bare tuple, dict or tensor, which could be one batch or several.
    """
    if isinstance(batches, Window):
        _check_count(batches)
        return _with_tensors(batches)
    if isinstance(batches, list):
        return stack(batches)
    if isinstance(batches, Iterator):
        items = list(batches)
        if not items:
            raise BatchError(
                f"batches is a {type(batches).__name__} that gives nothing: it was read to its "
                "end before, closed, or made from an empty loader; make a new iterator"
            )
        return stack(items)
    what = f"batches is a {type(batches).__name__}"
    if isinstance(batches, Iterable) and not isinstance(batches, _ONE_BATCH):
        raise BatchError(
            f"{what}; pass the microbatches of one step: a list or an iterator of them, or each "
            "window of funcacc.windows(loader, size)"
        )
    raise BatchError(
        f"{what}, which may mean one batch or several microbatches; "
        "write [batch] for one microbatch, or funcacc.split(batch, n) to cut it into n"
    )


_ONE_BATCH = (tuple, Mapping, Tensor, np.ndarray, str)


def _check_count(window: Window) -> None:
    count, capacity = window.count, window.capacity
    if isinstance(count, Tensor):
        if count.ndim or count.is_floating_point() or count.dtype == torch.bool:
            raise BatchError(
                f"the window's count is {TensorSpec.of(count)}; give an int or a 0-d integer tensor"
            )
        known = int(count) if count.device.type == "cpu" else None
    elif isinstance(count, bool) or not isinstance(count, (int, np.integer)):
        raise BatchError(
            f"the window's count is {count!r}; give an int or a 0-d integer tensor, "
            f"1 <= count <= {capacity}"
        )
    else:
        known = int(count)
    if known is not None and not 1 <= known <= capacity:
        raise BatchError(
            f"the window's count is {known}, but its capacity is {capacity}; "
            f"give 1 <= count <= {capacity}"
        )


def _with_tensors(window: Window) -> Window:
    leaves, spec = trees.flatten(window.tree)
    if all(isinstance(x, Tensor) and not x.is_meta for x in leaves):
        return window
    paths = trees.paths(window.tree, "window")
    tensors = [_tensor(x, p) for x, p in zip(leaves, paths, strict=True)]
    return Window(trees.unflatten(spec, tensors), window.count)


def whole(value: int, what: str, least: int = 1) -> int:
    """`value`, if it is a whole number that isn't too small.

    Raises:
        BatchError: naming `what` and the value otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise BatchError(f"{what} is {value!r}; give a whole number, at least {least}")
    return int(value)


def split(batch: PyTree, num_microbatches: int) -> Window:
    """Cut one batch into microbatches along the first axis of each leaf.

    Microbatch i takes rows i, i + n, i + 2n, ...: a batch whose rows are spread over
    devices stays spread the same way in every microbatch.

    Args:
        batch: tree of tensors or arrays, each of shape ``[B, ...]``.
        num_microbatches: n; must divide B.

    Returns:
        A window of n microbatches of B / n rows.

    Raises:
        BatchError: when n doesn't divide B, naming both, or is no whole number >= 1.
    """
    leaves, spec = trees.flatten(batch)
    if not leaves:
        raise BatchError("the batch has no leaves to split")
    paths = trees.paths(batch, "batch")
    tensors = [_tensor(x, p) for x, p in zip(leaves, paths, strict=True)]
    rows = f"{tensors[0].shape[0]} rows" if tensors[0].ndim else "a 0-d tensor"
    n = whole(num_microbatches, f"num_microbatches, for {paths[0]} of {rows},")
    for t, p in zip(tensors, paths, strict=True):
        if not t.ndim:
            raise BatchError(f"{p} is 0-d, so it has no batch axis to split")
        if t.shape[0] != tensors[0].shape[0]:
            raise BatchError(f"{p} has {t.shape[0]} rows, but {paths[0]} has {tensors[0].shape[0]}")
        if t.shape[0] % n or not t.shape[0]:
            raise BatchError(
                f"{p} has {t.shape[0]} rows, which don't divide into {n} microbatches; "
                "choose a divisor, or pad the batch"
            )
    cut = [t.reshape(t.shape[0] // n, n, *t.shape[1:]).transpose(0, 1) for t in tensors]
    return Window(trees.unflatten(spec, cut))
