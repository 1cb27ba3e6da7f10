"""One case on real ranks: `run_case` plays its training script under a sharding engine and says how it ended.

The script of one rank is `job`; it honours every option of `cases.common.DEFAULTS`. A `Report` tells six ends apart:

    match       the result equals the single-process reference, on every rank
    DIFFERENT   it does not, and nobody said a word: the worst end
    error       some rank raised
    HANG        some rank still ran at the timeout, or raised only because a collective timed out
    CRASH       some process died
    and `problems` says whether that is what the case expects
"""

from __future__ import annotations

import functools
import gc
import re
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tests.harness import Outcome, init_group, live_tensors, rank_outcomes

from .cases import REGISTRY, options_of
from .reference import STEP_KEYS, Scaler, active_optimizers, compare, dense, detached, new_result, run, run_micro_batches, unscale

Engine = Literal["zfx", "fsdp2"]
FULL = StateDictOptions(full_state_dict=True)
TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """How models are sharded: by zfx with these limits, or by FSDP2 (`fully_shard`), the yardstick.

    Attributes:
        limits: keyword arguments of `zfx.Limits`.
        timeout_s: of `zfx.compile`: how long ranks wait for one another.
    """

    engine: Engine = "zfx"
    limits: tuple[tuple[str, int], ...] = (("max_reuse_distance", 0), ("param_persistence_threshold", 0))
    timeout_s: float = 20.0


DEFAULT_LIMITS = Setting(limits=())


# --------------------------------------------------------------------------------------------------------------------
# On a rank
# --------------------------------------------------------------------------------------------------------------------


def shard(model: nn.Module, setting: Setting, o: dict[str, Any]) -> None:
    """Shard the model in place."""
    if setting.engine == "zfx":
        import zfx

        offload = {"cpu_offload": True} if o["cpu_offload"] else {}
        leaves = {"leaf_modules": o["leaf_modules"](model)} if o["leaf_modules"] else {}
        limits = zfx.Limits(**dict(setting.limits))
        zfx.compile(model, dist.get_world_size(), limits=limits, timeout=setting.timeout_s, **offload, **leaves)
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=False) if o["cpu_offload"] else OffloadPolicy()
    for child in model.children():
        if type(child).forward is not nn.Module.forward and any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


def full(t: torch.Tensor | None) -> torch.Tensor | None:
    if t is None:
        return None
    return dense((t.full_tensor() if isinstance(t, DTensor) else t).detach()).clone()


def everyone(x: Any) -> list[Any]:
    xs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(xs, x)
    return xs


class Script:
    """The training script of one rank, from building the model to its final parameters."""

    def __init__(self, case_id: str, setting: Setting) -> None:
        self.rank = dist.get_rank()
        self.model_factory, self.make_batch, self.loss_fn, options, _ = REGISTRY[case_id].build()
        self.o = o = options_of(options)
        self.res = new_result()
        self.scaler = Scaler(**o["loss_scale"] or {})
        self.model: nn.Module = self.model_factory()
        if o["init_fn"]:
            self.model.to("meta")
        optimizer = o["optimizer"](self.model) if o["optimizer_first"] else None
        for model in [self.model[name] for name in o["engines"]] if o["engines"] else [self.model]:
            shard(model, setting, o)
        if o["init_fn"]:
            self.model.to_empty(device="cpu")
            o["init_fn"](self.model)
        self.optimizer = optimizer or o["optimizer"](self.model)

    def train(self, first: int, last: int) -> dict[str, Any]:
        """Steps `first` to `last - 1`; what they left is on the exception, if one is raised."""
        try:
            for step in range(first, last):
                if self.o["batches_per_rank"] and step >= self.o["batches_per_rank"](self.rank):
                    self.res["stopped"] = (step, [self.rank])
                    return self.res
                self.step(step)
        except Exception as e:
            e.partial = self.res  # type: ignore[attr-defined]
            raise
        return self.res

    def step(self, step: int) -> None:
        o, model, res = self.o, self.model, self.res
        if o["before_step"]:
            o["before_step"](model, step, self.rank)
        model.zero_grad(set_to_none=True)
        loss = run_micro_batches(model, self.rank, step, self.make_batch, self.loss_fn, o, self.scaler.scale)
        losses = everyone(loss)
        skip = not self.unscale()
        res["losses"].append([float(x) for x in losses])
        res["grads"].append({n: full(p.grad) for n, p in model.named_parameters()})
        if o["after_backward"] and o["after_backward"](model, step, losses) == "skip":
            skip = True
        norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), o["clip_norm"])) if o["clip_norm"] else None
        if not skip:
            for optimizer in active_optimizers(self.optimizer, o, step):
                optimizer.step()
        res["norms"].append(None if norm is None else float(norm))
        res["skipped"].append(skip)
        if o["between"]:
            res["probes"].append(everyone(detached(o["between"](model, step, self.rank))))

    def unscale(self) -> bool:
        """Undo the loss scale. Whether the gradients are finite, on all ranks."""
        if not self.o["loss_scale"]:
            return True
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        local = all(bool(torch.isfinite(g.to_local() if isinstance(g, DTensor) else g).all()) for g in grads)
        finite = all(everyone(local))
        self.res["scales"].append(self.scaler.scale)
        unscale(self.model, self.scaler.scale)
        self.scaler.update(finite)
        return finite

    def finish(self) -> dict[str, Any]:
        res = self.res
        res["params"] = {n: full(p) for n, p in self.model.named_parameters()}
        res["buffers"] = everyone({n: b.detach().clone() for n, b in self.model.named_buffers()})
        res["state_keys"] = list(self.model.state_dict())
        if self.o["export"]:
            fresh = self.model_factory()
            fresh.load_state_dict(get_model_state_dict(self.model, options=FULL), strict=True)
            res["exported"] = {n: p.detach().clone() for n, p in fresh.named_parameters()}
        return res

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return get_state_dict(self.model, self.optimizer, options=FULL)

    def load(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=FULL)


