"""Functional gradient accumulation for PyTorch: one step, one program, every buffer donated."""

from funcacc import losses, sharding
from funcacc.batches import Window, split, stack
from funcacc.engines import device, engines
from funcacc.errors import FuncaccError
from funcacc.gradients import accumulate
from funcacc.jit import jit
from funcacc.layers import scan_layers
from funcacc.loops import fori_loop, scan, while_loop
from funcacc.loss import Last, Loss, Mean, Stack, Sum
from funcacc.model import FunctionalModel, functionalize
from funcacc.one_line import train_step
from funcacc.reading import windows
from funcacc.remat import checkpoint
from funcacc.saving import load, save
from funcacc.state import TrainState
from funcacc.step import Accumulated, StepOutput
from funcacc.train import TrainStep

__all__ = [
    "Accumulated",
    "FuncaccError",
    "FunctionalModel",
    "Last",
    "Loss",
    "Mean",
    "Stack",
    "StepOutput",
    "Sum",
    "TrainState",
    "TrainStep",
    "Window",
    "accumulate",
    "checkpoint",
    "device",
    "engines",
    "fori_loop",
    "functionalize",
    "jit",
    "load",
    "losses",
    "save",
    "scan",
    "scan_layers",
    "sharding",
    "split",
    "stack",
    "train_step",
    "while_loop",
    "windows",
]
