"""Files: written whole or not at all; plain trees in them, and which of them are damaged."""

from __future__ import annotations

import copy
import json
import os
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from funcacc.errors import StateError
from funcacc.types import TensorSpec

SAFETENSORS = ".safetensors"
_ENTRY = "funcacc"
"""The name under which a safetensors file holds its structure."""
_ENTRY_CRC = "funcacc.crc32"
_DICTS: tuple[type[dict[Any, Any]], ...] = (Counter, OrderedDict)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace ``path`` by what ``write`` writes, or leave it as it was.

    A kill or a power cut at any moment leaves the whole old file or the whole new one.
    """

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as file:
            write(file)

    _replace(path, fill)


def _replace(path: Path, fill: Callable[[Path], object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        fill(temporary)
        _to_disk(temporary, os.O_RDWR)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _to_disk(path.parent, os.O_RDONLY)


def _to_disk(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tree(path: Path, tree: dict[str, Any]) -> None:
    """Write a tree that `plain` made: as safetensors by that suffix, else by `torch.save`.

    Raises:
        StateError: for what safetensors can't hold, or when it isn't installed.
    """
    if path.suffix == SAFETENSORS:
        save_file = _safetensors(path).save_file
        tensors, metadata = _named(tree)
        _replace(path, lambda temporary: save_file(tensors, temporary, metadata))
    else:
        write_atomically(path, lambda file: torch.save(tree, file))


def read_tree(path: Path) -> dict[str, Any]:
    """Read what `write_tree` wrote; tensors on the CPU. Nothing in the file is executed.

    Raises:
        OSError: when there is no such file, or it can't be opened.
        StateError: when it is truncated or damaged, or no such file.
    """
    with path.open("rb"):
        pass
    tree = _read_safetensors(path) if path.suffix == SAFETENSORS else _read_torch(path)
    if not isinstance(tree, dict) or not all(isinstance(k, str) for k in tree):
        raise StateError(f"{path}: holds a {type(tree).__name__}, where a dict by name belongs")
    return tree


def plain(value: Any, path: str, known: dict[int, Tensor]) -> Any:
    """A copy of a tree, of what loads with ``weights_only=True``; tensors are on the CPU.

    Args:
        value: the tree.
        path: of the tree, for errors.
        known: tensors met so far, by id; what was one tensor stays one.

    Raises:
        StateError: naming the place of anything else.
    """
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = _on_cpu(value)
        return known[id(value)]
    if isinstance(value, dict):
        inside = {_key(k, path): plain(v, f"{path}[{k!r}]", known) for k, v in value.items()}
        return next((c for c in _DICTS if isinstance(value, c)), dict)(inside)
    if isinstance(value, (list, tuple)):
        inner = [plain(v, f"{path}[{i}]", known) for i, v in enumerate(value)]
        return inner if isinstance(value, list) else tuple(inner)
    # Subclasses, such as a NumPy number that a schedule computed, don't load.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        return value.item()
    if value is None or isinstance(value, torch.dtype):
        return value
    raise StateError(
        f"{path} is a {type(value).__name__}, which a file that loads with weights_only=True "
        "can't hold; keep tensors, numbers, strings, dicts and lists in a state dict"
    )


def _key(key: Any, path: str) -> Any:
    if isinstance(key, (str, int)):
        return key
    raise StateError(f"{path} has the key {key!r}; only strings and integers can be saved")


def _on_cpu(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu()
    # A part of something larger would be saved with all of that.
    part = host.layout == torch.strided and host.untyped_storage().nbytes() > host.nbytes
    return host.clone() if part else host


# torch ---------------------------------------------------------------------------------


def _read_torch(path: Path) -> Any:
    if not zipfile.is_zipfile(path):
        raise StateError(f"{path}: is truncated, or no file of torch.save")
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            larger = (
                any(e.compress_type for e in entries) or sum(e.file_size for e in entries) > size
            )
            damaged = None if larger else archive.testzip()
    except Exception as e:
        raise StateError(f"{path}: is damaged: {e}") from e
    if larger:
        raise StateError(f"{path}: is damaged: what it holds is larger than the file")
    if damaged:
        raise StateError(f"{path}: is damaged: the checksum of {damaged} is wrong")
    try:
        # Otherwise a tensor that claims more than is there would be read past its end.
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:
        reason = str(e).partition("\n")[0]
        raise StateError(
            f"{path}: doesn't load with weights_only=True, so it isn't what funcacc.save "
            f"writes: {reason}"
        ) from e
    if _grows(tree, size):
        raise StateError(f"{path}: is damaged: what it holds is larger than the file")
    # The file may be written over while its tensors are in use.
    return copy.deepcopy(tree)


def _grows(tree: Any, size: int) -> bool:
    """Whether a tree has more values, or larger tensors, than fit into a file of this size."""
    storages: set[int] = set()
    todo, room = [tree], size
    while todo:
        value = todo.pop()
        room -= 1
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += value
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            storage = value.untyped_storage()
            room -= 0 if storage._cdata in storages else storage.nbytes()
            storages.add(storage._cdata)
        if room < len(todo):
            return True
    return False


# safetensors ---------------------------------------------------------------------------


def _safetensors(path: Path) -> Any:
    try:
        import safetensors.torch
    except ImportError as e:
        raise StateError(
            f"{path}: safetensors is not installed; install it by: "
            "pip install 'funcacc[safetensors]'"
        ) from e
    return safetensors.torch


def _named(tree: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by dotted name; the structure around them, with their checksums, as JSON."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()

    def described(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            if value.layout != torch.strided:
                raise StateError(f"{name} is {value.layout}, which safetensors can't hold")
            while name in tensors:
                name += "'"
            # safetensors refuses tensors that share memory.
            storage = value.untyped_storage()._cdata
            tensors[name] = value.clone() if storage in storages else value.contiguous()
            storages.add(storage)
            spec = str(TensorSpec.of(value))
            return {"tensor": name, "spec": spec, "crc32": _checksum(tensors[name])}
        if isinstance(value, dict):
            kind = type(value).__name__
            return {kind: [[k, described(v, f"{name}.{k}")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = type(value).__name__
            return {kind: [described(v, f"{name}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        return value

    structure = json.dumps({part: described(value, part) for part, value in tree.items()})
    return tensors, {_ENTRY: structure, _ENTRY_CRC: str(zlib.crc32(structure.encode()))}


def _read_safetensors(path: Path) -> dict[str, Any]:
    _safetensors(path)
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as e:
        raise StateError(f"{path}: is truncated, or no safetensors file: {e}") from e
    if _ENTRY not in metadata:
        raise StateError(
            f"{path}: has no {_ENTRY!r} entry in its metadata, so it isn't what funcacc.save "
            f"writes; it holds {_some(tensors)}: load it by safetensors.torch.load_file"
        )
    if metadata.get(_ENTRY_CRC) != str(zlib.crc32(metadata[_ENTRY].encode())):
        raise StateError(f"{path}: is damaged: the checksum of its {_ENTRY!r} entry is wrong")
    try:
        structure = json.loads(metadata[_ENTRY])
        return {part: _restored(value, tensors, path) for part, value in structure.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise StateError(f"{path}: is damaged: its {_ENTRY!r} entry can't be read") from e


def _some(names: Any) -> str:
    first = list(names)[:4]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")


def _restored(value: Any, tensors: dict[str, Tensor], path: Path) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = tensors[value["tensor"]]
        if _checksum(tensor) != value["crc32"] or str(TensorSpec.of(tensor)) != value["spec"]:
            raise StateError(f"{path}: is damaged: the checksum of {value['tensor']} is wrong")
        return tensor
    (kind, content), *_ = value.items()
    if kind == "dtype":
        dtype = getattr(torch, content)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(content)
        return dtype
    if kind in ("list", "tuple"):
        inner = [_restored(v, tensors, path) for v in content]
        return inner if kind == "list" else tuple(inner)
    inside = {k: _restored(v, tensors, path) for k, v in content}
    return next((c for c in _DICTS if c.__name__ == kind), dict)(inside)


def _checksum(tensor: Tensor) -> int:
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)
