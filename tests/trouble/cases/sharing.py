"""Sharing: one parameter, several names or several uses."""

from __future__ import annotations

import torch
from torch import nn

from .common import case, factory, lm_batch, lm_loss, match, mlp, mse, reg_batch


@case("tied_embed_head", kind="sharing",
      refs=["pytorch/pytorch#83052", "Lightning-AI/pytorch-lightning#21403", "NVIDIA-NeMo/RL#264"],
      symptom="input embedding tied to output head: crash at wrap time or the two halves of the gradient are not summed",
      why="the tie crosses two gather groups; sharding each side separately breaks object identity")
def tied_embed_head():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(11, 6)
            self.mix = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.mix(self.emb(ids))))

    def check(res):
        assert [n for n in res["params"] if n.endswith("weight")] in (["emb.weight", "mix.weight"], ["mix.weight", "head.weight"])
        assert {"emb.weight", "head.weight"} <= set(res["state_keys"])
    return factory(M), lm_batch(11), lm_loss, {}, match(
        "one shard for the tied weight; its gradient is the sum of both uses, reduced once", check=check)


@case("tied_transposed_autoencoder", kind="sharing",
      refs=["facebookresearch/fairscale#836", "facebookresearch/lingua#84"],
      symptom="decoder uses the encoder weight transposed; early release after the first use corrupts the second",
      why="first and last use of one parameter are far apart and one of them goes through a view")
def tied_transposed_autoencoder():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(7, 3) * 0.5)
            self.mid = mlp(3, 5, 3)
            self.b = nn.Parameter(torch.zeros(7))

        def forward(self, x):
            return self.mid(torch.tanh(x @ self.w)) @ self.w.t() + self.b
    return factory(M), reg_batch(7, 7), mse, {}, match()


@case("shared_block_recursive", kind="sharing",
      refs=["deepspeedai/DeepSpeed#2103", "facebookresearch/lingua#84", "facebookresearch/fairscale#780"],
      symptom="one block applied several times: gradient reduced more than once, or only the last use counted",
      why="the parameter has several gather points and its gradient is final only after the first use in program order")
def shared_block_recursive():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(5, 6)
            self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
            self.out = nn.Linear(6, 2)

        def forward(self, x):
            h = self.inp(x)
            for _ in range(4):
                h = h + self.block(h)
            return self.out(h)
    return factory(M), reg_batch(5, 2), mse, {}, match("one reduce-scatter per parameter per step")


@case("param_list_on_root", kind="sharing",
      refs=["pytorch/pytorch#109002", "deepspeedai/DeepSpeed#3570"],
      symptom="raw parameters on the root and in a ParameterList are never gathered",
      why="they belong to no wrapped leaf module; the schedule must be driven by graph uses, not by modules")
def param_list_on_root():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(5))
            self.ws = nn.ParameterList([nn.Parameter(torch.randn(5, 5) * 0.4) for _ in range(3)])
            self.deep = nn.ModuleList([nn.ModuleDict({"a": nn.ModuleList([nn.Linear(5, 2)])})])

        def forward(self, x):
            for w in self.ws:
                x = torch.tanh(x @ w) * self.gain
            return self.deep[0]["a"][0](x)
    return factory(M), reg_batch(5, 2), mse, {}, match()
