"""Host numbers that are inputs of a graph: hyperparameters traced as 0-d tensors.

An optimizer is written for Python floats: it compares them, takes square roots, passes
them as ``alpha=``. Traced as tensors they become inputs of the program. Questions about
their value (``if weight_decay != 0``) are answered from the value at hand and
remembered as guards: when an answer changes, the graph is traced again.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from funcacc.capture.context import host_read_message
from funcacc.errors import CaptureError, user_line

_Expr = Callable[[Sequence[float]], Any]


class Guard(NamedTuple):
    """An answer that a graph was traced with: ``question(numbers) == answer``."""

    question: _Expr
    answer: Any
    depends: frozenset[int]


class _Known(NamedTuple):
    tensor: Tensor
    value: Any
    question: _Expr
    depends: frozenset[int]


_TO_HOST: dict[Any, Callable[[Any], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__float__: float,
    Tensor.__int__: int,
    Tensor.__index__: operator.index,
}
_ALPHA = {
    Tensor.add: torch.add, Tensor.add_: Tensor.add_, torch.add: torch.add,
    Tensor.sub: torch.sub, Tensor.sub_: Tensor.sub_, torch.sub: torch.sub,
}  # fmt: skip
_ADDC = {
    Tensor.addcmul: (torch.add, torch.mul), Tensor.addcmul_: (Tensor.add_, torch.mul),
    torch.addcmul: (torch.add, torch.mul), Tensor.addcdiv: (torch.add, torch.div),
    Tensor.addcdiv_: (Tensor.add_, torch.div), torch.addcdiv: (torch.add, torch.div),
}  # fmt: skip
_LERP = {Tensor.lerp, Tensor.lerp_, torch.lerp}
_CLAMP = {
    Tensor.clamp: torch.clamp, Tensor.clamp_: Tensor.clamp_, torch.clamp: torch.clamp,
    Tensor.clip: torch.clamp, Tensor.clip_: Tensor.clamp_, torch.clip: torch.clamp,
}  # fmt: skip
# What `x += y` calls. Python's numbers don't change in place, whoever else holds them.
_REBINDING = {
    Tensor.add_: torch.add, Tensor.sub_: torch.sub, Tensor.mul_: torch.mul,
    Tensor.div_: torch.div, Tensor.pow_: torch.pow, Tensor.floor_divide_: torch.floor_divide,
    Tensor.remainder_: torch.remainder,
}  # fmt: skip
# Which argument is the divisor.
_DIVISORS = {
    Tensor.div: 1, Tensor.true_divide: 1, torch.div: 1, torch.true_divide: 1,
    Tensor.floor_divide: 1, Tensor.__floordiv__: 1, Tensor.remainder: 1,
    Tensor.__rtruediv__: 0, Tensor.__rfloordiv__: 0, Tensor.__rmod__: 0,
}  # fmt: skip
_MATH = ("sqrt", "exp", "log", "log2", "log10", "log1p", "cos", "sin", "tanh", "pow")


def _accept_tensors(
    plain: Callable[..., Any], over_tensors: Callable[..., Tensor]
) -> Callable[..., Any]:
    """A function on numbers that takes 0-d tensors too."""

    def either(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not any(isinstance(a, Tensor) for a in args):
            return plain(*args, **kwargs)
        return over_tensors(*args)

    return either


def _reduced(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def over_tensors(*args: Any) -> Tensor:
        items = [_tensor(a) for a in args]
        return functools.reduce(combine, items)

    return over_tensors


def _tensor(x: Any) -> Tensor:
    # As an operation on constants, which HostNumbers follows.
    return x if isinstance(x, Tensor) else torch.scalar_tensor(x, dtype=torch.float64)


@contextlib.contextmanager
def _number_functions() -> Iterator[None]:
    """Python's functions on numbers, for tensors that stand for numbers."""
    with contextlib.ExitStack() as stack:
        for name in _MATH:
            over = _reduced(torch.pow) if name == "pow" else getattr(torch, name)
            wrapped = _accept_tensors(getattr(math, name), over)
            stack.enter_context(mock.patch.object(math, name, wrapped))
        for name, combine in (("min", torch.minimum), ("max", torch.maximum)):
            wrapped = _accept_tensors(getattr(builtins, name), _reduced(combine))
            stack.enter_context(mock.patch.object(builtins, name, wrapped))
        yield


