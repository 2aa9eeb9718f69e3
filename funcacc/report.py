"""What was compiled, and what of the state was donated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcacc.types import TensorSpec


@dataclass
class Leaf:
    """One input of the program.

    Attributes:
        path: as code, e.g. ``params['fc.weight']``.
        spec: shape and dtype.
        donated: whether an output takes its buffer.
        in_place: whether the output was found at the address of the input; `None` when
            that wasn't looked at.
        placement: over which axes of the mesh each dimension is cut, as text; empty on one
            device.
        parts: into how many parts it is cut.
    """

    path: str
    spec: TensorSpec
    donated: bool
    in_place: bool | None = None
    placement: str = ""
    parts: int = 1

    @property
    def device_bytes(self) -> int:
        """Bytes on each device."""
        return self.spec.nbytes // self.parts


class Collective(NamedTuple):
    """Communication between devices.

    Attributes:
        kind: as XLA calls it, e.g. ``all-reduce``.
        nbytes: bytes of its result on one device.
        in_loop: whether it takes place for each microbatch (or each trip of another loop).
    """

    kind: str
    nbytes: int
    in_loop: bool


@dataclass
class Report:
    """The account of a `TrainStep`.

    Attributes:
        engine: its name.
        compiles: programs built.
        traces: times the loss function was traced.
        reasons: why, one line for each trace.
        leaves: inputs of the latest program.
        seconds: time spent so far in ``capture``, ``lower`` and ``compile``.
        num_state: how many of the leaves are state; they come first.
        mesh: names and sizes of its axes, as text; empty on one device.
        collectives: communication of the latest program; None where that wasn't asked for.
    """

    engine: str
    compiles: int = 0
    traces: int = 0
    reasons: list[str] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    num_state: int = 0
    mesh: str = ""
    collectives: list[Collective] | None = None

    @property
    def state_leaves(self) -> int:
        """Leaves of the state."""
        return self.num_state

    @property
    def donated_leaves(self) -> int:
        """Leaves whose buffer an output takes."""
        return sum(x.donated for x in self.leaves)

    @property
    def in_place_leaves(self) -> int:
        """Donated leaves whose output was found at their own address."""
        return sum(bool(x.in_place) for x in self.leaves)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return sum(x.spec.nbytes for x in self.leaves[: self.num_state])

    @property
    def device_state_bytes(self) -> int:
        """Bytes of the state on each device."""
        return sum(x.device_bytes for x in self.leaves[: self.num_state])

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donated leaves."""
        return sum(x.spec.nbytes for x in self.leaves if x.donated)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return {
            "engine": self.engine,
            "compiles": self.compiles,
            "traces": self.traces,
            "reasons": list(self.reasons),
            "state_leaves": self.state_leaves,
            "donated_leaves": self.donated_leaves,
            "in_place_leaves": self.in_place_leaves,
            "state_bytes": self.state_bytes,
            "donated_bytes": self.donated_bytes,
            "mesh": self.mesh,
            "device_state_bytes": self.device_state_bytes,
            "collectives": None
            if self.collectives is None
            else [c._asdict() for c in self.collectives],
            "seconds": dict(self.seconds),
            "leaves": [
                {
                    "path": x.path,
                    "spec": str(x.spec),
                    "bytes": x.spec.nbytes,
                    "donated": x.donated,
                    "in_place": x.in_place,
                    "placement": x.placement,
                    "device_bytes": x.device_bytes,
                }
                for x in self.leaves
            ],
        }

    def __str__(self) -> str:
        """A summary and the table of leaves."""
        times = ", ".join(f"{k} {v:.2f} s" for k, v in self.seconds.items())
        lines = [
            f"funcacc report: engine {self.engine}, {self.compiles} program(s) compiled, "
            f"{self.traces} trace(s); {times}",
            f"state: {self.state_leaves} leaves, {_size(self.state_bytes)}; donated: "
            f"{self.donated_leaves} leaves, {_size(self.donated_bytes)}"
            # Sharded buffers have no address that one could look at.
            + ("" if self.mesh else f"; found in place: {self.in_place_leaves}"),
            *self._mesh_lines(),
            *(f"trace: {r}" for r in self.reasons),
        ]
        width = max((len(x.path) for x in self.leaves), default=0)
        for x in self.leaves:
            place = {True: "in place", False: "MOVED", None: ""}[x.in_place]
            kind = "donated" if x.donated else "kept"
            where = f" {x.placement:<14} {_size(x.device_bytes):>10}" if self.mesh else ""
            lines.append(
                f"  {x.path:<{width}}  {x.spec!s:<24} {_size(x.spec.nbytes):>10}{where}  "
                f"{kind} {place}"
            )
        return "\n".join(line.rstrip() for line in lines)

    def _mesh_lines(self) -> list[str]:
        if not self.mesh:
            return []
        lines = [f"mesh {self.mesh}: {_size(self.device_state_bytes)} of state on each device"]
        for where, in_loop in (("in the loop, each trip", True), ("outside the loop", False)):
            if self.collectives is not None:
                lines.append(
                    f"{where}: {_total(c for c in self.collectives if c.in_loop == in_loop)}"
                )
        return lines


def _total(found: Iterable[Collective]) -> str:
    kinds: dict[str, list[int]] = {}
    for c in found:
        kinds.setdefault(c.kind, []).append(c.nbytes)
    listed = [f"{len(n)} {kind} ({_size(sum(n))})" for kind, n in sorted(kinds.items())]
    return ", ".join(listed) or "no communication"


def _size(n: int) -> str:
    value, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{n} B"
