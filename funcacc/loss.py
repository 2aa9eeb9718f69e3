"""What a loss function may return, and how aux values are reduced over a window."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcacc import trees
from funcacc.errors import ModelError
from funcacc.types import PyTree


class Term(NamedTuple):
    """One term of a loss: ``coefficient * sum_i(total_i) / sum_i(weight_i)``."""

    total: Tensor
    weight: Tensor
    coefficient: float


class Loss:
    """A microbatch's share of a loss that is normalised over the whole window.

    Over the microbatches i of a window, each term t contributes
    ``c[t] * sum_i(total[t, i]) / sum_i(weight[t, i])``. ``a + b`` has the terms of both;
    ``c * a`` scales the coefficients.

    Args:
        total: scalar tensor, differentiable: a sum over the microbatch.
        weight: what it is a sum of: a scalar tensor or a number, >= 0, not differentiated.
        aux: any tree of tensors, `Mean`, `Sum`, `Last` and `Stack`.

    Example:
        >>> import torch, funcacc
        >>> token_sum, tokens = torch.tensor(10.0), torch.tensor(5)
        >>> loss = funcacc.Loss(token_sum, tokens) + 0.01 * funcacc.Loss.mean(torch.tensor(3.0))
        >>> [term.coefficient for term in loss.terms]
        [1.0, 0.01]
    """

    def __init__(self, total: Tensor, weight: Tensor | float, aux: PyTree = None) -> None:
        if not isinstance(total, Tensor):
            raise ModelError(
                f"Loss(total, ...) takes a tensor, got {type(total).__name__}; "
                "pass the differentiable sum over the microbatch"
            )
        if not isinstance(weight, Tensor):
            if not isinstance(weight, Real) or not weight >= 0:
                raise ModelError(
                    f"the weight of a Loss is {weight!r}; give what `total` is a sum of: "
                    "a scalar tensor or a number, >= 0"
                )
            wide = torch.promote_types(total.dtype, torch.float32)
            weight = torch.full((), float(weight), dtype=wide, device=total.device)
        self.terms: tuple[Term, ...] = (Term(total, weight.detach(), 1.0),)
        self.aux: PyTree = aux

    @classmethod
    def mean(cls, value: Tensor, aux: PyTree = None) -> Loss:
        """A term that is averaged over the microbatches: total = value, weight = 1."""
        return cls(value, 1.0, aux)

    @classmethod
    def _of(cls, terms: tuple[Term, ...], aux: PyTree) -> Loss:
        out = cls.__new__(cls)
        out.terms, out.aux = terms, aux
        return out

    def __add__(self, other: Loss) -> Loss:
        """The sum: all terms of both; at most one aux, or two dicts with different keys."""
        if not isinstance(other, Loss):
            return NotImplemented
        return Loss._of(self.terms + other.terms, _merge_aux(self.aux, other.aux))

    def __radd__(self, other: object) -> Loss:
        """What ``sum(losses)`` starts with is 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __mul__(self, factor: float) -> Loss:
        """Scale every term by a Python number."""
        if not isinstance(factor, Real):
            raise ModelError(
                f"a Loss is scaled by a Python number, got {type(factor).__name__}; "
                "to scale by a tensor, multiply `total` by it"
            )
        c = float(factor)
        terms = tuple(t._replace(coefficient=c * t.coefficient) for t in self.terms)
        return Loss._of(terms, self.aux)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        """Terms and aux."""
        return f"Loss(terms={self.terms!r}, aux={self.aux!r})"


def _merge_aux(a: PyTree, b: PyTree) -> PyTree:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict) and isinstance(b, dict) and not a.keys() & b.keys():
        return {**a, **b}
    raise ModelError(
        "both losses of a sum carry aux, and they can't be merged; "
        "give aux to one of them, or use dicts with different keys"
    )


class Mean(NamedTuple):
    """Aux reduced as ``sum_i(weight_i * value_i) / sum_i(weight_i)``.

    0 if the weights sum to 0. A value of weight 0 counts as 0, also where it is 0 / 0. The
    weight has the shape of the value, or one that broadcasts to it.
    """

    value: Any
    weight: Any = 1


class Sum(NamedTuple):
    """Aux reduced as ``sum_i(value_i)``.

    In ``int64`` for integers and booleans, in ``float32`` or wider for floats.
    """

    value: Any


class Last(NamedTuple):
    """Aux of the last microbatch of the window."""

    value: Any


class Stack(NamedTuple):
    """Aux of all microbatches, stacked: the shape gains a leading axis of the capacity."""

    value: Any


REDUCTIONS = (Mean, Sum, Last, Stack)


def terms_and_aux(result: Any) -> tuple[tuple[Term, ...], PyTree]:
    """What a loss function returned, in one form.

    Args:
        result: a scalar tensor, ``(scalar or Loss, aux)``, a `Loss`, or an object with
            a ``.loss`` (a transformers model's output).

    Returns:
        The terms, and the aux tree.

    Raises:
        ModelError: for anything else, saying what came.
    """
    aux: PyTree = None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (Tensor, Loss)):
        result, aux = result
    if not isinstance(result, (Tensor, Loss)):
        inner = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
        if inner is None:
            raise ModelError(
                f"the loss function returned {type(result).__name__}; return a scalar tensor, "
                "(scalar, aux), a funcacc.Loss, or an object whose .loss is a scalar tensor"
            )
        result = inner
    loss = result if isinstance(result, Loss) else Loss.mean(result)
    for n, term in enumerate(loss.terms):
        _check_scalar(term.total, "the loss" if len(loss.terms) == 1 else f"loss term {n}")
        if term.weight.ndim:
            raise ModelError(
                f"the weight of loss term {n} has shape {tuple(term.weight.shape)}; "
                "a weight is one number a microbatch: sum it"
            )
    return loss.terms, _merge_aux(loss.aux, aux)


def _check_scalar(total: Tensor, what: str) -> None:
    if total.ndim and total.numel() != 1:
        raise ModelError(
            f"{what} has shape {tuple(total.shape)}; return a scalar: take .mean(), or "
            ".sum() with funcacc.Loss(total, weight) for exact weighting"
        )
    if not total.is_floating_point():
        raise ModelError(
            f"{what} has dtype {total.dtype}, which has no gradient; return a floating loss"
        )


def split_aux(aux: PyTree) -> tuple[list[Any], trees.TreeSpec]:
    """The reductions in an aux tree in order, bare leaves as `Mean`, and the structure.

    Raises:
        ModelError: for a leaf that is neither a tensor nor a number.
    """
    leaves, spec = trees.flatten_until(aux, lambda x: isinstance(x, REDUCTIONS))
    found = [leaf if isinstance(leaf, REDUCTIONS) else Mean(leaf) for leaf in leaves]
    for reduction in found:
        if not isinstance(reduction.value, (Tensor, bool, int, float)):
            raise ModelError(
                f"aux holds a {type(reduction.value).__name__}; it may hold tensors and numbers, "
                "bare or in funcacc.Mean, Sum, Last or Stack"
            )
        if isinstance(reduction, Mean):
            _check_weight(reduction)
    return found, spec


def _check_weight(mean: Mean) -> None:
    value, weight = (tuple(getattr(x, "shape", ())) for x in mean)
    fits = len(weight) <= len(value) and all(
        w in (1, v) for w, v in zip(reversed(weight), reversed(value), strict=False)
    )
    if not fits:
        raise ModelError(
            f"aux holds a funcacc.Mean of shape {value} with a weight of shape {weight}; give a "
            "weight that broadcasts to the value, e.g. one number"
        )
