"""A loop of one's own: sharpness-aware minimisation, with gradients by `accumulate`.

SAM asks for the gradient twice in each step: at the weights, and where the loss is larger nearby.
`accumulate` gives the window's gradient by one program; the rest is plain PyTorch::

    PJRT_DEVICE=CPU python examples/custom_loop.py
"""

import argparse

import torch
from torch import nn

import funcacc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", default="auto", help="auto, xla or eager")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--rho", type=float, default=0.05, help="how far nearby is")
asked = parser.parse_args()
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
model.to(funcacc.device(asked.engine))
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def loss_fn(model, batch):
    """Defined once, outside the loop: a new function on each call would be traced again."""
    return funcacc.losses.cross_entropy(model(batch["x"]), batch["y"])


def microbatch() -> dict[str, torch.Tensor]:
    """Labels of a random teacher."""
    x = torch.randn(32, 16)
    with torch.no_grad():
        return {"x": x, "y": teacher(x).argmax(1)}


params = dict(model.named_parameters())
losses = []
for i in range(asked.steps):
    window = funcacc.stack([microbatch() for _ in range(4)])  # stacked once, used twice
    here = funcacc.accumulate(model, window, loss_fn)
    with torch.no_grad():
        scale = asked.rho / (here.grad_norm + 1e-12)
        moves = {name: scale * grad for name, grad in here.grads.items()}
        for name, move in moves.items():
            params[name].add_(move)

    opt.zero_grad()
    funcacc.accumulate(model, window, loss_fn, into_grad=True)  # adds to p.grad
    with torch.no_grad():
        for name, move in moves.items():
            params[name].sub_(move)
    opt.step()

    losses.append(here.loss)
    if i % 30 == 0 or i == asked.steps - 1:
        print(f"step {i}: loss {float(here.loss):.4f}, gradient norm {float(here.grad_norm):.4f}")
