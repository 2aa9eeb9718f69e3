"""The conditions under which user code is traced.

User code runs on fake CPU tensors whatever device the model is on, so that every engine
gets the same program. Two modes and a few patches make that invisible to it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch import vmap as vmap_api
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    has_proxy_slot,
    set_proxy_slot,
)
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from funcacc import guard
from funcacc.capture.batch_norm import cumulative_averages
from funcacc.capture.cut import ancestors
from funcacc.capture.random import RandomOperations
from funcacc.capture.remat import Recompute, checkpoints
from funcacc.errors import CaptureError, user_line

functorch = torch._C._functorch
_CPU = torch.device("cpu")
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")
_FACTORIES = _device_constructors()
_MOVES = {torch.Tensor.cuda, getattr(torch.Tensor, "xla", torch.Tensor.cuda)}
_HOST_ARRAYS = {torch.Tensor.numpy, torch.Tensor.__array__}


def host_read_message(what: str, where: str) -> str:
    """The wording for code that needs a number which only the device has."""
    return (
        f"{what} at {where} reads a value on the host, which a step compiled once can't do: "
        "the value differs from call to call. Keep it a tensor: use torch.where instead of "
        "`if`, and return the tensor as aux instead of calling .item()"
    )


class UserTensors(TorchFunctionMode):
    """Lets user code mix the traced tensors with real ones and with any device's name."""

    def __init__(
        self, fake_mode: FakeTensorMode, in_loop: bool, outer: UserTensors | None = None
    ) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.in_loop = in_loop
        # The stack of transforms is empty while a body is traced, so that a loop in it has to ask
        # the trace of that body.
        self.transformed = in_loop and (
            functorch.peek_interpreter_stack() is not None
            or (outer is not None and outer.transformed)
        )
        self.lifted: dict[int, tuple[Tensor, Tensor]] = {}
        self.origin: dict[int, Tensor] = {}

    def lift(self, real: Tensor) -> Tensor:
        """The traced stand-in of a tensor that user code closed over."""
        if id(real) not in self.lifted:
            # A loop's body may ask for the gradient of what it closes over.
            wanted = self.in_loop and real.requires_grad and torch.is_grad_enabled()
            with _disable_current_modes(), temporarily_clear_interpreter_stack(), self.fake_mode:
                fake = torch.empty(real.shape, dtype=real.dtype, requires_grad=wanted)
            self.lifted[id(real)] = (real, fake)
            self.origin[id(fake)] = real
        return self.lifted[id(real)][1]

    def _foreign(self, x: Tensor) -> bool:
        """Whether `x` comes from outside this capture."""
        if functorch.is_functorch_wrapped_tensor(x):
            return self.transformed and self._wrapped_outside(x)
        if not isinstance(x, FakeTensor):
            return True
        if not self.in_loop or id(x) in self.origin:
            return False
        return not _made_here(x)

    def _wrapped_outside(self, x: Tensor) -> bool:
        """Whether a transform around the loop has wrapped `x`, not one in its body."""
        while functorch.is_functorch_wrapped_tensor(x):
            x = functorch.get_unwrapped(x)
        if _made_here(x) or id(x) in self.origin:
            return False
        if functorch.peek_interpreter_stack() is not None:
            raise CaptureError(
                f"at {user_line()} a transform of torch.func inside the body of a loop meets a "
                "tensor that the body closed over, while another transform is around the loop; "
                "put the tensor into the carry or into xs"
            )
        return True

    def admit(self, x: Any) -> Any:
        """`x`, with stand-ins for the real tensors in it."""
        if isinstance(x, Tensor):
            return self.lift(x) if self._foreign(x) else x
        if isinstance(x, (list, tuple)):
            return (
                type(x)(*map(self.admit, x))
                if hasattr(x, "_fields")
                else type(x)(map(self.admit, x))
            )
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with stand-ins for real tensors, on the CPU."""
        kwargs = {k: self.admit(v) for k, v in (kwargs or {}).items()}
        if func not in _FACTORIES:
            args = tuple(self.admit(a) for a in args)
        if func in _HOST_ARRAYS:
            raise CaptureError(host_read_message(f".{func.__name__}()", user_line()))
        if func is torch.Tensor.backward:
            raise CaptureError(
                f"backward() at {user_line()}: the step differentiates the loss itself, and "
                "gradients that backward() puts into .grad would be lost; return the loss, and "
                "use torch.autograd.grad(..., create_graph=True) for gradients that are part of it"
            )
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        if func in _MOVES:
            return args[0]
        if "device" in kwargs or func in _FACTORIES:
            kwargs["device"] = _CPU
        elif func is torch.Tensor.to:
            args = (args[0], *(_CPU if _is_device(a) else a for a in args[1:]))
        return func(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """In parts: the fused kernel has a gradient on CPU and CUDA only."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _made_here(x: Tensor) -> bool:
    """Whether the innermost trace knows `x`: it knows all that was made in it."""
    mode = get_proxy_mode()
    return mode is None or has_proxy_slot(x, mode.tracer)