class HostNumbers(TorchFunctionMode):
    """Traces code that computes with host numbers as if they were tensors.

    Args:
        tensors: 0-d tensors of the trace.
        values: what each is now.
    """

    def __init__(self, tensors: Sequence[Tensor], values: Sequence[float]) -> None:
        super().__init__()
        self.guards: list[Guard] = []
        self._functions = contextlib.ExitStack()
        self._known: dict[int, _Known] = {}
        self._items: dict[int, Tensor] = {}
        for i, (t, v) in enumerate(zip(tensors, values, strict=True)):
            self._known[id(t)] = _Known(t, v, operator.itemgetter(i), frozenset({i}))

    def __enter__(self) -> HostNumbers:
        """Also let `math`, `min` and `max` take the tensors that stand for numbers."""
        self._functions.enter_context(_number_functions())
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Undo it."""
        super().__exit__(*exc)
        self._functions.close()

    def question(self, value: Any) -> _Expr | None:
        """How `value` follows from the numbers; None if it depends on anything else."""
        if isinstance(value, (int, float)):
            return lambda numbers: value
        known = self._known.get(id(value))
        return known.question if known else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions, rewrite calls that take numbers only, follow known values."""
        kwargs = kwargs or {}
        if func is Tensor.item:
            return self._item(args[0])
        if func is torch.scalar_tensor and isinstance(args[0], (int, float)):
            return self._constant(args[0])
        if func in _REBINDING and (id(args[0]) in self._known or id(args[0]) in self._items):
            func = _REBINDING[func]
        if func in _TO_HOST:
            return self._answer(func, args[0])
        rewritten = _with_tensor_numbers(func, args, kwargs)
        if rewritten is not None:
            return rewritten
        if func in _DIVISORS:
            self._check_divisor(args[_DIVISORS[func]], args[1 - _DIVISORS[func]])
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _item(self, tensor: Tensor) -> Tensor:
        """The tensor as a Python number would be: on its own, and in double precision."""
        if id(tensor) in self._known:
            return tensor
        number = tensor.double() if tensor.is_floating_point() else tensor.clone()
        number = number.clone() if number is tensor else number
        self._items[id(number)] = number
        return number

    def _constant(self, value: float) -> Tensor:
        tensor = torch.full((), value, dtype=torch.float64)
        self._known[id(tensor)] = _Known(tensor, value, lambda numbers: value, frozenset())
        return tensor

    def _check_divisor(self, divisor: Any, dividend: Any) -> None:
        """Raise as Python does, where both are numbers: optimizers catch it."""
        known = self._known.get(id(divisor))
        if known is None or (isinstance(dividend, Tensor) and id(dividend) not in self._known):
            return
        is_zero = bool(known.value == 0)
        guard = Guard(lambda numbers: bool(known.question(numbers) == 0), is_zero, known.depends)
        self.guards.append(guard)
        if is_zero:
            raise ZeroDivisionError("division by zero")

    def _answer(self, func: Any, tensor: Tensor) -> Any:
        known = self._known.get(id(tensor))
        to_host = _TO_HOST[func]
        if known is None:
            try:
                return func(tensor)
            except Exception as e:
                name = f"{to_host.__name__}()"
                raise CaptureError(host_read_message(name, user_line())) from e
        answer = to_host(known.value)
        guard = Guard(lambda numbers: to_host(known.question(numbers)), answer, known.depends)
        self.guards.append(guard)
        return answer

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the host value of a result that depends on known numbers only."""
        if not isinstance(result, Tensor) or result.ndim or kwargs:
            return
        operands = [self._known.get(id(a), a) for a in args]
        known = [o for o in operands if isinstance(o, _Known)]
        if not known or any(
            isinstance(o, (Tensor, list, tuple)) and not isinstance(o, _Known) for o in operands
        ):
            return
        value = _on_host(func, [o.value if isinstance(o, _Known) else o for o in operands])

        def question(numbers: Sequence[float]) -> Any:
            return _on_host(
                func, [o.question(numbers) if isinstance(o, _Known) else o for o in operands]
            )

        depends = frozenset().union(*(o.depends for o in known))
        self._known[id(result)] = _Known(result, value, question, depends)


def _on_host(func: Any, operands: list[Any]) -> Any:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        tensors = [
            torch.tensor(o, dtype=torch.float64) if isinstance(o, float) else o for o in operands
        ]
        first = tensors[0]
        if not isinstance(first, Tensor):
            tensors[0] = torch.tensor(first)
        return func(*tensors).item()


def _with_tensor_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """The call with a tensor in place of a Python number, where torch wants the number."""
    if func in _ALPHA and isinstance(kwargs.get("alpha"), Tensor):
        return _ALPHA[func](args[0], args[1] * kwargs["alpha"])
    if func in _ADDC and isinstance(kwargs.get("value"), Tensor):
        add, combine = _ADDC[func]
        return add(args[0], combine(kwargs["value"] * args[1], args[2]))
    if func in _CLAMP:
        limits = _bound(("self", "min", "max"), args, kwargs)[1:]
        if any(isinstance(x, Tensor) for x in limits):
            return _CLAMP[func](
                args[0], *(x if x is None else _tensor(x).to(args[0].dtype) for x in limits)
            )
    if func in _LERP:
        start, end, weight = _bound(("self", "end", "weight"), args, kwargs)
        if isinstance(weight, Tensor) and weight.dtype != start.dtype:
            return func(start, end, weight.to(start.dtype))
    return None


def _bound(names: Sequence[str], args: Any, kwargs: Any) -> list[Any]:
    """Arguments in the order of `names`, however they were passed."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]
