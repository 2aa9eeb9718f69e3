"""Batch normalisation with cumulative averages and with statistics of parts of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


def _cumulative(module: _BatchNorm, x: Tensor) -> Tensor:
    """The forward pass for ``momentum=None``, where PyTorch reads the count as a number."""
    assert module.running_mean is not None and module.running_var is not None
    assert module.num_batches_tracked is not None
    module._check_input_dim(x)
    mean, var = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
    out = F.batch_norm(x, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        for running, new in ((module.running_mean, mean), (module.running_var, var)):
            running.add_((new - running) / module.num_batches_tracked.to(running.dtype))
    return out


@contextlib.contextmanager
def cumulative_averages() -> Iterator[None]:
    """Let modules with ``momentum=None`` be traced."""
    forward: Callable[[_BatchNorm, Tensor], Tensor] = _BatchNorm.forward

    def chosen(self: _BatchNorm, input: Tensor) -> Tensor:
        tracks = self.training and self.track_running_stats and self.running_mean is not None
        if self.momentum is None and tracks:
            return _cumulative(self, input)
        return forward(self, input)

    with mock.patch.object(_BatchNorm, "forward", chosen):
        yield


def _in_groups(groups: int) -> Callable[..., Tensor]:
    whole = F.batch_norm

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or input.shape[0] % groups:
            return whole(input, running_mean, running_var, weight, bias, training, momentum, eps)
        apart = input.reshape(groups, -1, *input.shape[1:])
        wide = apart.to(torch.promote_types(input.dtype, torch.float32))
        dims = [d for d in range(wide.ndim) if d not in (0, 2)]
        var, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
        out = ((wide - mean) * torch.rsqrt(var + eps)).reshape(input.shape)
        count = apart.numel() // (groups * input.shape[1])
        with torch.no_grad():
            for running, new in (
                (running_mean, mean),
                (running_var, var * (count / max(count - 1, 1))),
            ):
                if running is not None:
                    average = new.mean(0).flatten().to(running.dtype)
                    running.mul_(1 - momentum).add_(average, alpha=momentum)
        shape = [1, -1] + [1] * (input.ndim - 2)
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        return out.to(input.dtype)

    return batch_norm


@contextlib.contextmanager
def local_statistics(groups: int) -> Iterator[None]:
    """Let each of so many groups of rows be normalised by its own statistics.

    That is what data parallelism without synchronisation does. Running statistics move by the mean
    over the groups.
    """
    if groups == 1:
        yield
        return
    with mock.patch.object(F, "batch_norm", _in_groups(groups)):
        yield
