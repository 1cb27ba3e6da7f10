"""Around: what training loops do before, between and beside forward and backward. Common practice, from no single thread."""

from __future__ import annotations

import contextlib
import functools
import pickle

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .common import adamw, case, either, factory, gen, lm_batch, lm_loss, match, mlp, mse, plain_sgd, reg_batch, rnd


def waiting(model, wait):
    """`model.zfx.no_sync()` where the model is a compiled one, and only if asked."""
    return model.zfx.no_sync() if wait and hasattr(model, "zfx") else contextlib.nullcontext()


def indexed(make):
    """The batch with its global micro-batch index in it."""
    return lambda rank, mb: dict(make(rank, mb), mb=mb)


@case("no_sync_uneven_tokens", kind="around", refs=[],
      symptom="gradients that wait for the last micro-batch are reduced early, twice or never, or weighted wrongly",
      why="micro-batches have different numbers of tokens, and each is weighted by its own")
def no_sync_uneven_tokens():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.net, self.head = nn.Embedding(9, 6), mlp(6, 8, 6), nn.Linear(6, 9, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(self.net(self.emb(ids)))

    def make(rank, mb):
        return dict(lm_batch(9, B=2, T=3 + (2 * mb + rank) % 4)(rank, mb), mb=mb)

    def train(model, b, scale):
        with waiting(model, b["mb"] % 4 != 3):
            loss = F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten(), reduction="sum") / 8
            (loss * scale).backward()
        return loss.detach()
    return factory(M), make, lm_loss, dict(micro=4, train_step=train), match("one reduction a parameter and step")


@case("no_sync_first_used_last", kind="around", refs=[],
      symptom="a parameter that only one micro-batch uses is forgotten",
      why="what waits and what the last backward completes are different sets of parameters")
def no_sync_first_used_last():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.early, self.late, self.c = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x, use_late):
            return self.c(torch.tanh((self.late if use_late else self.early)(self.a(x))))

    def train(model, b, scale):
        last = b["mb"] % 3 == 2
        with waiting(model, not last):
            loss = ((model(b["x"], last) - b["y"]) ** 2).mean()
            (loss * scale).backward()
        return loss.detach()
    return factory(M), indexed(reg_batch(4, 4)), mse, dict(micro=3, train_step=train), match(
        "what only waited is reduced at the end of the last backward")


@case("step_while_gradients_wait", kind="around", refs=[],
      symptom="optimizer.step() without a reduction: nothing moves, or each rank moves its own way",
      why="the last micro-batch ran inside no_sync() too")
def step_while_gradients_wait():
    def train(model, b, scale):
        with waiting(model, True):
            loss = mse(model, b)
            (loss * scale).backward()
        return loss.detach()
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(train_step=train), either(
        "an error at the step that says which gradients wait", ["no_sync"])


@case("retain_graph_changing_lengths", kind="around", refs=[],
      symptom="backward(retain_graph=True) is refused once lengths changed, or what a second one needs is freed",
      why="a saved tensor may be given away only if no second backward can come")
def retain_graph_changing_lengths():
    def make(rank, mb):
        return reg_batch(4, 2, B=3 + (mb + rank) % 3)(rank, mb)

    def train(model, b, scale):
        loss = mse(model, b)
        (loss * scale).backward(retain_graph=True)
        (loss * scale * 0.5).backward()
        return loss.detach()
    return factory(lambda: mlp(4, 6, 2)), make, mse, dict(train_step=train, steps=4), match()


@case("grad_instead_of_backward", kind="around", refs=[],
      symptom="torch.autograd.grad returns shards of nobody's gradient, or leaves something behind in .grad",
      why="it asks for gradients of the sharded parameters without accumulating them")
def grad_instead_of_backward():
    def train(model, b, scale):
        loss = mse(model, b)
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(loss * scale, params)):
            p.grad = g if p.grad is None else p.grad + g
        return loss.detach()
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(train_step=train, micro=2), match()


@case("forward_hook_registered_late", kind="around", refs=[],
      symptom="a forward hook that is registered after the first step is ignored, without a word",
      why="guards on empty hook lists are left out for speed")
