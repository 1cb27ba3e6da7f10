"""State: buffers, attributes, weights changed behind the optimizer's back."""

from __future__ import annotations

import torch
from torch import nn

from .common import case, either, factory, gen, match, mse, reg_batch, rnd


@case("batchnorm_stats", kind="state",
      refs=["facebookresearch/fairscale#442", "Lightning-AI/pytorch-lightning#18802", "pytorch/pytorch#143900"],
      symptom="running statistics are cast, lost or sharded",
      why="buffers change inside forward and must be written back, once, in full precision")
def batchnorm_stats():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.head = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(12, 2)

        def forward(self, x):
            return self.head(torch.relu(self.bn(self.conv(x))).flatten(1))

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 4, 2, 4, 4), y=rnd(g, 4, 2))
    return factory(M), make, mse, dict(micro=2), match(
        "running_mean/var and num_batches_tracked equal the rank-local reference (or the documented sync policy); "
        "updated once per micro-batch", buffers="rank_local")


@case("buffer_mutated_and_returned", kind="state",
      refs=["pytorch/TensorRT#4694", "pytorch/pytorch#115774", "pytorch/pytorch#109240"],
      symptom="a buffer that is updated in place and also returned: graph surgery fails or the old value is returned",
      why="the write-back node has a user, and the output aliases an input")
def buffer_mutated_and_returned():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("ema", torch.zeros(4))

        def forward(self, x):
            self.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return self.lin(x) + self.ema, self.ema

    def loss(model, b):
        pred, ema = model(b["x"])
        return ((pred - b["y"]) ** 2).mean() + ema.pow(2).sum()
    return factory(M), reg_batch(4, 4), loss, {}, match("buffer equals the rank-local reference", buffers="rank_local")


@case("weight_surgery_between_steps", kind="state",
      refs=["pytorch/pytorch#139152", "pytorch/pytorch#117742", "deepspeedai/DeepSpeed#6987"],
      symptom="pruning by p.data between two steps is ignored, or hits a shard with a full-size mask",
      why="the user edits the visible tensor; the engine computes from another one")
def weight_surgery_between_steps():
    def build():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def before(model, step, rank):
        if step == 1:
            model[0].weight.data.mul_((torch.arange(24).view(6, 4) % 3 != 0).double())
            model[2].weight.data = model[2].weight.data * 0.5
    return factory(build), reg_batch(4, 2), mse, dict(before_step=before), either(
        "match through the documented way to edit weights, or a clear error; never ignored", ["shard", "DTensor"])


@case("lazy_growing_cache", kind="state",
      refs=["meta-pytorch/torchtune#1544", "huggingface/transformers#25830"],
      symptom="a table built in the first forward and rebuilt for longer inputs is stale, or its creation breaks capture",
      why="module state is replaced (not mutated) inside forward, depending on the input length")
def lazy_growing_cache():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 2)
            self.register_buffer("table", torch.empty(0, 4), persistent=False)

        def forward(self, x):
            T = x.shape[1]
            if self.table.shape[0] < T:
                self.table = torch.sin(torch.arange(T).double()[:, None] * torch.arange(1, 5).double())
            return self.lin(x * self.table[:T]).mean(1)

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 3, (3, 6, 4, 8)[mb % 4], 4), y=rnd(g, 3, 2))
    return factory(M), make, mse, dict(steps=4), match()
