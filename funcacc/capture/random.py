"""Random operations on the explicit key.

While user code is traced, each operation that draws random numbers is replaced by a
function of (key, number of the draw). An operation without such a function is refused.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcacc.capture import ops
from funcacc.errors import CaptureError, user_line

aten = torch.ops.aten


class KeySource:
    """A key and how many draws were made from it.

    Args:
        key: ``int32[2]``, a tensor of the trace.
    """

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.draws = 0

    def bits(self, shape: Sequence[int]) -> Tensor:
        """The next draw: ``int32`` of `shape`."""
        self.draws += 1
        return ops.random_bits(self.key, self.draws - 1, list(shape))

    def get_state(self) -> Tensor:
        """What `torch.get_rng_state` answers while user code is traced."""
        return torch.tensor([self.draws], dtype=torch.int64)

    def set_state(self, state: Tensor) -> None:
        """Go back to a draw, so that a recompute meets the numbers of its forward pass."""
        self.draws = int(state[0])

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uniform on [0, 1) with as many bits as `dtype` holds exactly."""
        if dtype == torch.float64:
            high = (self.bits(shape) & 0x3FFFFFF).to(dtype) * 2.0**-26
            return high + (self.bits(shape) & 0x7FFFFFF).to(dtype) * 2.0**-53
        width = {torch.bfloat16: 8, torch.float16: 11}.get(dtype, 24)
        scaled = (self.bits(shape) & ((1 << width) - 1)).to(torch.float32) * 2.0**-width
        return scaled.to(dtype)

    def open_uniform(self, shape: Sequence[int]) -> Tensor:
        """Uniform on (0, 1), ``float32``, symmetric about 1/2."""
        return (self.bits(shape) & 0x7FFFFF).to(torch.float32) * 2.0**-23 + 2.0**-24

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Standard normal by the inverse of its distribution function."""
        z = math.sqrt(2.0) * torch.erfinv(2.0 * self.open_uniform(shape) - 1.0)
        return z.to(dtype)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """Integers in [low, high), ``int64``; 62 random bits modulo the range."""
        wide = (self.bits(shape).to(torch.int64) & 0x7FFFFFFF) * (1 << 31)
        wide = wide + (self.bits(shape).to(torch.int64) & 0x7FFFFFFF)
        return torch.remainder(wide, high - low) + low

    def gumbel(self, shape: Sequence[int]) -> Tensor:
        """Standard Gumbel, ``float32``."""
        return -torch.log(-torch.log(self.open_uniform(shape)))


@contextlib.contextmanager
def noticing_host_draws(drawn: set[str]) -> Iterator[None]:
    """Add to `drawn` the host's generators (Python's, NumPy's) that move meanwhile."""
    before = _host_generators()
    yield
    drawn.update(name for name, state in _host_generators().items() if state != before[name])


def warn_of_host_draws(drawn: set[str]) -> None:
    """Warn that a trace has frozen the numbers of these generators, as `noticing_host_draws`."""
    if drawn:
        warnings.warn(
            f"while the loss function was traced, {' and '.join(sorted(drawn))} drew random "
            "numbers on the host. If the loss did that (and not another thread), every microbatch "
            "of every step gets these same numbers; draw by torch.rand, torch.randint, ... instead",
            stacklevel=2,
        )


def _host_generators() -> dict[str, Any]:
    algorithm, words, *rest = np.random.get_state()
    return {
        "Python's random": random.getstate(),
        "numpy.random": (algorithm, words.tobytes(), *rest),
    }


Handler = Callable[..., Any]
_HANDLERS: dict[Any, Handler] = {}


def _handles(*overloads: Any) -> Callable[[Handler], Handler]:
    def register(fn: Handler) -> Handler:
        for overload in overloads:
            _HANDLERS[overload] = fn
        return fn

    return register


def _dtype(kwargs: dict[str, Any], default: torch.dtype | None = None) -> torch.dtype:
    return kwargs.get("dtype") or default or torch.get_default_dtype()


