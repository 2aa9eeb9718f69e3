"""The options of ``funcacc train`` and the checks that need no data and no device."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from funcacc.cli import meshes
from funcacc.cli.errors import OneLineParser, UsageError
from funcacc.cli.gpt import GPTConfig


@dataclass(frozen=True)
class TrainOptions:
    """What ``funcacc train`` was asked for; one field for each option."""

    engine: str
    mesh: dict[str, int] | None
    microbatches: int
    microbatch_size: int
    context: int
    steps: int
    lr: float
    warmup: int
    clip: float
    dropout: float
    layers: int
    heads: int
    width: int
    seed: int
    data: Path | None
    out: Path
    resume: bool
    eval_every: int
    save_every: int
    memory: bool

    @property
    def model(self) -> GPTConfig:
        """The model's shape."""
        return GPTConfig(self.context, self.layers, self.heads, self.width, self.dropout)

    @property
    def tokens_per_step(self) -> int:
        """How many bytes one optimizer step learns from."""
        return self.microbatches * self.microbatch_size * self.context

    def config(self, *, engine: str, digest: str) -> dict[str, Any]:
        """Return what determines the run's numbers, as JSON values.

        Args:
            engine: The engine that ``auto`` came to.
            digest: A hash of the data, whose path may change while it stays the same.
        """
        elsewhere = ("data", "out", "resume", "save_every", "memory")
        kept = {key: value for key, value in asdict(self).items() if key not in elsewhere}
        return kept | {"engine": engine, "data_sha256": digest}


def parse(argv: Sequence[str]) -> TrainOptions:
    """Turn arguments into options.

    Raises:
        UsageError: An argument is unknown, malformed or at odds with another.
    """
    options = vars(_parser().parse_args(argv))
    warmup = options["warmup"]
    if warmup is None:
        options["warmup"] = options["steps"] // 10
    elif warmup > options["steps"]:
        raise UsageError(f"--warmup {warmup} is longer than --steps {options['steps']}")
    mesh = options["mesh"] or {}
    if mesh and options["engine"] in ("eager", "jax"):
        name = options["engine"]
        raise UsageError(f"--mesh needs --engine xla: the {name} engine runs on one device")
    if options["microbatch_size"] % meshes.rows(mesh):
        raise UsageError(
            f"--microbatch-size {options['microbatch_size']} can't be cut into "
            f"{meshes.rows(mesh)} equal parts, as --mesh wants"
        )
    if options["width"] % options["heads"]:
        raise UsageError(f"--heads {options['heads']} does not divide --width {options['width']}")
    return TrainOptions(**options)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="funcacc train",
        description="Train a byte-level GPT with funcacc.TrainStep: one compiled program a step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    count, rate, part = _whole(1), _real(0.0, math.inf), _real(0.0, 1.0, low_too=True)
    add = parser.add_argument
    add("--engine", choices=("auto", "xla", "jax", "eager"), default="auto", help="where to train")
    axes = "; ".join(f"{name} {what}" for name, what in meshes.AXES.items())
    add("--mesh", type=meshes.parse, metavar="AXES",
        help=f"devices to train on, e.g. data=4,model=2: {axes}")  # fmt: skip
    add("--microbatches", type=count, default=4, help="microbatches in an optimizer step")
    add("--microbatch-size", type=count, default=4, help="sequences in a microbatch")
    add("--context", type=count, default=128, help="bytes in a sequence")
    add("--steps", type=count, default=400, help="optimizer steps")
    add("--lr", type=rate, default=3e-3, help="peak learning rate; a cosine takes it to a tenth")
    add("--warmup", type=_whole(0), help="steps of linear warm-up (default: a tenth of --steps)")
    add("--clip", type=_real(0.0, math.inf, low_too=True), default=1.0,
        help="largest gradient norm; 0 switches clipping off")  # fmt: skip
    add("--dropout", type=part, default=0.0, help="probability of dropping")
    add("--layers", type=count, default=4, help="blocks")
    add("--heads", type=count, default=4, help="attention heads in a block")
    add("--width", type=count, default=160, help="size of a token's vector")
    add("--seed", type=_whole(0), default=0, help="of parameters, data order and dropout")
    add("--data", type=Path, help="a text file, or a folder of them (default: the Python "
        "sources of this interpreter's standard library)")  # fmt: skip
    add("--out", type=Path, default=Path("runs/train"), metavar="RUN_DIR", help="where to write")
    add("--resume", action="store_true", help="go on with the run in RUN_DIR, if there is one")
    add("--eval-every", type=count, default=50, help="steps between held-out losses")
    add("--save-every", type=count, default=50, help="steps between checkpoints")
    add("--memory", action="store_true", help="at the end also ask the compiler what the program "
        "needs (XLA on a CPU), by compiling it once more")  # fmt: skip
    return parser


def _whole(low: int) -> Callable[[str], int]:
    def parse_whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return value

    return parse_whole


def _real(low: float, high: float, *, low_too: bool = False) -> Callable[[str], float]:
    bounds = f"from {low:g}" if low_too else f"above {low:g}"
    bounds += "" if high == math.inf else f" and below {high:g}"

    def parse_real(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value < high or (low_too and value == low)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")
        return value

    return parse_real
