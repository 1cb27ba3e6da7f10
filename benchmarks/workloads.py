"""What the benchmarks train: GPT-2-like decoders with untied embeddings, and batches that differ by rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Tokens (batch, time) and their successors in; the mean cross-entropy out."""

    def __init__(self, layers: int, dim: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Workload:
    """A model's shape and the batch of each rank."""

    layers: int
    dim: int
    heads: int
    vocabulary: int
    context: int
    batch: int

    def model(self) -> Decoder:
        """Equal on every rank."""
        torch.manual_seed(0)
        return Decoder(self.layers, self.dim, self.heads, self.vocabulary, self.context)

    def batches(self, rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets. Small tokens are likelier (a squared uniform), so that there is something to learn."""
        generator = torch.Generator().manual_seed(1234 + rank)
        texts = [torch.rand(self.batch, self.context + 1, generator=generator).square() for _ in range(count)]
        rows = [(text * self.vocabulary).long().clamp_(max=self.vocabulary - 1) for text in texts]
        return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


WORKLOADS = {
    "gpt12": Workload(layers=12, dim=512, heads=8, vocabulary=8192, context=256, batch=2),  # 46.4 million parameters
    "tiny": Workload(layers=2, dim=64, heads=2, vocabulary=256, context=32, batch=2),
}