@_handles(aten.rand.default)
def _rand(src: KeySource, size: Sequence[int], **kw: Any) -> Tensor:
    return src.uniform(size, _dtype(kw))


@_handles(aten.rand_like.default)
def _rand_like(src: KeySource, x: Tensor, **kw: Any) -> Tensor:
    return src.uniform(x.shape, _dtype(kw, x.dtype))


@_handles(aten.randn.default)
def _randn(src: KeySource, size: Sequence[int], **kw: Any) -> Tensor:
    return src.normal(size, _dtype(kw))


@_handles(aten.randn_like.default)
def _randn_like(src: KeySource, x: Tensor, **kw: Any) -> Tensor:
    return src.normal(x.shape, _dtype(kw, x.dtype))


@_handles(aten.randint.default)
def _randint(src: KeySource, high: int, size: Sequence[int], **kw: Any) -> Tensor:
    return src.integers(0, high, size).to(_dtype(kw, torch.int64))


@_handles(aten.randint.low)
def _randint_low(src: KeySource, low: int, high: int, size: Sequence[int], **kw: Any) -> Tensor:
    return src.integers(low, high, size).to(_dtype(kw, torch.int64))


@_handles(aten.randint_like.default)
def _randint_like(src: KeySource, x: Tensor, high: int, **kw: Any) -> Tensor:
    return src.integers(0, high, x.shape).to(_dtype(kw, x.dtype))


@_handles(aten.randint_like.low_dtype)
def _randint_like_low(src: KeySource, x: Tensor, low: int, high: int, **kw: Any) -> Tensor:
    return src.integers(low, high, x.shape).to(_dtype(kw, x.dtype))


@_handles(aten.randperm.default)
def _randperm(src: KeySource, n: int, **kw: Any) -> Tensor:
    # 62-bit sort keys: two of a million are equal with probability 1e-7.
    wide = (src.bits([n]).to(torch.int64) & 0x7FFFFFFF) * (1 << 31)
    order = torch.argsort(wide + (src.bits([n]).to(torch.int64) & 0x7FFFFFFF))
    return order.to(_dtype(kw, torch.int64))


