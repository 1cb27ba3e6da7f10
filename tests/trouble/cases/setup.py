"""Setup: how the model, its optimizer and the process group come to be. Common practice, from no single thread."""

from __future__ import annotations

import torch
from torch import nn

from .common import adamw, case, either, factory, match, mlp, mse, plain_sgd, reg_batch, rnd, sgd


@case("optimizer_before_compile", kind="setup", refs=[],
      symptom="the optimizer was built on the plain model: it steps parameters that no longer exist",
      why="parameters are replaced by sharded ones while the optimizer holds on to the old objects")
def optimizer_before_compile():
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(optimizer_first=True, optimizer=adamw), either(
        "match, or an error that says to build the optimizer afterwards; never an optimizer that steps nothing",
        ["optimizer", "build it"])


@case("deferred_init_on_meta", kind="setup", refs=[],
      symptom="a model on the meta device is sharded, materialised and initialised: values are lost or differ by rank",
      why="there is nothing to shard yet, and initialisation sees shards")
def deferred_init_on_meta():
    def init(model):
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.fill_(0.1 * (i + 1))
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(init_fn=init), either(
        "match, or an error that says that parameters on the meta device cannot be run", ["meta device"])


@case("process_group_again", kind="setup", refs=[],
      symptom="a second model after destroy_process_group() and init_process_group() uses the dead group",
      why="groups, meshes and compiled graphs are cached by name or for the life of the process")
def process_group_again():
    return factory(lambda: mlp(5, 8, 2)), reg_batch(5, 2), mse, dict(reinit_pg=True, steps=2), match()


@case("dynamic_loss_scale", kind="setup", refs=[],
      symptom="ranks disagree on an overflow because each looks at its own shard: one skips the step, the others do not",
      why="a gradient overflows in some rows only, and one rank owns them")
def dynamic_loss_scale():
    def make(rank, mb):
        b = reg_batch(5, 2)(rank, mb)
        if mb == 1 and rank == 1:
            b["x"] = b["x"] * 1e200
        return b

    def check(res):
        assert res["skipped"] == [False, True, False, False], res["skipped"]
    return factory(lambda: nn.Linear(5, 2)), make, mse, dict(
        steps=4, loss_scale=dict(init=1024.0, backoff=0.5, growth=2.0, growth_interval=2), optimizer=plain_sgd,
        nonfinite_ok=True), match("every rank skips step 1 and halves the scale", check=check)


@case("gan_two_optimizers", kind="setup", refs=[],
      symptom="alternating optimizers: the idle network's gradients are reduced, or its step happens on stale ones",
      why="one backward runs through both networks, and only one of them steps")
def gan_two_optimizers():
    def train(model, b, scale):
        fake = model["gen"](b["x"])
        real = (model["disc"](b["y"]) - 1).pow(2).mean() + model["disc"](fake.detach()).pow(2).mean()
        fooled = (model["disc"](fake) - 1).pow(2).mean()
        loss = real + 0.5 * fooled
        (loss * scale).backward()
        return loss.detach()

    def opt(model):
        return {n: sgd(model[n]) for n in ("gen", "disc")}
    return (factory(lambda: nn.ModuleDict({"gen": mlp(3, 6, 4), "disc": mlp(4, 6, 1)})), reg_batch(3, 4), mse,
            dict(train_step=train, optimizer=opt, active=lambda step: ("disc",) if step % 2 == 0 else ("gen",),
                 engines=("gen", "disc"), steps=4), match())


@case("inference_mode_first", kind="setup", refs=[],
      symptom="eval on a batch that was never seen, under inference_mode, before the first training step",
      why="tensors made under inference_mode cannot take part in autograd later")
def inference_mode_first():
    def before(model, step, rank):
        if step == 0:
            with torch.inference_mode():
                model(rnd(torch.Generator().manual_seed(5 + rank), 3, 4))
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(before_step=before), match()


@case("penalty_on_parameters", kind="setup", refs=[],
      symptom="an L2 penalty over model.parameters() in the loss: the norm of shards, or a loss that is half DTensor",
      why="the loss adds a value computed from the sharded parameters themselves to one computed by the model")
def penalty_on_parameters():
    def loss(model, b):
        return mse(model, b) + 0.01 * sum(p.square().sum() for p in model.parameters())
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), loss, {}, either(
        "match, or an error that says how the penalty has to be written", ["DTensor"])


@case("submodule_under_two_names", kind="setup", refs=[],
      symptom="a module that is registered twice works in the first call only",
      why="its parameters are swapped once for each name, and the second swap takes the first one's value for the original")
def submodule_under_two_names():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.layers = nn.ModuleList([self.a, nn.Linear(4, 2)])

        def forward(self, x):
            return self.layers[1](torch.tanh(self.layers[0](self.a(x))))
    return factory(M), reg_batch(4, 2), mse, {}, match()


@case("reload_without_scalars", kind="setup", refs=[],
      symptom="as reload_other_world_size, without a 0-dim parameter, whose optimizer state torch itself reloads as a plain tensor",
      why="shard boundaries and padding depend on the world size; optimizer state has to be re-cut too")
def reload_without_scalars():
    return factory(lambda: mlp(5, 7, 3)), reg_batch(5, 3), mse, dict(
        steps=4, optimizer=adamw, reload_at=2, reload_world=lambda w: w + 1, export=True), match()
