"""The first state of an optimizer, as the optimizer itself makes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcacc import trees
from funcacc.optimizers import shadow


class Maker:
    """Makes the first state of parameters that are alike.

    Two trial runs on the host tell whether the state depends on the parameter's value or
    on its gradient; where it does on neither, one result serves all.
    """

    def __init__(self, opt: torch.optim.Optimizer, options: dict[str, Any], param: Tensor) -> None:
        self.opt = opt
        self.options = options
        value = param.detach().cpu()
        noise = torch.Generator().manual_seed(0)
        grad = torch.randn(value.shape, generator=noise).to(value.dtype)
        base = self._run(value, grad)
        self.from_gradient = not _same(base, self._run(value, -2 * grad))
        self.constant = base if _same(base, self._run(value + 1, grad)) else None

    def _run(self, value: Tensor, grad: Tensor) -> dict[str, Any]:
        return shadow.first_state(self.opt, self.options, value.clone(), grad)

    def make(self, param: Tensor) -> dict[str, Any]:
        """The state of one parameter, on the host."""
        if self.constant is not None:
            return dict(self.constant)
        value = param.detach().cpu()
        return self._run(value, torch.zeros_like(value))


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    xs, spec = trees.flatten(a)
    ys, other = trees.flatten(b)
    if spec != other:
        return False
    return all(
        torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else x is y or x == y
        for x, y in zip(xs, ys, strict=True)
    )