def forward_hook_registered_late():
    def before(model, step, rank):
        if step == 1:
            model[2].register_forward_hook(lambda module, args, out: out * 2)
            model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        if step == 2:
            model.register_forward_hook(lambda module, args, out: out * 0.5)
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(before_step=before, steps=4), match()


@case("backward_hook_on_a_part", kind="around", refs=[],
      symptom="a module's backward hook does not fire, or fires at capture only",
      why="the backward of a part is no node of autograd's any more")
def backward_hook_on_a_part():
    def before(model, step, rank):
        if step == 1:
            model[2].register_full_backward_hook(lambda module, grads, out: (grads[0] * 2,))
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(before_step=before), either(
        "match, or an error that names the module and says where hooks work", ["backward hook"])


@case("hooks_on_tensors_and_outermost", kind="around", refs=[],
      symptom="gradient hooks inside forward, or on the outermost module, are lost",
      why="one is traced into the backward, the other runs around the graph")
def hooks_on_tensors_and_outermost():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            if h.requires_grad:
                h.register_hook(lambda g: g * 0.5)
            return self.c(h)

    def before(model, step, rank):
        if step == 0:
            model.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 3,))
    return factory(M), reg_batch(4, 2), mse, dict(before_step=before), match()


@case("optimizer_in_backward", kind="around", refs=[],
      symptom="post-accumulate hooks step a parameter that the rest of the backward still reads",
      why="the optimizer runs inside the backward, parameter by parameter")
def optimizer_in_backward():
    made = {}

    def before(model, step, rank):
        if step == 0:
            made[id(model)] = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]
            for p, optimizer in zip(model.parameters(), made[id(model)]):
                if hasattr(model, "zfx"):
                    p.register_post_accumulate_grad_hook(lambda p, o=optimizer: o.step())

    def between(model, step, rank):
        return [p.detach().sum() if not hasattr(p, "full_tensor") else p.detach().full_tensor().sum() for p in model.parameters()]

    class InReference(torch.optim.Optimizer):
        """The reference averages gradients after the backward: there the same optimizers step then."""

        def __init__(self, model):
            super().__init__(model.parameters(), {})
            self.model = model

        def step(self):
            if not hasattr(self.model, "zfx"):
                for optimizer in made[id(self.model)]:
                    optimizer.step()
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(
        before_step=before, between=between, optimizer=InReference), match()


@case("selective_checkpoint", kind="around", refs=[],
      symptom="a checkpoint policy saves gathered weights, or is dropped",
      why="which values are saved is decided twice: by the policy, and by what parameters alone decide")
def selective_checkpoint():
    def policy(context, op, *args, **kwargs):
        saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 4)) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                contexts = functools.partial(create_selective_checkpoint_contexts, policy)
                x = x + checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x
    return factory(M), reg_batch(4, 4), mse, {}, match()


@case("old_style_norms", kind="around", refs=[],
      symptom="old-style weight_norm and spectral_norm set the weight from a hook, with stale or sharded parameters",
      why="the weight is a plain attribute that a forward pre-hook computes, and spectral_norm changes buffers too")
def old_style_norms():
    def build():
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(6, 2)))
    return factory(build), reg_batch(4, 2), mse, {}, match(buffers="rank_local")


@case("old_style_norm_outermost", kind="around", refs=[],
      symptom="the same on the outermost module: its hooks run outside the model's graph, on shards",
      why="hooks of the outermost module belong to the caller's side")
def old_style_norm_outermost():
    class Head(nn.Linear):
        pass
    return factory(lambda: nn.utils.weight_norm(Head(4, 2))), reg_batch(4, 2), mse, {}, either(
        "match, or an error when it is compiled", ["parametrizations"])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 6), nn.Linear(6, 2)

    def encode(self, x):
        return torch.tanh(self.enc(x))

    def forward(self, x):
        return self.dec(self.encode(x))


@case("part_of_a_model_called", kind="around", refs=[],
      symptom="model.encode(x) reads shards: a shape error, or a result that is silently a DTensor",
      why="only the model's own call gathers")
