"""Modules as pure functions of their parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from funcacc import guard
from funcacc.capture import context
from funcacc.capture.random import RandomOperations
from funcacc.types import LossFn, PyTree


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name; tied ones once, under their first name."""
    return dict(model.named_parameters())


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers by name, non-persistent ones included."""
    return dict(model.named_buffers())


def names(model: nn.Module) -> dict[int, str]:
    """Id of each parameter -> its name."""
    return {id(p): n for n, p in model.named_parameters()}


def call(model: nn.Module, loss_fn: LossFn | None, batch: PyTree) -> Any:
    """What the user's loss function returns; without one, the model's own output."""
    if loss_fn is not None:
        return loss_fn(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


@contextlib.contextmanager
def swapped(model: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Let the model compute with `values` in place of its parameters and buffers.

    Stays open over the backward pass too: a checkpoint recomputes there and reads the
    module's parameters again.
    """
    tracing = context.current()
    if tracing is not None:
        tracing.weights.update({id(v): v for v in values.values()})
    # A handler that saves the model must not meet traced values in it.
    waiting = guard.deferred(interruptible=True)
    with waiting, _no_traces_left(model), _reparametrize_module(model, values, tie_weights=True):
        yield


@contextlib.contextmanager
def inputs_as(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the floating tensors that the model is called with; `None` leaves them as they are."""
    if dtype is None:
        yield
        return

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs)
        )

    handle = model.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


_TABLES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def _no_traces_left(model: nn.Module) -> Iterator[None]:
    """Undo assignments of traced tensors to modules, useless outside the trace."""
    before = [
        (m, dict(m.__dict__), [dict(m.__dict__[t]) for t in _TABLES]) for m in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, tables in before:
            _restore(module.__dict__, attributes)
            for table, entries in zip(_TABLES, tables, strict=True):
                _restore(module.__dict__[table], entries)


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in list(now.items()):
        held = list(value.parameters()) if isinstance(value, nn.Module) else [value]
        if any(isinstance(t, FakeTensor) for t in held):
            if name in before:
                now[name] = before[name]
            else:
                del now[name]


class FunctionalModel:
    """A model and a loss function as one pure function.

    Made by `functionalize`.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None = None) -> None:
        self.model = model
        self.loss_fn = loss_fn

    def init(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The model's present parameters and buffers.

        Returns:
            ``(params, buffers)``: dicts from name to a detached copy. Tied weights are one
            entry.
        """
        params = {n: p.detach().clone() for n, p in parameters(self.model).items()}
        return params, {n: b.detach().clone() for n, b in buffers(self.model).items()}

    def apply(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        rng: Tensor | None,
        batch: PyTree,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Compute without touching the model.

        Args:
            params: by name, as `init` gives them.
            buffers: by name; not changed.
            rng: ``int32[2]`` key that dropout and other random operations draw from;
                `None` when there are none.
            batch: what the loss function takes.

        Returns:
            ``(result, new_buffers)``: what the loss function (or the model) returned, and
            the buffers after it.
        """
        values = {n: b.clone() for n, b in buffers.items()}
        with _drawing_from(rng), swapped(self.model, {**params, **values}):
            result = call(self.model, self.loss_fn, batch)
            after = dict(self.model.named_buffers(remove_duplicate=False))
        return result, {n: after[n] for n in buffers}


@contextlib.contextmanager
def _drawing_from(rng: Tensor | None) -> Iterator[None]:
    if rng is None:
        yield
        return
    tracing = context.current()
    random = tracing.random if tracing else RandomOperations()
    with contextlib.nullcontext() if tracing else random, random.drawing_from(rng):
        yield


def functionalize(model: nn.Module, loss_fn: LossFn | None = None) -> FunctionalModel:
    """A model, with or without a loss, as a pure function for use with `torch.func`.

    Args:
        model: any module.
        loss_fn: ``loss_fn(model, batch)``; `None` calls the model itself.

    Returns:
        A `FunctionalModel`.

    Example:
        >>> import torch, funcacc
        >>> fm = funcacc.functionalize(torch.nn.Linear(2, 1), lambda m, x: m(x).sum())
        >>> params, buffers = fm.init()
        >>> grad = torch.func.grad(lambda p: fm.apply(p, buffers, None, torch.ones(3, 2))[0])
        >>> grad(params)["weight"]
        tensor([[3., 3.]])
    """
    return FunctionalModel(model, loss_fn)
