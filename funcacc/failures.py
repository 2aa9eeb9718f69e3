"""What a dispatch that failed has left, and the errors that say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from funcacc.engines.base import Engine
from funcacc.errors import EngineError, FuncaccError, StateError

_CURE = (
    "Load a checkpoint before the next step: model.load_state_dict(...), "
    "opt.load_state_dict(...) and step.load_state_dict(...)"
)
_SHOWN = 6


def lost(engine: Engine, state: Mapping[str, Tensor]) -> list[str]:
    """Paths of the leaves of a state that have no value any more; waits for the device."""
    paths = list(state)
    return [paths[i] for i in engine.failures(list(state.values()))]


def of_dispatch(error: Exception, engine: Engine, state: Mapping[str, Tensor]) -> FuncaccError:
    """What to raise when a program or the upload of its inputs failed.

    Args:
        error: what the engine raised.
        engine: on which it ran.
        state: the donated tensors by path, as the user holds them.
    """
    gone = lost(engine, state)
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not gone:
        return EngineError(
            f"the {engine.name} engine failed to run the step: {first}. Parameters, buffers and "
            "optimizer state are as they were before it"
        )
    return StateError(
        f"the {engine.name} engine failed after the step had taken its state over: {first}. "
        f"{_listed(gone, state)} no value any more. {_CURE}"
    )


def still_lost(gone: Sequence[str], state: Mapping[str, Tensor]) -> StateError:
    """What to raise when a step is asked for before everything was loaded again."""
    return StateError(
        f"the device failed in an earlier step, and {_listed(gone, state)} no value since then. "
        f"{_CURE}"
    )


def _listed(gone: Sequence[str], state: Mapping[str, Tensor]) -> str:
    if len(gone) == len(state):
        return f"All {len(gone)} leaves of the state have"
    more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
    return f"{', '.join(gone[:_SHOWN])}{more} (of {len(state)} leaves) have"
