"""Operations that the table lacks, in terms of others, where PyTorch says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from funcacc.capture.graph import Graph
from funcacc.capture.passes import simplify

_ROUNDS = 4


def expanded(graph: Graph, has: Callable[[Any], bool]) -> None:
    """Rewrite a graph and its parts in place, until nothing more can be done.

    Args:
        graph: whose operations may be missing.
        has: whether one isn't.
    """
    for part in graph.parts:
        expanded(part, has)
    for _ in range(_ROUNDS):
        missing = {n.target for n in graph.nodes if not has(n.target)}
        known = {t: decomposition_table[t] for t in missing if t in decomposition_table}
        if not known:
            return
        with FakeTensorMode():
            fakes = [torch.empty(s.shape, dtype=s.dtype) for s in graph.inputs]
            with torch.no_grad():
                graph.module = make_fx(graph.module, decomposition_table=known)(*fakes)
        simplify(graph.module)
