"""Thousands of steps with whatever a user does between steps, beside a plain PyTorch loop.

    python benchmarks/soak.py --steps 5000 --seed 0 --engine xla

Between steps there are, at random: snapshots of all kinds, evaluation, another learning rate,
states loaded, traces that fail, windows of other sizes and tails, files saved and loaded, switches
of train() and eval(), gradients and averages of the user's own. At the end parameters, buffers and
optimizer state equal the plain loop's, no snapshot has changed, programs are as many as there were
kinds of windows, and resident memory has stayed where it was.
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import os
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import funcacc

# Sums in another order differ in the last bits, which thousands of steps amplify.
TOLERANCE = 1e-7
KEPT = 30


class Net(nn.Module):
    """Weights that two layers share, buffers, and a layer that behaves otherwise in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to (rows, 8)."""
        return self.c(torch.tanh(self.b(torch.tanh(self.norm(self.a(x))))))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error."""
    return (model(batch["x"]) - batch["y"]).square().mean()


def failing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Fails in the middle of its trace."""
    model(batch["x"])
    raise ZeroDivisionError


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a tree, on the host."""
    return [x.detach().cpu() for x in funcacc.trees.flatten(tree)[0] if isinstance(x, Tensor)]


class Soak:
    """A model under funcacc and its plain twin, and what can happen to both."""

    def __init__(self, engine: str, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        self.engine = engine
        self.folder = folder
        self.ref = Net().double()
        self.model = copy.deepcopy(self.ref).to(funcacc.device(engine))
        # Moving to XLA makes a parameter for each use of a shared one.
        self.model.c.weight = self.model.b.weight
        self.opt, self.ref_opt = (
            torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4) for m in (self.model, self.ref)
        )
        self.step = funcacc.TrainStep(self.model, self.opt, loss_fn, engine=engine, clip_norm=1.0)
        self.average, self.ref_average = AveragedModel(self.model), AveragedModel(self.ref)
        self.snapshots: list[tuple[str, list[Tensor], list[Tensor]]] = []
        self.states: list[tuple[Any, Any]] = []
        self.kinds: set[Any] = set()
        self.checked = 0
        self.furthest = 0.0

    # Steps -----------------------------------------------------------------------------

    def advance(self) -> None:
        """One step of both."""
        rows, capacity = self.rng.choice([(4, 3)] * 6 + [(4, 5), (2, 3)])
        count = self.rng.choice([capacity] * 3 + [1])
        batches = [
            {"x": torch.randn(rows, 6).double(), "y": torch.randn(rows, 8).double()}
            for _ in range(count)
        ]
        blank = [{k: torch.zeros_like(v) for k, v in batches[0].items()}] * (capacity - count)
        window = funcacc.Window(funcacc.stack([*batches, *blank]).tree, count)
        self.kinds.add((rows, capacity, self.model.training))
        self.ref_opt.zero_grad()
        for batch in batches:
            (loss_fn(self.ref, batch) / count).backward()
        torch.nn.utils.clip_grad_norm_(self.ref.parameters(), 1.0)
        self.ref_opt.step()
        self.step(window)

    # Events ----------------------------------------------------------------------------

    def snapshot(self) -> None:
        """A copy of some kind; what it has to hold is the twin's value now."""
        kinds = {
            "clone": lambda m, o: [p.detach().clone() for p in m.parameters()],
            "deepcopy": lambda m, o: list(copy.deepcopy(m).state_dict().values()),
            "state": lambda m, o: copy.deepcopy(o.state_dict()),
            "loaded": lambda m, o: self._other(m),
            "arithmetic": lambda m, o: [p.detach() * 2 for p in m.parameters()],
            "copied rows": lambda m, o: [m.b.weight.detach()[2:4].clone(), m.a.weight[0].clone()],
            "vector": lambda m, o: nn.utils.parameters_to_vector(m.parameters()),
        }
        name = self.rng.choice(list(kinds))
        own, want = (
            kinds[name](m, o) for m, o in ((self.model, self.opt), (self.ref, self.ref_opt))
        )
        own = [x for x in funcacc.trees.flatten(own)[0] if isinstance(x, Tensor)]
        self.snapshots.append((name, own, tensors(want)))
        if len(self.snapshots) > KEPT:
            self.compare(*self.snapshots.pop(self.rng.randrange(KEPT)))

    def _other(self, model: nn.Module) -> list[Tensor]:
        other = Net().double().to(next(model.parameters()).device)
        other.load_state_dict(model.state_dict())
        return list(other.state_dict().values())

    def compare(self, name: str, own: list[Tensor], want: list[Tensor]) -> None:
        """Refuse a snapshot that has changed."""
        for x, y in zip(own, want, strict=True):
            x = x.detach().cpu()
            torch.testing.assert_close(
                x, y, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{name}: {m}"
            )
            self.furthest = max(self.furthest, float((x - y).abs().max()))
        self.checked += 1

    def evaluate(self) -> None:
        """A forward pass without gradients."""
        x = torch.randn(4, 6).double()
        with torch.no_grad():
            for m in (self.model, self.ref):
                self.training = m.training
                m.eval()
            own = self.model(x.to(self.model.a.weight.device)).cpu()
            self.compare("evaluation", [own], [self.ref(x)])
            for m in (self.model, self.ref):
                m.train(self.training)

    def rate(self) -> None:
        """Another learning rate."""
        lr = self.rng.choice([1e-3, 3e-4, 1e-4, 0.0])
        for opt in (self.opt, self.ref_opt):
            opt.param_groups[0]["lr"] = lr

    def mode(self) -> None:
        """From train() to eval() or back."""
        for m in (self.model, self.ref):
            m.train(not m.training)

    def take_state(self) -> None:
        """Keep states to go back to."""
        pair = [
            copy.deepcopy((m.state_dict(), o.state_dict()))
            for m, o in ((self.model, self.opt), (self.ref, self.ref_opt))
        ]
        self.states = [*self.states[-3:], tuple(pair)]

    def load_state(self) -> None:
        """Go back to an earlier state, which stays as it is."""
        if not self.states:
            return
        own, ref = self.rng.choice(self.states)
        for (m, o), (model, opt) in (
            ((self.model, self.opt), own),
            ((self.ref, self.ref_opt), ref),
        ):
            m.load_state_dict(model)
            o.load_state_dict(copy.deepcopy(opt))

    def failed_trace(self) -> None:
        """A step whose loss fails."""
        other = funcacc.TrainStep(self.model, self.opt, failing, engine=self.engine)
        try:
            other([{"x": torch.zeros(4, 6).double(), "y": torch.zeros(4, 8).double()}])
        except ZeroDivisionError:
            return
        raise AssertionError("the failing loss didn't fail")

    def files(self) -> None:
        """Save, take a step, and load what was there before it."""
        path = self.folder / self.rng.choice(["run.pt", "run.safetensors"])
        parts = {"model": self.model, "opt": self.opt, "step": self.step}
        funcacc.save(path, **parts)
        plain = io.BytesIO()
        torch.save((self.ref.state_dict(), self.ref_opt.state_dict()), plain)
        self.advance()
        funcacc.load(path, **parts)
        plain.seek(0)
        model, opt = torch.load(plain, weights_only=True)
        self.ref.load_state_dict(model)
        self.ref_opt.load_state_dict(opt)

    def whole_model(self) -> None:
        """`torch.save` of the module itself, in mid-run."""
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        self.compare("torch.save", list(other.parameters()), tensors(list(self.ref.parameters())))

    def own_gradients(self) -> None:
        """A graph of the user's own, over the parameters as they are."""
        x = torch.randn(3, 6).double()
        own = self.model.a(x.to(self.model.a.weight.device)).square().sum()
        ref = self.ref.a(x).square().sum()
        (g,) = torch.autograd.grad(own, [self.model.a.weight])
        (h,) = torch.autograd.grad(ref, [self.ref.a.weight])
        self.compare("gradient", [g, own], [h, ref.detach()])

    def averages(self) -> None:
        """An averaged model goes on."""
        self.average.update_parameters(self.model)
        self.ref_average.update_parameters(self.ref)

    def event(self) -> str:
        """Something happens."""
        weights = {
            self.snapshot: 6,
            self.evaluate: 2,
            self.rate: 2,
            self.mode: 1,
            self.take_state: 1,
            self.load_state: 1,
            self.failed_trace: 0.1,
            self.files: 0.5,
            self.whole_model: 0.3,
            self.own_gradients: 1,
            self.averages: 1,
        }
        (chosen,) = self.rng.choices(list(weights), list(weights.values()))
        chosen()
        return chosen.__name__

    def finish(self) -> None:
        """Compare everything."""
        for snapshot in self.snapshots:
            self.compare(*snapshot)
        for kind in ("model", "opt", "average"):
            own, ref = getattr(self, kind), getattr(self, f"ref_{kind}".replace("ref_model", "ref"))
            self.compare(kind, tensors(own.state_dict()), tensors(ref.state_dict()))


