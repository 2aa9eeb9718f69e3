"""One optimizer step over a window, as users of each library write it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

import funcacc
from funcacc.bench.work import WORK, Batch, loss_fn, window

LR = 1e-3


class Peer:
    """A training run that takes steps over one window.

    Args:
        work: a key of `WORK`.
        count: microbatches in the window.

    Attributes:
        window: on the device.
        short: one microbatch less, as at the end of the data.
        schedule: of the learning rate.
        programs_before: how many programs there were before the first step.
    """

    device = "cpu"
    programs_before = 0

    def __init__(self, work: str, count: int) -> None:
        torch.manual_seed(0)
        device = funcacc.device("xla") if self.device == "xla" else torch.device("cpu")
        self.model = WORK[work].model().to(device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda i: 1 / (1 + i))
        host = window(WORK[work], count)
        self.window = {k: v.to(device) for k, v in host.items()}
        self.short = {k: v[: max(1, count - 1)].to(device) for k, v in host.items()}

    def step(self, window: Batch) -> Tensor:
        """Take a step; returns the loss."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block until the device has finished."""

    def programs(self) -> int | None:
        """How many programs were compiled so far, where there are any."""
        return None

    def seconds(self) -> dict[str, float]:
        """The parts of the first call, where they are known."""
        return {}


class Lazy(Peer):
    """On a device of torch_xla."""

    device = "xla"

    def wait(self) -> None:
        """Wait for the device."""
        importlib.import_module("torch_xla.core.xla_model").wait_device_ops()

    def programs(self) -> int:
        """All programs of the process, as torch_xla counts them."""
        metrics = importlib.import_module("torch_xla.debug.metrics")
        return int(metrics.counter_value("UncachedCompile") or 0)


class FuncaccEager(Peer):
    """``funcacc.TrainStep`` on the eager engine."""

    def __init__(self, work: str, count: int) -> None:
        super().__init__(work, count)
        self.run = funcacc.TrainStep(self.model, self.opt, loss_fn)
        self.wrapped: dict[int, funcacc.Window] = {}

    def step(self, window: Batch) -> Tensor:
        """One call; a shorter window keeps the capacity, as `funcacc.windows` makes it."""
        there = len(window["y"])
        if there not in self.wrapped:
            self.wrapped[there] = funcacc.Window(self.window, there)
        return self.run(self.wrapped[there]).loss

    def seconds(self) -> dict[str, float]:
        """Capture, lower and compile."""
        return dict(self.run.report().seconds)


class Funcacc(Lazy, FuncaccEager):
    """``funcacc.TrainStep`` on the XLA engine."""


class XlaAccumulation(Lazy):
    """torch_xla's ``experimental.gradient_accumulation``, then ``opt.step()``."""

    def step(self, window: Batch) -> Tensor:
        """As its documentation shows it."""
        module = importlib.import_module("torch_xla.experimental.gradient_accumulation")
        self.opt.zero_grad()
        loss: Tensor = module.gradient_accumulation(
            lambda x, y: loss_fn(self.model, {"x": x, "y": y}),
            (window["x"], window["y"]),
            self.model,
        )
        self.opt.step()
        importlib.import_module("torch_xla").sync()
        return loss


class Plain(Peer):
    """PyTorch's own loop, on the CPU."""

    def step(self, window: Batch) -> Tensor:
        """Accumulate into ``.grad``, then step."""
        self.opt.zero_grad()
        count = len(window["y"])
        total = torch.zeros((), device=self.device)
        for i in range(count):
            loss = self.loss({k: v[i] for k, v in window.items()}) / count
            loss.backward()
            total += loss.detach()
        self.update()
        return total

    def loss(self, batch: Batch) -> Tensor:
        """Of one microbatch."""
        return loss_fn(self.model, batch)

    def update(self) -> None:
        """The optimizer's step."""
        self.opt.step()


class Unrolled(Lazy, Plain):
    """The same loop on XLA's lazy tensors: one program with K copies of the microbatch."""

    def update(self) -> None:
        """Step, and run what has gathered."""
        self.opt.step()
        importlib.import_module("torch_xla").sync()


class Compiled(Plain):
    """The same loop with ``torch.compile`` of the loss and of the optimizer's step."""

    def __init__(self, work: str, count: int) -> None:
        super().__init__(work, count)
        self.compiled_loss = torch.compile(lambda batch: loss_fn(self.model, batch))
        self.compiled_update = torch.compile(self.opt.step)

    def loss(self, batch: Batch) -> Tensor:
        """Compiled."""
        return self.compiled_loss(batch)

    def update(self) -> None:
        """Compiled."""
        self.compiled_update()

    def programs(self) -> int:
        """Graphs that were compiled."""
        counters = importlib.import_module("torch._dynamo.utils").counters
        return int(counters["stats"]["unique_graphs"])


PEERS: dict[str, Callable[[str, int], Peer]] = {
    "funcacc": Funcacc,
    "funcacc-eager": FuncaccEager,
    "torch_xla": XlaAccumulation,
    "unrolled": Unrolled,
    "eager": Plain,
    "torch.compile": Compiled,
}
