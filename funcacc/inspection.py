"""What of a model a step needs to know, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.lazy import LazyModuleMixin

from funcacc.capture import context
from funcacc.errors import ModelError
from funcacc.model import buffers, parameters


def device_of(model: nn.Module) -> torch.device:
    """The one device that holds all parameters and buffers.

    Raises:
        ModelError: when there are none, or they are on several devices or not yet made.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    tensors = {**parameters(model), **buffers(model)}
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameters to train")
    for path, module in model.named_modules():
        if isinstance(module, LazyModuleMixin):
            # On XLA its parameters don't say so: moving makes them ordinary ones of size 0.
            raise ModelError(
                f"{path or type(module).__name__!r} is a lazy module without parameters yet; run "
                "one forward pass before moving the model to its device and making the optimizer"
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
    for name, t in tensors.items():
        if t.is_inference():
            raise ModelError(
                f"{name!r} was made under torch.inference_mode(), and such a tensor can never "
                "become another value outside of it; make the model outside"
            )
    _check_ties(model)
    return tensors[first].device


def check_loss(loss_fn: object) -> None:
    """Refuse what isn't a loss function.

    Raises:
        ModelError: naming its type.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise ModelError(
            f"loss_fn is a {type(loss_fn).__name__}; give a function (model, microbatch) -> loss, "
            "or None for the model's own"
        )


def check_placed(model: nn.Module, device: torch.device) -> None:
    """Refuse a model of which something has left the device since the step was made.

    Raises:
        ModelError: naming it.
    """
    for kind, tensors in (("params", parameters(model)), ("buffers", buffers(model))):
        for name, t in tensors.items():
            if t.device != device:
                raise ModelError(
                    f"{kind}[{name!r}] is on {t.device}, but the step was made for a model on "
                    f"{device}; move it back, or make optimizer and step after moving the model"
                )


def check_apart(params: Mapping[str, Tensor]) -> None:
    """Refuse trained parameters that lie in each other's memory: a step would separate them.

    Raises:
        ModelError: naming two of them.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, p in params.items():
        if p.numel():
            by_storage.setdefault(p.untyped_storage()._cdata, []).append((name, p))
    for found in by_storage.values():
        # Others may lie between each other's elements, as columns of a matrix do.
        rows = [(p.storage_offset(), p.numel(), n) for n, p in found if p.is_contiguous()]
        for (start, size, a), (after, _, b) in itertools.pairwise(sorted(rows)):
            if after < start + size:
                raise ModelError(
                    f"params[{a!r}] and params[{b!r}] are two parameters in the same memory; "
                    "assign one Parameter to both modules to tie them, or clone one of them"
                )


def _check_ties(model: nn.Module) -> None:
    """Find weights that a transformers model wants tied and that moving it has untied.

    Moving to XLA makes a new `Parameter` for each use of a shared one. Other libraries' modules
    don't say which of their parameters belong together.
    """
    for path, module in model.named_modules():
        wanted = getattr(module, "get_expanded_tied_weights_keys", None)
        own = dict(module.named_parameters(remove_duplicate=False))
        for a, b in wanted().items() if wanted else ():
            if a in own and b in own and own[a] is not own[b]:
                raise ModelError(
                    f"{type(module).__name__} ties {a!r} to {b!r}, but they are two parameters "
                    "now: moving a model to an XLA device unties them. Call "
                    f"{f'model.{path}' if path else 'model'}.tie_weights() after moving, before "
                    "the optimizer is made, or set config.tie_word_embeddings=False"
                )


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