def part_of_a_model_called():
    def loss(model, b):
        return mse(model, b) + model.encode(b["x"]).square().mean()
    return factory(Encoder), reg_batch(4, 2), loss, {}, either(
        "match, or an error that says how to run it", ["zfx.function"])


@case("part_as_a_function", kind="around", refs=[],
      symptom="a part of a model, and a loss that reads a weight outside forward, in one step with the model itself",
      why="three graphs share parameters, and each gathers and reduces for itself")
def part_as_a_function():
    made = {}

    def outer(model, x):
        return model.encode(x).square().mean() + (model(x) @ model.dec.weight).mean()

    def loss(model, b):
        if id(model) not in made:
            made[id(model)] = model.zfx.function(outer) if hasattr(model, "zfx") else functools.partial(outer, model)
        return mse(model, b) + made[id(model)](b["x"])
    return factory(Encoder), reg_batch(4, 2), loss, dict(micro=2), match()


@case("pickled_model", kind="around", refs=[],
      symptom="pickling a compiled model fails deep inside, or gives a file with one rank's shards",
      why="each rank holds its own part")
def pickled_model():
    def between(model, step, rank):
        pickle.dumps(model)
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(between=between), either(
        "match, or an error that says how to save", ["pickled"])


@case("weight_under_two_parameters", kind="around", refs=[],
      symptom="two Parameters share one memory: after sharding a step of one no longer moves the other",
      why="the tie is invisible in the names")
def weight_under_two_parameters():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)
            self.c.weight = nn.Parameter(self.a.weight.detach())

        def forward(self, x):
            return self.c(torch.tanh(self.a(x)))
    return factory(M), reg_batch(4, 4), mse, dict(optimizer=lambda m: torch.optim.SGD([m.a.weight], lr=0.1)), either(
        "match, or an error when it is compiled", ["shares memory"])


@case("weight_tied_across_models", kind="around", refs=[],
      symptom="two models share an embedding; compiled one by one, each goes on with its own",
      why="the second still sees the whole tensor that the first has replaced")
def weight_tied_across_models():
    def build():
        m = nn.ModuleDict({
            "enc": nn.Sequential(nn.Linear(4, 5), nn.Tanh()), "dec": nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5))})
        m["dec"][1].weight = m["enc"][0].weight
        return m

    def loss(model, b):
        return ((model["dec"](model["enc"](b["x"])) - b["y"]) ** 2).mean()
    return factory(build), reg_batch(4, 5), loss, dict(engines=("enc", "dec")), either(
        "match, or an error when the first is compiled", ["outside the model", "tied"])


@case("anomaly_detection", kind="around", refs=[],
      symptom="torch.autograd.set_detect_anomaly(True) fails on sharded gradients: an operator without a sharding strategy",
      why="it asks every gradient whether it has a NaN")
def anomaly_detection():
    def train(model, b, scale):
        with torch.autograd.set_detect_anomaly(True):
            loss = mse(model, b)
            (loss * scale).backward()
        return loss.detach()
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(train_step=train), match()


@case("generate_between_steps", kind="around", refs=[],
      symptom="ranks generate texts of different lengths: the one that ends first leaves the others in a gather",
      why="the number of forwards follows each rank's own tokens; the cache grows with each")
def generate_between_steps():
    def build():
        from transformers import LlamaConfig, LlamaForCausalLM
        return LlamaForCausalLM(LlamaConfig(vocab_size=7, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                                            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
                                            eos_token_id=None, pad_token_id=0))

    def between(model, step, rank):
        prompt = torch.randint(1, 7, (1, 3), generator=gen(rank, step))
        wanted = dict(max_new_tokens=2 + 3 * rank, do_sample=False)
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **wanted)
        return F.pad(tokens[0, : 5 + 3 * rank], (0, 12 - (5 + 3 * rank)))

    def loss(model, b):
        return model(input_ids=b["ids"], labels=b["y"]).loss
    return factory(build), lm_batch(7), loss, dict(between=between, steps=2, timeout_s=120), match(
        "each rank's tokens are those that it would have generated alone")


