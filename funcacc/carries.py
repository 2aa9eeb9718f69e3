"""What enters and leaves a loop: leaves, bounds, and errors that list every mismatch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from funcacc import trees
from funcacc.errors import CarryError
from funcacc.types import PyTree, TensorSpec


def tensors(tree: PyTree, root: str) -> tuple[list[Tensor], trees.TreeSpec]:
    """The leaves of `tree` as tensors, and its structure.

    Raises:
        CarryError: naming each leaf that is neither tensor nor number.
    """
    leaves, spec = trees.flatten(tree)
    wrong = [
        f"  {path} is a {type(leaf).__name__}"
        for leaf, path in zip(leaves, trees.paths(tree, root), strict=True)
        if not isinstance(leaf, (Tensor, bool, int, float))
    ]
    if wrong:
        raise CarryError(
            "what enters or leaves a loop must be tensors, numbers or None; keep other objects "
            "outside and let the body close over them:\n" + "\n".join(wrong)
        )
    return [x if isinstance(x, Tensor) else torch.tensor(x) for x in leaves], spec


def check_carry(
    init: PyTree, entered: Sequence[TensorSpec], spec: trees.TreeSpec, out: PyTree
) -> list[Tensor]:
    """The leaves of what a body returned.

    Raises:
        CarryError: listing every leaf that left otherwise than it entered.
    """
    leaves, left = tensors(out, "carry")
    if left != spec:
        raise CarryError(
            "the body returns another structure than the carry had:\n"
            + trees.describe_difference(init, out, "carry")
        )
    lines = [
        f"  {path} enters as {before} and leaves as {TensorSpec.of(after)}"
        for path, before, after in zip(trees.paths(init, "carry"), entered, leaves, strict=True)
        if before != TensorSpec.of(after)
    ]
    if lines:
        raise CarryError(
            "the body changes the shape or dtype of the carry; cast or reshape inside it:\n"
            + "\n".join(lines)
        )
    return leaves


def check_condition(answer: object) -> Tensor:
    """What a condition returned.

    Raises:
        CarryError: when it isn't a boolean scalar tensor.
    """
    if isinstance(answer, Tensor) and answer.ndim == 0 and answer.dtype == torch.bool:
        return answer
    got = TensorSpec.of(answer) if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
    raise CarryError(f"cond_fn returned {got}; it must return a boolean scalar tensor")


def pair(out: object) -> tuple[PyTree, PyTree]:
    """What the body of a scan returned.

    Raises:
        CarryError: when it isn't ``(carry, y)``.
    """
    if not isinstance(out, tuple) or len(out) != 2:
        kind = "Tensor" if isinstance(out, Tensor) else type(out).__name__
        raise CarryError(
            f"the body of a scan returned a {kind}; it must return (carry, y), "
            "with y None where there is nothing to stack"
        )
    return out


def length_of(slices: Sequence[Tensor], given: int | None) -> int:
    """The number of trips of a scan.

    Raises:
        CarryError: when leading axes and the length disagree, or there is none of them.
    """
    if given is not None and given < 0:
        raise CarryError(f"scan's length is {given}; give 0 or more")
    sizes = {int(x.shape[0]) if x.ndim else -1 for x in slices}
    if given is not None:
        sizes.add(given)
    if len(sizes) != 1 or -1 in sizes:
        raise CarryError(
            "scan needs one length: the leading axes of xs are "
            f"{[list(x.shape) for x in slices]}, length is {given}"
        )
    return sizes.pop()


def check_bound(value: int | Tensor, name: str) -> None:
    """Refuse what can't bound a loop.

    Raises:
        CarryError: for a negative number, or anything that isn't an integer scalar.
    """
    if isinstance(value, Tensor):
        if value.ndim or value.is_floating_point() or value.dtype == torch.bool:
            raise CarryError(f"{name} is {TensorSpec.of(value)}; it must be an integer scalar")
    elif isinstance(value, bool) or not isinstance(value, int):
        raise CarryError(f"{name} is a {type(value).__name__}; it must be an integer scalar")
    elif value < 0:
        raise CarryError(f"{name} is {value}; bounds are 0 or more, shift the index in the body")


def index_dtype(lower: int | Tensor, upper: int | Tensor) -> torch.dtype:
    """The dtype of an index from `lower` to `upper`, at least one of which is a tensor.

    That of the tensors; ``int64`` where a number doesn't fit into it, since an index that
    overflows would never arrive.
    """
    bounds = (lower, upper)
    dtype = functools.reduce(
        torch.promote_types, [b.dtype for b in bounds if isinstance(b, Tensor)]
    )
    fits = all(b <= torch.iinfo(dtype).max for b in bounds if not isinstance(b, Tensor))
    return dtype if fits else torch.int64
