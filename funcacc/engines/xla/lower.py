"""`Graph` to an XLA computation with parameters and results in the graph's own order."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_xla.core.xla_builder as xb
from torch import Tensor, fx

from funcacc.capture import ops
from funcacc.capture.graph import Graph, find
from funcacc.engines.xla import marks, natives, private, wide
from funcacc.engines.xla.mesh import DeviceMesh
from funcacc.engines.xla.unmerged import Unmerged
from funcacc.errors import EngineError
from funcacc.placement import Placement
from funcacc.types import TensorSpec

aten = torch.ops.aten


def check_operations(graph: Graph) -> None:
    """Refuse operations that torch_xla lacks, and complex numbers, before anything was lowered.

    Raises:
        EngineError: naming each of them.
    """
    missing = sorted(
        {
            str(n.target)
            for n in graph.nodes
            if isinstance(n.target, torch._ops.OpOverload)
            and n.target not in _NATIVE
            and not private.has_kernel(n.target)
        }
    )
    if missing:
        raise EngineError(
            f"the xla engine has no kernel for {', '.join(missing)}; write the model without "
            'them, or keep it on the CPU, where engine="eager" runs it'
        )
    complex_ones = [n for n in graph.nodes if _is_complex(n.meta.get("val"))]
    if complex_ones:
        raise EngineError(
            f"the xla engine has no complex numbers, which {complex_ones[0].target} gives; compute "
            "with real and imaginary parts (a rotation as x * cos + rotated(x) * sin), or keep the "
            'model on the CPU, where engine="eager" runs it'
        )
    for part in graph.parts:
        check_operations(part)


def _is_complex(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


class Target(NamedTuple):
    """What a graph is lowered for.

    Attributes:
        device: torch_xla's.
        mesh: behind it, where there are several.
    """

    device: torch.device
    mesh: DeviceMesh | None = None


def lower(graph: Graph, name: str, target: Target) -> Any:
    """The computation of `graph`: one parameter an input, and a tuple of the outputs."""
    with private.embedded_constants(), torch.no_grad():
        holders = [private.placeholder(s.shape, s.dtype) for s in graph.inputs]
        # User graphs get clones: the mapping of parameters is by the holders themselves.
        results = _interpret(graph, [h.clone() for h in holders], target)
        index = {node: i for i, node in enumerate(graph.placeholders)}
        computed = [r for r, n in zip(results, graph.results, strict=True) if n not in index]
        inner, numbers = None, [None] * len(holders)
        if computed:
            inner, numbers = private.lower_lazy(name, holders, computed)

    def fn(builder: Any, *params: Any) -> list[Any]:
        values = iter(())
        if inner is not None:
            args = {n: p for n, p in zip(numbers, params, strict=True) if n is not None}
            out = xb.Op.call(inner, [args[i] for i in range(len(args))], builder=builder)
            values = iter([out.get_tuple_element(i) for i in range(len(computed))])
        return [params[index[n]] if n in index else next(values) for n in graph.results]

    shapes = [natives.shape_of(s.shape, s.dtype) for s in graph.inputs]
    return natives.build(name, shapes, fn)


def _interpret(graph: Graph, inputs: list[Tensor], target: Target) -> list[Tensor]:
    device = target.device
    env: dict[fx.Node, Any] = dict(zip(graph.placeholders, inputs, strict=True))
    unmerged = Unmerged()
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": device}
        if node.target is aten.sub.Tensor and isinstance(args[0], int):
            # torch_xla gives `number - int32` as an int64.
            dtype = node.meta["val"].dtype
            args = (torch.full((), args[0], dtype=dtype, device=device), *args[1:])
        native = _NATIVE.get(node.target)
        if node.target is aten.addmm.default and target.mesh is not None:
            native = None if len(args) == 3 and not kwargs and args[0].ndim == 1 else native
        if node.target is aten.full.default and kwargs.get("dtype") is torch.bool:
            # A boolean constant would become a tensor outside the program.
            env[node] = torch.full(args[0], int(args[1]), dtype=torch.int32, device=device) != 0
        elif native:
            env[node] = native(target, *args, **kwargs)
        elif node.target is operator.getitem:
            env[node] = args[0][args[1]]
        elif target.mesh is not None and (made := unmerged.run(node, args)) is not None:
            env[node] = made
        elif (made := wide.run(node, args, kwargs)) is not None:
            env[node] = made
        else:
            env[node] = node.target(*args, **kwargs)
    return [env[n] for n in graph.results]


def _loop(
    target: Target, cond: int, body: int, carry: list[Tensor], consts: list[Tensor]
) -> list[Tensor]:
    def shapes(tensors: list[Tensor]) -> list[Any]:
        return [natives.shape_of(tuple(t.shape), t.dtype) for t in tensors]

    computation = natives.while_loop(
        lower(find(cond), "condition", target),
        lower(find(body), "body", target),
        shapes(carry),
        shapes(consts),
    )
    return private.user_computation("funcacc_loop", [*carry, *consts], computation)


def _one(name: str, inputs: list[Tensor], computation: Any) -> Tensor:
    return private.user_computation(f"funcacc_{name}", inputs, computation)[0]


def _take(target: Target, xs: Tensor, index: Tensor) -> Tensor:
    return _one("take", [xs, index], natives.take(*TensorSpec.of(xs), index.dtype))


def _put(target: Target, xs: Tensor, index: Tensor, x: Tensor, dim: int = 0) -> Tensor:
    return _one("put", [xs, index, x], natives.put(*TensorSpec.of(xs), index.dtype, dim))


def _scaled_product(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``beta * x + alpha * (a @ b)``; torch_xla's kernel goes to the host unless both are 1."""

    def run(
        target: Target, x: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        scaled = product(a, b) if alpha == 1 else alpha * product(a, b)
        if beta == 0:
            return scaled
        return scaled + (x if beta == 1 else beta * x)

    return run


def _scatter_rows(target: Target, xs: Tensor, indices: Tensor, count: int) -> Tensor:
    made = natives.scatter_rows(*TensorSpec.of(xs), indices.dtype, count)
    return _one("scatter_rows", [xs, indices], made)


def _layer_norm(
    target: Target,
    x: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if target.mesh is None:
        found: tuple[Tensor, Tensor, Tensor] = torch.native_layer_norm(x, shape, weight, bias, eps)
        return found
    # The kernel is one operation of XLA's, for which the partitioner gathers all of `x`.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = list(range(x.ndim - len(shape), x.ndim))
    var, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    out = (wide - mean) * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def _remat(target: Target, x: Tensor, after: Tensor) -> Tensor:
    return _one("remat", [x, after], natives.remat(*TensorSpec.of(x), *TensorSpec.of(after)))


def _hold(target: Target, xs: list[Tensor]) -> list[Tensor]:
    return private.held(xs)


def _pin(target: Target, x: Tensor, placement: str) -> Tensor:
    if placement.startswith("["):
        return private.annotated(x, marks.sharding(placement))
    if target.mesh is None:
        return x
    return private.annotated(x, target.mesh.sharding(Placement.parse(placement)))


def _mark(target: Target, x: Tensor, mesh: str, spec: str) -> Tensor:
    return private.annotated(x, marks.from_strings(mesh, spec))


_NATIVE: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: _scaled_product(torch.mm),
    aten.baddbmm.default: _scaled_product(torch.bmm),
    aten.native_layer_norm.default: _layer_norm,
    ops.call: lambda target, serial, inputs: _interpret(find(serial), inputs, target),
    ops.loop: _loop,
    ops.take: _take,
    ops.put: _put,
    ops.scatter_rows: _scatter_rows,
    ops.pin: _pin,
    marks.MARK: _mark,
    ops.hold: _hold,
    ops.remat: _remat,
    ops.fold_in: lambda target, key, data: _one(
        "fold_in", [key, data], natives.fold_in(data.dtype)
    ),
    ops.random_bits: lambda target, key, stream, shape: _one(
        "random_bits", [key], natives.random_bits(stream, tuple(shape))
    ),
}
