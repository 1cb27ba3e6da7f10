"""Loop: what the training script does around forward/backward."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .common import adamw, case, either, error, factory, gen, lm_batch, lm_loss, match, mlp, mse, reg_batch, rnd, sgd


@case("requires_grad_toggle", kind="loop",
      refs=["pytorch/pytorch#139476", "pytorch/pytorch#186998", "dingo-gw/dingo#407"],
      symptom="a layer that was frozen at first capture never trains after it is unfrozen; no error",
      why="requires_grad changes in place and the old graph, without that gradient, is reused")
def requires_grad_toggle():
    def build():
        m = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        return m

    def before(model, step, rank):
        for p in model[2].parameters():
            p.requires_grad_(step % 2 == 1)
    f = ("2.weight", "2.bias")
    return factory(build), reg_batch(4, 2), mse, dict(before_step=before, steps=4), match(
        "gradient None while frozen, correct while trainable", none_grads={0: f, 2: f})


@case("eval_between_steps", kind="loop",
      refs=["deepspeedai/DeepSpeed#3068", "deepspeedai/DeepSpeed#3156", "deepspeedai/DeepSpeed#5394"],
      symptom="training after an evaluation pass fails with parameters still in flight",
      why="the eval pass runs another order and no backward, and leaves prefetches behind")
def eval_between_steps():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.bn, self.d, self.c = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)

        def forward(self, x):
            return self.c(self.d(torch.relu(self.bn(self.a(x)))))

    def between(model, step, rank):
        model.eval()
        with torch.no_grad():
            out = [model(rnd(gen(7 + rank, step), n, 4)).sum() for n in (7, 3)]
        model.train()
        return out
    return factory(M), reg_batch(4, 2), mse, dict(between=between), match(
        "training and eval probes match; eval leaves no parameter gathered", buffers="rank_local")


@case("dynamic_seq_len", kind="loop",
      refs=["deepspeedai/DeepSpeed#7611", "pytorch/pytorch#155558", "pytorch/pytorch#147561"],
      symptom="variable-length batches: one rank recompiles while the others train; different graphs or a hang",
      why="guards fail at different steps on different ranks, and each compile may decide differently on what to gather again")
def dynamic_seq_len():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.net, self.head = nn.Embedding(9, 6), mlp(6, 8, 6), nn.Linear(6, 9)

        def forward(self, ids):
            h = self.emb(ids)
            return self.head(h + self.net(h).cumsum(1))

    def make(rank, mb):
        return lm_batch(9, B=2, T=3 + (2 * mb + rank) % 5)(rank, mb)
    return factory(M), make, lm_loss, dict(steps=6), match("same schedule on all ranks whatever the lengths")


@case("builtin_container_root", kind="loop",
      refs=["pytorch/pytorch#150915", "pytorch/pytorch#132923"],
      symptom="the root is a plain nn.Sequential; in-place compilation captures nothing and says nothing",
      why="frames that live in torch.nn are on the tracer's skip list, so there is no frame to capture")
def builtin_container_root():
    def build():
        return nn.Sequential(nn.Embedding(9, 6), nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)), nn.LayerNorm(6),
                             nn.Linear(6, 9))
    return factory(build), lm_batch(9), lm_loss, {}, match("match, and an assertion that something was captured at all")


@case("uneven_batches", kind="loop",
      refs=["pytorch/torchtitan#1617", "pytorch/pytorch#152964"],
      symptom="one rank runs out of data and the others wait in a collective until the timeout",
      why="no rank can know that a peer will not come")
def uneven_batches():
    return factory(lambda: mlp(5, 8, 2)), reg_batch(5, 2), mse, dict(
        batches_per_rank=lambda rank: 3 if rank == 0 else 2, rank_divergent=True), error(
        "the common steps match; then every rank stops within the timeout with an error that says which rank left",
        ["rank"])


@case("clip_grad_norm", kind="loop",
      refs=["pytorch/pytorch#88621", "pytorch/pytorch#72548"],
      symptom="clipping by the norm of local shards, or counting tied and padded entries twice",
      why="each rank sees a part of the gradient only")
def clip_grad_norm():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.mid, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(self.mid(self.emb(ids)))
    return factory(M), lm_batch(7), lm_loss, dict(clip_norm=0.05), match("returned norm and clipped update match on every rank")


@case("nan_loss_one_rank", kind="loop",
      refs=["ecmwf/WeatherGenerator#2724", "Lightning-AI/pytorch-lightning#5243", "deepspeedai/DeepSpeed#8415"],
      symptom="one rank skips a bad batch on its own: hang; or the NaN goes through the reduction into all weights",
      why="the decision to skip must be global and must come before the update")
def nan_loss_one_rank():
    def make(rank, mb):
        b = reg_batch(5, 2)(rank, mb)
        if rank == 1 and mb == 1:
            b["x"][0, 0] = float("nan")
        return b

    def after(model, step, losses):
        return None if all(bool(torch.isfinite(loss)) for loss in losses) else "skip"

    def check(res):
        assert res["skipped"] == [False, True, False], res["skipped"]
    return factory(lambda: mlp(5, 8, 2)), make, mse, dict(after_backward=after, nonfinite_ok=True), match(
        "step 1 changes nothing on any rank, step 2 matches; the skip is reported, not silent",
        check=check)


@case("param_groups_by_ndim", kind="loop",
      refs=["pytorch/pytorch#101343", "mosaicml/composer#3493"],
      symptom="weight-decay groups chosen by p.ndim or by name come out wrong after sharding",
      why="flat shards are one-dimensional and may be renamed")
def param_groups_by_ndim():
    def opt(m):
        decay = [p for n, p in m.named_parameters() if p.ndim >= 2]
        rest = [p for n, p in m.named_parameters() if p.ndim < 2]
        return torch.optim.AdamW([dict(params=decay, weight_decay=0.3, lr=0.02),
                                  dict(params=rest, weight_decay=0.0, lr=0.05)])
    return factory(lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2))), reg_batch(4, 2), mse, dict(
        optimizer=opt), match("same groups as on the plain model (two with 2 and 4 parameters)")


class MiniMuon(torch.optim.Optimizer):
    """Momentum with an orthogonalised update for matrices (cubic Newton-Schulz)."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(group["beta"]).add_(p.grad)
                u = m
                if p.ndim == 2:
                    u = m / (m.norm() + 1e-12)
                    for _ in range(6):
                        u = 1.5 * u - 0.5 * u @ u.t() @ u
                p.add_(u, alpha=-group["lr"])


