"""What a trouble case is, and the helpers that cases are written with.

Nearly every case was prompted by a public issue thread (`Case.refs`); the models were written from scratch. A case is a
function that returns

    (model_factory, make_batch, loss_fn, options, expectation)

    model_factory()        -> nn.Module, the same weights on every call and rank
    make_batch(rank, mb)   -> dict; mb is the global micro-batch index (step * options["micro"] + k)
    loss_fn(model, batch)  -> scalar tensor
    options                -> see DEFAULTS
    expectation            -> see match(), either(), error()

Rules that the reference and a sharded run both follow:

  * each rank is seeded with `micro_seed(rank, mb)` right before each micro-batch;
  * gradients are the mean over ranks of the rank-local gradients, summed over the micro-batches; a rank that has no gradient
    for a parameter counts as zero; if no rank has one, the gradient is None and stays None;
  * `zero_grad(set_to_none=True)` at the start of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """One case. `symptom`: how it went wrong for others; `why`: what makes it hard."""

    id: str
    kind: str
    refs: tuple[str, ...]
    symptom: str
    why: str
    build: Callable[[], tuple]


REGISTRY: dict[str, Case] = {}


def case(id, *, kind, refs, symptom, why):
    """Register the decorated function under `id`."""

    def register(build):
        if id in REGISTRY:
            raise ValueError(f"two cases are called {id}")
        REGISTRY[id] = Case(id, kind, tuple(refs), symptom, why, build)
        return build

    return register


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


DEFAULTS: dict[str, Any] = dict(
    steps=3,  # optimizer steps
    micro=1,  # micro-batches per step (gradient accumulation)
    scale_by_micro=True,  # runner multiplies each micro loss by 1/micro
    world_sizes=(2, 3),  # world sizes to try
    optimizer=sgd,  # optimizer(model) -> Optimizer, or dict of Optimizers
    active=None,  # active(step) -> keys of the dict of optimizers to step
    optimizer_first=False,  # build the optimizer on the plain model, before it is compiled
    train_step=None,  # train_step(model, batch, scale) -> loss; does backward itself
    before_step=None,  # before_step(model, step, rank)
    after_backward=None,  # after_backward(model, step, losses_of_all_ranks) -> None | "skip"
    between=None,  # between(model, step, rank) -> tensors to compare ("probe")
    clip_norm=None,  # global grad-norm clip before the optimizer step
    loss_scale=None,  # dict(init, backoff, growth, growth_interval): dynamic scaling
    leaf_modules=None,  # leaf_modules(model) -> modules that are compiled as leaves
    engines=None,  # names of children that are compiled as separate models
    reload_at=None,  # save at the start of this step, reload into a new job ...
    reload_world=None,  # ... whose world size is reload_world(old_world)
    export=False,  # the final full state_dict loads into a fresh model_factory()
    init_fn=None,  # compiled on the meta device, then to_empty, then init_fn(model)
    recreate=0,  # build, train and drop the model this many times
    reinit_pg=False,  # destroy and re-create the process group between two runs
    cpu_offload=False,  # run with parameters and optimizer state offloaded, if there is such a mode
    batches_per_rank=None,  # batches_per_rank(rank) -> number of steps that rank has data for
    raises=None,  # (rank, step): loss_fn raises there, on that rank only
    nonfinite_ok=False,  # losses may be nan/inf
    rank_divergent=False,  # ranks take different code paths in the same step
    timeout_s=60,  # a sharded run that takes longer counts as a hang
)


def options_of(options):
    """`options` on top of the defaults."""
    if unknown := set(options) - set(DEFAULTS):
        raise ValueError(f"unknown options {sorted(unknown)}")
    return {**DEFAULTS, **options}


def match(text="loss and every gradient equal the single-process rank-mean reference", tol=1e-10, **kw):
    """A run must equal the reference.

    Extra keys: `none_grads` (names, or {step: names}) whose gradient must be None; `buffers` ("rank_local": they follow the
    rank's own data); `check(result)`: asserts on the result of a run, true for the reference and for a sharded run alike.
    """
    return dict(outcome="match", tol=tol, text=text, **kw)


def either(text, mentions=(), tol=1e-10, **kw):
    """Equal to the reference, or a clear error with one of `mentions`; silently different or a hang is a failure."""
    return dict(outcome="match_or_error", tol=tol, mentions=tuple(mentions), text=text, **kw)


def error(text, mentions=(), **kw):
    """An error with one of `mentions`, within the time."""
    return dict(outcome="error", mentions=tuple(mentions), text=text, **kw)


def micro_seed(rank, mb):
    return 7919 * (rank + 1) + 31 * mb


def factory(builder, seed=0, dtype=torch.float64):
    """Deterministic model factory that leaves the global RNG and the default dtype alone."""

    def make():
        old = torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            torch.set_default_dtype(dtype)
            try:
                return builder()
            finally:
                torch.set_default_dtype(old)

    return make


def gen(rank, mb, salt=0):
    return torch.Generator().manual_seed(100_003 * (rank + 1) + 1_009 * mb + salt)


def rnd(g, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def reg_batch(din, dout, B=4, dtype=torch.float64):
    def make(rank, mb):
        g = gen(rank, mb)
        return dict(x=rnd(g, B, din, dtype=dtype), y=rnd(g, B, dout, dtype=dtype))

    return make


def lm_batch(vocab, B=3, T=5):
    def make(rank, mb):
        g = gen(rank, mb)
        t = torch.randint(0, vocab, (B, T + 1), generator=g)
        return dict(ids=t[:, :-1].contiguous(), y=t[:, 1:].contiguous())

    return make


def mse(model, b):
    return ((model(b["x"]) - b["y"]) ** 2).mean()


def lm_loss(model, b):
    return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten())


def mlp(*dims):
    layers = []
    for i, (a, c) in enumerate(pairwise(dims)):
        layers.append(nn.Linear(a, c))
        if i < len(dims) - 2:
            layers.append(nn.Tanh())
    return nn.Sequential(*layers)
