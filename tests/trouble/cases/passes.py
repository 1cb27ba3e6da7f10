"""Passes: several forwards or backwards, recompute, hooks, RNG."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .common import case, either, factory, gen, lm_batch, lm_loss, match, mlp, mse, reg_batch, rnd


@case("siamese_two_forwards", kind="passes",
      refs=["facebookresearch/fairscale#617", "xfactlab/orpo#9"],
      symptom="two forwards before one backward: gradients of one pass are lost, or 'reduced twice'",
      why="the engine expects forward and backward to alternate")
def siamese_two_forwards():
    def make(rank, mb):
        g = gen(rank, mb)
        return dict(a=rnd(g, 4, 5), b=rnd(g, 4, 5))

    def loss(model, b):
        za, zb = F.normalize(model(b["a"]), dim=-1), F.normalize(model(b["b"]), dim=-1)
        return F.cross_entropy(za @ zb.t() * 3.0, torch.arange(4))
    return factory(lambda: mlp(5, 8, 3)), make, loss, {}, match("one optimizer-visible gradient: the sum over both passes")


@case("two_forwards_then_two_backwards", kind="passes",
      refs=["pytorch/pytorch#136861", "facebookresearch/fairscale#918"],
      symptom="fwd, fwd, bwd, bwd: the second backward finds released weights",
      why="state is a single phase variable instead of one record per pass")
def two_forwards_then_two_backwards():
    def train(model, b, scale):
        l1 = ((model(b["x"]) - b["y"]) ** 2).mean()
        l2 = model(b["x"] * 0.5 + 1).abs().mean()
        (l1 * scale).backward()
        (l2 * scale).backward()
        return (l1 + l2).detach()
    return factory(lambda: mlp(5, 8, 3)), reg_batch(5, 3), mse, dict(train_step=train), match()


@case("gradient_penalty", kind="passes",
      refs=["soran-ghaderi/torchebm#244", "pytorch/pytorch#91469", "pytorch/pytorch#181581"],
      symptom="second-order gradients are silently wrong, or freed storage is touched",
      why="the backward graph itself must be differentiable and must gather again")
def gradient_penalty():
    def loss(model, b):
        x = b["x"].clone().requires_grad_(True)
        out = model(x)
        (gx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return ((out - b["y"]) ** 2).mean() + (gx.norm(dim=-1) - 1).pow(2).mean()
    return factory(lambda: mlp(4, 7, 1)), reg_batch(4, 1), loss, {}, either(
        "match or a clear error that says double backward is not supported; a wrong gradient is the worst outcome",
        ["double backward"])


@case("maml_functional_call", kind="passes",
      refs=["deepspeedai/DeepSpeed#8026", "soran-ghaderi/torchebm#244"],
      symptom="functional calls with adapted weights see shards, or crash the process",
      why="the user takes named_parameters() as full tensors and builds new ones from them")
def maml_functional_call():
    def train(model, b, scale):
        params = dict(model.named_parameters())
        inner = ((torch.func.functional_call(model, params, (b["x"],)) - b["y"]) ** 2).mean()
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads)}
        outer = ((torch.func.functional_call(model, fast, (b["x"] + 0.1,)) - b["y"]) ** 2).mean()
        (outer * scale).backward()
        return outer.detach()
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(train_step=train), either(
        "match or a clear error that functional calls on sharded parameters are not supported", ["functional_call", "shard"])


@case("grad_accum_4", kind="passes",
      refs=["pytorch/pytorch#90546", "allenai/open-instruct#1498", "pytorch/pytorch#98494"],
      symptom="only the last micro-batch survives, or accumulated gradients are reduced again in each micro-step",
      why="whether to add to or to replace the reduced shard depends on where in the cycle the pass is")
def grad_accum_4():
    return factory(lambda: mlp(5, 9, 2)), reg_batch(5, 2), mse, dict(micro=4), match()


@case("grad_set_none_before_step", kind="passes",
      refs=["facebookresearch/fairscale#605"],
      symptom="setting p.grad = None to hold a layer still has no effect",
      why="the optimizer reads a different (sharded) gradient than the one the user cleared")
def grad_set_none_before_step():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.proto = mlp(4, 6, 5), nn.Linear(5, 2, bias=False)

        def forward(self, x):
            return self.proto(self.body(x))

    def after(model, step, losses):
        if step < 2:
            model.proto.weight.grad = None
    return factory(M), reg_batch(4, 2), mse, dict(after_backward=after, steps=4), match(
        "proto.weight does not move in steps 0 and 1, moves from step 2 on")


@case("param_grad_hook_row_mask", kind="passes",
      refs=["meta-pytorch/torchrec#4268", "pytorch/pytorch#129450", "hiyouga/LlamaFactory#10563"],
      symptom="a hook registered on a parameter never fires, or sees a shard where it expects full rows",
      why="the registered tensor is not the one autograd differentiates")
def param_grad_hook_row_mask():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)
            keep = (torch.arange(9) >= 6).double()[:, None]
            self.emb.weight.register_hook(lambda g: g * keep)

        def forward(self, ids):
            return self.head(torch.tanh(self.emb(ids)))

    def check(res):
        assert not any(g["emb.weight"][:6].any() for g in res["grads"]), "the hook did not run"
    return factory(M), lm_batch(9), lm_loss, {}, either(
        "match (rows 0-5 do not move) or an error at wrap time that names the hook and emb.weight", ["hook", "emb.weight"],
        check=check)


@case("dropout_checkpoint_nonreentrant", kind="passes",
      refs=["pytorch/pytorch#190758", "pytorch/pytorch#190717", "deepspeedai/DeepSpeed#6811"],
      symptom="recompute draws a new dropout mask, so backward differentiates another function",
      why="random operators are moved into the backward graph without their RNG state")
def dropout_checkpoint_nonreentrant():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(5, 8), nn.Linear(8, 2)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())

        def forward(self, x):
            return self.c(checkpoint(self.block, self.a(x), use_reentrant=False))
    return factory(M), reg_batch(5, 2, B=6), mse, {}, match(
        "same masks as eager with the same per-rank seed; at the least the backward mask equals the forward mask")


@case("checkpoint_reentrant", kind="passes",
      refs=["NVIDIA/Megatron-LM#6153", "pytorch/pytorch#153354", "pytorch/pytorch#82203"],
      symptom="recompute inside backward looks like a new forward and starts forward-order prefetch",
      why="reentrant checkpointing runs forward code inside the backward pass")
def checkpoint_reentrant():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(9, 6)
            self.blocks = nn.ModuleList([mlp(6, 8, 6) for _ in range(3)])
            self.head = nn.Linear(6, 9)

        def forward(self, ids):
            h = self.emb(ids)
            for b in self.blocks:
                h = h + checkpoint(b, h, use_reentrant=True)
            return self.head(h)
    return factory(M), lm_batch(9), lm_loss, {}, either("match, or a clear error asking for use_reentrant=False", ["reentrant"])
