"""A GAN: two training steps over shared modules, each with its own loss and optimizer.

A generator learns a ring of eight Gaussians in the plane, in under a minute::

    PJRT_DEVICE=CPU python examples/gan.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import funcacc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", default="auto", help="auto, xla or eager")
parser.add_argument("--steps", type=int, default=3000, help="steps of each of the two players")
asked = parser.parse_args()
torch.manual_seed(0)

angles = torch.arange(8) * math.tau / 8
centres = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)


def real(rows: int) -> torch.Tensor:
    """Points of the ring: [rows, 2]."""
    return centres[torch.randint(0, 8, (rows,))] + 0.1 * torch.randn(rows, 2)


def mlp(inputs: int, outputs: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2),
        nn.Linear(128, outputs),
    )  # fmt: skip


# Both steps are made of one module. What a step trains is what its optimizer has: the other
# player's parameters are inputs of its program, without accumulator and without state.
device = funcacc.device(asked.engine)
gan = nn.ModuleDict({"generator": mlp(16, 2), "critic": mlp(2, 1)}).to(device)
betas = (0.5, 0.9)
opt_g = torch.optim.Adam(gan["generator"].parameters(), lr=1e-3, betas=betas)
opt_d = torch.optim.Adam(gan["critic"].parameters(), lr=1e-3, betas=betas)
schedules = [
    torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=asked.steps)
    for opt in (opt_g, opt_d)
]


def fakes(gan, rows):
    """Generated points. The noise is drawn in the program, anew for each microbatch."""
    noise = torch.randn(rows, 16, device=next(gan.parameters()).device)
    return gan["generator"](noise)


def critic_loss(gan, points):
    """Tell real points from generated ones: which of a pair is the real one."""
    with torch.no_grad():
        generated = fakes(gan, len(points))
    return F.softplus(gan["critic"](generated) - gan["critic"](points)).mean()


def generator_loss(gan, points):
    """Make the critic take the generated one; comparing pairs leaves no Gaussian out."""
    return F.softplus(gan["critic"](points) - gan["critic"](fakes(gan, len(points)))).mean()


critic_step = funcacc.TrainStep(gan, opt_d, critic_loss, seed=1)
generator_step = funcacc.TrainStep(gan, opt_g, generator_loss, seed=2)
for i in range(asked.steps):
    window = [real(64) for _ in range(4)]
    d = critic_step(window)
    g = generator_step(window)
    for schedule in schedules:
        schedule.step()
    if i % 300 == 0 or i == asked.steps - 1:
        print(f"step {i}: critic {float(d.loss):.3f}, generator {float(g.loss):.3f}")

with torch.no_grad():
    points = fakes(gan, 2000).cpu()
distance, nearest = torch.cdist(points, centres).min(dim=1)
hits = torch.bincount(nearest[distance < 0.4], minlength=8)
print(f"{float((distance < 0.4).float().mean()):.0%} of the points lie on the ring")
print(f"points on each Gaussian: {hits.tolist()}")