def _is_device(x: Any) -> bool:
    return isinstance(x, (torch.device, str))


class Tracing:
    """One capture, with those around it that it is nested in.

    Attributes:
        fake_mode: shared by nested captures, so that an inner one may close over the
            tensors of an outer one.
        tensors: what user code closed over so far.
        random: where random numbers come from.
        keep: graphs that operations of this trace name, alive until it is finished.
        weights: the traced values of parameters and buffers, by id.
    """

    def __init__(self, outer: Tracing | None, in_loop: bool) -> None:
        self.outer = outer
        self.fake_mode = outer.fake_mode if outer else FakeTensorMode(allow_non_fake_inputs=True)
        self.tensors = UserTensors(self.fake_mode, in_loop, outer.tensors if outer else None)
        self.random = RandomOperations()
        self.keep: list[Any] = []
        self.weights: dict[int, Tensor] = {}

    def is_weight(self, x: Tensor) -> bool:
        """Whether `x` is the value of a parameter or buffer, here or in a trace around."""
        if id(x) in self.weights:
            return True
        real = self.tensors.origin.get(id(x))
        if real is None:
            return False
        return isinstance(real, Parameter) or (
            self.outer is not None and self.outer.is_weight(real)
        )

    def computed_from(self, x: Tensor, real: Tensor) -> bool:
        """Whether `x`, of this trace, depends on the tensor `real` that user code closed over."""
        mode = get_proxy_mode()
        if mode is None or id(real) not in self.tensors.lifted or not _made_here(x):
            return False
        tracer, stand_in = mode.tracer, self.tensors.lifted[id(real)][1]
        node = get_proxy_slot(x, tracer).proxy.node
        return any(
            n.op == "get_attr" and getattr(tracer.root, n.target) is stand_in
            for n in ancestors([node])
        )

    def replace(self, x: Tensor, fn: Callable[[Tensor], Tensor], what: str) -> None:
        """Let `x` stand for ``fn(x)`` from here on, which is the same value.

        Args:
            x: a tensor of this trace.
            fn: one operation.
            what: the user's function that asked for it.

        Raises:
            CaptureError: for a tensor of another trace, or one that vmap has wrapped.
        """
        x = self.tensors.admit(x)
        while functorch.is_functorch_wrapped_tensor(x) and not functorch.is_batchedtensor(x):
            x = functorch.get_unwrapped(x)
        mode = get_proxy_mode()
        if mode is None or functorch.is_batchedtensor(x) or not has_proxy_slot(x, mode.tracer):
            raise CaptureError(
                f"{what} at {user_line()} is about a tensor that "
                + ("vmap has cut up" if functorch.is_batchedtensor(x) else "was made outside")
                + "; call it before, on the tensor as it is there"
            )
        with torch.no_grad(), temporarily_clear_interpreter_stack():
            new = fn(x.detach())
        set_proxy_slot(x, mode.tracer, get_proxy_slot(new, mode.tracer))

    def recompute(self) -> Recompute:
        """The mode in which a checkpoint that stands here computes its region again."""
        sources = self.random.sources
        return Recompute(sources[-1] if sources else None, self.is_weight)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.items: list[Tracing] = []


