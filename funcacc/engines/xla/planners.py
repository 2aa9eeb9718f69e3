"""How shards go to and come from a folder of `torch.distributed.checkpoint`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner


class SavePlanner(SPMDSavePlanner):
    """torch_xla's, for tensors too that are cut over some of the mesh's axes and equal over others.

    For those it lists each shard once a copy, and torch, which takes the same shard in two plans
    for written twice, then writes none of them.
    """

    def create_local_plan(self) -> SavePlan:
        """With one copy of each shard; torch drops those that other processes write too."""
        plan: SavePlan = super().create_local_plan()
        once = {_place(item): item for item in reversed(plan.items)}
        return dataclasses.replace(plan, items=[i for i in plan.items if once[_place(i)] is i])


def _place(item: Any) -> Any:
    return item.index.fqn, item.index.offset


__all__ = ["SPMDLoadPlanner", "SavePlanner"]
