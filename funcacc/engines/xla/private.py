"""Every call into torch_xla's private interface, each with its reason.

Measured on torch_xla 2.9.0; `funcacc.engines` refuses other versions.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor

from funcacc.errors import EngineError

extension = _C = torch_xla._XLAC


forked_from: int | None = None
"""The process that initialised the device, in a child that was forked after that."""


def _in_child() -> None:
    global forked_from
    if _C._xla_runtime_is_initialized():
        forked_from = os.getppid()


os.register_at_fork(after_in_child=_in_child)


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A device tensor without data, whose use becomes a parameter of what is lowered."""
    tensor: Tensor = xb.create_placeholder_tensor(list(shape), dtype)
    return tensor


@contextlib.contextmanager
def embedded_constants() -> Iterator[None]:
    """Write Python numbers into the program; otherwise each becomes a parameter of it."""
    before = _C._get_xla_all_numbers_special_scalars()
    _C._set_xla_all_numbers_special_scalars(True)
    try:
        yield
    finally:
        _C._set_xla_all_numbers_special_scalars(before)


def lower_lazy(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[Any, list[int | None]]:
    """The computation of pending `outputs`, and the parameter number of each input in it.

    The lowering context is the only public-in-name way from lazy tensors to HLO with a
    mapping of parameters.
    """
    context = _C.lowering.LoweringContext(name)
    context.build(list(outputs))
    numbers = [context.tensor_parameter_id(t) for t in inputs]
    extra = len(context.device_parameter_id_tensor_mapping()) - sum(n >= 0 for n in numbers)
    if extra:
        raise AssertionError(f"{name} reads {extra} tensors that are not among its inputs")
    computation = xb.computation_from_module_proto(name, context.hlo())
    return computation, [n if n >= 0 else None for n in numbers]


def user_computation(name: str, inputs: Sequence[Tensor], computation: Any) -> list[Tensor]:
    """Pending tensors that are the results of `computation` on `inputs`."""
    return list(_C._xla_user_computation(f"xla::{name}", list(inputs), computation))


def computation_text(computation: Any) -> str:
    """HLO text of a computation."""
    text: str = xb.get_computation_hlo(computation)
    return text


@contextlib.contextmanager
def donation(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Compile with these inputs as buffer donors."""
    before = _C._xla_get_enable_alias_with_buffer_donor_config()
    _C._xla_set_enable_alias_with_buffer_donor_config(True)
    for t in tensors:
        _C._set_buffer_donation(t, True)
    try:
        yield
    finally:
        # The mark sits on the buffer; without a donating dispatch it would stay there and
        # give the buffer away to the next graph that the user runs.
        for t in tensors:
            _C._set_buffer_donation(t, False)
        _C._xla_set_enable_alias_with_buffer_donor_config(before)


def input_order(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[int]:
    """For each parameter of the program of `outputs`, which of `inputs` it is."""
    position = {_C._xla_get_tensor_id(t): i for i, t in enumerate(inputs)}
    ids, data = _C._get_tensors_xla_device_data_node(list(outputs))
    ids = [_renamed.get(i, i) for i in ids]
    if sharded():
        # Asking gives sharded data the ids of the tensors that come back, for the next time.
        _renamed.update(zip(map(_C._xla_get_tensor_id, data), ids, strict=True))
    return [position[i] for i in ids]


_renamed: dict[int, int] = {}


def compile_cached(outputs: Sequence[Tensor]) -> Any:
    """Compile pending `outputs` without running them; the hash under which they are cached."""
    graph_hash = _C._get_graph_hash(list(outputs))
    _C._xla_warm_up_cache(list(outputs), [])
    return graph_hash


def module_proto(outputs: Sequence[Tensor]) -> bytes:
    """HLO of pending tensors before optimisation, serialised."""
    proto: bytes = _C._get_xla_tensors_hlo_proto(list(outputs))
    return proto


def on_cpu() -> bool:
    """Whether XLA's own CPU compiler is at work."""
    return str(xr.device_type()) == "CPU"


def run_cached(graph_hash: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Dispatch a cached program without tracing."""
    return list(_C._run_cached_graph(graph_hash, inputs))


def optimized_hlo_text(outputs: Sequence[Tensor]) -> str:
    """HLO of pending tensors as XLA runs it; compiles them for this.

    torch_xla looks at the variable once in a process, when HLO is first asked for, and gives
    unoptimised HLO without it.
    """
    os.environ["XLA_DUMP_POST_OPTIMIZATIONS"] = "1"
    text: str = _C._get_xla_tensors_hlo(list(outputs))
    return text


def clear_pending(device: torch.device) -> None:
    """Forget pending work: what hangs on a placeholder would crash the next sync."""
    _C._clear_pending_irs(str(device))


def sync() -> None:
    """Materialise all pending tensors, e.g. clones that still share a buffer."""
    torch_xla.sync()


_made_by_us = 0
_making = threading.Lock()


def tensors_made_elsewhere() -> int:
    """How many device tensors the process has made so far, uploads by `device_data` left out.

    While it stays the same there is nothing new that a sync could have to materialise: a
    clone, a deep copy and the result of an operation each make a tensor.
    """
    with _making:
        return int(_C._xla_counter_value("CreateXlaTensor") or 0) - _made_by_us


def wait() -> None:
    """Block until the device is idle."""
    xm.wait_device_ops()


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Addresses of buffers; only on XLA:CPU do they point to memory one may compare."""
    return [_C._unsafe_buffer_pointer(t) for t in tensors]


def device_count() -> int:
    """Devices of all processes."""
    return int(xr.global_runtime_device_count())


def switch_spmd_on() -> None:
    """Compile for a mesh of devices from now on.

    Raises:
        EngineError: when there is something on a device already: torch_xla would have to
            replicate it, and what was compiled for one device would go wrong.
    """
    if sharded():
        return
    if _C._xla_get_spmd_config_is_locked():
        raise EngineError(
            "SPMD can't be switched on any more, since something is on an XLA device or has asked "
            "for one; call funcacc.sharding.mesh(...) (or torch_xla.runtime.use_spmd()) first "
            "in the program"
        )
    xr.use_spmd()


def global_mesh() -> xs.Mesh | None:
    """The mesh that was made global in the process."""
    return xs.get_global_mesh() if sharded() else None


def upload_sharding(tensor: Tensor, mesh: xs.Mesh, spec: tuple[Any, ...]) -> Any:
    """How a host tensor is cut when it is uploaded.

    `ShardingSpec` does the same, but takes a vector cut over one of several axes for cut over
    all of them.
    """
    if not spec:
        return None
    tiles, groups, copies, kind = mesh._get_op_sharding_args(spec)
    return _C.XlaShardingSpec(tensor, tiles, groups, copies, kind, False)


def op_shardings(tensors: Sequence[Tensor]) -> list[Any]:
    """For each tensor its sharding as an object, or None."""
    return list(map(_C._get_xla_op_sharding, tensors))


def copies(tensors: Sequence[Tensor], shardings: Sequence[Any]) -> list[Tensor]:
    """Copies in buffers of their own, which clones get at the next sync only.

    Args:
        tensors: to be copied.
        shardings: for each copy how it is to lie over the mesh; None leaves it to XLA.
    """
    made = [t.detach().clone() for t in tensors]
    for copy, sharding in zip(made, shardings, strict=True):
        if sharding is not None:
            _C._xla_annotate_custom_sharding(copy, sharding)
    sync()
    return made


def renew(view: Tensor) -> None:
    """Let a view see its base as it is: otherwise each use computes it anew, after any sync."""
    torch._functionalize_sync(view)


def held(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Pending tensors behind one optimisation barrier."""
    # It works in place.
    copies = [t.clone() for t in tensors]
    _C._xla_optimization_barrier_(copies)
    return copies


def annotated(tensor: Tensor, sharding: Any) -> Tensor:
    """A pending tensor that lies over the mesh like this."""
    # The annotation is in place, and on a placeholder it would stand outside the program.
    copy = tensor.detach().clone()
    _C._xla_annotate_custom_sharding(copy, sharding)
    return copy


def sharded() -> bool:
    """Whether the process compiles for a mesh of devices."""
    return bool(xr.is_spmd())


def sharding_texts(tensors: Sequence[Tensor]) -> list[str]:
    """The shardings of device tensors in XLA's words.

    That of a tensor without any is whole on each device; it gets the word for it when it is first
    used.
    """
    return [text or "{replicated}" for text in map(_C._get_xla_sharding_spec, tensors)]


def consumed(tensor: Tensor) -> bool:
    """Whether a donation has taken this tensor's buffer, so that it has no value any more."""
    try:
        # Each fails for the other kind of tensor, whether it has a value or not.
        if sharded():
            _C._get_local_shards([tensor])
        else:
            tensor.detach().cpu()
    except RuntimeError:
        return True
    return False


def _copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    copy = src.to(self.device, self.dtype).expand(self.shape).clone()
    sharding = _C._get_xla_op_sharding(self) if sharded() else None
    if sharding is not None:
        # It would lie as `src` does: loading a state dict would undo the sharding.
        _C._xla_annotate_custom_sharding(copy, sharding)
    return copy


_library = torch.library.Library("aten", "IMPL")


def copy_into_fresh_buffers() -> None:
    """Make ``a.copy_(b)`` a copy on XLA, for good.

    torch_xla lets `a` share the buffer of `b` when shape and dtype agree, also after a
    sync. Donating `b` would then destroy `a`: the weights of an averaged or target model,
    everything that `load_state_dict` filled. (Its kernel also overwrites its operand.)
    """
    with warnings.catch_warnings():
        # That the kernel is overridden is the purpose.
        warnings.simplefilter("ignore", UserWarning)
        _library.impl("copy", _copy, "XLA")


def device_data(tensor: Tensor, device: torch.device, sharding: Any = None) -> Tensor:
    """A host tensor in a fresh device buffer, at once; cut as an `XlaShardingSpec` says.

    What ``.to(device)`` makes is a host tensor until something needs its buffer. A sync takes
    up all such tensors of the process: one that another thread is making goes wrong then
    ("Check failed: data()->tensor_data"). And equal scalars get one buffer from a cache, so
    that a donated one would take every equal scalar of the process with it.
    """
    global _made_by_us
    with _making:
        cut = None if sharding is None else [sharding]
        made: Tensor = _C._xla_tensors_from_aten([tensor], [str(device)], cut)[0]
        _made_by_us += 1
    return made


def has_alias(tensor: Tensor) -> bool:
    """Whether another tensor object (a view, ``.detach()``, ``.data``) shares the storage."""
    held = tensor.untyped_storage()
    # Two are the tensor and the Python object, which may have been there before.
    return torch._C._storage_Use_Count(held._cdata) > 2


def rebind(target: Tensor, value: Tensor) -> None:
    """Let `target` take the buffer of `value`, with all aliases of `target` following.

    Without aliases the storage can be exchanged. With aliases the new value goes through
    the storage that they share; the sync folds the update into it, which otherwise keeps
    a list of all values it ever had.
    """
    if not has_alias(target):
        target.data = value
        return
    probe = target.detach()
    torch._functionalize_replace(target, torch._from_functional_tensor(value))
    torch._functionalize_commit_update(target)
    torch._functionalize_sync(probe)


def rebind_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """`rebind` of each."""
    held = list(map(Tensor.untyped_storage, targets))
    counts = map(torch._C._storage_Use_Count, map(_address, held))
    for target, value, count in zip(targets, values, counts, strict=True):
        # The tensor and the list: no alias.
        if count == 2:
            target.data = value
        else:
            rebind(target, value)


_address = operator.attrgetter("_cdata")


def has_kernel(operator: torch._ops.OpOverload) -> bool:
    """Whether torch_xla can lower an operation, natively or through a composite kernel.

    Others would fall back to the CPU, which pending tensors can't: the process would crash.
    (The key ``CompositeExplicitAutogradNonFunctional`` doesn't count: it leads to an ``out=``
    form that falls back.)
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = (
        "XLA",
        "CompositeImplicitAutograd",
        "CompositeExplicitAutograd",
    )
    return any(has(operator.name(), key) for key in keys)
