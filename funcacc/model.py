"""Modules as pure functions of their parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module

from funcacc.capture import context
from funcacc.capture.random import RandomOperations
from funcacc.errors import ModelError
from funcacc.types import LossFn, PyTree


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name; tied ones once, under their first name."""
    return dict(model.named_parameters())


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers by name, non-persistent ones included."""
    return dict(model.named_buffers())


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
    with _no_traces_left(model), _reparametrize_module(model, values, tie_weights=True):
        yield


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


def gradient_hooks(model: nn.Module) -> dict[str, list[Callable[[Tensor], Tensor | None]]]:
    """The hooks on the gradients of parameters, by name.

    Raises:
        ModelError: for a hook that waits for ``.grad``, which a step doesn't write.
    """
    found = {}
    for name, p in parameters(model).items():
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise ModelError(
                f"params[{name!r}] has a hook of register_post_accumulate_grad_hook(), and a step "
                "doesn't accumulate into .grad; use register_hook(), or the option grad_transform"
            )
        if p._backward_hooks:
            found[name] = list(p._backward_hooks.values())
    return found


def refuse_new_state(model: nn.Module, names: Iterable[str], frozen: Mapping[str, Tensor]) -> None:
    """Refuse what the forward pass made that outlives it in a plain loop.

    Args:
        model: after its forward pass, values still swapped in.
        names: parameters and buffers before it, all names of shared ones.
        frozen: the traced parameters that aren't differentiated.

    Raises:
        ModelError: with the path, and what to do.
    """
    known = set(names)
    for what, named in (("params", model.named_parameters), ("buffers", model.named_buffers)):
        for name, _ in named(remove_duplicate=False):
            if name not in known:
                raise ModelError(
                    f"the forward pass makes {what}[{name!r}], which a step can't carry, since it "
                    "wasn't there before; run one forward pass before the step, and make the "
                    "optimizer after it"
                )
    for name, p in frozen.items():
        if p.requires_grad:
            raise ModelError(
                f"the forward pass sets requires_grad of params[{name!r}], too late for the step; "
                "set it before the call"
            )


def tensor_attributes(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """The tensors that modules hold as plain attributes: path, module, name, tensor."""
    return [
        (f"{path}.{name}" if path else name, module, name, value)
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor)
    ]


def refuse_attribute_state(before: list[tuple[str, nn.Module, str, Tensor]]) -> None:
    """Refuse an attribute that the forward pass replaces by a function of its value.

    Args:
        before: what `tensor_attributes` gave before it.

    Raises:
        ModelError: with the path, and what to do.
    """
    tracing = context.current()
    assert tracing is not None
    for path, module, name, old in before:
        new = module.__dict__.get(name)
        if isinstance(new, FakeTensor) and new is not old and tracing.computed_from(new, old):
            raise ModelError(
                f"the forward pass replaces {path!r}, a tensor attribute, by a value computed from "
                "it, and a step carries only parameters and buffers from one microbatch to the "
                f"next; make it a buffer: self.register_buffer({name!r}, ...)"
            )


def all_names(model: nn.Module) -> list[str]:
    """Names of parameters and buffers, all of those that share one."""
    params = model.named_parameters(remove_duplicate=False)
    return [n for n, _ in (*params, *model.named_buffers(remove_duplicate=False))]


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


def device_of(model: nn.Module) -> torch.device:
    """The one device that holds all parameters and buffers.

    Raises:
        ModelError: when there are none, or they are on several devices or not yet made.
    """
    tensors = {**parameters(model), **buffers(model)}
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameters to train")
    for name, t in tensors.items():
        if isinstance(t, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ModelError(
                f"params[{name!r}] is not initialised yet (a lazy module); run one forward pass "
                "before the first step"
            )
    first = next(iter(tensors))
    for name, t in tensors.items():
        if t.device != tensors[first].device:
            raise ModelError(
                f"the model is on two devices: {first!r} on {tensors[first].device}, "
                f"{name!r} on {t.device}; move all of it by model.to(device)"
            )
    if tensors[first].device.type == "meta":
        raise ModelError("the model is on the meta device, without values; materialise it first")
    _check_ties(model)
    return tensors[first].device


def _check_ties(model: nn.Module) -> None:
    """Find weights that a transformers model wants tied and that moving it has untied."""
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if not getattr(config, "tie_word_embeddings", False) or not hasattr(module, "tie_weights"):
            continue
        entry, head = module.get_input_embeddings(), module.get_output_embeddings()
        a, b = getattr(entry, "weight", None), getattr(head, "weight", None)
        if a is not None and b is not None and a is not b and a.shape == b.shape:
            name = f"model.{path}" if path else "model"
            raise ModelError(
                f"{type(module).__name__} ties its output weights to its input embeddings "
                "(config.tie_word_embeddings), but they are two parameters now: moving a model to "
                f"an XLA device unties them. Call {name}.tie_weights() after moving, before the "
                "optimizer is made, or set tie_word_embeddings=False"
            )
