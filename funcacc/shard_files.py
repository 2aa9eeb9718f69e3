"""Reading checkpoints of `torch.distributed.checkpoint` without running what is in them.

PyTorch unpickles their metadata, and values that aren't tensors, as they come.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from funcacc.errors import StateError

_ALLOWED = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (filesystem.__name__, "_StorageInfo"),
    *(
        (metadata.__name__, name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what describes tensors."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


class ShardReader(FileSystemReader):
    """A reader of a folder that anybody may have written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """What the folder says that it holds.

        Raises:
            StateError: when it says that in another way than by descriptions, or names files
                outside of the folder.
            OSError: when it can't be read.
        """
        path = self.fs.concat_path(self.path, ".metadata")
        with self.fs.create_stream(path, "rb") as file:
            try:
                found = _Unpickler(file).load()
                names = [info.relative_path for info in found.storage_data.values()]
            except Exception as e:
                raise StateError(f"{path}: is damaged, or no metadata of tensors: {e}") from e
        for name in names:
            if not isinstance(name, str) or PurePath(name).name != name:
                raise StateError(f"{path}: names {name!r}, which isn't a file in its folder")
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        result: metadata.Metadata = found
        return result


class _Checked:
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """A value, if it loads without running anything."""
        try:
            torch.load(io.BytesIO(value.getvalue()), weights_only=True)
        except Exception as e:
            reason = str(e).partition("\n")[0]
            raise StateError(
                f"{read_item.dest_index.fqn} doesn't load with weights_only=True: {reason}"
            ) from e
        super().load_bytes(read_item, value)  # type: ignore[misc]


def checked(planner: type = DefaultLoadPlanner) -> type:
    """The class of planners like this one that run nothing either."""
    return type("Checked", (_Checked, planner), {})
