"""An estimate: what a person decides from before renting, for one captured model at one world size.

What is counted where, in bytes on each rank:

    step        shards + gathered + packing + secondary shards + unreduced gradients + activations
                                                                                     the schedule's, bounded by `memory_budget`
    optimizer   by a stated rule, see `OPTIMIZERS`                                   on top
    margin      a share of the device                                                kept free
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .build import Capture
from .certificate import Certificate, certify
from .errors import InfeasibleBudget
from .ir import Program, Schedule
from .limits import Limits
from .passes import gather_on_demand, plan
from .passes.window import plan_windows
from .replay import bucket_of
from .simulate import Moment, Simulation, Span, simulate
from .verify import verify

NO_BOUND = 2**62


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer holds between steps.

    Attributes:
        copies: tensors like the shard, in its own dtype.
        bytes_an_element: what it holds beside those, whatever the dtype.
        rule: the same in words.
    """

    copies: int
    bytes_an_element: int
    rule: str


OPTIMIZERS = {
    "adamw": Optimizer(2, 0, "AdamW: two moments in the parameters' dtype, as torch.optim.AdamW holds them"),
    "adamw-fp32": Optimizer(0, 12, "AdamW with two moments and a master copy in float32: 12 bytes an element"),
    "none": Optimizer(0, 0, "no optimizer state"),
}


def optimizer_bytes(capture: Capture, program: Program, optimizer: Optimizer) -> int:
    """Bytes of optimizer state on each rank, for the parameters that get a gradient."""
    trainable = {p.name for p in program.parameters if p.grad_bytes}
    layouts = [layout.over(program.world_size, program.replicas) for layout in capture.layouts if layout.name in trainable]
    return sum(o.chunk_numel * (optimizer.copies * o.dtype.itemsize + optimizer.bytes_an_element) for o in layouts)


@dataclass(frozen=True)
class Estimate:
    """Schedules of one optimizer step, and what they come to.

    Attributes:
        schedules: one for each kind of micro-batch, see `plan_windows`.
        repeats: how often each of them runs in one optimizer step.
        optimizer_bytes: on each rank, not in any schedule.
    """

    schedules: tuple[Schedule, ...]
    repeats: tuple[int, ...]
    simulations: tuple[Simulation, ...]
    certificates: tuple[Certificate, ...]
    optimizer_bytes: int

    @property
    def worst(self) -> int:
        """Index of the schedule with the highest peak."""
        return max(range(len(self.schedules)), key=lambda i: self.simulations[i].peak.total)

    @property
    def peak_bytes(self) -> int:
        return self.simulations[self.worst].peak.total

    def total(self, what: Callable[[Simulation], float]) -> float:
        """A figure of one micro-batch, over the whole optimizer step."""
        return sum(count * what(simulation) for count, simulation in zip(self.repeats, self.simulations))

    @property
    def step_us(self) -> float:
        return self.total(lambda s: s.finish_us)

    @property
    def exposed_us(self) -> float:
        return self.total(lambda s: s.exposed_us)

    def volume_bytes(self, kind: str) -> int:
        return int(self.total(lambda s: sum(span.num_bytes for span in s.spans if span.kind == kind)))

    def secondary(self, what: Callable[[Span], float]) -> float:
        """A figure of the gathers from secondary shards, over the whole optimizer step."""
        return sum(
            count * sum(what(span) for span in simulation.spans if span.kind == "all_gather" and _is_secondary(schedule, span))
            for count, schedule, simulation in zip(self.repeats, self.schedules, self.simulations)
        )


def estimate(program: Program, limits: Limits, optimizer_bytes: int, accumulate: int = 1) -> Estimate:
    """Plan, verify, simulate and certify.

    Raises:
        InfeasibleBudget: no schedule respects the limits.
    """
    schedules = plan_windows(lambda p: plan(p, limits, check=verify), program, accumulate)
    return _estimate(schedules, optimizer_bytes, accumulate)


def least(program: Program, optimizer_bytes: int) -> Estimate:
    """The schedule that holds least at every step, whatever that costs in time. Not bound by any limit."""
    limits = Limits(max_live_parameters=NO_BOUND, memory_budget=None)
    return _estimate((gather_on_demand(Schedule(program, limits)),), optimizer_bytes, 1)


def fits(program: Program, limits: Limits) -> InfeasibleBudget | None:
    """Why no schedule respects the limits, or None if one does."""
    try:
        gather_on_demand(Schedule(program, limits))
    except InfeasibleBudget as refusal:
        return refusal
    return None


def _estimate(schedules: Sequence[Schedule], optimizer_bytes: int, accumulate: int) -> Estimate:
    repeats = {1: (accumulate,), 2: (1, 1), 3: (1, accumulate - 2, 1)}[len(schedules)]
    return Estimate(
        tuple(schedules), repeats, tuple(map(simulate, schedules)), tuple(map(certify, schedules)), optimizer_bytes
    )  # fmt: skip


