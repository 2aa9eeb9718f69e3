"""What the compiler says that a program needs: asked in a process of its own.

XLA dumps its assignment of buffers when a flag says so at the start of the process. So another
process compiles the program once more: ``python -m funcacc.engines.xla.account FOLDER``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch_xla.core.xla_builder as xb

from funcacc.engines.dump import dumped
from funcacc.engines.xla import private
from funcacc.engines.xla.slots import compile_with_slots
from funcacc.errors import EngineError
from funcacc.report import Need
from funcacc.types import TensorSpec


def need(
    computation: Any, inputs: Sequence[TensorSpec], donate: int, device: torch.device
) -> Need | None:
    """The memory of a program; `None` where the compiler doesn't tell.

    Args:
        computation: one parameter an input, and a tuple of the outputs.
        inputs: of the program.
        donate: this many first outputs overwrite as many first inputs.
        device: where it is to run.

    Raises:
        EngineError: when the other process failed.
    """
    if private.sharded() or not private.on_cpu():
        return None
    with tempfile.TemporaryDirectory() as folder:
        order, proto = _serialised(computation, inputs, device)
        about = {
            "order": order,
            "inputs": [(list(s.shape), str(s.dtype).split(".")[1]) for s in inputs],
            "donate": donate,
        }
        (Path(folder) / "about.json").write_text(json.dumps(about))
        (Path(folder) / "program.pb").write_bytes(proto)
        found = dumped(lambda environment: _compile_elsewhere(folder, environment))
    return None if found is None else found.need


def _serialised(
    computation: Any, inputs: Sequence[TensorSpec], device: torch.device
) -> tuple[list[int], bytes]:
    """The program with its parameters in torch_xla's order, and that order."""
    try:
        holders = [private.placeholder(s.shape, s.dtype) for s in inputs]
        pending = private.user_computation("funcacc_step", holders, computation)
        return private.input_order(pending, holders), private.module_proto(pending)
    finally:
        private.clear_pending(device)


def _compile_elsewhere(folder: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__, folder],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise EngineError(f"the process that asks the compiler for its account failed: {last}")


def main(folder: str) -> None:
    """Compile what `need` has written into a folder."""
    about: dict[str, Any] = json.loads((Path(folder) / "about.json").read_text())
    proto = (Path(folder) / "program.pb").read_bytes()
    computation = xb.computation_from_module_proto("step", proto)
    holders = [private.placeholder(s, getattr(torch, d)) for s, d in about["inputs"]]
    arguments = [holders[i] for i in about["order"]]
    pending = private.user_computation("funcacc_step", arguments, computation)
    order = private.input_order(pending, holders)
    compile_with_slots(pending, order, holders[: about["donate"]])


if __name__ == "__main__":
    main(sys.argv[1])
