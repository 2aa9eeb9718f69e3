"""What a dispatch that failed has left, and the errors that say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from funcacc import account
from funcacc.engines.base import Engine
from funcacc.errors import EngineError, FuncaccError, StateError
from funcacc.report import Leaf

_SHOWN = 6


def lost(engine: Engine, state: Mapping[str, Tensor]) -> list[str]:
    """Paths of the leaves of a state that have no value any more; waits for the device."""
    paths = list(state)
    return [paths[i] for i in engine.failures(list(state.values()))]


def of_dispatch(
    error: Exception,
    engine: Engine,
    state: Mapping[str, Tensor],
    leaves: Sequence[Leaf],
    checkpoint: Path | None,
) -> FuncaccError:
    """What to raise when a program or the upload of its inputs failed.

    Args:
        error: what the engine raised.
        engine: on which it ran.
        state: the donated tensors by path, as the user holds them.
        leaves: what the program takes of memory.
        checkpoint: the newest one known.
    """
    gone = lost(engine, state)
    short = account.is_out_of_memory(error)
    if not gone:
        if short:
            return account.out_of_memory(error, "run", leaves)
        return EngineError(
            f"the {engine.name} engine failed to run the step: {account.first_line(error)}. "
            "Parameters, buffers and optimizer state are as they were before it"
        )
    return StateError(
        f"the {engine.name} engine failed after the step had taken its state over: "
        f"{account.first_line(error)}. {_listed(gone, state)} no value any more. "
        f"{_cure(checkpoint)}" + (f"\n{account.advice(leaves)}" if short else "")
    )


def still_lost(
    gone: Sequence[str], state: Mapping[str, Tensor], checkpoint: Path | None
) -> StateError:
    """What to raise when a step is asked for before everything was loaded again."""
    return StateError(
        f"the device failed in an earlier step, and {_listed(gone, state)} no value since then. "
        f"{_cure(checkpoint)}"
    )


def copied(leaves: Sequence[Leaf]) -> EngineError:
    """What to raise when a program that was to donate its state has copied some of it.

    Args:
        leaves: of the state that no output has taken.
    """
    lines = [f"  {x.path} ({x.spec}{', ' + x.placement if x.placement else ''})" for x in leaves]
    return EngineError(
        "the program doesn't write these leaves of the state into their own memory, so that each "
        "would exist twice:\n" + "\n".join(lines) + "\nThe step was taken, and model and optimizer "
        "hold its values; further steps are refused. Give TrainStep donate=False to go on with "
        "copies of all state"
    )


def _cure(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return (
            "Load a checkpoint before the next step: model.load_state_dict(...), "
            "opt.load_state_dict(...) and step.load_state_dict(...)"
        )
    return (
        f"Load a checkpoint before the next step; the newest that funcacc has saved or loaded of "
        f"this model is {checkpoint}"
    )


def _listed(gone: Sequence[str], state: Mapping[str, Tensor]) -> str:
    if len(gone) == len(state):
        return f"All {len(gone)} leaves of the state have"
    more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
    return f"{', '.join(gone[:_SHOWN])}{more} (of {len(state)} leaves) have"
