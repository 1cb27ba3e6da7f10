"""Layout: shapes, strides, dtypes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .common import case, either, factory, gen, lm_batch, lm_loss, match, mlp, mse, reg_batch, rnd


@case("scalar_param", kind="layout",
      refs=["pytorch/pytorch#130810", "komikndr/raylight#5"],
      symptom="0-dim parameter (a learned temperature) is rejected, or is saved with the wrong shape",
      why="there is no dimension to split; only a flat view with padding works")
def scalar_param():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(5, 3, bias=False)
            self.log_t = nn.Parameter(torch.tensor(0.3))

        def forward(self, u, v):
            u, v = F.normalize(self.a(u), dim=-1), F.normalize(self.b(v), dim=-1)
            return u @ v.t() * self.log_t.exp()

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(u=rnd(g, 4, 4), v=rnd(g, 4, 5))

    def loss(model, b):
        return F.cross_entropy(model(b["u"], b["v"]), torch.arange(4))

    def check(res):
        assert res["params"]["log_t"].shape == () and res["grads"][0]["log_t"].shape == ()
    return factory(M), make, loss, dict(world_sizes=(2, 3, 4), export=True), match(
        "0-dim parameter keeps shape () everywhere the user can see it", check=check)


@case("uneven_numel", kind="layout",
      refs=["Lightning-AI/lightning-thunder#248", "NCAR/miles-credit#416"],
      symptom="sizes not divisible by the world size are refused, or the padding leaks into norms and checkpoints",
      why="the last shard is short; every collective needs padding that nobody may see")
def uneven_numel():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(13, 5)
            self.net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 13))

        def forward(self, ids):
            return self.net(self.emb(ids))
    return factory(M), lm_batch(13), lm_loss, dict(world_sizes=(2, 3, 4), clip_norm=0.2, export=True), match()


@case("zero_size_param", kind="layout",
      refs=["deepspeedai/DeepSpeed#8375"],
      symptom="a trainable parameter with zero elements is never marked gathered, or loses its shape",
      why="'anything left to fetch' is decided by counting elements")
def zero_size_param():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.empty(0, 4))
            self.lin = nn.Linear(4, 2)

        def forward(self, x):
            return self.lin(torch.cat([x, F.linear(x, self.extra)], dim=-1))

    def check(res):
        assert res["params"]["extra"].shape == (0, 4)
    return factory(M), reg_batch(4, 2), mse, {}, match(
        "shape (0, 4) preserved; its gradient is an empty (0, 4) tensor", check=check)


@case("mixed_dtype_params", kind="layout",
      refs=["pytorch/pytorch#156784", "huggingface/accelerate#3985", "radixark/miles#1502"],
      symptom="parameters of several dtypes in one group: assertion, or silently cast to one dtype",
      why="one flat buffer and one collective per group assume a single dtype")
def mixed_dtype_params():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(8, 6, dtype=torch.bfloat16)
            self.norm = nn.LayerNorm(6, dtype=torch.float32)
            self.lin = nn.Linear(6, 8)

        def forward(self, ids):
            return self.lin(self.norm(self.emb(ids).float()).double())

    def check(res):
        assert [res["params"][n].dtype for n in ("emb.weight", "norm.weight", "lin.weight")] == [
            torch.bfloat16, torch.float32, torch.float64]
    return factory(M), lm_batch(8), lm_loss, {}, match(
        "each parameter and its gradient keep their own dtype; tolerance per dtype "
        "(1e-10 float64, 1e-5 float32, 2e-2 bfloat16)", check=check)


@case("complex_param", kind="layout",
      refs=["pytorch/pytorch#71613", "pytorch/pytorch#156632"],
      symptom="collectives refuse complex tensors, or a real view loses the conjugate convention of the gradient",
      why="backends have no complex dtype; shard and reduce must go through view_as_real")
def complex_param():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.filt = nn.Parameter(torch.randn(5, dtype=torch.complex128) * 0.5 + 1)
            self.lin = nn.Linear(8, 2)

        def forward(self, x):
            return self.lin(torch.fft.irfft(torch.fft.rfft(x) * self.filt, n=8))
    return factory(M), reg_batch(8, 2), mse, {}, either(
        "match, or an error that says complex parameters are not supported", ["complex"])


@case("frozen_plus_lora", kind="layout",
      refs=["pytorch/pytorch#104690", "pytorch/pytorch#91167", "deepspeedai/DeepSpeed#8214"],
      symptom="frozen and trainable parameters in one block: 'uniform requires_grad' error or KeyError for the frozen ones",
      why="frozen parameters have gathers but no gradient and no optimizer slot")
def frozen_plus_lora():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.base = nn.LayerNorm(6), nn.Linear(6, 6)
            for p in self.parameters():
                p.requires_grad_(False)
            self.A = nn.Parameter(torch.randn(2, 6) * 0.3)
            self.B = nn.Parameter(torch.randn(6, 2) * 0.1)

        def forward(self, x):
            h = self.norm(x)
            return x + torch.tanh(self.base(h) + F.linear(F.linear(h, self.A), self.B))

    def opt(m):
        return torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.02)
    return factory(lambda: nn.Sequential(Block(), Block(), nn.Linear(6, 2))), reg_batch(6, 2), mse, dict(optimizer=opt), match(
        "frozen parameters: no gradient, no reduce-scatter, bit-identical at the end",
        none_grads=("0.norm.weight", "0.base.weight", "1.base.bias"))


@case("bf16_autocast_master", kind="layout",
      refs=["pytorch/pytorch#111317", "pytorch/pytorch#186998"],
      symptom="gradient arrives in bf16 for an fp32 parameter, or the reduction happens in bf16",
      why="the low-precision cast sits inside the graph; the reduce point may land on the wrong side of it")
def bf16_autocast_master():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(8, 16, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x)

    def loss(model, b):
        return ((model(b["x"]).float() - b["y"]) ** 2).mean()
    return (factory(M, dtype=torch.float32), reg_batch(8, 4, dtype=torch.float32), loss,
            {}, match("parameters and gradients float32; tolerance 2e-2 relative", tol=2e-2))
