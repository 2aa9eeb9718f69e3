"""What was compiled, what of the state was donated, and what it takes of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcacc import page
from funcacc.page import size
from funcacc.types import TensorSpec

KINDS = (
    "params",
    "optimizer state",
    "buffers",
    "key and numbers",
    "captured constants",
    "window",
    "accumulators",
)
"""Everything that a program can't do without."""


@dataclass
class Leaf:
    """One input of the program, or one sum that its loop carries.

    Attributes:
        path: as code, e.g. ``params['fc.weight']``.
        spec: shape and dtype.
        donated: whether an output takes its buffer.
        in_place: whether the output was found at the address of the input; `None` when
            that wasn't looked at.
        placement: over which axes of the mesh each dimension is cut, as text; empty on one
            device.
        parts: into how many parts it is cut.
        kind: one of `KINDS`.
        output: which output of the program takes its buffer.
    """

    path: str
    spec: TensorSpec
    donated: bool
    in_place: bool | None = None
    placement: str = ""
    parts: int = 1
    kind: str = "params"
    output: int | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes on each device."""
        return self.spec.nbytes // self.parts

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return {
            "path": self.path,
            "kind": self.kind,
            "spec": str(self.spec),
            "bytes": self.spec.nbytes,
            "donated": self.donated,
            "output": self.output,
            "in_place": self.in_place,
            "placement": self.placement,
            "device_bytes": self.device_bytes,
        }


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


class Need(NamedTuple):
    """The memory that a program takes, as its compiler has assigned it.

    Attributes:
        total: bytes of everything.
        inputs: the program's inputs; donated ones hold outputs afterwards.
        temporaries: accumulators, activations and whatever else lives in between.
        outputs: outputs that take no input's memory.
        constants: numbers in the program.
    """

    total: int
    inputs: int
    temporaries: int
    outputs: int
    constants: int


@dataclass
class Build:
    """A program that was built.

    Attributes:
        reason: why it was.
        traced: whether the loss function was traced for it, rather than found traced.
        seconds: in ``capture``, ``lower`` and ``compile``.
        step: optimizer steps that the state had seen by then.
    """

    reason: str
    traced: bool
    seconds: dict[str, float] = field(default_factory=dict)
    step: int = 0

    def __str__(self) -> str:
        """One line."""
        what = "traced" if self.traced else "found traced"
        times = ", ".join(f"{k} {v:.2f} s" for k, v in self.seconds.items())
        return f"after step {self.step}: {self.reason} ({what}; {times})"


@dataclass
class Report:
    """The account of a `TrainStep`.

    Attributes:
        engine: its name.
        compiles: programs built, and run at least once.
        traces: times the loss function was traced.
        builds: each program that was built, oldest first.
        leaves: inputs of the latest program.
        inside: the sums that its loop over the microbatches carries.
        seconds: time spent so far in ``capture``, ``lower`` and ``compile``.
        num_state: how many of the leaves are state; they come first.
        mesh: names and sizes of its axes, as text; empty on one device.
        collectives: communication of the latest program; None where that wasn't asked for.
        need: of the latest program, from its compiler; None where that wasn't asked for, or the
            compiler doesn't tell.
    """

    engine: str
    compiles: int = 0
    traces: int = 0
    builds: list[Build] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    inside: list[Leaf] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    num_state: int = 0
    mesh: str = ""
    collectives: list[Collective] | None = None
    need: Need | None = None

    @property
    def reasons(self) -> list[str]:
        """Why each program was built."""
        return [b.reason for b in self.builds]

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

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes on each device by kind, of `KINDS`."""
        return totals([*self.leaves, *self.inside])

    @property
    def floor_bytes(self) -> int:
        """What no program for this step can do without, on each device.

        State, what is read besides, the window, and one accumulator for each trained parameter.
        Not in it: activations of one microbatch and their gradients, copies in a
        `compute_dtype`, results such as the loss, and whatever the compiler holds for a while.
        """
        return sum(self.kinds.values())

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return {
            "engine": self.engine,
            "compiles": self.compiles,
            "traces": self.traces,
            "reasons": self.reasons,
            "builds": [vars(b) | {"seconds": dict(b.seconds)} for b in self.builds],
            "state_leaves": self.state_leaves,
            "donated_leaves": self.donated_leaves,
            "in_place_leaves": self.in_place_leaves,
            "state_bytes": self.state_bytes,
            "donated_bytes": self.donated_bytes,
            "mesh": self.mesh,
            "device_state_bytes": self.device_state_bytes,
            "kinds": self.kinds,
            "floor_bytes": self.floor_bytes,
            "need": None if self.need is None else self.need._asdict(),
            "collectives": None
            if self.collectives is None
            else [c._asdict() for c in self.collectives],
            "seconds": dict(self.seconds),
            "leaves": [x.to_dict() for x in self.leaves],
            "inside": [x.to_dict() for x in self.inside],
        }

    def __str__(self) -> str:
        """A summary, the memory by kind, the programs, and the table of leaves."""
        times = ", ".join(f"{k} {v:.2f} s" for k, v in self.seconds.items())
        lines = [
            f"funcacc report: engine {self.engine}, {self.compiles} program(s) compiled, "
            f"{self.traces} trace(s); {times}",
            f"state: {self.state_leaves} leaves, {size(self.state_bytes)}; donated: "
            f"{self.donated_leaves} leaves, {size(self.donated_bytes)}"
            # Sharded buffers have no address that one could look at.
            + ("" if self.mesh else f"; found in place: {self.in_place_leaves}"),
            *self._mesh_lines(),
            *memory_lines([*self.leaves, *self.inside], self.need, bool(self.mesh)),
            *(f"program {b}" for b in self.builds),
        ]
        width = max((len(x.path) for x in self.leaves), default=0)
        for x in self.leaves:
            where = f" {x.placement:<14} {size(x.device_bytes):>10}" if self.mesh else ""
            lines.append(
                f"  {x.path:<{width}}  {x.spec!s:<24} {size(x.spec.nbytes):>10}{where}  {fate(x)}"
            )
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return page.fragment(self.to_dict())

    def _mesh_lines(self) -> list[str]:
        if not self.mesh:
            return []
        lines = [f"mesh {self.mesh}: {size(self.device_state_bytes)} of state on each device"]
        for where, in_loop in (("in the loop, each trip", True), ("outside the loop", False)):
            if self.collectives is not None:
                lines.append(
                    f"{where}: {_total(c for c in self.collectives if c.in_loop == in_loop)}"
                )
        return lines