_stack = _Stack()


def current() -> Tracing | None:
    """The innermost capture of this thread, if one is under way."""
    return _stack.items[-1] if _stack.items else None


# Functions are replaced for the whole process while a trace is under way, but other threads
# (a loader that reads ahead) go on as ever.
_get_state, _set_state = torch.get_rng_state, torch.set_rng_state
_is_compiling = torch.compiler.is_compiling


def _random_state() -> Tensor:
    tracing = current()
    if tracing is None:
        return _get_state()
    return tracing.random.source("torch.get_rng_state()").get_state()


def _set_random_state(state: Tensor) -> None:
    tracing = current()
    if tracing is None:
        _set_state(state)
    else:
        tracing.random.source("torch.set_rng_state()").set_state(state)


def _compiling() -> bool:
    return current() is not None or _is_compiling()


def _recompute() -> Recompute:
    tracing = current()
    assert tracing is not None
    return tracing.recompute()


def _portable_autocast(init: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu", *args, **kwargs)

    return wrapped


@contextlib.contextmanager
def _surrounding_autocast(device_type: str) -> Iterator[None]:
    """Carry the caller's autocast over to the CPU, where the trace runs."""
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast("cpu", dtype=dtype, enabled=enabled):
        yield


def entering(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with stand-ins for those that the innermost capture closes over."""
    tracing = current()
    return [tracing.tensors.admit(t) for t in tensors] if tracing else list(tensors)


def autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    """What of the caller's autocast state a trace depends on."""
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


_adapters: list[Callable[[], contextlib.AbstractContextManager[None]]] = []


def while_tracing(adapter: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Have a context entered around each trace: an engine's library learns to be traced."""
    _adapters.append(adapter)


_WRAPPERS = ((vmap_api, "_add_batch_dim"), (eager_transforms, "_wrap_tensor_for_grad"))


def _admitting(wrap: Callable[..., Any], tensors: UserTensors) -> Callable[..., Any]:
    def admitted(x: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap(tensors.admit(x), *args, **kwargs)

    return admitted


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def tracing(device_type: str = "cpu", *, in_loop: bool = False) -> Iterator[Tracing]:
    """Set the conditions for one capture.

    Args:
        device_type: where the model really is, for the caller's autocast state.
        in_loop: whether it is of a loop's body, whose closed-over tensors may be those of a
            capture around it and may need gradients.
    """
    outer = current()
    here = Tracing(outer, in_loop)
    with contextlib.ExitStack() as stack:
        if outer:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(_without_function_modes())
        else:
            stack.enter_context(guard.lock)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(_surrounding_autocast(device_type))
            stack.enter_context(torch.enable_grad())
            # What it writes pages about is also raised.
            stack.callback(setattr, _fake_log, "disabled", _fake_log.disabled)
            _fake_log.disabled = True
            # transformers (and others) leave their host reads out of a compiled program.
            stack.enter_context(mock.patch.object(torch.compiler, "is_compiling", _compiling))
            # Checkpointing rewinds the generator by these two before it recomputes.
            stack.enter_context(mock.patch.object(torch, "get_rng_state", _random_state))
            stack.enter_context(mock.patch.object(torch, "set_rng_state", _set_random_state))
            stack.enter_context(checkpoints(_recompute))
            stack.enter_context(cumulative_averages())
            for adapter in _adapters:
                stack.enter_context(adapter())
            autocast = torch.amp.autocast_mode.autocast
            stack.enter_context(
                mock.patch.object(autocast, "__init__", _portable_autocast(autocast.__init__))
            )
            # Both would pick kernels of the CPU that other devices lack.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)
        # A transform around a loop is applied to the loop, not to the trace of its body.
        stack.enter_context(temporarily_clear_interpreter_stack())
        # Transforms in the body wrap their arguments without asking the mode.
        for module, name in _WRAPPERS:
            wrap = _admitting(getattr(module, name), here.tensors)
            stack.enter_context(mock.patch.object(module, name, wrap))
        _stack.items.append(here)
        stack.callback(_stack.items.pop)
        stack.enter_context(here.fake_mode)
        yield here
