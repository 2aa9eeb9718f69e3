"""Train a small GPT on the bytes of the standard library's sources, and let it write.

About a minute on 2 CPU cores::

    PJRT_DEVICE=CPU python examples/train_gpt.py
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import funcacc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", default="auto", help="auto, xla or eager")
parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
parser.add_argument("--microbatches", type=int, default=4, help="in each optimizer step")
parser.add_argument("--rows", type=int, default=4, help="sequences in a microbatch")
parser.add_argument("--context", type=int, default=96, help="bytes in a sequence")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
asked = parser.parse_args()
torch.manual_seed(0)

# Text: every Python file of the standard library's top folder, the last tenth held out.
folder = Path(sysconfig.get_path("stdlib"))
text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
train, heldout = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def rows(source: torch.Tensor, count: int) -> torch.Tensor:
    """Random pieces of the text: uint8 [count, context + 1]."""
    starts = torch.randint(0, len(source) - asked.context, (count,))
    return torch.stack([source[s : s + asked.context + 1] for s in starts])


class GPT(nn.Module):
    """Blocks of torch.nn with a causal mask; the output matrix is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, asked.width)
        self.positions = nn.Parameter(torch.zeros(asked.context, asked.width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                asked.width, 4, 4 * asked.width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(asked.layers)
        )
        self.norm = nn.LayerNorm(asked.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, 256] of the byte after each of tokens [B, T]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.norm(x) @ self.tokens.weight.T


def loss_fn(model, batch):
    """The mean over all bytes of the window: sum and number, divided once by funcacc."""
    batch = batch.long()
    logits = model(batch[:, :-1])
    return funcacc.losses.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


# The model moves first; the optimizer is made of the parameters that are on the device.
model = GPT().to(funcacc.device(asked.engine))
# Matrices decay, vectors don't.
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
opt = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
# The learning rate is an input of the program: no schedule compiles anything again.
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=asked.steps + 1)
step = funcacc.TrainStep(model, opt, loss_fn, clip_norm=1.0)

losses = []
for i in range(asked.steps):
    window = [rows(train, asked.rows) for _ in range(asked.microbatches)]
    out = step(window)
    schedule.step()
    losses.append(out.loss)  # on the device: nothing waits for it
    if i % 20 == 0 or i == asked.steps - 1:
        print(f"step {i}: loss {float(out.loss):.3f}, gradient norm {float(out.grad_norm):.2f}")

# From here on plain PyTorch, with a copy on the CPU.
copy = GPT().eval()
copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
with torch.no_grad():
    batch = rows(heldout, 64).long()
    logits = copy(batch[:, :-1]).flatten(0, 1)
    heldout_loss = float(nn.functional.cross_entropy(logits, batch[:, 1:].flatten()))
    print(f"held-out loss {heldout_loss:.3f} nats a byte")
    written = torch.tensor([list(b"\ndef ")])
    for _ in range(200):
        logits = copy(written[:, -asked.context :])[:, -1]
        chosen = torch.multinomial(torch.softmax(logits / 0.8, dim=1), 1)
        written = torch.cat([written, chosen], dim=1)
print(bytes(written[0].tolist()).decode(errors="replace"))
