"""Train a small MLP on a mesh of devices, plainly data parallel or with parameters in shards too.

On 8 virtual devices of the CPU::

    CPU_NUM_DEVICES=8 PJRT_DEVICE=CPU python examples/data_parallel.py
    CPU_NUM_DEVICES=8 PJRT_DEVICE=CPU python examples/data_parallel.py --fsdp
"""

import argparse

import torch
from torch import nn

import funcacc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=8)
parser.add_argument("--fsdp", action="store_true", help="keep parameters in shards as well")
parser.add_argument("--steps", type=int, default=50)
asked = parser.parse_args()

# First of all: from here on the process compiles for all devices. Batches are cut over an axis
# that is called data (or fsdp); batch_axis= of TrainStep names another one.
funcacc.sharding.mesh(data=asked.devices)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
model = model.to(funcacc.device("xla"))
# Rows of each matrix over the devices. Without rules every device has all parameters.
funcacc.sharding.shard(model, {"*.weight": ("data", None)} if asked.fsdp else {})

# Optimizer state follows its parameter; nothing has to be said about it.
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_fn(model, batch):
    """Sum and number of rows, so that the mean is exact over devices and microbatches."""
    return funcacc.losses.cross_entropy(model(batch["x"]), batch["y"])


def data(count):
    """Microbatches as any loader gives them: on the host, whole."""
    target = torch.randn(32, 8)
    for _ in range(count):
        x = torch.randn(64, 32)
        yield {"x": x, "y": (x @ target).argmax(1)}


step = funcacc.TrainStep(model, opt, loss_fn, clip_norm=1.0)
for i, window in enumerate(funcacc.windows(data(4 * asked.steps), 4)):
    out = step(window)
    if i % 10 == 0 or i == asked.steps - 1:
        print(f"step {i}: loss {float(out.loss):.4f}, gradient norm {float(out.grad_norm):.4f}")

# Where each leaf lies, whether its buffer was reused, and what was sent between devices: gradients
# once for each window, unless parameters are in shards.
print(step.report(collectives=True))
