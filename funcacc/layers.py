"""`scan_layers`: a stack of identical modules as one loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from funcacc import attributes, loops, model, trees
from funcacc.capture import context
from funcacc.capture.context import Tracing
from funcacc.capture.trace import capture
from funcacc.errors import ModelError
from funcacc.remat import checkpoint as recompute
from funcacc.types import PyTree, TensorSpec


def scan_layers(
    modules: Iterable[nn.Module], x: PyTree, *args: Any, checkpoint: bool = False
) -> PyTree:
    """Send `x` through a stack of identical modules, in one loop.

    Equals::

        for module in modules:
            x = module(x, *args)
        return x

    with these differences where it is traced (inside a training step or `jit`, and on XLA
    devices); elsewhere it is that loop:

    - the program holds the module once, so the time to trace and compile it hardly depends
      on how many there are;
    - parameters and buffers are copied into one stack for the loop, and the gradients of
      the parameters come as a stack, so both are there twice while it runs;
    - each module draws random numbers of its own, others than it would draw without the loop;
    - differentiable once, in reverse mode.

    Buffers that the modules update (batch statistics) are updated in each of them.

    Args:
        modules: alike in class, settings, shapes and dtypes; values may differ, and so may
            attributes that the forward pass doesn't read (a layer's index). An ``nn.ModuleList``
            or any other iterable.
        x: what the first one takes; each returns something of the same structure, shapes
            and dtypes.
        *args: given to each of them as they are.
        checkpoint: keep only `x` at each module for the gradient, and compute the rest again
            on the way back.

    Returns:
        What the last one returned.

    Raises:
        ModelError: when a module differs from the first; all differences are listed.
        CarryError: when a module returns another structure, shape or dtype than it took.

    Example:
        >>> import torch, funcacc
        >>> blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        >>> funcacc.scan_layers(blocks, torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    stack = list(modules)
    _check_alike(stack)
    if not stack:
        return x
    if _on_host(stack, x):
        for module in stack:
            x = _call(module, x, args, checkpoint)
        return x
    params = [model.parameters(m) for m in stack]
    buffers = [model.buffers(m) for m in stack]
    first = stack[0]
    changed = _changed_buffers(first, x, args) if buffers[0] else []
    # One dict each, in one order; `swapped` puts a slice of them into the first module.
    xs = {n: _stack([p[n] for p in params]) for n in params[0]}
    xs.update({n: _stack([b[n] for b in buffers]) for n in buffers[0]})

    def body(carry: PyTree, values: dict[str, Tensor]) -> tuple[PyTree, list[Tensor]]:
        with model.swapped(first, dict(values)):
            out = first(carry, *args)
            after = model.buffers(first)
        return out, [after[n] for n in changed]

    different = _differing_attributes(stack)
    with attributes.noting_reads(first, different.keys()) as read:
        out, rows = loops.scan(body, x, xs, len(stack), checkpoint=checkpoint)
    if read:
        _refuse([different[path] for path in sorted(read)])
    with torch.no_grad():
        for name, new in zip(changed, rows, strict=True):
            for i, own in enumerate(buffers):
                own[name].copy_(new[i])
    return out


def _stack(values: list[Tensor]) -> Tensor:
    """`torch.stack`, with fewer operations in the graph."""
    if not values[0].ndim:
        return torch.stack(values)
    return torch.cat(values).view(len(values), *values[0].shape)


def _call(module: nn.Module, x: PyTree, args: tuple[Any, ...], checkpoint: bool) -> PyTree:
    if checkpoint and torch.is_grad_enabled():
        return recompute(module, x, *args)
    return module(x, *args)


def _on_host(stack: list[nn.Module], x: PyTree) -> bool:
    leaves = [t for t in trees.flatten(x)[0] if isinstance(t, Tensor)]
    tensors = [*leaves, *model.parameters(stack[0]).values()]
    return context.current() is None and all(t.device.type != "xla" for t in tensors)


def _changed_buffers(module: nn.Module, x: PyTree, args: tuple[Any, ...]) -> list[str]:
    """The buffers that a forward pass writes: those that leave a trace otherwise than they came."""
    leaves, spec = trees.flatten(x)
    given = {**model.parameters(module), **model.buffers(module)}
    names = list(model.buffers(module))

    def fn(tracing: Tracing, key: Tensor, *flat: Tensor) -> list[Tensor]:
        values = {n: t.clone() for n, t in zip(given, flat, strict=False)}
        with tracing.random.drawing_from(key), model.swapped(module, values), torch.no_grad():
            module(trees.unflatten(spec, list(flat[len(given) :])), *args)
            after = model.buffers(module)
        return [after[n] for n in names]

    specs = [TensorSpec((2,), torch.int32), *map(TensorSpec.of, [*given.values(), *leaves])]
    graph = capture(fn, specs, [f"in[{i}]" for i in range(len(specs))], in_loop=True)
    inputs = set(graph.placeholders)
    return [n for n, result in zip(names, graph.results, strict=True) if result not in inputs]


def _check_alike(stack: list[nn.Module]) -> None:
    for i, module in enumerate(stack):
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"scan_layers takes modules, but modules[{i}] is a {type(module).__name__}"
            )
    lines = []
    for i, module in enumerate(stack[1:], 1):
        for what, want, got in zip(
            ("class", "parameters", "buffers", "train() or eval()", "settings"),
            _signature(stack[0]),
            _signature(module),
            strict=True,
        ):
            if want != got:
                lines.append(f"  modules[{i}] has other {what}: {_short(got)}, not {_short(want)}")
                break
    if lines:
        _refuse(lines)


def _refuse(lines: list[str]) -> NoReturn:
    raise ModelError(
        "scan_layers needs modules that are alike; call those that differ one by one:\n"
        + "\n".join(lines)
    )


def _differing_attributes(stack: list[nn.Module]) -> dict[str, str]:
    """Path of each attribute that isn't the same in all modules -> how it differs."""
    found: dict[str, str] = {}
    want = {path: value for path, _, value in attributes.entries(stack[0])}
    for i, module in enumerate(stack[1:], 1):
        for path, kind, value in attributes.entries(module):
            if kind != "hooks" and path in want and want[path] != value and path not in found:
                got = "another tensor" if isinstance(value, tuple) else f"{value!r}"
                first = "" if isinstance(value, tuple) else f", not {want[path]!r}"
                found[path] = f"  modules[{i}].{path}, which forward reads, is {got}{first}"
    return found


def _signature(module: nn.Module) -> tuple[Any, ...]:
    return (
        type(module).__name__,
        {n: str(TensorSpec.of(p)) for n, p in model.parameters(module).items()},
        {n: str(TensorSpec.of(b)) for n, b in model.buffers(module).items()},
        tuple(m.training for m in module.modules()),
        repr(module),
    )


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 120 else text[:117] + "..."
