"""A byte-level GPT: small, pre-norm, with the embedding and the output head tied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model.

    Attributes:
        context: The longest sequence, in bytes.
        layers: How many blocks.
        heads: Attention heads in each block; divides ``width``.
        width: The size of a token's vector.
        dropout: Probability of dropping, on embeddings, attention and residuals.
    """

    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix ``x`` (batch, time, width) over time, each position seeing no later one."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """Attention and a two-layer MLP, each normalised first and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block; same shape as ``x``."""
        x = x + self.drop(self.attention(self.norm1(x)))
        x = x + self.drop(self.mlp(self.norm2(x)))
        return x


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits.

        Args:
            tokens: (batch, time) integers below 256; time is at most ``config.context``.

        Returns:
            (batch, time, 256); position t holds the logits of byte t + 1.
        """
        x = self.drop(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        # One parameter used twice, not two that share storage: moving a module with tied
        # parameters to an XLA device silently unties them.
        return F.linear(self.norm(x), self.tokens.weight)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return optimizer groups: matrices decay, vectors (norms, biases) don't."""
        parameters = list(self.parameters())
        return [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]

    def _initialise(self) -> None:
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # Each of the 2 * layers additions to the stream is scaled so that its variance does
        # not grow with depth.
        scale = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                with torch.no_grad():
                    parameter.mul_(scale)


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, length: int, *, seed: int = 0, temperature: float = 0.8
) -> bytes:
    """Continue a prompt, one sampled byte at a time.

    Every forward pass has the full context (the text so far on the left, zeros to its right,
    which no earlier position sees), so that the shape never changes.

    Args:
        model: A model on the CPU, where reading a byte back costs nothing.
        prompt: At least one byte.
        length: How many bytes to add.
        seed: Of the sampler.
        temperature: Below 1 prefers likely bytes.

    Returns:
        The prompt and what follows it.
    """
    context = model.config.context
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    was_training = model.training
    model.eval()
    for _ in range(length):
        seen = text[-context:]
        padded = torch.tensor([seen + [0] * (context - len(seen))])
        logits = model(padded)[0, len(seen) - 1] / temperature
        text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    model.train(was_training)
    return bytes(text)
