"""``funcacc train``: a byte-level GPT from nothing to a sample of text.

Reads top to bottom: ``main`` checks everything before it writes anything, ``Session`` holds
what a checkpoint holds, ``_train`` is the loop, ``_finish`` the report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import funcacc
from funcacc.cli import meshes, options, text
from funcacc.cli.errors import RunError
from funcacc.cli.gpt import GPT, generate
from funcacc.cli.runs import RunDir
from funcacc.report import Report

READ_EVERY = 10  # steps between two looks at the device, which wait for it
HELDOUT_BATCHES = 16
SAMPLE_BYTES = 300
LAST_LR = 0.1  # of the peak


def main(argv: Sequence[str]) -> int:
    """Run ``funcacc train``; return its exit code."""
    asked = options.parse(argv)
    corpus = text.load(asked.data, asked.context)
    if asked.mesh:
        meshes.make(asked.mesh)
    device = funcacc.device("xla" if asked.mesh else asked.engine)
    engine = "xla" if device.type == "xla" else "jax" if asked.engine == "jax" else "eager"
    run = RunDir(asked.out, asked.config(engine=engine, digest=corpus.digest))
    run.check(resume=asked.resume)
    if run.finished():
        print(f"{run.path} holds a finished run of this configuration; its report:\n")
        print(run.report.read_text(encoding="utf-8"), end="")
        return 0
    session = Session.begin(asked, corpus, device, run)
    entropy = text.unigram_entropy(corpus.heldout)
    print(
        f"text: {corpus.name}, {_millions(len(corpus.train))} bytes and "
        f"{_millions(len(corpus.heldout))} held out, unigram entropy {entropy:.3f} nats a byte\n"
        f"model: GPT, {_millions(sum(p.numel() for p in session.model.parameters()))} parameters; "
        f"{engine} engine on {device}\n"
        f"step: {asked.microbatches} microbatches of {asked.microbatch_size} x {asked.context} "
        f"bytes; {asked.steps} steps",
        flush=True,
    )
    _train(session)
    _finish(session, entropy)
    return 0


@dataclass
class Session:
    """A run under way: the objects whose state a checkpoint holds, and what they work on."""

    asked: options.TrainOptions
    corpus: text.Corpus
    device: torch.device
    run: RunDir
    model: GPT
    opt: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    step: funcacc.TrainStep
    done: int = 0
    seconds: float = 0.0
    described: int = 0

    @classmethod
    def begin(
        cls,
        asked: options.TrainOptions,
        corpus: text.Corpus,
        device: torch.device,
        run: RunDir,
    ) -> Session:
        """Make model, optimizer and step, then load the checkpoint if there is one."""
        torch.manual_seed(asked.seed)
        model = GPT(asked.model).to(device)
        if asked.mesh:
            meshes.shard(model, asked.mesh)
        opt = torch.optim.AdamW(model.parameter_groups(0.1), lr=asked.lr, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lr_factor(asked.warmup, asked.steps))
        step = funcacc.TrainStep(
            model,
            opt,
            next_byte_loss,
            # The device doesn't tell jax from eager.
            engine="jax" if asked.engine == "jax" else "auto",
            clip_norm=asked.clip or None,
            seed=asked.seed,
        )
        session = cls(asked, corpus, device, run, model, opt, scheduler, step)
        saved = run.start(**session._parts)
        if saved is not None:
            session.done, session.seconds = saved["step"], saved["seconds"]
            print(f"going on after step {session.done} of {asked.steps} in {run.path}")
        return session

    @property
    def _parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "opt": self.opt,
            "scheduler": self.scheduler,
            "train_step": self.step,
        }

    def save(self) -> None:
        """Write a checkpoint."""
        self.run.save(step=self.done, seconds=self.seconds, **self._parts)

    def advance(self) -> tuple[funcacc.StepOutput, float]:
        """Take one optimizer step; return its output and the learning rate it used."""
        asked = self.asked
        window = text.microbatches(
            self.corpus.train,
            seed=asked.seed,
            step=self.done,
            count=asked.microbatches,
            size=asked.microbatch_size,
            context=asked.context,
        )
        lr = self.scheduler.get_last_lr()[0]
        out = self.step(window)
        self.scheduler.step()
        self.done += 1
        return out, float(lr)

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Return the mean loss on the held-out batches: plain PyTorch on the model's device."""
        asked = self.asked
        batches = text.heldout_batches(
            self.corpus.heldout,
            count=HELDOUT_BATCHES,
            size=asked.microbatch_size,
            context=asked.context,
        )
        self.model.eval()
        # Reading each batch's loss ends its graph on a lazy device: one small program, reused.
        losses = [_plain_loss(self.model, batch.to(self.device)).item() for batch in batches]
        self.model.train()
        return sum(losses) / len(losses)

    def describe(self, *, last: bool = False) -> Report:
        """Write down the account of the step, and the programs built since the last time."""
        # Each of the two compiles once more.
        collectives, memory = last and bool(self.asked.mesh), last and self.asked.memory
        report = self.step.report(collectives=collectives, memory=memory)
        new = report.builds[self.described :]
        self.described = len(report.builds)
        fields = [dict(vars(build)) for build in new]
        self.run.append({"step": f.pop("step"), "program": f} for f in fields)
        self.run.describe(report.to_dict())
        return report

    def sample(self) -> str:
        """Return text from a copy of the model on the CPU."""
        model = GPT(self.model.config)
        model.load_state_dict({n: t.cpu() for n, t in self.model.state_dict().items()})
        sampled = generate(model, b"\ndef ", SAMPLE_BYTES, seed=self.asked.seed)
        return sampled.decode("utf-8", errors="replace").strip()


