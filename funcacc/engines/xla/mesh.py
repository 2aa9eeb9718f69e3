"""Placements as torch_xla's shardings, and back."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch_xla.distributed.spmd as xs
from torch import Tensor

from funcacc.engines.xla import private
from funcacc.errors import EngineError, OptionError
from funcacc.placement import Placement


class DeviceMesh:
    """A mesh of torch_xla under names for its axes.

    Args:
        mesh: the user's.

    Attributes:
        sizes: of each axis, by name.
    """

    def __init__(self, mesh: xs.Mesh) -> None:
        self.mesh = mesh
        self.sizes = {str(name): int(size) for name, size in mesh.shape().items()}
        self.read = functools.cache(self._read)

    def sharding(self, placement: Placement) -> Any:
        """torch_xla's sharding of a placement."""
        return self.mesh.get_op_sharding(self._spec(placement))

    def upload(self, tensor: Tensor, placement: Placement) -> Any:
        """What an upload of a host tensor needs to know."""
        return private.upload_sharding(tensor, self.mesh, self._spec(placement))

    def _spec(self, placement: Placement) -> tuple[Any, ...]:
        places = {name: i for i, name in enumerate(self.sizes)}
        found = [tuple(places[a] for a in axes) for axes in placement.dims]
        return tuple(None if not d else d[0] if len(d) == 1 else d for d in found)

    def _read(self, text: str, rank: int) -> Placement:
        """The placement of a tensor, from XLA's text for its sharding.

        Raises:
            EngineError: when it lies over another mesh.
        """
        tiles = Tiles.read(text, rank)
        if math.prod(tiles.counts) == 1:
            return Placement.whole(rank)
        for dims in _cuts(tiles.counts, {n: s for n, s in self.sizes.items() if s > 1}):
            placement = Placement(dims)
            if np.array_equal(tiles.devices, self._tiles(placement)):
                return placement
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        raise EngineError(
            f"it is sharded as {text}, which isn't a placement on the step's mesh ({sizes}); "
            "shard all of the model over one mesh, and give the step that mesh"
        )

    def _tiles(self, placement: Placement) -> np.ndarray:
        names = list(self.sizes)
        order = [names.index(a) for a in placement.axes]
        rest = [i for i in range(len(names)) if i not in order]
        tiles = self.mesh.get_logical_mesh().transpose(order + rest)
        return np.sort(tiles.reshape(placement.parts(self.sizes), -1), axis=1)


def make_mesh(axes: Mapping[str, int]) -> xs.Mesh:
    """All devices as the global mesh of the process, which compiles for it from now on.

    Raises:
        EngineError: when something is on a device already.
        OptionError: when sizes and devices disagree.
    """
    private.switch_spmd_on()
    count = private.device_count()
    if math.prod(axes.values()) != count:
        asked = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise OptionError(
            f"a mesh of {asked} has {math.prod(axes.values())} devices, but there are {count}; "
            "choose sizes whose product is that (on the CPU, CPU_NUM_DEVICES sets it)"
        )
    mesh = xs.Mesh(np.arange(count), tuple(axes.values()), tuple(axes))
    xs.set_global_mesh(mesh)
    return mesh


class Tiles:
    """A sharding as XLA writes it.

    Attributes:
        counts: into how many parts each dimension is cut.
        devices: the devices of each part, sorted, ``[parts, copies]``; empty when whole.
    """

    def __init__(self, counts: tuple[int, ...], devices: np.ndarray) -> None:
        self.counts = counts
        self.devices = devices

    @classmethod
    def read(cls, text: str, rank: int) -> Tiles:
        """From XLA's text.

        Raises:
            EngineError: for a form that no tensor of a step has.
        """
        found = re.fullmatch(
            r"\{devices=\[([\d,]+)\](<=\[([\d,]+)\](T\(([\d,]+)\))?|[\d,]+)(.*)\}", text
        )
        if found is None:
            if text == "{replicated}" or text.startswith("{maximal"):
                return cls((1,) * rank, np.empty(0))
            raise EngineError(f"a sharding of the form {text} has no place in a step")
        counts = _numbers(found[1])
        if found[3]:
            ids = np.arange(math.prod(counts)).reshape(_numbers(found[3]))
            ids = ids.transpose(_numbers(found[5])) if found[5] else ids
        else:
            ids = np.array(_numbers(found[2]))
        copies = math.prod(counts[rank:])
        return cls(counts[:rank], np.sort(ids.reshape(-1, copies), axis=1))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _cuts(counts: tuple[int, ...], sizes: dict[str, int]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways of cutting dimensions into so many parts over axes of these sizes."""
    if not counts:
        yield ()
        return
    for n in range(len(sizes) + 1):
        for axes in itertools.permutations(sizes, n):
            if math.prod(sizes[a] for a in axes) == counts[0]:
                rest = {a: s for a, s in sizes.items() if a not in axes}
                for others in _cuts(counts[1:], rest):
                    yield (axes, *others)