# ---- as data -----------------------------------------------------------------------------------------------------------


def facts(found: Estimate) -> dict[str, Any]:
    """The estimate as plain data. Bytes are on each rank; times are of one optimizer step, `accumulate` micro-batches long."""
    schedule, simulation = found.schedules[found.worst], found.simulations[found.worst]
    program, kept = schedule.program, set(schedule.kept)
    micro_batches = [(count, one) for count, one in zip(found.repeats, found.certificates) if count]
    return {
        "world_size": program.world_size,
        "replicas": program.replicas,
        **({"reshard_to": program.reshard_to} if program.reshard_to else {}),
        "accumulate": sum(found.repeats),
        "costs": program.costs.source,
        "limits": {f.name: getattr(schedule.limits, f.name) for f in fields(schedule.limits)},
        "parameters": {
            "count": len(program.parameters),
            "elements": sum(p.numel for p in program.parameters),
            "gathered_bytes": sum(p.num_bytes for p in program.parameters),
        },
        "memory": {
            "peak": _moment(program, simulation.peak),
            "forward_end": _moment(program, simulation.forward_end),
            "backward_end": None if program.turn is None else _moment(program, simulation.backward_end),
            "optimizer_bytes": found.optimizer_bytes,
            "total_bytes": found.peak_bytes + found.optimizer_bytes,
        },
        "volume": {
            "gathered_bytes": found.volume_bytes("all_gather"),
            "reduced_bytes": found.volume_bytes("reduce_scatter"),
            "all_reduced_bytes": found.volume_bytes("all_reduce"),
            **({"secondary_bytes": int(found.secondary(lambda s: s.num_bytes))} if program.reshard_to else {}),
        },
        **({"resharded": _resharded(schedule)} if program.reshard_to else {}),
        "kept": {
            "count": len(schedule.kept),
            "bytes": sum(p.num_bytes for p in program.parameters if p.name in kept),
        },
        "buckets": {
            kind: sum(b.kind == kind for b in schedule.buckets) for kind in ("all_gather", "reduce_scatter")
        },
        "time": {
            "step_us": found.step_us,
            "compute_us": found.total(lambda s: s.compute_us),
            "launch_us": found.total(lambda s: s.overhead_us),
            "exposed_us": found.exposed_us,
            "gather_us": found.total(lambda s: _busy(s, "all_gather")),
            "reduce_us": found.total(lambda s: _busy(s, "reduce_scatter")),
            "all_reduce_us": found.total(lambda s: _busy(s, "all_reduce")),
            **({"secondary_us": found.secondary(lambda s: s.end_us - s.start_us)} if program.reshard_to else {}),
        },
        "certificate": {
            "time": _certified(micro_batches, "time", "us"),
            "volume": _certified(micro_batches, "volume", "bytes"),
            "peak": _certified([(1, found.certificates[found.worst])], "peak", "bytes"),
        },
    }  # fmt: skip


def _certified(rows: Sequence[tuple[int, Certificate]], what: str, unit: str) -> dict[str, Any]:
    """Achieved and bound of so many micro-batches of each kind: what bounds each of them bounds their sum."""
    achieved, bound = (sum(count * getattr(one, f"{what}{part}_{unit}") for count, one in rows) for part in ("", "_bound"))
    ratio = 1.0 if achieved == bound else achieved / bound if bound else math.inf
    binds = ", ".join(dict.fromkeys(getattr(one, f"{what}_binds") for _, one in rows))
    return {"achieved": achieved, "bound": bound, "ratio": ratio, "binds": binds}


def facts_of(schedule: Schedule) -> dict[str, Any]:
    """The same of one schedule, whatever optimizer there is."""
    return facts(_estimate((schedule,), 0, 1))


def _is_secondary(schedule: Schedule, span: Span) -> bool:
    bucket = bucket_of(schedule, span.bucket)
    return bucket is not None and bucket.secondary


def _resharded(schedule: Schedule) -> dict[str, int]:
    """How many parameters are resharded over the turn, and what their secondary shards take on each rank."""
    program, names = schedule.program, set(schedule.resharded)
    return {"count": len(names), "bytes": sum(program.secondary_bytes(p) for p in program.parameters if p.name in names)}


def _busy(simulation: Simulation, kind: str) -> float:
    return sum(span.end_us - span.start_us for span in simulation.spans if span.kind == kind)


def _moment(program: Program, moment: Moment) -> dict[str, Any]:
    step = program.steps[moment.point].name if moment.point < len(program.steps) else "the end"
    kinds = ["parameters", "packing", "gradients", "activations", "shards", "total"]
    if program.reshard_to:
        kinds.insert(2, "secondary")
    return {"step": step, "point": moment.point, "time_us": moment.time_us, **{f"{k}_bytes": getattr(moment, k) for k in kinds}}