class Meter:
    """Holds the outputs of steps on the device and reads them a few at a time.

    Args:
        tokens_per_step: How many bytes a step learns from.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.pending: list[tuple[int, float, funcacc.StepOutput]] = []
        self.started = time.perf_counter()

    def restart(self) -> None:
        """Leave the time until now out of the next reading."""
        self.started = time.perf_counter()

    def add(self, step: int, lr: float, out: funcacc.StepOutput) -> None:
        """Keep a step's output for the next reading."""
        self.pending.append((step, lr, out))

    def read(self) -> tuple[list[dict[str, Any]], float]:
        """Wait for the device; return a record for each step since the last reading.

        Returns:
            The records, and the seconds that these steps took.

        Raises:
            RunError: A loss or a gradient norm is not finite.
        """
        records = []
        for step, lr, out in self.pending:
            loss, norm = float(out.loss), float(out.grad_norm)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise RunError(f"step {step}: loss {loss}, gradient norm {norm}; try a lower --lr")
            records.append({"step": step, "loss": loss, "grad_norm": norm, "lr": lr})
        seconds = time.perf_counter() - self.started
        rate = self.tokens_per_step * len(records) / seconds
        self.pending.clear()
        self.restart()
        return [record | {"tokens_per_s": round(rate, 1)} for record in records], seconds


def next_byte_loss(model: torch.nn.Module, batch: Tensor) -> funcacc.Loss:
    """Return the loss of predicting each byte of ``batch`` (size, context + 1) but the first."""
    inputs, targets = batch[:, :-1].long(), batch[:, 1:].long()
    return funcacc.losses.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def lr_factor(warmup: int, steps: int) -> Any:
    """Return the schedule: linear warm-up, then a cosine to ``LAST_LR``, as factors of the peak."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return LAST_LR + (1 - LAST_LR) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def _train(session: Session) -> None:
    asked, run = session.asked, session.run
    first = session.done
    meter = Meter(asked.tokens_per_step)
    with tqdm(total=asked.steps, initial=first, unit="step", disable=None) as bar:
        while session.done < asked.steps:
            out, lr = session.advance()
            meter.add(session.done, lr, out)
            last = session.done == asked.steps
            look = last or session.done % asked.eval_every == 0
            save = last or session.done % asked.save_every == 0
            # The first step, which compiles, is read alone: it must not spoil the throughput.
            if look or save or session.done == first + 1 or session.done % READ_EVERY == 0:
                records, seconds = meter.read()
                session.seconds += seconds
                run.append(records)
                if len(session.step.report().builds) > session.described:
                    session.describe()
                _show(bar, records)
            if look:
                loss = session.heldout_loss()
                run.append([{"step": session.done, "heldout_loss": loss}])
                bar.write(_line(records[-1], loss))
            if save:
                session.save()
            if look or save:
                meter.restart()


def _show(bar: Any, records: list[dict[str, Any]]) -> None:
    newest = records[-1]
    bar.set_postfix_str(
        f"loss {newest['loss']:.3f}, {newest['tokens_per_s']:,.0f} tokens/s, "
        f"grad norm {newest['grad_norm']:.2f}",
        refresh=False,
    )
    bar.update(len(records))


def _line(record: dict[str, Any], heldout_loss: float) -> str:
    return (
        f"step {record['step']}: loss {record['loss']:.3f}, held-out loss {heldout_loss:.3f}, "
        f"{record['tokens_per_s']:,.0f} tokens/s"
    )


def _finish(session: Session, entropy: float) -> None:
    from funcacc.cli import plot

    run = session.run
    metrics = run.read_metrics()
    plot.draw(metrics, entropy, run.plot)
    loss = next(record["heldout_loss"] for record in reversed(metrics) if "heldout_loss" in record)
    report = (
        f"held-out loss {loss:.3f} nats a byte after {session.done} steps and "
        f"{session.seconds:.0f} s of training; unigram entropy of the same text {entropy:.3f}\n\n"
        f"a sample:\n{session.sample()}\n\n"
        f"{session.describe(last=True)}\n\n"
        f"metrics: {run.metrics}\nplot: {run.plot}\ncheckpoint: {run.checkpoint}\n"
        f"a page about it: funcacc report {run.path}\n"
    )
    run.finish(report)
    print("\n" + report, end="")


def _plain_loss(model: GPT, batch: Tensor) -> Tensor:
    inputs, targets = batch[:, :-1].long(), batch[:, 1:].long()
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count >= 100_000 else f"{count:,}"
