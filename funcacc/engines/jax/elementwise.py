"""ATen operations on one element at a time, in JAX; operands have the result's dtype already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

aten = torch.ops.aten


def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return jnp.add(x, y if alpha == 1 else y * alpha)


def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return jnp.subtract(x, y if alpha == 1 else y * alpha)


def _rounded_div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if jnp.issubdtype(jnp.result_type(x, y), jnp.integer):
        exact = jnp.floor_divide(jnp.abs(x), jnp.abs(y))
        return jnp.where((x < 0) == (y < 0), exact, -exact)
    return jnp.trunc(x / y)


def _pow(x: Any, exponent: Any) -> Any:
    special = {0.5: jnp.sqrt, -0.5: lax.rsqrt, -1: jnp.reciprocal}
    if isinstance(exponent, (int, float)):
        if exponent in special and jnp.issubdtype(x.dtype, jnp.inexact):
            return special[exponent](x)
        if float(exponent).is_integer() and abs(exponent) <= 8:
            return lax.integer_pow(x, int(exponent))
    return jnp.power(x, exponent)


def _sign(x: Any) -> Any:
    # Unlike jnp.sign, 0 for NaN.
    return jnp.where(x > 0, 1, 0) - jnp.where(x < 0, 1, 0)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def _gelu(x: Any, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _gelu_backward(grad: Any, x: Any, approximate: str = "none") -> Any:
    return jax.vjp(lambda x: _gelu(x, approximate), x)[1](grad)[0]


def _elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    negative = alpha * jnp.expm1(jnp.minimum(x, 0) * input_scale)
    return scale * jnp.where(x > 0, x, negative)


def _nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


ARITHMETIC: dict[Any, Callable[..., Any]] = {
    aten.abs.default: jnp.abs,
    aten.acos.default: jnp.arccos,
    aten.acosh.default: jnp.arccosh,
    aten.add.Scalar: _add,
    aten.add.Tensor: _add,
    aten.asin.default: jnp.arcsin,
    aten.asinh.default: jnp.arcsinh,
    aten.atan.default: jnp.arctan,
    aten.atan2.default: jnp.arctan2,
    aten.atanh.default: jnp.arctanh,
    aten.bitwise_and.Scalar: jnp.bitwise_and,
    aten.bitwise_and.Tensor: jnp.bitwise_and,
    aten.bitwise_left_shift.Tensor: jnp.left_shift,
    aten.bitwise_left_shift.Tensor_Scalar: jnp.left_shift,
    aten.bitwise_not.default: jnp.bitwise_not,
    aten.bitwise_or.Scalar: jnp.bitwise_or,
    aten.bitwise_or.Tensor: jnp.bitwise_or,
    aten.bitwise_right_shift.Tensor: jnp.right_shift,
    aten.bitwise_right_shift.Tensor_Scalar: jnp.right_shift,
    aten.bitwise_xor.Scalar: jnp.bitwise_xor,
    aten.bitwise_xor.Tensor: jnp.bitwise_xor,
    aten.ceil.default: jnp.ceil,
    aten.clamp.Tensor: _clamp,
    aten.clamp.default: _clamp,
    aten.clamp_max.default: jnp.minimum,
    aten.clamp_min.default: jnp.maximum,
    aten.cos.default: jnp.cos,
    aten.cosh.default: jnp.cosh,
    aten.digamma.default: lax.digamma,
    aten.div.Scalar: jnp.true_divide,
    aten.div.Scalar_mode: _rounded_div,
    aten.div.Tensor: jnp.true_divide,
    aten.div.Tensor_mode: _rounded_div,
    aten.elu.default: _elu,
    aten.erf.default: lax.erf,
    aten.erfc.default: lax.erfc,
    aten.erfinv.default: lax.erf_inv,
    aten.exp.default: jnp.exp,
    aten.exp2.default: jnp.exp2,
    aten.expm1.default: jnp.expm1,
    aten.floor.default: jnp.floor,
    aten.fmax.default: jnp.fmax,
    aten.fmin.default: jnp.fmin,
    aten.fmod.Scalar: jnp.fmod,
    aten.fmod.Tensor: jnp.fmod,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.hardtanh.default: lambda x, low=-1, high=1: _clamp(x, low, high),
    aten.hypot.default: jnp.hypot,
    aten.leaky_relu.default: lambda x, slope=0.01: jnp.where(x > 0, x, x * slope),
    aten.lgamma.default: lax.lgamma,
    aten.log.default: jnp.log,
    aten.log10.default: jnp.log10,
    aten.log1p.default: jnp.log1p,
    aten.log2.default: jnp.log2,
    aten.maximum.default: jnp.maximum,
    aten.minimum.default: jnp.minimum,
    aten.mul.Scalar: jnp.multiply,
    aten.mul.Tensor: jnp.multiply,
    aten.nan_to_num.default: _nan_to_num,
    aten.neg.default: jnp.negative,
    aten.pow.Scalar: jnp.power,
    aten.pow.Tensor_Scalar: _pow,
    aten.pow.Tensor_Tensor: jnp.power,
    aten.reciprocal.default: jnp.reciprocal,
    aten.relu.default: lambda x: jnp.maximum(x, 0),
    aten.remainder.Scalar: jnp.remainder,
    aten.remainder.Scalar_Tensor: jnp.remainder,
    aten.remainder.Tensor: jnp.remainder,
    aten.round.default: jnp.round,
    aten.rsqrt.default: lax.rsqrt,
    aten.sigmoid.default: jax.nn.sigmoid,
    aten.sign.default: _sign,
    aten.sin.default: jnp.sin,
    aten.sinh.default: jnp.sinh,
    aten.sqrt.default: jnp.sqrt,
    aten.square.default: jnp.square,
    aten.sub.Scalar: _sub,
    aten.sub.Tensor: _sub,
    aten.tan.default: jnp.tan,
    aten.tanh.default: jnp.tanh,
    aten.trunc.default: jnp.trunc,
}
"""Those that compute in the dtype of their result, to which operands are cast first."""

COMPARING: dict[Any, Callable[..., Any]] = {
    aten.eq.Scalar: jnp.equal,
    aten.eq.Tensor: jnp.equal,
    aten.ge.Scalar: jnp.greater_equal,
    aten.ge.Tensor: jnp.greater_equal,
    aten.gt.Scalar: jnp.greater,
    aten.gt.Tensor: jnp.greater,
    aten.isfinite.default: jnp.isfinite,
    aten.isinf.default: jnp.isinf,
    aten.isnan.default: jnp.isnan,
    aten.le.Scalar: jnp.less_equal,
    aten.le.Tensor: jnp.less_equal,
    aten.logical_and.default: jnp.logical_and,
    aten.logical_not.default: jnp.logical_not,
    aten.logical_or.default: jnp.logical_or,
    aten.logical_xor.default: jnp.logical_xor,
    aten.lt.Scalar: jnp.less,
    aten.lt.Tensor: jnp.less,
    aten.ne.Scalar: jnp.not_equal,
    aten.ne.Tensor: jnp.not_equal,
    aten.signbit.default: jnp.signbit,
    aten.where.self: jnp.where,
}
"""Those whose operands keep their dtypes."""
