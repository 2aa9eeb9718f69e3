"""Noting which hyperparameters and attributes an optimizer's step looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Asked:
    """Which values an optimizer's step looks at: keys of its groups, attributes of its own.

    Attributes:
        keys: for each group, the keys that were read or written; `None` for all of them, also
            those that may be added.
        attributes: names of attributes.
    """

    def __init__(self, groups: int) -> None:
        self.keys: list[set[str] | None] = [set() for _ in range(groups)]
        self.attributes: set[str] = set()

    def add(self, other: Asked) -> None:
        """Take in what another step looked at."""
        pairs = zip(self.keys, other.keys, strict=True)
        self.keys = [None if a is None or b is None else a | b for a, b in pairs]
        self.attributes |= other.attributes


class _NotedGroup(dict):
    """A parameter group that notes its keys as they are read or written."""

    def __init__(self, content: dict[str, Any], asked: Asked, position: int) -> None:
        super().__init__(content)
        self._asked = asked
        self._position = position

    def _note(self, key: Any = None) -> None:
        keys = self._asked.keys[self._position]
        if key is None:
            self._asked.keys[self._position] = None
        elif keys is not None:
            keys.add(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._note(key)
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __iter__(self) -> Iterator[str]:
        self._note()
        return super().__iter__()

    def keys(self) -> Any:
        self._note()
        return super().keys()

    def values(self) -> Any:
        self._note()
        return super().values()

    def items(self) -> Any:
        self._note()
        return super().items()


def noted_group(content: dict[str, Any], asked: Asked, position: int) -> dict[str, Any]:
    """A group that notes in ``asked.keys[position]`` which keys are read or written."""
    return _NotedGroup(content, asked, position)


def noted_class(cls: Any, asked: Asked) -> type:
    """A class like `cls` whose instances note which of their attributes are read."""

    def __getattribute__(self: Any, name: str) -> Any:
        asked.attributes.add(name)
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": __getattribute__})
