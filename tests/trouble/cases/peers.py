"""What the test suites of FSDP2 and of DeepSpeed ZeRO-3 try: their ideas, on models of our own.

`refs` names the file in the peer's repository (test/distributed/_composable/fsdp in pytorch/pytorch, tests/unit in
deepspeedai/DeepSpeed) or an issue.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .common import adamw, case, either, factory, gen, lm_batch, lm_loss, match, mlp, mse, plain_sgd, reg_batch, rnd

FSDP2, DEEPSPEED = "test_fully_shard_{}.py", "v1/zero/test_zero_user_backward.py"


@case("peers_module_in_a_loop", kind="peers", refs=["v1/zero/test_zero.py"],
      symptom="one layer applied three times in a loop, over two micro-batches: a use is lost or reduced twice",
      why="uses are counted by calls of a module, and the count starts over where it should not")
def peers_module_in_a_loop():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x):
            for _ in range(3):
                x = torch.tanh(self.inner(x)) + x
            return self.head(x)
    return factory(M), reg_batch(5, 3), mse, dict(micro=2), match()


@case("peers_extra_path_each_second_step", kind="peers", refs=["v1/zero/test_zero.py"],
      symptom="a layer gets a second path to the loss in every other step; its gradient is that of the other kind of step",
      why="the number of contributions to a gradient was learnt from the first step")
def peers_extra_path_each_second_step():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, twice):
            h = torch.tanh(self.a(x))
            return self.b(h + self.a(h)) if twice else self.b(h)

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 4, 4), y=rnd(g, 4, 2), twice=mb % 2 == 1)
    return factory(M), make, lambda m, b: F.mse_loss(m(b["x"], b["twice"]), b["y"]), dict(steps=4), match()


@case("peers_gradient_of_a_tensor", kind="peers", refs=[DEEPSPEED],
      symptom="out.backward(gradient) of an output that is not a scalar: the engine scales a loss that it never saw",
      why="the loss is not the engine's to scale")
def peers_gradient_of_a_tensor():
    def train(model, b, scale):
        out = model(b["x"])
        out.backward((out.detach() - b["y"]) * scale)
        return (out.detach() - b["y"]).square().mean()
    return factory(lambda: mlp(4, 7, 3)), reg_batch(4, 3), mse, dict(train_step=train), match()


@case("peers_two_heads_one_at_a_time", kind="peers", refs=[DEEPSPEED, FSDP2.format("autograd")],
      symptom="the head that a step did not use moves all the same, by its old gradient or by weight decay",
      why="gradients live in one flat buffer that nobody clears")
def peers_two_heads_one_at_a_time():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x, left):
            h = torch.tanh(self.trunk(x))
            return self.left(h) if left else self.right(h)

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 4, 4), y=rnd(g, 4, 2), left=mb % 2 == 0)
    none = {s: [f"{'right' if s % 2 == 0 else 'left'}.{p}" for p in ("weight", "bias")] for s in range(4)}
    return (factory(M), make, lambda m, b: F.mse_loss(m(b["x"], b["left"]), b["y"]), dict(steps=4, optimizer=adamw),
            match("the idle head has no gradient and does not move", none_grads=none))


@case("peers_output_nobody_reads", kind="peers", refs=[FSDP2.format("autograd")],
      symptom="an output that the loss does not read leaves its layer gathered, or reduced with garbage",
      why="the backward of that layer never comes, and something waits for it")
def peers_output_nobody_reads():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.main, self.aux = mlp(4, 6, 6), nn.Linear(6, 2), nn.Linear(6, 5)

        def forward(self, x):
            h = self.body(x)
            return self.main(h), self.aux(h)

    def loss(model, b):
        main, aux = model(b["x"])
        return F.mse_loss(main, b["y"]) + (aux.square().mean() if b["both"] else 0.0)

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 4, 4), y=rnd(g, 4, 2), both=mb % 2 == 1)
    return (factory(M), make, loss, dict(steps=4, optimizer=adamw),
            match(none_grads={s: ["aux.weight", "aux.bias"] for s in (0, 2)}))


@case("peers_one_forward_one_backward", kind="peers", refs=[FSDP2.format("training")],
      symptom="pipeline order, f0 f1 b0 f2 b1 b2: a backward meets what the next forward left behind",
      why="what a forward saves for its backward is the module's, not the call's")
def peers_one_forward_one_backward():
    def train(model, b, scale):
        def forward(i):
            return F.mse_loss(model(b["x"][i]), b["y"][i])
        losses = [forward(0), forward(1)]
        (losses[0] * scale).backward()
        losses.append(forward(2))
        (losses[1] * scale).backward()
        (losses[2] * scale).backward()
        return sum(losses).detach()

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 3, 4, 5), y=rnd(g, 3, 4, 2))
    return factory(lambda: mlp(5, 8, 8, 2)), make, mse, dict(train_step=train), match()


class Scores(NamedTuple):
    main: torch.Tensor
    rest: dict


@case("peers_containers", kind="peers", refs=["v1/zero/test_zero.py", FSDP2.format("autograd")],
      symptom="named tuples, nested dicts, strings and None between and out of modules: tensors inside are overlooked",
      why="a hook looks for tensors in the containers that it knows")
def peers_containers():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, state, *, mode="tanh", times=1):
            x = state["x"]
            for _ in range(times):
                x = getattr(torch, mode)(self.lin(x))
            return {**state, "x": x, "trace": [*state["trace"], (x, None, mode)]}

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = Inner(), Inner(), nn.Linear(4, 2)

        def forward(self, x):
            state = self.two(self.one({"x": x, "trace": []}, mode="sigmoid"), times=2)
            return Scores(self.head(state["x"]), {"trace": state["trace"], "name": "scores", "none": None})

    def loss(model, b):
        out = model(b["x"])
        assert type(out) is Scores and out.rest["name"] == "scores" and out.rest["none"] is None
        return F.mse_loss(out.main, b["y"]) + sum(x.square().mean() for x, _, _ in out.rest["trace"])
    return factory(M), reg_batch(4, 2), loss, {}, match()


@case("peers_tied_and_uneven", kind="peers", refs=[FSDP2.format("training"), "checkpoint/test_shared_weights.py"],
      symptom="a tied weight of 7 rows: padding reaches the sum of its two gradients, or one half is reduced alone",
      why="sharing and padding meet in one buffer")
def peers_tied_and_uneven():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.mid, self.out = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
            self.out.weight = self.emb.weight

        def forward(self, ids):
            return self.out(torch.tanh(self.mid(self.emb(ids))))
    return factory(M), lm_batch(7), lm_loss, dict(optimizer=adamw, world_sizes=(2, 3, 4), export=True), match()


@case("peers_frozen_several_forwards", kind="peers", refs=[FSDP2.format("frozen")],
      symptom="frozen and trained layers in one block, called twice: sizes of the reduction follow the wrong call",
      why="which parameters want a gradient is looked up per block")
def peers_frozen_several_forwards():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.requires_grad_(False)
            self.c.bias.requires_grad_(False)

        def forward(self, x):
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    def loss(model, b):
        return F.mse_loss(model(model(b["x"])), b["y"])
    return factory(M), reg_batch(4, 4), loss, {}, match(none_grads=["b.weight", "b.bias", "c.bias"])


@case("peers_goes_on_after_an_exception", kind="peers",
      refs=[FSDP2.format("training"), "v1/zero/test_zero_activation_checkpoint_lifecycle.py"],
      symptom="after an exception in the middle of a backward the next step uses what it left behind",
      why="state that the end of a backward would have cleared")
def peers_goes_on_after_an_exception():
    class Trip(torch.autograd.Function):
        armed = False

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if Trip.armed:
                raise RuntimeError("tripped")
            return grad

    def train(model, b, scale):
        x = Trip.apply(b["x"].clone().requires_grad_(True))
        Trip.armed = True
        try:
            F.mse_loss(model(x), b["y"]).backward()  # the parameters' gradients may have arrived before it raises
        except RuntimeError as error:
            assert "tripped" in str(error)
        Trip.armed = False
        for p in model.parameters():
            p.grad = None
        loss = F.mse_loss(model(b["x"]), b["y"])
        (loss * scale).backward()
        return loss.detach()
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(train_step=train), match()


@case("peers_checkpoint_of_frozen_and_trained", kind="peers", refs=[DEEPSPEED],
      symptom="a checkpointed block with a frozen norm: recompute reads a weight that was released, or reduces a frozen one",
      why="recompute gathers again, outside of the order that was recorded")
def peers_checkpoint_of_frozen_and_trained():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(6), nn.Linear(6, 6)
            self.norm.requires_grad_(False)

        def forward(self, x):
            return x + torch.tanh(self.lin(self.norm(x)))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 2)

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)
    return factory(M), reg_batch(6, 2), mse, dict(micro=2), match()


@case("peers_order_changes_every_step", kind="peers", refs=["deepspeedai/DeepSpeed#6870", "deepspeedai/DeepSpeed#5006"],
      symptom="layers run in another order in every step: the recorded order is thrown away each time, or a step hangs",
      why="prefetching follows the order of the step before")
def peers_order_changes_every_step():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), nn.Linear(5, 2)

        def forward(self, x, backwards):
            for layer in list(self.layers)[:: -1 if backwards else 1]:
                x = torch.tanh(layer(x))
            return self.head(x)

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 3, 5), y=rnd(g, 3, 2), backwards=mb % 2 == 1)
    return factory(M), make, lambda m, b: F.mse_loss(m(b["x"], b["backwards"]), b["y"]), dict(steps=5), match()


@case("peers_no_grad_in_train_mode", kind="peers", refs=["deepspeedai/DeepSpeed#4922", "v1/zero/test_zero.py"],
      symptom="forwards under no_grad, in train() as in eval(), between steps: what they gather is never given back",
      why="the end of a step is found by its backward")
def peers_no_grad_in_train_mode():
    def between(model, step, rank):
        outs = []
        for train in (True, False):
            model.train(train)
            with torch.no_grad():
                outs.append(model(rnd(gen(rank, step, salt=9), 3, 5)))
        model.train()
        return outs
    return factory(lambda: mlp(5, 8, 2)), reg_batch(5, 2), mse, dict(between=between, steps=4), match()


@case("peers_late_module", kind="peers", refs=["v1/zero/test_zero_late_module_attach.py"],
      symptom="a module that is attached after the model was sharded runs on whole weights and never trains alike on all ranks",
      why="nobody looks at the model again")
def peers_late_module():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.extra = nn.Linear(4, 4), None

        def forward(self, x):
            x = torch.tanh(self.body(x))
            return x if self.extra is None else self.extra(x)

    def before(model, step, rank):
        if step == 1:
            model.extra = factory(lambda: nn.Linear(4, 4), seed=3)()
    return factory(M), reg_batch(4, 4), mse, dict(before_step=before, optimizer=plain_sgd), either(
        "an error that says that a parameter is not the model's, or a right gradient for it", ["not one of the model's"])
