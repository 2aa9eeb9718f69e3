"""``funcacc doctor``: what is installed, and does each engine compute what PyTorch computes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import funcacc
from funcacc.cli.errors import OneLineParser

MICROBATCHES = 3
TOLERANCE = 1e-5
TIMEOUT = 300  # seconds for one engine's check


def main(argv: Sequence[str]) -> int:
    """Run ``funcacc doctor``; return 1 when an installed engine fails, else 0."""
    parser = OneLineParser(
        prog="funcacc doctor",
        description="Say what is installed; check every engine with one training step.",
    )
    engines = funcacc.engines()
    parser.add_argument(
        "--engine", choices=list(engines), help="check this engine only, in this process"
    )
    asked = parser.parse_args(argv)
    if asked.engine is not None:
        return _check_here(asked.engine)
    _print_versions()
    failed = []
    for name, engine in engines.items():
        if not engine.installed:
            print(f"{name:8} missing: {engine.reason}\n{'':8} to install it: {engine.install}")
        elif not _check_apart(name):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def self_check(engine: str) -> tuple[torch.device, float]:
    """Take one step on an engine and the same step in plain PyTorch on the CPU.

    Args:
        engine: A name in ``funcacc.engines()``, installed.

    Returns:
        The device used, and the largest absolute difference among the loss and all parameters.
    """
    device = funcacc.device(engine)
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator))
        for _ in range(MICROBATCHES)
    ]
    expected_model, model = _mlp(), _mlp().to(device)
    expected_loss = _plain_step(expected_model, _adamw(expected_model), batches)
    step = funcacc.TrainStep(model, _adamw(model), _squared_error, engine=engine)
    loss = step(batches).loss
    pairs = [(loss.detach().cpu(), expected_loss)]
    pairs += [
        (got.detach().cpu(), want.detach())
        for got, want in zip(model.parameters(), expected_model.parameters(), strict=True)
    ]
    return device, max(float((got - want).abs().max()) for got, want in pairs)


def _print_versions() -> None:
    print(f"python   {platform.python_version()} on {platform.platform()}")
    for package in ("funcacc", "torch", "torch_xla", "jaxlib"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{package:8} {version}")
    print(f"cpu      {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        print(f"cuda:{index}   {torch.cuda.get_device_name(index)}")


def _check_apart(name: str) -> bool:
    """Check an engine in a process of its own.

    A crash of the engine is then a line of the report; and a process that has opened an
    accelerator, or imported what another engine cannot live with, is not the one that goes on.
    """
    command = [sys.executable, "-m", "funcacc.cli", "doctor", "--engine", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name:8} FAILED: no answer in {TIMEOUT} s")
        return False
    answer = [line for line in done.stdout.splitlines() if line.startswith(f"{name:8} ")]
    if answer:
        print(answer[-1])
    else:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{name:8} FAILED: exit code {done.returncode}: {last}")
    return done.returncode == 0


def _check_here(name: str) -> int:
    try:
        device, difference = self_check(name)
    except Exception as error:  # any failure is the answer that the user asked for
        print(f"{name:8} FAILED: {type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    ok = difference <= TOLERANCE
    verdict = "ok" if ok else "FAILED"
    print(
        f"{name:8} {verdict}: one step on {_describe(device)} differs from plain PyTorch by "
        f"{difference:.1e} (at most {TOLERANCE:.0e})"
    )
    return 0 if ok else 1


def _describe(device: torch.device) -> str:
    if device.type != "xla":
        return str(device)
    from torch_xla import runtime

    return f"{device} ({runtime.global_runtime_device_count()} x {runtime.device_type()})"


def _mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    # With the default eps, Adam turns the rounding of a near-zero gradient into a whole step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def _squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    error: Tensor = (model(x) - y).square().mean()
    return error


def _plain_step(
    model: nn.Module, opt: torch.optim.Optimizer, batches: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    opt.zero_grad()
    losses = [_squared_error(model, batch) / len(batches) for batch in batches]
    for loss in losses:
        loss.backward()
    opt.step()
    return torch.stack([loss.detach() for loss in losses]).sum()
