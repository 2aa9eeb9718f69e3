"""`capture`: run user code once on fake tensors and keep what it did as a `Graph`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)
from torch.func import functionalize
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from funcacc.capture import context, mutation, passes
from funcacc.capture.decompositions import decompositions
from funcacc.capture.graph import Graph, find
from funcacc.capture.ops import call, loop
from funcacc.errors import CaptureError, user_line
from funcacc.types import TensorSpec

_HOST_READS = (DataDependentOutputException, GuardOnDataDependentSymNode)


def capture(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[TensorSpec],
    names: Sequence[str],
    *,
    device_type: str = "cpu",
    in_loop: bool = False,
    protected: int | None = None,
) -> Graph:
    """Trace ``fn(tracing, *tensors) -> tensors`` into a pure graph.

    Everything that runs inside becomes part of the graph: autograd, in-place
    operations (which end as pure ones), random operations (on the key that `fn` sets by
    ``tracing.random.drawing_from``). Tensors that `fn` closes over become inputs.

    Args:
        fn: called once, with a `Tracing` and one fake tensor for each input.
        inputs: shapes and dtypes.
        names: a path for each input.
        device_type: device of the caller's autocast state.
        in_loop: as for `context.tracing`.
        protected: when given, this many first inputs, and all that `fn` closes over, must not
            be written in place.

    Returns:
        The graph.

    Raises:
        CaptureError: for code that can't be part of a pure graph, with the user's line.
    """
    # Python code of a module is generated when it is first called: most never are.
    with _use_lazy_graph_module(True), context.tracing(device_type, in_loop=in_loop) as tracing:
        fakes = [torch.empty(s.shape, dtype=s.dtype) for s in inputs]

        def traced(*tensors: Tensor) -> list[Tensor]:
            with tracing.tensors, tracing.random:
                results = fn(tracing, *tensors)
                # Returned tensors may be real ones that user code merely passed on.
                admitted = [tracing.tensors.admit(t) for t in results]
                return [t.detach() if t.requires_grad else t for t in admitted]

        try:
            with torch.fx.traceback.preserve_node_meta():
                first = make_fx(traced, decomposition_table=decompositions())(*fakes)
        except _HOST_READS as e:
            where = user_line(e.__traceback__)
            raise CaptureError(context.host_read_message("the code", where)) from e
        except DynamicOutputShapeException as e:
            raise CaptureError(
                f"{e.func} at {user_line(e.__traceback__)} has an output whose shape depends on "
                "values, which a program compiled once can't have. Use a form with a fixed shape: "
                "torch.where(mask, x, 0) instead of x[mask]"
            ) from e
        except UnsupportedFakeTensorException as e:
            raise CaptureError(f"{user_line(e.__traceback__)} can't be traced: {e}") from e
        except RuntimeError as e:
            if "Expected XLA tensor" not in str(e):
                raise
            raise CaptureError(
                f"{user_line(e.__traceback__)} hands a traced tensor to a function of torch_xla "
                "other than mark_sharding and its kin; a trace has no XLA tensors yet: call it "
                "outside the step, or write it in operations of PyTorch"
            ) from e
        captured, names = passes.constants_to_inputs(first, tracing.tensors.origin), list(names)
        if in_loop:
            _refuse_writes(first, len(captured))
        if protected is not None:
            _protect(first, names[:protected], len(captured))
        module = _pure(first, fakes + [_fake(tracing, t) for t in captured])
    passes.simplify(module)
    if captured:
        captured = passes.drop_unused(module, captured)
    names += [f"captured[{i}]" for i in range(len(captured))]
    specs = [*inputs, *map(TensorSpec.of, captured)]
    return _finish(module, specs, names, captured)


def _refuse_writes(module: fx.GraphModule, num_captured: int) -> None:
    """Refuse a loop's body that writes into what it closed over: no trip would see it."""
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    closed = set(inputs[len(inputs) - num_captured :])
    for node in closed.intersection(mutation.written_inputs(module)):
        raise CaptureError(
            f"the body of a loop writes in place into a {TensorSpec.of(_value(node))} tensor that "
            "it closed over, which is equal in all trips; put the tensor into the carry and "
            "return it from the body"
        )


def _protect(module: fx.GraphModule, names: Sequence[str], num_captured: int) -> None:
    """Refuse writes into what the step wouldn't bring back."""
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    written = set(mutation.written_inputs(module))
    for node, name in zip(inputs, names, strict=False):
        if node in written:
            raise CaptureError(
                f"the forward pass writes in place into {name}, which only the optimizer may; do "
                "it after the step, under torch.no_grad(), or compute a new tensor from it"
            )
    for node in inputs[len(inputs) - num_captured :]:
        if node in written:
            raise CaptureError(
                f"the forward pass writes in place into a {TensorSpec.of(_value(node))} tensor "
                "that is neither parameter nor buffer of the model, so that the next microbatch "
                "wouldn't see it; make it a buffer by register_buffer(), in a module that is part "
                "of the model"
            )


def _fake(tracing: context.Tracing, tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _pure(module: fx.GraphModule, fakes: list[Tensor]) -> fx.GraphModule:
    """The same program without mutation."""
    passes.drop_profiling(module)
    if mutation.write_out(module):
        return module
    module.recompile()

    def on_copies(*tensors: Tensor) -> Any:
        # So that writing into an argument stays inside the graph.
        return module(*(t.clone() for t in tensors))

    with torch.no_grad():
        return make_fx(
            functionalize(on_copies, remove="mutations"), decomposition_table=decompositions()
        )(*fakes)


def _finish(
    module: fx.GraphModule, specs: list[TensorSpec], names: list[str], captured: list[Tensor]
) -> Graph:
    parts: dict[int, Graph] = {}
    for node in module.graph.nodes:
        if node.target is call:
            parts[node.args[0]] = find(node.args[0])
        elif node.target is loop:
            parts.update({n: find(n) for n in node.args[:2]})
    results = list(next(iter(reversed(module.graph.nodes))).args[0])
    outputs = [TensorSpec.of(_value(r)) for r in results]
    return Graph(module, specs, outputs, names, captured, list(parts.values()))


def _value(node: Any) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