def job(case_id: str, setting: Setting, state: Any = None) -> Any:
    """What one rank does: the result; or, up to the step where the case reloads, the result so far and what was saved."""
    o = options_of(REGISTRY[case_id].build()[3])
    if state is not None:
        script = Script(case_id, setting)
        script.load(state)
        script.train(o["reload_at"], o["steps"])
        return script.finish()
    leaks = [found for _ in range(o["recreate"]) if (found := recreate(case_id, setting))]
    if o["reinit_pg"]:
        recreate(case_id, setting)
        dist.destroy_process_group()
        init_group()
    script = Script(case_id, setting)
    if o["reload_at"] is not None:
        return script.train(0, o["reload_at"]), script.save()
    res = script.train(0, o["steps"])
    if res["stopped"] is None:
        script.finish()
    return {**res, "leaks": leaks[1:]}  # the first may fill caches


def recreate(case_id: str, setting: Setting) -> str:
    """Build, train and drop; what is left behind, in words."""
    gc.collect()
    before = live_tensors()
    script = Script(case_id, setting)
    model = weakref.ref(script.model)
    script.train(0, script.o["steps"])
    del script
    gc.collect()
    after = live_tensors()
    left = ["the model is still alive"] if model() is not None else []
    more = any(a > b for a, b in zip(after, before))  # what earlier cases left in this process may go meanwhile
    return "; ".join(left + ([f"{before} before, {after} after"] if more else []))


# --------------------------------------------------------------------------------------------------------------------
# In the test process
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """How a case ended. `detail` is one line; `seconds` is the slowest rank's time."""

    case_id: str
    world_size: int
    end: Literal["match", "DIFFERENT", "error", "HANG", "CRASH"]
    detail: str
    seconds: float
    outcomes: tuple[Outcome, ...] = field(repr=False)

    def __str__(self) -> str:
        return self.end if not self.detail else f"{self.end}: {self.detail}"


@functools.cache
def reference_of(case_id: str, world_size: int) -> dict[str, Any]:
    return run(REGISTRY[case_id], world_size)


def run_case(case_id: str, world_size: int, setting: Setting | None = None) -> Report:
    """Run the case on `world_size` real ranks and compare what they did with the reference."""
    _, _, _, options, expectation = REGISTRY[case_id].build()
    o, setting, start = options_of(options), setting or Setting(), time.monotonic()
    if o["rank_divergent"]:
        setting = Setting(setting.engine, setting.limits, min(setting.timeout_s, 8.0))
    outcomes = rank_outcomes(world_size, job, case_id, setting, timeout=o["timeout_s"])
    saved = None
    if o["reload_at"] is not None and all(x.status == "ok" for x in outcomes):
        saved, state = outcomes[0].value
        outcomes = rank_outcomes(o["reload_world"](world_size), job, case_id, setting, state, timeout=o["timeout_s"])
    end, detail = end_of(outcomes)
    if end == "match":
        ref = reference_of(case_id, world_size)
        bad = [f"rank {x.rank}: {line}" for x in outcomes for line in differences(ref, merged(saved, x.value), expectation)]
        if bad:
            end, detail = "DIFFERENT", f"{len(bad)} differences, first {bad[0]}"
    return Report(case_id, world_size, end, detail, time.monotonic() - start, tuple(outcomes))


