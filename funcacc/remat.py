"""`checkpoint`: compute again in the backward pass instead of keeping."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from funcacc import trees
from funcacc.capture import context


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, of which only the inputs are kept for the gradient.

    Equals::

        return fn(*args, **kwargs)

    with these differences:

    - where gradients are recorded, `fn` is run again on the way back, with the same random
      numbers, and what it computes is not kept in between. Compiled by XLA too: the second
      run depends on the gradient that arrives, so that no compiler merges it with the first;
    - buffers that `fn` updates (batch statistics) are updated twice, as by
      `torch.utils.checkpoint`;
    - outside a traced step, on XLA tensors, where torch's checkpoint fails, it is exactly the
      line above, without any saving.

    ``torch.utils.checkpoint.checkpoint`` (of both kinds), ``checkpoint_sequential``,
    selective checkpoints, torch_xla's checkpoint and what transformers builds on them are
    treated alike inside a traced step.

    Args:
        fn: a module or any function; may close over tensors.
        *args: for `fn`.
        **kwargs: for `fn`.

    Returns:
        What `fn` returns.

    Example:
        >>> import torch, funcacc
        >>> block = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.GELU())
        >>> funcacc.checkpoint(block, torch.ones(3, 2)).shape
        torch.Size([3, 8])
    """
    if context.current() is None and _any_on_xla((args, kwargs)):
        return fn(*args, **kwargs)
    return torch_checkpoint(functools.partial(fn, **kwargs), *args, use_reentrant=False)


def _any_on_xla(tree: Any) -> bool:
    leaves, _ = trees.flatten(tree)
    return any(isinstance(t, Tensor) and t.device.type == "xla" for t in leaves)