def resident() -> float:
    """MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Run, print, and refuse what isn't as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="xla", choices=["xla", "jax", "eager"])
    asked = parser.parse_args()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(asked.engine, asked.seed, Path(folder))
        happened: Counter[str] = Counter()
        memory = []
        for i in range(asked.steps):
            soak.advance()
            if soak.rng.random() < 0.5:
                happened[soak.event()] += 1
            if (i + 1) % max(1, asked.steps // 10) == 0:
                memory.append(resident())
                print(f"step {i + 1}: {memory[-1]:.1f} MiB resident", flush=True)
        soak.finish()
    report = soak.step.report()
    print(", ".join(f"{n} x {name}" for name, n in happened.most_common()))
    seconds = time.perf_counter() - started
    print(
        f"{asked.steps} steps in {seconds:.0f} s; {soak.checked} comparisons, "
        f"furthest apart {soak.furthest:.1e}; "
        f"{report.compiles} programs for {len(soak.kinds)} kinds of windows and modes, "
        f"{report.traces} traces"
    )
    grown = memory[-1] - memory[len(memory) // 2]
    print(f"resident memory grew by {grown:.1f} MiB in the second half")
    assert report.compiles == len(soak.kinds), report.reasons
    assert report.donated_leaves == report.state_leaves
    assert grown < 0.02 * memory[-1], memory


if __name__ == "__main__":
    main()
