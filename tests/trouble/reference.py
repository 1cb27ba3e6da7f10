"""The reference: `world_size` data-parallel ranks, simulated one after another in one process, without torch.distributed.

Each rank owns a full replica; gradients are averaged over the replicas, and each replica steps its own optimizer. The result is
a plain dict of what a sharded run has to reproduce; `compare` says where one differs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .cases import Case, micro_seed, options_of

TOLERANCE_OF_DTYPE = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}


def new_result() -> dict[str, Any]:
    """What both runs fill in: a list entry per step in each."""
    return dict(losses=[], grads=[], norms=[], probes=[], scales=[], skipped=[], raised=None, stopped=None)


def dense(t: torch.Tensor) -> torch.Tensor:
    return t.to_dense() if t.layout != torch.strided else t


def detached(x: Any) -> Any:
    """`x` with copies of its tensors."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, (list, tuple)):
        return [detached(v) for v in x]
    return x


@dataclass
class Scaler:
    """Dynamic loss scaling, decided by all ranks together."""

    init: float = 1.0
    backoff: float = 1.0
    growth: float = 1.0
    growth_interval: int = 1
    good: int = field(default=0, init=False)

    @property
    def scale(self) -> float:
        return self.init

    def update(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.init *= self.backoff
        elif self.good % self.growth_interval == 0:
            self.init *= self.growth


class Replica:
    """One simulated rank."""

    def __init__(self, rank: int, parts: tuple, o: dict[str, Any]) -> None:
        self.rank, self.o = rank, o
        model_factory, self.make_batch, self.loss_fn = parts[:3]
        self.model: nn.Module = model_factory()
        if o["init_fn"]:
            o["init_fn"](self.model)
        self.optimizer = o["optimizer"](self.model)

    def optimizers(self, step: int) -> list[torch.optim.Optimizer]:
        return active_optimizers(self.optimizer, self.o, step)

    def backward(self, step: int, scale: float) -> torch.Tensor:
        """The micro-batches of one step; see `run_micro_batches`."""
        return run_micro_batches(self.model, self.rank, step, self.make_batch, self.loss_fn, self.o, scale)


def active_optimizers(optimizer: Any, o: dict[str, Any], step: int) -> list[torch.optim.Optimizer]:
    return [optimizer[k] for k in o["active"](step)] if isinstance(optimizer, dict) else [optimizer]


def run_micro_batches(model: nn.Module, rank: int, step: int, make_batch: Any, loss_fn: Any, o: dict[str, Any],
                      scale: float) -> torch.Tensor:
    """Forward and backward of one step's micro-batches on one rank, sharded or not; returns the step's loss."""
    total = torch.zeros((), dtype=torch.float64)
    for mb in range(step * o["micro"], (step + 1) * o["micro"]):
        batch, weight = make_batch(rank, mb), 1.0 / o["micro"] if o["scale_by_micro"] else 1.0
        torch.manual_seed(micro_seed(rank, mb))
        if o["train_step"]:
            loss = o["train_step"](model, batch, weight * scale)
        else:
            loss = loss_fn(model, batch)
            (loss * weight * scale).backward()
        total = total + loss.detach().double() * weight
    return total


def mean_grads(models: list[nn.Module]) -> dict[str, torch.Tensor | None]:
    """Rank-mean of `.grad` by name; None where no rank has a gradient."""
    out: dict[str, torch.Tensor | None] = {}
    for name, first in models[0].named_parameters():
        found = [g for m in models if (g := dict(m.named_parameters())[name].grad) is not None]
        wide = torch.promote_types(first.dtype, torch.float64)
        out[name] = (sum(dense(g).to(wide) for g in found) / len(models)).to(first.dtype) if found else None
    return out


def _install_mean(team: list[Replica]) -> dict[str, torch.Tensor | None]:
    grads = mean_grads([t.model for t in team])
    for t in team:
        for name, p in t.model.named_parameters():
            g = grads[name]
            p.grad = None if g is None else g.clone()
    return grads


def _reloaded(team: list[Replica], world_size: int, parts: tuple, o: dict[str, Any]) -> list[Replica]:
    state, optimizer_state = team[0].model.state_dict(), team[0].optimizer.state_dict()
    new = [Replica(r, parts, o) for r in range(world_size)]
    for t in new:
        t.model.load_state_dict(state)
        t.optimizer.load_state_dict(copy.deepcopy(optimizer_state))
    return new


def run(case: Case, world_size: int) -> dict[str, Any]:
    """Run the case with `world_size` replicas."""
    parts = case.build()
    o = options_of(parts[3])
    team = [Replica(r, parts, o) for r in range(world_size)]
    scaler = Scaler(**o["loss_scale"] or {})
    res = new_result()
    for step in range(o["steps"]):
        if o["batches_per_rank"] and (gone := [t.rank for t in team if step >= o["batches_per_rank"](t.rank)]):
            res["stopped"] = (step, gone)
            break
        if o["reload_at"] == step:
            team = _reloaded(team, o["reload_world"](world_size), parts, o)
        if not _step(team, step, o, scaler, res):
            break
    return _finish(res, team)


def _step(team: list[Replica], step: int, o: dict[str, Any], scaler: Scaler, res: dict[str, Any]) -> bool:
    """One step of all replicas. False if one raised, as its case wants."""
    for t in team:
        if o["before_step"]:
            o["before_step"](t.model, step, t.rank)
        t.model.zero_grad(set_to_none=True)
    losses = []
    for t in team:
        try:
            losses.append(t.backward(step, scaler.scale))
        except Exception as e:
            if o["raises"] != (t.rank, step):
                raise
            res["raised"] = (t.rank, step, f"{type(e).__name__}: {e}")
            return False
    grads = _install_mean(team)
    finite = all(g is None or bool(torch.isfinite(g).all()) for g in grads.values())
    if o["loss_scale"]:
        res["scales"].append(scaler.scale)
        for t in team:
            unscale(t.model, scaler.scale)
        scaler.update(finite)
    res["losses"].append([float(loss) for loss in losses])
    res["grads"].append({n: detached(p.grad) for n, p in team[0].model.named_parameters()})
    skip, norm = bool(o["loss_scale"]) and not finite, None
    for t in team:
        if o["after_backward"] and o["after_backward"](t.model, step, losses) == "skip":
            skip = True
        if o["clip_norm"]:
            norm = float(torch.nn.utils.clip_grad_norm_(t.model.parameters(), o["clip_norm"]))
        if not skip:
            for optimizer in t.optimizers(step):
                optimizer.step()
    res["norms"].append(norm)
    res["skipped"].append(skip)
    if o["between"]:
        res["probes"].append([detached(o["between"](t.model, step, t.rank)) for t in team])
    return True


def unscale(model: nn.Module, scale: float) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(scale)


def _finish(res: dict[str, Any], team: list[Replica]) -> dict[str, Any]:
    res["params"] = {n: p.detach().clone() for n, p in team[0].model.named_parameters()}
    res["buffers"] = [{n: b.detach().clone() for n, b in t.model.named_buffers()} for t in team]
    res["state_keys"] = list(team[0].model.state_dict())
    return res


# --------------------------------------------------------------------------------------------------------------------
# Comparison
# --------------------------------------------------------------------------------------------------------------------


def distance(a: Any, b: Any) -> float:
    """Largest |a-b| / max(1, |a|); inf if one is None or the shapes differ. NaN equals NaN."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if isinstance(a, (list, tuple)):
        return max([distance(x, y) for x, y in zip(a, b)] + ([float("inf")] if len(a) != len(b) else [0.0]))
    a, b = (x if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (torch.isnan(a.abs()) & torch.isnan(b.abs()))
    d = torch.where(same, torch.zeros((), dtype=torch.float64), (a - b).abs() / a.abs().clamp_min(1.0))
    return float("inf") if torch.isnan(d).any() else float(d.max())


def _differences(what: str, a: Any, b: Any, tolerance: float) -> list[str]:
    if isinstance(a, dict):
        bad = [f"{what}: names differ {sorted(a.keys() ^ b.keys())}"] if a.keys() != b.keys() else []
        return bad + [d for n in a if n in b for d in _differences(f"{what}.{n}", a[n], b[n], tolerance)]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype != b.dtype:
        return [f"{what}: dtype {b.dtype}, not {a.dtype}"]
    bound = max(tolerance, TOLERANCE_OF_DTYPE.get(getattr(a, "dtype", None), 0.0))
    far = distance(a, b)
    return [] if far <= bound else [f"{what}: {far:.3g} > {bound:g}"]


STEP_KEYS = ("losses", "grads", "norms", "probes", "scales")


def compare(ref: dict[str, Any], got: dict[str, Any], tolerance: float, *, num_steps: int | None = None) -> list[str]:
    """Lines `what: how far`; none means that `got` equals `ref`. With `num_steps`, only what those first steps left."""
    bad: list[str] = []
    for key in STEP_KEYS if num_steps is not None else (*STEP_KEYS, "buffers"):
        a, b = (x[key] if num_steps is None else x[key][:num_steps] for x in (ref, got))
        if len(a) != len(b):
            bad.append(f"{key}: {len(b)} entries, not {len(a)}")
        bad += [d for i, (x, y) in enumerate(zip(a, b)) for d in _differences(f"{key}[{i}]", x, y, tolerance)]
    if num_steps is not None:
        return bad
    bad += _differences("params", ref["params"], got["params"], tolerance)
    return bad + [f"{key}: {got[key]}, not {ref[key]}" for key in ("skipped", "state_keys") if ref[key] != got[key]]
