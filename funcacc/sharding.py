"""Meshes of devices, models cut over one by rules on names, checkpoints in shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from funcacc import model as models
from funcacc.engines import get_engine, require
from funcacc.errors import OptionError
from funcacc.inspection import device_of
from funcacc.placement import Placement
from funcacc.plan import check_even
from funcacc.shards import load, save

__all__ = ["load", "mesh", "save", "shard"]

Cut = Sequence[str | tuple[str, ...] | None]
"""For each dimension the mesh axis, or axes, that it is cut over; None for a whole one."""


def mesh(**axes: int) -> Any:
    """All devices as a mesh, for torch_xla and for funcacc: SPMD is on from here.

    Comes first in a program, before anything is on a device. A step, `shard` and torch_xla use it
    unless they are given another mesh.

    Args:
        **axes: name and size of each axis, the one whose devices are farthest apart first.

    Returns:
        A `torch_xla.distributed.spmd.Mesh`.

    Raises:
        EngineError: when torch_xla isn't installed, or something is on a device already.
        OptionError: when the sizes don't multiply to the number of devices.
    """
    require("xla")
    from funcacc.engines.xla.mesh import make_mesh

    return make_mesh(axes)


def shard(model: nn.Module, rules: Mapping[str, Cut], mesh: Any = None) -> None:
    """Cut the parameters of a model over a mesh.

    Equals, with torch_xla's own function::

        for name, p in model.named_parameters():
            xs.mark_sharding(p, mesh, the cut of the first pattern that matches the name)

    and parameters that no pattern matches are whole on each device. Buffers always are. To be
    called once the model is on its device, before the first step; optimizer state follows.

    Args:
        model: on an XLA device.
        rules: pattern of `fnmatch` on the parameter's name -> cut, e.g.
            ``{"*.mlp.up.weight": ("model", None)}``.
        mesh: as made by `mesh`, which is the default.

    Raises:
        OptionError: for a pattern that no name matches, a cut of another rank than its parameter,
            or an unknown axis.
        EngineError: for an axis that doesn't divide its dimension.
    """
    engine = get_engine("xla", device_of(model), mesh)
    if not engine.axes:
        raise OptionError("there is no mesh to cut over; make one by funcacc.sharding.mesh(data=8)")
    params, placements, unused = models.parameters(model), [], set(rules)
    for name, p in params.items():
        matching = [pattern for pattern in rules if fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        cut = rules[matching[0]] if matching else (None,) * p.ndim
        placements.append(_placement(name, p.ndim, cut, engine.axes))
        check_even(f"params[{name!r}]", p.shape, placements[-1], engine.axes)
    if unused:
        raise OptionError(
            f"no parameter is called {min(unused)!r}; the names are like {next(iter(params))!r}"
        )
    engine.place(list(params.values()), placements)


def _placement(name: str, rank: int, cut: Cut, sizes: Mapping[str, int]) -> Placement:
    axes = [() if c is None else (c,) if isinstance(c, str) else tuple(c) for c in cut]
    for axis in (a for dim in axes for a in dim):
        if axis not in sizes:
            known = ", ".join(f"{n}={s}" for n, s in sizes.items())
            raise OptionError(
                f"the rule for params[{name!r}] names the axis {axis!r}, but the mesh has {known}"
            )
    if len(axes) != rank:
        raise OptionError(
            f"params[{name!r}] has {rank} dimensions, but its rule {tuple(cut)} cuts {len(axes)}; "
            "give one axis or None for each dimension"
        )
    return Placement(tuple(axes))
