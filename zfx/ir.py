"""The types that zfx and its passes share: `Program` (what the model does) and `Schedule` (what zfx adds). No torch here.

A program is a row of steps in execution order: the forward, one step that stands for the caller's code at the turn (the
loss, other models, ...), the backward. A point `p` lies just before step `p`; point `len(steps)` lies after the last step.

        point 0   point 1            point turn    point turn+1                    point len(steps)
          |         |                   |             |                               |
          v  step0  v  step1  ...       v  the turn   v  first backward step   ...    v

A schedule is the program plus instructions. Each instruction runs at a point; instructions at one point run in the order in
which they stand in `Schedule.instructions`, then the step runs.

    all_gather      launches bucket b: its parameters' full buffers (and its packing buffer) are allocated and are live from here on
    wait            bucket b has arrived: its parameters may be read; its packing buffer is gone
    release         the parameters named are no longer live
    reduce_scatter  launches bucket b: the gradients named are complete and are on their way
    wait_reduce     bucket b's shards of the gradients are there; the unreduced gradients are gone

What is held, exactly, and after every single instruction (not only at steps):

    gathered    from its all_gather to its release: `num_bytes` (`num_elements`) a parameter
    packing     from all_gather to wait: the same again for each packed member of the bucket
    gradients   `grad_bytes` from the step that completes the gradient to wait_reduce; the same again, for what arrives from
                the other ranks, from reduce_scatter to wait_reduce
    other       `Step.other_bytes` while a step runs, and `Program.static_bytes` always

`max_live_parameters` bounds gathered + packing, in elements; `memory_budget` bounds the sum of all, in bytes, at each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .limits import Limits

Phase = Literal["forward", "turn", "backward"]
Kind = Literal["all_gather", "wait", "release", "reduce_scatter", "wait_reduce"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """What compute and communication cost, as plain data: the same on every rank, never measured while training.

    A collective of `n` bytes (the gathered size) takes `latency_us + n / bytes_per_us`. A compute step takes the larger of
    its flops over `flops_per_us` and its bytes over `memory_bytes_per_us`. The defaults are round numbers for one CPU core
    and loopback TCP; they steer when collectives are launched and how they are bucketed, never a result.

    Attributes:
        pack_threshold_bytes: parameters whose gathered size is below this travel packed in one buffer: copying them costs
            less than a message of their own.
        bucket_bytes: a bucket is closed once it holds this many bytes: latency is then a small part of its time.
    """

    latency_us: float = 100.0
    bytes_per_us: float = 2_000.0
    flops_per_us: float = 50_000.0
    memory_bytes_per_us: float = 10_000.0
    pack_threshold_bytes: int = 65_536
    bucket_bytes: int = 4_194_304

    def __post_init__(self) -> None:
        for name in ("bytes_per_us", "flops_per_us", "memory_bytes_per_us"):
            if not getattr(self, name) > 0:
                raise ValueError(f"CostModel.{name} must be above 0, got {getattr(self, name)!r}")
        for name in ("latency_us", "pack_threshold_bytes", "bucket_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"CostModel.{name} must not be negative, got {getattr(self, name)!r}")

    def collective_us(self, num_bytes: int) -> float:
        return self.latency_us + num_bytes / self.bytes_per_us

    def compute_us(self, num_flops: int, num_bytes: int) -> float:
        return max(num_flops / self.flops_per_us, num_bytes / self.memory_bytes_per_us)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One sharded parameter as the planner sees it.

    Attributes:
        name: its first name in the model, e.g. `blocks.0.up.weight`.
        num_elements: elements that are held when it is gathered (rows padded to a multiple of the world size).
        num_bytes: the same in bytes.
        grad_bytes: bytes of its unreduced gradient, 0 if it has none in this program.
        numel: elements of the parameter itself, without padding; what `param_persistence_threshold` is compared with.
    """

    name: str
    num_elements: int
    num_bytes: int
    grad_bytes: int = 0
    numel: int = -1

    def __post_init__(self) -> None:
        if self.numel < 0:
            object.__setattr__(self, "numel", self.num_elements)
        if min(self.num_elements, self.num_bytes, self.grad_bytes) < 0:
            raise ValueError(f"{self.name}: sizes must not be negative")


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of the captured graphs.

    Attributes:
        name: unique in the program, e.g. `forward.addmm_3`.
        phase: "forward", "turn" or "backward".
        op: the operator, e.g. `aten.addmm.default`.
        reads: names of the parameters whose gathered values it reads (itself or through views).
        completes: names of the parameters whose gradient is complete once the step has run.
        other_bytes: bytes live while it runs that are neither gathered parameters nor completed gradients
            (activations, inputs, partial gradients, workspace).
        duration_us: estimated time.
    """

    name: str
    phase: Phase
    op: str = ""
    reads: tuple[str, ...] = ()
    completes: tuple[str, ...] = ()
    other_bytes: int = 0
    duration_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """Forward and backward as one row of steps. Without a backward there is no turn.

    Attributes:
        parameters: every parameter that is read or whose gradient is completed, in order of first appearance.
        steps: forward steps, then (if there is a backward) exactly one "turn" step, then backward steps.
        world_size: number of ranks that a parameter is sharded over.
        escapes: parameters of which an alias leaves the program as an output: never released, kept across the turn.
        static_bytes: bytes held throughout: parameter shards and their gradients' shards.
        costs: the cost model that the durations come from.

    Raises:
        ValueError: names are not unique, a step names an unknown parameter, or phases are out of order.
    """

    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    world_size: int = 1
    escapes: tuple[str, ...] = ()
    static_bytes: int = 0
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        known = {p.name for p in self.parameters}
        if len(known) != len(self.parameters):
            raise ValueError("parameter names must be unique")
        if len({s.name for s in self.steps}) != len(self.steps):
            raise ValueError("step names must be unique")
        order = {"forward": 0, "turn": 1, "backward": 2}
        strange = next((s for s in self.steps if s.phase not in order), None)
        if strange is not None:
            raise ValueError(f"step {strange.name!r} has the unknown phase {strange.phase!r}")
        ranks = [order[s.phase] for s in self.steps]
        if ranks != sorted(ranks) or ranks.count(1) > 1 or (2 in ranks and 1 not in ranks):
            raise ValueError("steps must be forward, then one turn, then backward")
        for step in self.steps:
            unknown = (set(step.reads) | set(step.completes)) - known
            if unknown:
                raise ValueError(f"step {step.name!r} names unknown parameters {sorted(unknown)}")
        if set(self.escapes) - known:
            raise ValueError(f"escapes names unknown parameters {sorted(set(self.escapes) - known)}")

    @property
    def turn(self) -> int | None:
        """Index of the turn step, or None for a program without a backward."""
        return next((i for i, s in enumerate(self.steps) if s.phase == "turn"), None)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one instruction launches: direct transfers, one per parameter, and at most one pack.

    Attributes:
        index: its place in `Schedule.buckets`; collectives of one kind are launched in index order.
        kind: "all_gather" or "reduce_scatter".
        parameters: all members, in order of first read (gathers) or completion (reductions).
        packed: those members that travel in one packing buffer; the others go directly into (out of) their own tensor.
    """

    index: int
    kind: Literal["all_gather", "reduce_scatter"]
    parameters: tuple[str, ...]
    packed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction at a point. `bucket` is None for `release` only; `parameters` are the names concerned."""

    kind: Kind
    point: int
    parameters: tuple[str, ...]
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A program with its instructions, in execution order.

    `kept` names the parameters that stay gathered across the turn: saved for backward instead of gathered again.
    """

    program: Program
    limits: Limits
    buckets: tuple[Bucket, ...] = ()
    instructions: tuple[Instruction, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        from .text import render  # the drawing room is above this one; only printing leads there

        return render(self)
