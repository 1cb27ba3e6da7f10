"""Usage: which parameters run, when, on which rank."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from .common import adamw, case, either, factory, gen, lm_batch, lm_loss, match, mlp, mse, plain_sgd, reg_batch, rnd


@case("unused_param_stays_none", kind="usage",
      refs=["pytorch/pytorch#28294", "pytorch/pytorch#83129"],
      symptom="unused parameter gets a zero gradient and is then shrunk by weight decay, or is never released",
      why="None and zero mean different things to an optimizer")
def unused_param_stays_none():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unused = mlp(4, 6, 2), nn.Linear(6, 3)

        def forward(self, x):
            return self.body(x)
    return factory(M), reg_batch(4, 2), mse, dict(optimizer=adamw), match(
        "gradient None, value unchanged after AdamW with weight decay",
        none_grads=("unused.weight", "unused.bias"))


@case("rank_conditional_encoder", kind="usage",
      refs=["pytorch/pytorch#158719", "pytorch/pytorch#152964", "pytorch/torchtitan#4777"],
      symptom="an encoder runs only on ranks whose sample has an image; the others never join its gather: hang",
      why="the set of collectives in a step depends on local data")
def rank_conditional_encoder():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision, self.text, self.head = mlp(3, 5, 6), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x, img=None):
            h = self.text(x)
            if img is not None:
                h = h + self.vision(img)
            return self.head(torch.tanh(h))

    def make(rank, mb):
        g = gen(rank, mb)
        b = dict(x=rnd(g, 4, 4), y=rnd(g, 4, 2), img=rnd(g, 4, 3))
        return b if (rank + mb) % 2 == 0 else dict(b, img=None)

    def loss(model, b):
        return ((model(b["x"], img=b["img"]) - b["y"]) ** 2).mean()
    return factory(M), make, loss, dict(rank_divergent=True), either(
        "match (ranks without an image contribute zero) or a prompt error naming the rank and the parameter; never a hang",
        ["rank"])


@case("step_conditional_branch", kind="usage",
      refs=["deepspeedai/DeepSpeed#5828", "deepspeedai/DeepSpeed#3599", "deepspeedai/DeepSpeed#6557"],
      symptom="a layer is skipped in some steps: prefetched parameters stay in flight, or the step order is rejected",
      why="the recorded order no longer holds; a prefetch was issued for a parameter that is not used")
def step_conditional_branch():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.mid, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x, use_mid):
            h = torch.tanh(self.a(x))
            if use_mid:
                h = torch.tanh(self.mid(h))
            return self.c(h)

    def make(rank, mb):
        return dict(reg_batch(4, 2)(rank, mb), use_mid=mb % 2 == 0)

    def loss(model, b):
        return ((model(b["x"], b["use_mid"]) - b["y"]) ** 2).mean()
    return factory(M), make, loss, dict(steps=4), match(
        "match; in odd steps mid has gradient None (momentum must not move it) and nothing stays gathered",
        none_grads={1: ("mid.weight", "mid.bias"), 3: ("mid.weight", "mid.bias")})


@case("early_exit_item", kind="usage",
      refs=["deepspeedai/DeepSpeed#7998"],
      symptom="ranks run a different number of layers because of a data-dependent exit; the deeper rank waits forever",
      why="a host-side .item() decides how many gathers follow")
def early_exit_item():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            depth = x[:, 0].mean().item()
            for i, layer in enumerate(self.layers):
                if i >= depth:
                    break
                x = x + torch.tanh(layer(x))
            return self.head(x)

    def make(rank, mb):
        b = reg_batch(4, 2)(rank, mb)
        b["x"][:, 0] = 1.0 + (rank + mb) % 3
        return b
    return factory(M), make, mse, dict(rank_divergent=True), either(
        "match or a prompt clear error that names the data-dependent branch; never a hang", ["data-dependent", "item"])


@case("chunked_head_rank_dependent", kind="usage",
      refs=["huggingface/trl#6696", "huggingface/trl#6698"],
      symptom="a chunked loss calls the head a different number of times per rank (masked tokens): stall in the first step",
      why="one gather per call, and the number of calls follows the local token count")
def chunked_head_rank_dependent():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)

        def forward(self, ids, y, mask):
            h, y = torch.tanh(self.emb(ids))[mask], y[mask]
            total = h.sum() * 0.0
            for hc, yc in zip(h.split(4), y.split(4)):
                total = total + F.cross_entropy(self.head(hc), yc, reduction="sum")
            return total / 8.0

    def make(rank, mb):
        b = lm_batch(9, B=2, T=6)(rank, mb)
        mask = torch.arange(12).view(2, 6) < 3 + 4 * ((rank + mb) % 3)
        return dict(b, mask=mask)

    def loss(model, b):
        return model(b["ids"], b["y"], b["mask"])
    return factory(M), make, loss, dict(rank_divergent=True), either(
        "match (gather once per step, not once per call, makes this easy) or a clear error; never a hang", ["data-dependent"])


@case("soft_prompt_frozen_trunk", kind="usage",
      refs=["pytorch/pytorch#95805", "pytorch/pytorch#101982"],
      symptom="frozen trunk is gathered for backward and never released, because no parameter gradient fires there",
      why="release is tied to the weight gradient, but frozen weights only serve the input gradient")
def soft_prompt_frozen_trunk():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.trunk, self.head = nn.Embedding(9, 6), mlp(6, 10, 6), nn.Linear(6, 9)
            for p in self.parameters():
                p.requires_grad_(False)
            self.prompt = nn.Parameter(torch.randn(6) * 0.3)

        def forward(self, ids):
            return self.head(self.trunk(self.emb(ids) + self.prompt))

    def opt(m):
        return torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    return factory(M), lm_batch(9), lm_loss, dict(optimizer=opt), match(
        "only prompt has a gradient; trunk weights are gathered for backward and released; exactly one reduce per step",
        none_grads=("emb.weight", "trunk.0.weight", "head.weight"))


@case("param_as_output", kind="usage",
      refs=["deepspeedai/DeepSpeed#2642", "deepspeedai/DeepSpeed#876"],
      symptom="a module returns its own parameter; by the time the caller uses it, it is empty",
      why="the last use is after the owner's forward; a graph output aliases a gathered buffer that gets recycled")
def param_as_output():
    class Deferred(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight), self.bias

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = Deferred(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            y, bias = self.a(x)
            return self.c(torch.tanh(y) + bias), self.a.weight

    def loss(model, b):
        pred, w = model(b["x"])
        return ((pred - b["y"]) ** 2).mean() + 0.1 * (w ** 2).sum()
    return factory(M), reg_batch(4, 2), loss, {}, either(
        "match (the returned weight is full, and the penalty contributes to its gradient) or a clear error naming a.weight",
        ["a.weight"])


@case("mha_out_proj", kind="usage",
      refs=["pytorch/pytorch#78109", "facebookresearch/fairscale#899", "pytorch/pytorch#89215"],
      symptom="MultiheadAttention reads out_proj.weight without calling out_proj: its gather hook never fires",
      why="a parent uses a child's parameter directly")
def mha_out_proj():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.att, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            h, w = self.att(x, x, x)
            return self.out(h + x) * w.sum(-1).mean()

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 2, 4, 8), y=rnd(g, 2, 4, 3))
    return factory(M), make, mse, {}, match()


@case("structured_output", kind="usage",
      refs=["deepspeedai/DeepSpeed#1961", "pytorch/pytorch#102878"],
      symptom="tensors hidden in dataclasses, dicts and custom objects are missed: backward hooks do not run",
      why="inputs and outputs are searched for tensors only in known container types")
def structured_output():
    class Tag:
        def __init__(self, name):
            self.name = name

    class Item:
        def __init__(self, x):
            self.x, self.tag = x, Tag("in")

    @dataclasses.dataclass
    class Out:
        pred: torch.Tensor
        aux: dict
        extras: tuple

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, item):
            h = torch.tanh(self.a(item.x))
            return Out(self.c(h), {"h": h, "none": None}, (item.tag, None, {"n": 3}))

    def loss(model, b):
        out = model(Item(b["x"]))
        assert isinstance(out, Out) and out.aux["none"] is None and out.extras[0].name == "in"
        return ((out.pred - b["y"]) ** 2).mean() + 0.01 * out.aux["h"].abs().sum()
    return factory(M), reg_batch(4, 2), loss, {}, match("match, and the output has the original types")


@case("input_mutated_inplace", kind="usage",
      refs=["pytorch/pytorch#109240", "pytorch/pytorch#90844"],
      symptom="the model changes its input in place; after capture the caller's tensor keeps its old values",
      why="functionalisation turns the write into an extra output that must be copied back")
def input_mutated_inplace():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("s", torch.tensor([1.0, 2.0, 0.5, -1.0]))
            self.lin = nn.Linear(4, 2)

        def forward(self, x):
            x.mul_(self.s).add_(1.0)
            return self.lin(x)

    def loss(model, b):
        return ((model(b["x"]) - b["y"]) ** 2).mean() + b["x"].pow(2).mean()
    return factory(M), reg_batch(4, 2), loss, {}, match("match, including the term that reads the mutated input")


@case("graph_break_middle", kind="usage",
      refs=["deepspeedai/DeepSpeed#8059", "pytorch/pytorch#192000", "deepspeedai/DeepSpeed#7228"],
      symptom="code the tracer cannot follow runs eagerly on parameters that only the compiled graph knows how to gather",
      why="between two captured graphs the module still holds shards, and eager autograd saves them by reference")
def graph_break_middle():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.opaque, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.log = []

        @torch._dynamo.disable
        def hidden(self, h):
            return torch.tanh(self.opaque(h))

        def forward(self, x):
            h = torch.tanh(self.a(x))
            self.log.append(float(h.detach().mean()))
            return self.c(self.hidden(h))
    return factory(M), reg_batch(4, 2), mse, {}, either(
        "match, or an error that names the line that broke the graph", ["graph break", "hidden"])


@case("lstm_trunk", kind="usage",
      refs=["pytorch/pytorch#158007", "pytorch/pytorch#141184"],
      symptom="recurrent layers are skipped by the tracer, and everything after them too; flat weight lists go stale",
      why="RNN modules keep a second list of references to their weights and break capture by design")
def lstm_trunk():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.rnn, self.head = nn.Linear(3, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x):
            out, _ = self.rnn(torch.tanh(self.inp(x)))
            return self.head(out[:, -1])

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 3, 4, 3), y=rnd(g, 3, 2))
    return factory(M), make, mse, {}, either("match, or an error that says recurrent layers are not captured", ["LSTM", "RNN"])


@case("custom_autograd_function", kind="usage",
      refs=["ByteDance-Seed/VeOmni#804", "pytorch/pytorch#141111"],
      symptom="a custom Function saves the gathered weight; in backward its storage has size 0",
      why="the saved tensor bypasses the hooks that would gather again before backward")
def custom_autograd_function():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t() * 0.5

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return 0.5 * g @ w, 0.5 * g.t() @ x

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.w, self.c = nn.Linear(4, 6), nn.Parameter(torch.randn(5, 6)), nn.Linear(5, 2)

        def forward(self, x):
            return self.c(torch.tanh(Scaled.apply(self.a(x), self.w)))
    return factory(M), reg_batch(4, 2), mse, {}, match()


@case("embedding_sparse_grad", kind="usage",
      refs=["pytorch/pytorch#150656", "deepspeedai/DeepSpeed#8504"],
      symptom="sparse embedding gradients fail to compile, or a sparse-to-dense shortcut drops rows",
      why="reduce-scatter needs a dense gradient")
def embedding_sparse_grad():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(9, 5, sparse=True), nn.Linear(5, 9)

        def forward(self, ids):
            return self.head(self.emb(ids))
    return factory(M), lm_batch(9), lm_loss, dict(optimizer=plain_sgd), either(
        "match (as dense) or an error that says sparse gradients are not supported", ["sparse"])
