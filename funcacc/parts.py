"""What users save by name: objects with a state dict, lists of them, values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def is_list(part: Any) -> bool:
    """Whether a part is a list of objects that have a state."""
    return isinstance(part, (list, tuple)) and any(hasattr(x, "state_dict") for x in part)


def state_of(part: Any) -> Any:
    """The state dict of an object, those of a list of objects, or the value itself."""
    if hasattr(part, "state_dict"):
        return part.state_dict()
    return [state_of(x) for x in part] if is_list(part) else part


def single(part: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """The objects of a part, each with its state."""
    if is_list(part):
        for p, s in zip(part, state, strict=True):
            yield from single(p, s)
    else:
        yield part, state


_newest: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()


def remember(path: Path, parts: Mapping[str, Any]) -> None:
    """Note where the state of objects was saved to, or loaded from."""
    for part in parts.values():
        for x in part if is_list(part) else [part]:
            # Objects of other libraries may have neither a hash nor weak references.
            with contextlib.suppress(TypeError):
                _newest[x] = path.absolute()


def newest(part: Any) -> Path | None:
    """Where the state of an object was last saved to, or loaded from."""
    return _newest.get(part)