@_handles(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def _normal(src: KeySource, mean: Any, std: Any = 1.0, **kw: Any) -> Tensor:
    like = torch.as_tensor(mean) + torch.as_tensor(std)
    return mean + std * src.normal(like.shape, like.dtype)


@_handles(aten.normal.float_float)
def _normal_numbers(
    src: KeySource, mean: float, std: float, size: Sequence[int], **kw: Any
) -> Tensor:
    return mean + std * src.normal(size, _dtype(kw))


def _mask(src: KeySource, shape: Sequence[int], p: Any) -> Tensor:
    return src.uniform(shape, torch.float32) < p


@_handles(aten.bernoulli.default)
def _bernoulli(src: KeySource, p: Tensor, **kw: Any) -> Tensor:
    return _mask(src, p.shape, p).to(p.dtype)


@_handles(aten.bernoulli.p)
def _bernoulli_p(src: KeySource, x: Tensor, p: float, **kw: Any) -> Tensor:
    return _mask(src, x.shape, p).to(x.dtype)


@_handles(aten.bernoulli_.float, aten.bernoulli_.Tensor)
def _bernoulli_(src: KeySource, x: Tensor, p: Any = 0.5, **kw: Any) -> Tensor:
    return x.copy_(_mask(src, x.shape, p))


@_handles(aten.native_dropout.default)
def _native_dropout(src: KeySource, x: Tensor, p: float, train: bool | None) -> Any:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = _mask(src, x.shape, 1.0 - p)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return x * keep * scale, keep


@_handles(aten.uniform_.default)
def _uniform_(src: KeySource, x: Tensor, low: float = 0.0, high: float = 1.0, **kw: Any) -> Tensor:
    return x.copy_(src.uniform(x.shape, x.dtype) * (high - low) + low)


@_handles(aten.normal_.default)
def _normal_(src: KeySource, x: Tensor, mean: float = 0.0, std: float = 1.0, **kw: Any) -> Tensor:
    return x.copy_(src.normal(x.shape, x.dtype) * std + mean)


@_handles(aten.exponential_.default)
def _exponential_(src: KeySource, x: Tensor, rate: float = 1.0, **kw: Any) -> Tensor:
    return x.copy_(torch.log(src.open_uniform(x.shape)) * (-1.0 / rate))


@_handles(aten.log_normal_.default)
def _log_normal_(
    src: KeySource, x: Tensor, mean: float = 1.0, std: float = 2.0, **kw: Any
) -> Tensor:
    return x.copy_(torch.exp(src.normal(x.shape, torch.float32) * std + mean))


@_handles(aten.cauchy_.default)
def _cauchy_(
    src: KeySource, x: Tensor, median: float = 0.0, sigma: float = 1.0, **kw: Any
) -> Tensor:
    angle = math.pi * (src.open_uniform(x.shape) - 0.5)
    return x.copy_(median + sigma * torch.tan(angle))


@_handles(aten.geometric_.default)
def _geometric_(src: KeySource, x: Tensor, p: float, **kw: Any) -> Tensor:
    return x.copy_(torch.ceil(torch.log(src.open_uniform(x.shape)) / math.log1p(-p)))


@_handles(aten.random_.default)
def _random_(src: KeySource, x: Tensor, **kw: Any) -> Tensor:
    limit = (
        1 << min(24, 8 if x.dtype == torch.bfloat16 else 24)
        if x.is_floating_point()
        else min(torch.iinfo(x.dtype).max, (1 << 31) - 1) + 1
    )
    return x.copy_(src.integers(0, limit, x.shape))


@_handles(aten.random_.to)
def _random_to(src: KeySource, x: Tensor, to: int, **kw: Any) -> Tensor:
    return x.copy_(src.integers(0, to, x.shape))


@_handles(getattr(aten.random_, "from"))
def _random_from(src: KeySource, x: Tensor, low: int, to: int, **kw: Any) -> Tensor:
    return x.copy_(src.integers(low, to, x.shape))


@_handles(aten.multinomial.default)
def _multinomial(
    src: KeySource, weights: Tensor, num: int, replacement: bool = False, **kw: Any
) -> Tensor:
    scores = torch.log(weights.to(torch.float32))
    if replacement:
        noise = src.gumbel([*weights.shape[:-1], num, weights.shape[-1]])
        return torch.argmax(scores.unsqueeze(-2) + noise, dim=-1)
    return torch.topk(scores + src.gumbel(weights.shape), num, dim=-1).indices


class RandomOperations(TorchDispatchMode):
    """While it is on, random operations draw from the innermost `KeySource`."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[KeySource] = []

    @contextlib.contextmanager
    def drawing_from(self, key: Tensor) -> Iterator[KeySource]:
        """Draw from `key` inside this context."""
        self.sources.append(KeySource(key))
        try:
            yield self.sources[-1]
        finally:
            self.sources.pop()

    def source(self, what: str) -> KeySource:
        """The key in force.

        Raises:
            CaptureError: when there is none.
        """
        if not self.sources:
            raise CaptureError(f"{what} at {user_line()} draws random numbers without a key")
        return self.sources[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace an operation that draws; pass on all others."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func in (aten.dropout.default, aten.feature_dropout.default):
            # Composites that only look random: their parts come here again.
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace == "funcacc":
            return func(*args, **kwargs)
        if kwargs.pop("generator", None) is not None:
            raise CaptureError(
                f"{func} at {user_line()} is given a torch.Generator, which a compiled step "
                "can't follow; leave generator out: the numbers then come from the step's key"
            )
        handler = _HANDLERS.get(func)
        if handler is None:
            raise CaptureError(
                f"{func} at {user_line()} draws random numbers in a way that has no "
                "counterpart on the explicit key; write it in terms of torch.rand or torch.randn"
            )
        return handler(self.source(str(func)), *args, **kwargs)