class MiniLars(torch.optim.Optimizer):
    """SGD with a per-tensor trust ratio |w| / |g|."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() + 1e-3) / (p.grad.norm() + 1e-3), alpha=-group["lr"])


@case("full_matrix_optimizer", kind="loop",
      refs=["KellerJordan/Muon#45"],
      symptom="an optimizer that needs whole matrices gets flat shards and orthogonalises garbage",
      why="the update is not element-wise")
def full_matrix_optimizer():
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(optimizer=lambda m: MiniMuon(m.parameters())), either(
        "match (needs the whole matrix) or a clear error; never orthogonalised shards", ["element", "placement"])


@case("weight_norm", kind="loop",
      refs=["deepspeedai/DeepSpeed#1045", "huggingface/transformers#30881"],
      symptom="weight_norm replaces weight by two parameters after construction; they are missed or not gathered",
      why="the used weight is computed in a parametrisation from parameters under other names")
def weight_norm():
    def build():
        wn = nn.utils.parametrizations.weight_norm
        return nn.Sequential(wn(nn.Linear(4, 6)), nn.Tanh(), wn(nn.Linear(6, 2), dim=1))
    return factory(build), reg_batch(4, 2), mse, dict(export=True), match()


@case("ema_deepcopy", kind="loop",
      refs=["pytorch/pytorch#82070", "pytorch/pytorch#117742", "huggingface/transformers#35994"],
      symptom="deepcopy of a wrapped model fails, or the copy shares state; updates to the copy do not show in its forward",
      why="handles, streams and compiled code do not copy; parameters of the copy are not those its forward reads")
def ema_deepcopy():
    store = {}

    def between(model, step, rank):
        if step == 0:
            store[rank] = copy.deepcopy(model).requires_grad_(False)
        ema = store[rank]
        with torch.no_grad():
            for pe, p in zip(ema.parameters(), model.parameters()):
                pe.lerp_(p.detach(), 0.3)
            return ema(rnd(gen(6, step), 3, 4))
    return factory(lambda: mlp(4, 6, 2)), reg_batch(4, 2), mse, dict(between=between, steps=4), either(
        "EMA outputs match, or a clear error at deepcopy", ["deepcopy"])


@case("teacher_student", kind="loop",
      refs=["deepspeedai/DeepSpeed#3175", "arcee-ai/DistillKit#3"],
      symptom="frozen teacher and trained student in one process: the teacher's weights are empty ('must be 2-D')",
      why="only one of two models was wrapped, or both share one global schedule")
def teacher_student():
    def build():
        m = nn.ModuleDict({"teacher": mlp(4, 9, 3), "student": mlp(4, 5, 3)})
        m["teacher"].requires_grad_(False)
        return m

    def loss(model, b):
        with torch.no_grad():
            t = model["teacher"](b["x"])
        return ((model["student"](b["x"]) - t) ** 2).mean()
    return factory(build), reg_batch(4, 3), loss, dict(engines=("teacher", "student"),
                                                       optimizer=lambda m: sgd(m["student"])), match(
        none_grads=("teacher.0.weight", "teacher.2.bias"))


@case("reload_other_world_size", kind="loop",
      refs=["deepspeedai/DeepSpeed#2898", "Lightning-AI/pytorch-lightning#16815", "pytorch/pytorch#102821"],
      symptom="a checkpoint written by N ranks does not load, or loads wrongly, on M ranks",
      why="shard boundaries and padding depend on the world size; optimizer state has to be re-cut too")
def reload_other_world_size():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.net, self.t = nn.Embedding(7, 5), mlp(5, 6, 7), nn.Parameter(torch.tensor(0.5))

        def forward(self, ids):
            return self.net(self.emb(ids)) * self.t.exp()
    return factory(M), lm_batch(7), lm_loss, dict(steps=4, optimizer=adamw, reload_at=2, reload_world=lambda w: w + 1,
                                                  export=True), match(
        "from step 2 on the run continues on world+1 ranks exactly as the reference does")


@case("engine_recreate", kind="loop",
      refs=["deepspeedai/DeepSpeed#5674", "deepspeedai/DeepSpeed#879", "deepspeedai/DeepSpeed#7204"],
      symptom="memory grows with each engine that is created and dropped in one process",
      why="hooks, closures and global registries hold the model in reference cycles")
def engine_recreate():
    return factory(lambda: mlp(16, 64, 16)), reg_batch(16, 16), mse, dict(recreate=4, steps=2), match(
        "after del + gc.collect() a weak reference to the model is dead and live tensor bytes are back at the baseline")


@case("exception_one_rank", kind="loop",
      refs=["ai2cm/ace#849", "pytorch/torchtitan#3863", "pytorch/torchtitan#1547"],
      symptom="one rank raises and the others sit in a collective for half an hour",
      why="nothing tells the peers; in-flight prefetches also keep the raising rank from exiting")
def exception_one_rank():
    def make(rank, mb):
        return dict(reg_batch(5, 2)(rank, mb), poison=rank == 1 and mb == 1)

    def loss(model, b):
        out = model(b["x"])
        if b["poison"]:
            raise ValueError("poisoned batch")
        return ((out - b["y"]) ** 2).mean()
    return factory(lambda: mlp(5, 8, 2)), make, loss, dict(raises=(1, 1), rank_divergent=True), error(
        "rank 1 ends with ValueError: poisoned batch; the others end within the timeout with an error that names rank 1",
        ["rank 1"])


@case("cpu_offload_accum", kind="loop",
      refs=["instructlab/training#414", "pytorch/pytorch#98494", "pytorch/pytorch#148532"],
      symptom="offload plus gradient accumulation plus clipping: the new gradient replaces the old one, or device mismatch",
      why="gradients live on another device than the pass that produces them")
def cpu_offload_accum():
    return factory(lambda: mlp(5, 9, 2)), reg_batch(5, 2), mse, dict(micro=3, clip_norm=0.1, cpu_offload=True), either(
        "match, or an error that says there is no offload mode", ["offload"])
