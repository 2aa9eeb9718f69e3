"""Clean-up of traced graphs: each pass takes a module or graph and changes it in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from funcacc.capture.graph import Graph

aten = torch.ops.aten

_PROFILING = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_COPIES = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}
_REDUCING = {
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var_mean.correction,
    aten.var.correction,
}
_PROMOTING = {
    getattr(packet, name)
    for packet in (
        aten.add,
        aten.sub,
        aten.mul,
        aten.div,
        aten.pow,
        aten.maximum,
        aten.minimum,
        aten.atan2,
        aten.fmod,
        aten.remainder,
        aten.where,
        aten.eq,
        aten.ne,
        aten.lt,
        aten.le,
        aten.gt,
        aten.ge,
    )
    for name in packet.overloads()
    if name in ("Tensor", "Tensor_Tensor", "self", "default")
}


def drop_profiling(module: fx.GraphModule) -> None:
    """Delete the marks that `Optimizer.step` leaves for the profiler."""
    for node in reversed(list(module.graph.nodes)):
        if node.target in _PROFILING:
            node.replace_all_uses_with(None)
            module.graph.erase_node(node)


def constants_to_inputs(module: fx.GraphModule, origin: dict[int, Tensor]) -> list[Tensor]:
    """Turn tensors stored in the module into trailing inputs; one-element ones into constants.

    Args:
        module: as traced.
        origin: for each stand-in, by id, the tensor of the user that it stands for.

    Returns:
        The tensors, in the order of the new inputs.
    """
    graph = module.graph
    found: dict[int, tuple[Tensor, fx.Node]] = {}
    last = [n for n in graph.nodes if n.op == "placeholder"]
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        value = getattr(module, node.target)
        if getattr(value, "constant", None) is not None:
            value = value.constant
        real = origin.get(id(value), value)
        if real is value and type(value) is Tensor and value.numel() == 1:
            _embed(graph, node, value)
            continue
        if id(real) not in found:
            with graph.inserting_after(last[-1]) if last else graph.inserting_before(node):
                last.append(graph.placeholder(f"captured_{len(found)}"))
            last[-1].meta["val"] = value
            found[id(real)] = (real, last[-1])
        node.replace_all_uses_with(found[id(real)][1])
        graph.erase_node(node)
    module.recompile()
    return [real for real, _ in found.values()]


def drop_unused(module: fx.GraphModule, captured: list[Tensor]) -> list[Tensor]:
    """Drop the trailing inputs that nothing reads; returns the tensors that are left."""
    last = [n for n in module.graph.nodes if n.op == "placeholder"][-len(captured) :]
    kept = []
    for node, tensor in zip(last, captured, strict=False):
        if node.users:
            kept.append(tensor)
        else:
            module.graph.erase_node(node)
    module.recompile()
    return kept


def _embed(graph: fx.Graph, node: fx.Node, value: Tensor) -> None:
    with _disable_current_modes():
        number = value.item()
    with graph.inserting_before(node):
        full = graph.call_function(
            aten.full.default,
            (list(value.shape), number),
            {"dtype": value.dtype, "device": torch.device("cpu"), "pin_memory": False},
        )
    full.meta["val"] = node.meta.get("val", value)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def simplify(module: fx.GraphModule) -> None:
    """Drop copies that a pure program doesn't need, write promotions out, drop dead code."""
    for node in list(module.graph.nodes):
        if node.target in _COPIES and _same_layout(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target is aten.copy.default:
            _replace_copy(module.graph, node)
        elif node.target in _PROMOTING:
            _promote(module.graph, node)
        elif node.target in _REDUCING and len(node.args) > 1 and node.args[1] == []:
            # "All dimensions"; torch_xla takes it for none.
            rank = node.args[0].meta["val"].ndim
            node.args = (node.args[0], list(range(rank)), *node.args[2:])
    module.graph.eliminate_dead_code()
    module.recompile()


def _replace_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Write a functional copy as cast and expand: torch_xla's own overwrites its operand."""
    source, target = node.args[1], node.meta["val"]
    value = source.meta["val"]
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    if value.dtype != target.dtype:
        steps.append((aten._to_copy.default, (), {"dtype": target.dtype}))
    if value.shape != target.shape:
        steps.append((aten.expand.default, (list(target.shape),), {}))
    with graph.inserting_before(node):
        for op, args, kwargs in steps:
            source = graph.call_function(op, (source, *args), kwargs)
            source.meta["val"] = target
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _same_layout(node: fx.Node) -> bool:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    a, b = source.meta.get("val"), node.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.stride() == b.stride()


def _promote(graph: fx.Graph, node: fx.Node) -> None:
    """Cast operands of mixed dtype where they stand: engines promote 0-d ones differently."""
    skip = 1 if node.target is aten.where.self else 0
    operands = [a for a in node.args[skip:] if isinstance(a, fx.Node)]
    values = [a.meta["val"] for a in operands]
    if len({v.dtype for v in values}) < 2:
        return
    common = torch.result_type(values[0], values[1])
    if not common.is_floating_point:
        return
    for operand, value in zip(operands, values, strict=True):
        if value.dtype != common:
            with graph.inserting_before(node):
                cast = graph.call_function(aten._to_copy.default, (operand,), {"dtype": common})
            cast.meta["val"] = value.to(common)
            node.replace_input_with(operand, cast)


def place(graph: Graph, device: torch.device) -> None:
    """Create tensors on `device` instead of the CPU, where the graph was traced."""
    for node in graph.module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    graph.module.recompile()
    for part in graph.parts:
        place(part, device)
