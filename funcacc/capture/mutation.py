"""In-place operations written out as pure ones, where a look at the graph is enough.

Most in-place operations of user code write into tensors that nothing else looks at: an
accumulator, a moment, a fresh mask. Renaming is all that these need, and saves a second
trace of the whole program, which `torch.func.functionalize` takes for the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from funcacc.capture.decompositions import decompositions

aten = torch.ops.aten


def mutates(node: fx.Node) -> bool:
    """Whether the operation writes into an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_inputs(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs that the module writes into, directly or through a view."""
    found = []
    for node in module.graph.nodes:
        if mutates(node):
            root = node.args[0]
            while root is not None and root.op != "placeholder":
                root = root.args[0] if mutates(root) else _view_of(root)
            if root is not None:
                found.append(root)
    return found


def write_out(module: fx.GraphModule) -> bool:
    """Replace the in-place operations whose tensor has no live alias.

    Args:
        module: as traced; changed in place.

    Returns:
        Whether the module is pure now.
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    written = [n for n in order if mutates(n)]
    for node in written:
        pure = _pure_form(node)
        if pure is None or not _unaliased(node, order):
            return False
        _rename(module.graph, node, pure, order)
    return True


def _pure_form(node: fx.Node) -> Any:
    """``add.Tensor`` for ``add_.Tensor``; None where there is none to use as it is."""
    assert isinstance(node.target, torch._ops.OpOverload)
    packet = node.target.overloadpacket
    name = packet.__name__
    if node.target.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    pure = _overload(getattr(aten, name[:-1], None), _argument_types(node.target))
    if pure is None or (pure is not aten.copy.default and pure in decompositions()):
        return None
    return pure


def _argument_types(op: torch._ops.OpOverload) -> list[str]:
    return [str(a.type) for a in op._schema.arguments]


def _overload(packet: Any, types: list[str]) -> torch._ops.OpOverload | None:
    """The overload that takes these arguments; names don't tell: ``pow_.Scalar``."""
    for name in packet.overloads() if packet else ():
        op: torch._ops.OpOverload = getattr(packet, name)
        if not op._schema.is_mutable and _argument_types(op) == types:
            return op
    return None


def _view_of(node: fx.Node) -> fx.Node | None:
    """The tensor whose memory the result of `node` is, if it is another's."""
    if not isinstance(node.target, torch._ops.OpOverload):
        source = node.args[0] if node.op == "call_function" and node.args else None
        # An element of a list of views, e.g. of split.
        return source if isinstance(source, fx.Node) and _view_of(source) else None
    returns = node.target._schema.returns
    if not returns or returns[0].alias_info is None or returns[0].alias_info.is_write:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _unaliased(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether nothing that is read after `node` shares memory with what it writes."""
    target = node.args[0]
    if not isinstance(target, fx.Node) or _view_of(target):
        return False
    todo = [u for u in target.users if order[u] < order[node]]
    while todo:
        user = todo.pop()
        if _view_of(user) is None:
            continue
        if any(order[u] >= order[node] for u in user.users):
            return False
        todo.extend(user.users)
    return True


def _rename(graph: fx.Graph, node: fx.Node, pure: Any, order: dict[fx.Node, int]) -> None:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    value, at = target.meta["val"], order[node]
    with graph.inserting_before(node):
        new = graph.call_function(pure, node.args, node.kwargs)
        new.meta["val"] = value if pure is aten.copy.default else _value(new)
        order[new] = at
        if new.meta["val"].dtype != value.dtype:
            new = graph.call_function(aten._to_copy.default, (new,), {"dtype": value.dtype})
            new.meta["val"] = value
            order[new] = at
    node.replace_all_uses_with(new)
    target.replace_all_uses_with(new, delete_user_cb=lambda user: order[user] > at)
    graph.erase_node(node)


def _value(node: fx.Node) -> Tensor:
    """The fake result of a pure operation, for its dtype."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    result = node.target(*args, **kwargs)
    assert isinstance(result, Tensor)
    return result