def totals(leaves: Iterable[Leaf]) -> dict[str, int]:
    """Bytes on each device by kind, in the order of `KINDS`; kinds without leaves are left out."""
    found: dict[str, int] = {}
    for x in leaves:
        found[x.kind] = found.get(x.kind, 0) + x.device_bytes
    return {k: found[k] for k in KINDS if k in found}


def memory_lines(leaves: Sequence[Leaf], need: Need | None, mesh: bool) -> list[str]:
    """The table of bytes by kind, with the floor below it."""
    if not leaves:
        return []
    by_kind = totals(leaves)
    lines = ["memory on each device:" if mesh else "memory:"]
    for kind, nbytes in by_kind.items():
        count = sum(x.kind == kind for x in leaves)
        lines.append(f"  {kind:<19} {count:>5} leaves {size(nbytes):>10}")
    lines.append(
        f"  floor, the sum of these   {size(sum(by_kind.values())):>12}  (without activations of "
        "one microbatch and results)"
    )
    if need is not None:
        lines.append(
            f"  the compiler's account    {size(need.total):>12}  (inputs {size(need.inputs)}, "
            f"temporaries with accumulators {size(need.temporaries)}, other outputs "
            f"{size(need.outputs)}, constants {size(need.constants)})"
        )
    return lines


def fate(leaf: Leaf) -> str:
    """What becomes of a leaf's buffer."""
    if not leaf.donated:
        return "kept"
    place = {True: " in place", False: " MOVED", None: ""}[leaf.in_place]
    return f"donated to output {leaf.output}{place}"


def _total(found: Iterable[Collective]) -> str:
    kinds: dict[str, list[int]] = {}
    for c in found:
        kinds.setdefault(c.kind, []).append(c.nbytes)
    listed = [f"{len(n)} {kind} ({size(sum(n))})" for kind, n in sorted(kinds.items())]
    return ", ".join(listed) or "no communication"
