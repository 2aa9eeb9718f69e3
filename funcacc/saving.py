"""`save` and `load`: everything that a run goes on from, in one file."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from funcacc import trees
from funcacc.engines import settle
from funcacc.errors import StateError
from funcacc.files import plain, read_tree, write_tree
from funcacc.misfits import COMPARED, misfits, parameter_names
from funcacc.parts import remember, single, state_of


def save(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write the state of models, optimizers, schedulers, steps and plain values to one file.

    The file is written aside and then put in the place of an older one: whatever happens, there
    is the whole old file or the whole new one. It holds host tensors, so it loads on every
    engine, and with ``torch.load(path, weights_only=True)`` it is a dict of the state dicts.

    Args:
        path: of the file; its folder exists. With the suffix ``.safetensors`` it holds tensors
            by dotted name (``model.fc.weight``, ``opt.state.0.exp_avg``), the rest in its
            metadata; otherwise it is written by `torch.save`.
        **parts: what to save, by name: anything with ``state_dict()``, a list of such
            objects, or a value made of tensors, numbers, strings, lists and dicts.

    Raises:
        StateError: for a value that a file without code can't hold, by its path.
        OSError: when it can't be written; an older file is as it was.

    Example:
        >>> import tempfile, torch, funcacc
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> step = funcacc.TrainStep(model, opt, lambda m, x: m(x).square().mean())
        >>> path = tempfile.mkdtemp() + "/run.pt"
        >>> funcacc.save(path, model=model, opt=opt, step=step, epoch=3)
        >>> funcacc.load(path, model=model, opt=opt, step=step)
        {'epoch': 3}
    """
    states = {name: state_of(part) for name, part in parts.items()}
    settle(x for x in trees.flatten(states)[0] if isinstance(x, Tensor))
    known: dict[int, Tensor] = {}
    write_tree(Path(path), {n: plain(state, n, known) for n, state in states.items()})
    remember(Path(path), parts)


def load(path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
    """Load what `save` wrote into models, optimizers, schedulers and steps.

    Everything is compared first: on an error nothing was changed. Optimizer state
    may be new; it is compared with what the optimizer itself would make.

    Args:
        path: of the file.
        **parts: what to load into, by the names given to `save`; parts of the file that
            aren't named are returned.

    Returns:
        The rest of the file: values, and state dicts that weren't asked for.

    Raises:
        StateError: for a file that is truncated, damaged or not of this kind; for state that
            doesn't fit, with the path of each leaf that differs and what it is in the file
            and here.
        OSError: when it can't be read.
    """
    saved = read_tree(Path(path))
    lines = []
    names = parameter_names(parts)
    for name, part in parts.items():
        if name in saved:
            lines += [f"  {line}" for line in misfits(part, saved[name], name, names)]
        else:
            lines.append(f"  {name}: missing in the file, which holds {', '.join(saved)}")
    if lines:
        raise StateError(f"{path} doesn't fit; nothing was loaded:\n" + "\n".join(lines))
    _load_all([(part, saved[name]) for name, part in parts.items()])
    remember(Path(path), parts)
    return {name: value for name, value in saved.items() if name not in parts}


# Loading -------------------------------------------------------------------------------


def _load_all(pairs: list[tuple[Any, Any]]) -> None:
    """Load; what may fail goes first, and is put back when it does."""
    flat = [p for part, state in pairs for p in single(part, state)]
    flat.sort(key=lambda pair: isinstance(pair[0], COMPARED))
    before: list[tuple[Any, Any]] = []
    try:
        for part, state in flat:
            if not isinstance(part, COMPARED):
                before.append((part, copy.deepcopy(part.state_dict())))
            part.load_state_dict(_versioned(part, state))
    except BaseException:
        for part, state in reversed(before):
            part.load_state_dict(state)
        raise


def _versioned(part: Any, state: Any) -> Any:
    """The versions of its modules, which only files of `torch.save` keep."""
    if isinstance(part, nn.Module) and not hasattr(state, "_metadata"):
        state = OrderedDict(state)
        state._metadata = getattr(part.state_dict(), "_metadata", None)
    return state
