"""Engines: what is installed, and which one runs a model."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc.engines import pairs
from funcacc.engines.base import Engine
from funcacc.engines.eager import EagerEngine
from funcacc.errors import EngineError


class EngineInfo(NamedTuple):
    """What `engines` tells of an engine.

    Attributes:
        installed: whether it can be used now.
        install: the command that installs it; empty where nothing is needed.
        reason: why it can't be used; empty when it can.
    """

    installed: bool
    install: str
    reason: str


def engines() -> dict[str, EngineInfo]:
    """The engines that funcacc has, and whether they are installed.

    Returns:
        A dict from name to `EngineInfo`.

    Example:
        >>> import funcacc
        >>> funcacc.engines()["eager"].installed
        True
    """
    return {"eager": EngineInfo(True, "", ""), **{n: _info(n) for n in _PACKAGES}}


_PACKAGES = {"xla": ("torch_xla", pairs.INSTALL_XLA), "jax": ("jax", pairs.INSTALL_JAX)}


def _info(name: str) -> EngineInfo:
    package, install = _PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        return EngineInfo(False, install, f"{package} is not installed")
    found = pairs.version(package)
    if found is None:
        return EngineInfo(False, install, f"{package} is there, but not as an installed package")
    if name == "xla":
        broken = pairs.broken_xla(torch.__version__.split("+")[0], found)
    else:
        broken = pairs.broken_jax(found, pairs.version("jaxlib"))
    if broken is not None:
        return EngineInfo(False, broken.cure, broken.reason)
    try:
        importlib.import_module(package)
    except Exception as e:
        return EngineInfo(False, install, f"{package} can't be imported: {e}")
    return EngineInfo(True, "", "")


def get_engine(name: str, device: torch.device, mesh: Any = None) -> Engine:
    """The engine called `name` for tensors on `device`.

    Args:
        name: ``"auto"``, ``"eager"``, ``"xla"`` or ``"jax"``.
        device: where the model is; ``"auto"`` goes by it, and on the CPU by the environment
            variable ``FUNCACC_ENGINE``, if that is set.
        mesh: of devices behind `device`, in the engine's own form; `None` takes the one that was
            made global in the process, if any.

    Raises:
        EngineError: for an unknown or missing engine, or a device it doesn't serve.
    """
    if name == "auto":
        name = _automatic(device)
    require(name)
    if (name == "xla") != (device.type == "xla"):
        cure = 'model.to(funcacc.device("xla"))' if name == "xla" else 'engine="xla"'
        raise EngineError(f"engine {name!r} can't run tensors on {device}; use {cure}")
    if name == "jax" and device.type != "cpu":
        raise EngineError(
            f"engine 'jax' takes models on the CPU, and this one is on {device}; use "
            'model.to(funcacc.device("jax"))'
        )
    if name == "xla":
        from funcacc.engines.xla import XlaEngine

        return XlaEngine(device, mesh)
    if mesh is not None:
        why = ", because its state lies where PyTorch reads it" if name == "jax" else ""
        raise EngineError(f'engine {name!r} runs on one device{why}; leave mesh out, or use "xla"')
    if name == "jax":
        from funcacc.engines.jax import JaxEngine

        return JaxEngine(device)
    return EagerEngine(device)


def _automatic(device: torch.device) -> str:
    if device.type == "xla":
        return "xla"
    asked = os.environ.get("FUNCACC_ENGINE", "eager")
    return asked if device.type == "cpu" and asked != "xla" else "eager"


def require(name: str) -> None:
    """Make sure that an engine can be used.

    Raises:
        EngineError: for an unknown or missing one, with the command that installs it.
    """
    if name == "eager":
        return
    if name not in _PACKAGES:
        raise EngineError(f"there is no engine {name!r}; choose from 'auto', 'eager', 'xla', 'jax'")
    info = _info(name)
    if not info.installed:
        raise EngineError(f"engine {name!r}: {info.reason}; install it by: {info.install}")


def device(engine: str = "auto") -> torch.device:
    """Where a model goes that an engine shall run.

    Args:
        engine: ``"xla"``, ``"jax"`` (the CPU: its step is asked for by ``engine="jax"``),
            ``"eager"``, or ``"auto"``: XLA where it is installed.

    Returns:
        The device, for ``model.to(...)``.

    Raises:
        EngineError: when the engine is unknown or not installed.

    Example:
        >>> import funcacc
        >>> funcacc.device("eager")
        device(type='cpu')
    """
    if engine == "auto":
        engine = "xla" if _info("xla").installed else "eager"
    if engine == "eager":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    get_engine(engine, torch.device("xla" if engine == "xla" else "cpu"))
    if engine == "jax":
        return torch.device("cpu")
    import torch_xla

    found: torch.device = torch_xla.device()
    return found


def settle(tensors: Iterable[Tensor]) -> None:
    """Have device tensors computed, all at once rather than in one program for each."""
    for device in {t.device for t in tensors if t.device.type != "cpu"}:
        engine = get_engine("auto", device)
        engine.settle()
        engine.wait()