@case("lora_from_peft", kind="around", refs=[],
      symptom="adapters are added by a library, under a frozen trunk that must neither be reduced nor take optimizer memory",
      why="frozen and trained parameters are mixed in every block, and module classes are the library's")
def lora_from_peft():
    def build():
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)),
                               LoraConfig(r=2, target_modules=["0", "2", "4"], init_lora_weights=False))
        return model.double()

    def opt(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    return factory(build), reg_batch(4, 2), mse, dict(optimizer=opt), match()


@case("foreach_norms_and_schedulers", kind="around", refs=[],
      symptom="norms by infinity or foreach kernels, and schedulers between them, see local shards",
      why="every one of them is torch's own code over DTensors")
def foreach_norms_and_schedulers():
    made = {}

    def opt(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
        made[id(optimizer)] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        made[id(model)] = made[id(optimizer)]
        return optimizer

    def after(model, step, losses):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm_type=float("inf"), foreach=True)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.2)

    def between(model, step, rank):
        made[id(model)].step()
        return torch.tensor(made[id(model)].get_last_lr())
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(optimizer=opt, after_backward=after, between=between), match()


@case("fused_adamw", kind="around", refs=[],
      symptom="a fused kernel steps padding, or is refused for DTensors",
      why="it walks over the local storages of all parameters at once")
def fused_adamw():
    return factory(lambda: mlp(5, 7, 3)), reg_batch(5, 3), mse, dict(
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, fused=True), clip_norm=0.5), match()


@case("adafactor", kind="around", refs=[],
      symptom="factored second moments over row shards",
      why="rows and columns are averaged over the whole matrix")
def adafactor():
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(
        optimizer=lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05, foreach=False)), either(
        "match, or torch's own error", ["placement", "sharding", "DTensor"])


@case("leaf_with_unused_experts", kind="around", refs=[],
      symptom="an expert that no rank's tokens reached gets a gradient of zeros, and is shrunk by weight decay",
      why="what a leaf uses is only known after it has run, and differs by rank")
def leaf_with_unused_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, which):
            return self.experts[int(which.max())](x)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.moe = nn.Linear(4, 4), Experts()

        def forward(self, x, which):
            return self.moe(torch.tanh(self.a(x)), which)

    def make(rank, mb):
        return dict(reg_batch(4, 4)(rank, mb), which=torch.tensor([(mb + rank) % 2]))

    def loss(model, b):
        return ((model(b["x"], b["which"]) - b["y"]) ** 2).mean()
    return factory(M), make, loss, dict(optimizer=adamw, leaf_modules=lambda m: [m.moe]), match(
        "the expert that nobody used keeps no gradient; one that some rank used has the mean",
        none_grads=("moe.experts.2.weight", "moe.experts.2.bias"))


@case("leaf_under_autocast", kind="around", refs=[],
      symptom="autocast does not reach into code that runs eagerly, or its cache outlives the weights",
      why="a leaf runs twice, outside of the region that it was called in")
def leaf_under_autocast():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x * float(x.detach().abs().max() > 0))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.rows, self.head = nn.Linear(3, 4), Rows(), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rows(torch.tanh(self.inp(x)))).float()

    def train(model, b, scale):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(b["x"])
        loss = (out - b["y"]).square().mean()
        (loss * scale).backward()
        return loss.detach()
    return factory(M, dtype=torch.float32), reg_batch(3, 2, dtype=torch.float32), mse, dict(
        train_step=train, optimizer=plain_sgd, leaf_modules=lambda m: [m.rows]), match(tol=2e-2)


@case("lstm_under_autocast", kind="around", refs=[],
      symptom="autocast does not reach into code that runs eagerly, or its cache outlives the weights",
      why="a leaf runs twice, outside of the region that it was called in")
def lstm_under_autocast():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.rnn, self.head = nn.Linear(3, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                out, _ = self.rnn(torch.tanh(self.inp(x)))
                return self.head(out[:, -1]).float()

    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, 3, 4, 3, dtype=torch.float32), y=rnd(g, 3, 2, dtype=torch.float32))
    return factory(M, dtype=torch.float32), make, mse, dict(optimizer=plain_sgd), either(
        "match, or an error that says how to call it", ["autocast"], tol=2e-2)
