"""Sums of half-precision numbers, added up in float32 as PyTorch's own kernels do it.

XLA reduces in the type that it is given: on a CPU a sum of bfloat16 ones stops at 256. The casts
cost no memory, since XLA computes them while it reduces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_ADDING = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.cumsum.default,
    aten.prod.default,
    aten.prod.dim_int,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.linalg_vector_norm.default,
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.embedding_dense_backward.default,
    aten.index_add.default,
    aten.scatter_add.default,
    aten.index_put.default,
}


def run(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The value of a node that adds half-precision numbers up; None for any other node.

    Args:
        node: of the graph.
        args: values of its arguments.
        kwargs: likewise.
    """
    if node.target not in _ADDING or node.meta["val"].dtype not in _HALF:
        return None
    wide = [x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x for x in args]
    if kwargs.get("dtype") in _HALF:
        kwargs = {**kwargs, "dtype": torch.float32}
    out: Tensor = node.target(*wide, **kwargs)
    return out.to(node.meta["val"].dtype)