def end_of(outcomes: list[Outcome]) -> tuple[Any, str]:
    """The worst that happened to a rank; "match" if all returned, which is yet to be seen."""
    def ranks(chosen: list[Outcome]) -> str:
        return f"ranks {[x.rank for x in chosen]}"

    if dead := [x for x in outcomes if x.status == "crash"]:
        return "CRASH", f"{ranks(dead)}, exit code {dead[0].exit_code}"
    if hung := [x for x in outcomes if x.status == "hang"]:
        return "HANG", ranks(hung)
    failed = [(x, x.error) for x in outcomes if x.error is not None]
    if late := [x for x, e in failed if "ZfxError" not in e.bases and TIMED_OUT.search(e.message)]:
        return "HANG", f"{ranks(late)} waited until a collective timed out"
    if not failed:
        return "match", ""
    texts = {e.first_line: x.rank for x, e in reversed(failed)}
    if len(failed) == len(outcomes) and len(texts) == 1:
        return "error", failed[0][1].first_line
    kinds = "; ".join(f"rank {x.rank} {e.first_line}" for x, e in failed if texts[e.first_line] == x.rank)
    return "error", kinds + ("" if len(failed) == len(outcomes) else "; the others returned")


def merged(saved: dict[str, Any] | None, res: dict[str, Any]) -> dict[str, Any]:
    """The result of a run that was saved and reloaded on the way."""
    return res if saved is None else {**res, **{key: saved[key] + res[key] for key in (*STEP_KEYS, "skipped")}}


def differences(ref: dict[str, Any], got: dict[str, Any], expectation: dict[str, Any]) -> list[str]:
    if got["stopped"] is not None:
        return ["the run stopped early"]
    bad = compare(ref, got, expectation["tol"]) + [f"leak: {text}" for text in got.get("leaks", ())]
    for name, p in got.get("exported", {}).items():
        if not torch.equal(p, got["params"][name]):
            bad.append(f"export of {name}")
    if expectation.get("check") and not bad:
        try:
            expectation["check"](got)
        except AssertionError as e:
            bad.append(f"check: {e}")
    return bad


# --------------------------------------------------------------------------------------------------------------------
# Against the expectation
# --------------------------------------------------------------------------------------------------------------------


CLEAR = {"ZfxError", "ValueError", "TypeError", "RuntimeError"}


def problems(report: Report) -> list[str]:
    """What is wrong with how the case ended; nothing if it ended as its expectation wants."""
    _, _, _, options, expectation = REGISTRY[report.case_id].build()
    wanted = expectation["outcome"]
    if wanted == "error":
        return _problems_of_stop(report, options_of(options), expectation)
    if report.end == "match":
        return []
    if wanted == "match" or report.end != "error":
        return [str(report)]
    return _unclear(report.outcomes, expectation["mentions"])


def _unclear(outcomes: tuple[Outcome, ...], mentions: tuple[str, ...]) -> list[str]:
    """Whether each rank raised the same clear error, which mentions what it should."""
    bad = [f"rank {x.rank} did not raise" for x in outcomes if x.error is None]
    errors = [(x.rank, x.error) for x in outcomes if x.error is not None]
    if len({e.type_name for _, e in errors}) > 1:
        bad.append("ranks raise different errors: " + "; ".join(f"rank {r} {e.first_line}" for r, e in errors))
    for rank, e in errors:
        if not CLEAR & set(e.bases):
            bad.append(f"rank {rank} raised {e.type_name}, which is no clear error")
        if not any(re.search(rf"(?i)(?<![a-z]){re.escape(word)}", e.message) for word in mentions):
            bad.append(f"rank {rank} mentions none of {mentions}: {e.first_line}")
    return bad


def _problems_of_stop(report: Report, o: dict[str, Any], expectation: dict[str, Any]) -> list[str]:
    """One rank leaves: by an exception of its own, or out of data. The others must raise and say which rank; the steps that
    all took must be right."""
    if report.end != "error":
        return [str(report)]
    if o["raises"]:
        leavers, num_steps = {o["raises"][0]}, o["raises"][1]
        wanted = run(REGISTRY[report.case_id], report.world_size)["raised"][2]
    else:
        num_steps = min(o["batches_per_rank"](r) for r in range(report.world_size))
        leavers, wanted = {r for r in range(report.world_size) if o["batches_per_rank"](r) == num_steps}, None
    bad = []
    for r in leavers:
        e = report.outcomes[r].error
        if (e and e.first_line) != wanted:
            bad.append(f"rank {r} should end with {wanted}, not {e}")
    others = tuple(x for x in report.outcomes if x.rank not in leavers)
    bad += _unclear(others, expectation["mentions"])
    for x in others:
        if x.error is not None:
            partial = x.error.attributes.get("partial")
            ref = reference_of(report.case_id, report.world_size)
            bad += compare(ref, partial, 1e-10, num_steps=num_steps) if partial else [f"rank {x.rank} left no result"]
    return bad
