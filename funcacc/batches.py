"""Windows: what one optimizer step consumes."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
            0-d tensor. Rows past it are never read. A count on an accelerator isn't checked,
            for that would wait for the device.

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
            self._explain(leaves)
        return int(sizes.pop()[0])

    def _explain(self, leaves: list[Any]) -> None:
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
        return _checked_window(batches)
    if isinstance(batches, (list, Iterator)):
        return stack(batches)
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


def _checked_window(window: Window) -> Window:
    capacity, count = window.capacity, window.count
    if isinstance(count, Tensor):
        if count.ndim or count.is_floating_point() or count.is_complex():
            raise BatchError(
                f"the window's count is {TensorSpec.of(count)}; give an int or a 0-d integer tensor"
            )
        known = int(count) if count.device.type == "cpu" else None
    else:
        try:
            known = count = operator.index(count)
        except TypeError as e:
            raise BatchError(
                f"the window's count is {count!r}; give an int or a 0-d integer tensor"
            ) from e
    if known is not None and not 1 <= known <= capacity:
        raise BatchError(
            f"the window's count is {known}, but its capacity is {capacity}; "
            f"give 1 <= count <= {capacity}"
        )
    leaves, spec = trees.flatten(window.tree)
    if all(isinstance(x, Tensor) for x in leaves):
        return window if count is window.count else Window(window.tree, count)
    paths = trees.paths(window.tree, "window")
    made = [_tensor(x, p) for x, p in zip(leaves, paths, strict=True)]
    return Window(trees.unflatten(spec, made), count)


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
        BatchError: when n doesn't divide B, naming both.
    """
    n = num_microbatches
    leaves, spec = trees.flatten(batch)
    if not leaves:
        raise BatchError("the batch has no leaves to split")
    paths = trees.paths(batch, "batch")
    tensors = [_tensor(x, p) for x, p in zip(leaves, paths, strict=True)]
    for t, p in zip(tensors, paths, strict=True):
        if not t.ndim:
            raise BatchError(f"{p} is 0-d, so it has no batch axis to split")
        if t.shape[0] != tensors[0].shape[0]:
            raise BatchError(f"{p} has {t.shape[0]} rows, but {paths[0]} has {tensors[0].shape[0]}")
        if n < 1:
            raise BatchError(
                f"{p} has {t.shape[0]} rows, to be cut into {n} microbatches; give at least 1"
            )
        if t.shape[0] % n or not t.shape[0]:
            raise BatchError(
                f"{p} has {t.shape[0]} rows, which don't divide into {n} microbatches; "
                "choose a divisor, or pad the batch"
            )
    cut = [t.reshape(t.shape[0] // n, n, *t.shape[1:]).transpose(0, 1) for t in tensors]
    return Window(trees.unflatten(spec, cut))


def windows(
    loader: Iterable[PyTree],
    size: int,
    *,
    device: torch.device | str | None = None,
    prefetch: int = 2,
) -> Iterator[Window]:
    """Group the microbatches of a loader into windows.

    Equals::

        while microbatches := list(itertools.islice(loader, size)):
            yield stack(microbatches)

    except that the last, shorter window has the same capacity and a smaller `count`, so
    that nothing is dropped and nothing is compiled again, and that a thread reads ahead.

    Args:
        loader: any iterable of microbatches. It is read in a background thread, in order; its
            exceptions are raised here when their window is asked for, with their traceback.
        size: K.
        device: where to move windows, in the background too; `None` leaves them on the host,
            and the step moves them.
        prefetch: how many windows are read ahead; 0 reads in this thread, when asked.

    Raises:
        BatchError: when `size` < 1 or `prefetch` < 0, or microbatches disagree.

    Example:
        >>> import torch, funcacc
        >>> loader = [torch.tensor([i]) for i in range(5)]
        >>> [w.tree.flatten().tolist()[: w.count] for w in funcacc.windows(loader, 2)]
        [[0, 1], [2, 3], [4]]
    """
    if size < 1:
        raise BatchError(f"the window size is {size}; give at least 1")
    if prefetch < 0:
        raise BatchError(f"prefetch is {prefetch}; give 0 to read without a thread, or more")
    source = _windows(iter(loader), size, device)
    return _read_ahead(source, prefetch) if prefetch else source


def _windows(
    source: Iterator[PyTree], size: int, device: torch.device | str | None
) -> Iterator[Window]:
    while items := list(itertools.islice(source, size)):
        window = _padded(items, size)
        if device is not None:
            window.tree = trees.map_tree(lambda t: t.to(device), window.tree)
        yield window


def _read_ahead(source: Iterator[Window], count: int) -> Iterator[Window]:
    with ThreadPoolExecutor(1, thread_name_prefix="funcacc-windows") as pool:
        pending = collections.deque(pool.submit(next, source, None) for _ in range(count))
        try:
            while (window := pending.popleft().result()) is not None:
                pending.append(pool.submit(next, source, None))
                yield window
        finally:
            for future in pending:
                future.cancel()


def _padded(items: Sequence[PyTree], size: int) -> Window:
    full = stack(items)
    missing = size - len(items)
    if not missing:
        return full

    def pad(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros((missing, *t.shape[1:]))])

    return Window(trees.map_tree(pad, full.tree), len(items))
