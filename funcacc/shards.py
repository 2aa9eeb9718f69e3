"""Saving and restoring state that lies in parts, by `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from funcacc import trees
from funcacc.engines import settle
from funcacc.errors import StateError
from funcacc.parts import is_list, remember, single, state_of
from funcacc.shard_files import ShardReader, checked


def save(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write the state of models, optimizers and steps to a folder, each process its shards.

    Every process calls it. The folder is one of `torch.distributed.checkpoint`: any mesh, and one
    device, can load it.

    Args:
        path: of the folder, which all processes see; made if it isn't there.
        **parts: what to save, by name: anything with ``state_dict()``, a list of such objects, or
            a value.
    """
    state = {name: state_of(part) for name, part in parts.items()}
    settle(_tensors(state))
    with _quiet():
        state_dict_saver.save(
            state,
            # Copying ahead takes a device of torch's own kind for granted.
            storage_writer=FileSystemWriter(path, per_thread_copy_ahead=0),
            planner=_planner(state, load=False),
            no_dist=not dist.is_initialized(),
        )
    remember(Path(path), parts)


def load(path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
    """Load what `save` wrote, each process its shards.

    Tensors are filled as they lie now, whatever the mesh was when they were saved. The state of an
    optimizer has to be there to be filled: after a step, or after ``step.compile(batches)``.

    Args:
        path: of the folder.
        **parts: what to load into, by the names given to `save`.

    Returns:
        Those of `parts` that are values, as they were saved.

    Raises:
        StateError: for what isn't in the folder, or has another shape there; nothing was loaded.
            For a shard that turns out to be damaged; what was read before it is loaded.
    """
    state = {name: state_of(part) for name, part in parts.items()}
    settle(_tensors(state))
    reader = ShardReader(path)
    _check(path, state, reader)
    try:
        with _quiet():
            state_dict_loader.load(
                state,
                storage_reader=reader,
                planner=_planner(state, load=True),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as e:
        (cause, _), *_ = e.failures.values()
        raise StateError(f"{path}: is damaged; what was read of it is loaded: {cause}") from e
    settle(_tensors(state))
    objects = {n: x for n, x in parts.items() if is_list(x) or hasattr(x, "load_state_dict")}
    for name, part in objects.items():
        for x, own in single(part, state[name]):
            x.load_state_dict(own)
    remember(Path(path), parts)
    return {name: state[name] for name in parts if name not in objects}


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [x for x in trees.flatten(state)[0] if isinstance(x, Tensor)]


def _planner(state: dict[str, Any], *, load: bool) -> Any:
    """The xla engine's planner where tensors are on a mesh; torch's own otherwise."""
    if all(t.device.type != "xla" for t in _tensors(state)):
        return checked()() if load else None
    from funcacc.engines.xla import planners

    return checked(planners.SPMDLoadPlanner)() if load else planners.SavePlanner()


def _check(path: Any, state: dict[str, Any], reader: FileSystemReader) -> None:
    entries = reader.read_metadata().state_dict_metadata
    saved = {n: list(x.size) for n, x in entries.items() if isinstance(x, TensorStorageMetadata)}
    here = dict(_named(state, ""))
    lines = []
    for name, x in here.items():
        if name not in saved:
            lines.append(f"  {name} is missing in it")
        elif saved[name] != list(x.shape):
            lines.append(f"  {name} is {saved[name]} in it, and {list(x.shape)} here")
    opened = tuple(f"{part}." for part in state)
    rest = [name for name in saved if name.startswith(opened) and name not in here]
    lines += [f"  {name} is in it, but not here" for name in rest]
    if lines:
        hint = ""
        if any(".state." in name for name in rest):
            hint = "\nAn optimizer without state gets it by a step, or by step.compile(batches)."
        listed = "\n".join(lines)
        raise StateError(f"{path} doesn't fit; nothing was loaded:\n{listed}{hint}")


def _named(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the names that the planners give them."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from _named(value, f"{name}.{key}" if name else str(key))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that planners of torch_xla 2.9 cause in torch 2.9."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="The function definition for SavePlanner")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        warnings.filterwarnings("ignore", message="Using a non-tuple sequence")
        yield
