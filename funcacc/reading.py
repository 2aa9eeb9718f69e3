"""Grouping what a loader gives into windows, ahead of the step that consumes them."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from funcacc import trees
from funcacc.batches import Window, stack, whole
from funcacc.engines import get_engine
from funcacc.engines.base import Engine
from funcacc.plan import default_axes, mesh_of, place_window
from funcacc.types import PyTree, TensorSpec


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
            and the step moves them. On a mesh of devices that is the process's own, rows are cut
            over the axes called ``data`` and ``fsdp``.
        prefetch: how many windows are read ahead; 0 reads in this thread, when asked.

    Raises:
        BatchError: when `size` < 1 or `prefetch` < 0, or microbatches disagree.
        EngineError: for a device whose engine isn't installed.

    Example:
        >>> import torch, funcacc
        >>> loader = [torch.tensor([i]) for i in range(5)]
        >>> [w.tree.flatten().tolist()[: w.count] for w in funcacc.windows(loader, 2)]
        [[0, 1], [2, 3], [4]]
    """
    size = whole(size, "the window size")
    prefetch = whole(prefetch, "prefetch", least=0)
    engine = None if device is None else get_engine("auto", torch.device(device))
    source = _windows(iter(loader), size, engine)
    return _read_ahead(source, prefetch) if prefetch else source


def _windows(source: Iterator[PyTree], size: int, engine: Engine | None) -> Iterator[Window]:
    while items := list(itertools.islice(source, size)):
        window = _padded(items, size)
        if engine is not None:
            window.tree = _moved(engine, window.tree)
        yield window


def _moved(engine: Engine, tree: PyTree) -> PyTree:
    """On the device; where that is a mesh, cut over the axes that steps cut batches over."""
    mesh = mesh_of(engine, default_axes(engine))
    leaves, spec = trees.flatten(tree)
    if mesh is None:
        return trees.unflatten(spec, list(map(engine.move, leaves)))
    paths = trees.paths(tree, "window")
    specs = dict(zip(paths, map(TensorSpec.of, leaves), strict=True))
    placed = place_window(mesh, specs, {})
    return trees.unflatten(
        spec, [engine.move(x, placed[p]) for p, x in zip(paths, leaves, strict=True)]
    )


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
