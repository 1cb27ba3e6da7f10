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
    reshard         this rank's secondary shards of the parameters named, which are live, are copied out of them
    release         the parameters named are no longer live
    reduce_scatter  launches bucket b: the gradients named are complete and are on their way
    wait_reduce     bucket b's shards of the gradients are there; the unreduced gradients are gone
    all_reduce      launches the second half of bucket b's reduction, where there are replicas: its shards are added up over them
    wait_all_reduce bucket b's shards of the gradients are final

What is held, exactly, and after every single instruction (not only at steps):

    gathered    from its all_gather to its release: `num_bytes` (`num_elements`) a parameter
    packing     from all_gather to wait: the same again for each packed member of the bucket
    secondary   `Program.secondary_bytes` from reshard to the wait of the last gather that takes the parameter from there
    gradients   `grad_bytes` from the step that completes the gradient to wait_reduce; the same again, for what arrives from
                the other ranks, from reduce_scatter to wait_reduce; `across_bytes`, for what arrives from the other replicas,
                from all_reduce to wait_all_reduce
    other       `Step.other_bytes` while a step runs, and `Program.static_bytes` always

Resharding (`Program.reshard_to`): a parameter need not be gathered from all ranks again in the backward. Where the forward reads it
for the last time each rank may copy a larger part of it, its secondary shard: one of `reshard_to`. The backward then gets that
in the place of the shard, and gathers the parameter from the few ranks beside it, as often as it is read there.

When it happens, by the cost model: compute runs step after step; gathers have one channel, reductions another and all-reduces a
third, each first in, first out. A collective starts when compute has reached its launch and the one before it on its channel is
over. Gathers from secondary shards queue with the others, but take the time of their own link; a `reshard` takes none. `wait`,
`wait_reduce` and `wait_all_reduce` stall compute until theirs is over. `CostModel.busy_us` of compute time is booked at each
`wait`, `reduce_scatter` and `all_reduce`.

`max_live_parameters` bounds gathered + packing, in elements; `memory_budget` bounds the sum of all, in bytes, at each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from .costs import CostModel
from .limits import Limits
from .records import LATER

Phase = Literal["forward", "turn", "backward"]
Window = Literal["only", "first", "middle", "last"]
Kind = Literal["all_gather", "wait", "reshard", "release", "reduce_scatter", "wait_reduce", "all_reduce", "wait_all_reduce"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One sharded parameter as the planner sees it.

    Attributes:
        name: its first name in the model, e.g. `blocks.0.up.weight`.
        num_elements: elements that are held when it is gathered (rows padded to a multiple of the world size).
        num_bytes: the same in bytes.
        grad_bytes: bytes of its unreduced gradient, 0 if it has none in this program.
        numel: elements of the parameter itself, without padding; what `param_persistence_threshold` is compared with.
        across_bytes: bytes of a rank's shard of its gradient, in the dtype that is added up over replicas; 0 where there are none.
    """

    name: str
    num_elements: int
    num_bytes: int
    grad_bytes: int = 0
    numel: int = -1
    across_bytes: int = 0

    def __post_init__(self) -> None:
        if self.numel < 0:
            object.__setattr__(self, "numel", self.num_elements)
        if min(self.num_elements, self.num_bytes, self.grad_bytes, self.across_bytes) < 0:
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
        nominal_us: the same by the parameters alone: what its products with parameters, and those that make gradients of
            parameters, would take on `CostModel.nominal_tokens` rows. Equal on ranks whose data differ.
    """

    name: str
    phase: Phase
    op: str = ""
    reads: tuple[str, ...] = ()
    completes: tuple[str, ...] = ()
    other_bytes: int = 0
    duration_us: float = 0.0
    nominal_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """Forward and backward as one row of steps. Without a backward there is no turn.

    Attributes:
        parameters: every parameter that is read or whose gradient is completed, in order of first appearance.
        steps: forward steps, then (if there is a backward) exactly one "turn" step, then backward steps.
        world_size: number of ranks.
        escapes: parameters of which an alias leaves the program as an output: never released, kept across the turn.
        static_bytes: bytes held throughout: parameter shards and their gradients' shards.
        costs: the cost model that the durations come from.
        uniform: every rank runs these very shapes, so that `duration_us` and `other_bytes` may decide which collectives there are.
            Otherwise only `nominal_us` and the parameters do, and ranks with different data agree.
        window: the program's place among the micro-batches between two optimizer steps: "only", or "first", "middle", "last". From
            each to the next, parameters may be carried (`Schedule.carried`).
        replicas: how often every parameter is there: each is sharded over `num_shards = world_size / replicas` ranks.
        reshard_to: how many neighbouring ranks have a parameter between them once it is resharded after the forward; 0: none is.

    Raises:
        ValueError: names are not unique, a step names an unknown parameter, phases are out of order, or the ranks can't be divided
            among the replicas, or those of a replica into groups of `reshard_to`.
    """

    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    world_size: int = 1
    escapes: tuple[str, ...] = ()
    static_bytes: int = 0
    costs: CostModel = field(default_factory=CostModel)
    uniform: bool = False
    window: Window = "only"
    replicas: int = 1
    reshard_to: int = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.world_size % self.replicas:
            raise ValueError(f"{self.world_size} ranks can't be divided among {self.replicas} replicas")
        if self.reshard_to and not (1 < self.reshard_to < self.num_shards and self.num_shards % self.reshard_to == 0):
            raise ValueError(f"the {self.num_shards} ranks of a replica can't be divided into smaller groups of {self.reshard_to}")
        if self.window not in get_args(Window):
            raise ValueError(f"window must be one of {', '.join(get_args(Window))}, got {self.window!r}")
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
    def num_shards(self) -> int:
        """Number of ranks that a parameter is sharded over."""
        return self.world_size // self.replicas

    def secondary_bytes(self, parameter: Parameter) -> int:
        """Bytes of a rank's secondary shard of it."""
        return -(-parameter.num_bytes // self.reshard_to) if self.reshard_to else 0

    @property
    def turn(self) -> int | None:
        """Index of the turn step, or None for a program without a backward."""
        return next((i for i, s in enumerate(self.steps) if s.phase == "turn"), None)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one instruction launches: direct transfers, one per parameter, and at most one pack.

    The all-reduce over replicas belongs to its reduction: both name the same bucket.

    Attributes:
        index: its place in `Schedule.buckets`; collectives of one kind are launched in index order.
        kind: "all_gather" or "reduce_scatter".
        parameters: all members, in order of first read (gathers) or completion (reductions).
        packed: those members that travel in one packing buffer; the others go directly into (out of) their own tensor.
        secondary: gathered from secondary shards.
    """

    index: int
    kind: Literal["all_gather", "reduce_scatter"]
    parameters: tuple[str, ...]
    packed: tuple[str, ...] = ()
    secondary: bool = field(default=False, metadata=LATER)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction at a point. `bucket` is None for `release` and `reshard` only; `parameters` are the names concerned."""

    kind: Kind
    point: int
    parameters: tuple[str, ...]
    bucket: int | None = None


@dataclass(frozen=True)  # no slots: what follows from a schedule may be remembered as long as it lives, see `certify`
class Schedule:
    """A program with its instructions, in execution order.

    `kept` names the parameters that stay gathered across the turn: saved for backward instead of gathered again.
    `carried` names those that stay gathered from the end of one micro-batch to the next. In the windows "middle" and "last" they
    are live, and arrived, at point 0, without an all_gather; in "first" and "middle" they are live after the last step.
    `resharded` names those of which the backward gets secondary shards.

    Raises:
        ValueError: the limits' `memory_budget` is "auto".
    """

    program: Program
    limits: Limits
    buckets: tuple[Bucket, ...] = ()
    instructions: tuple[Instruction, ...] = ()
    kept: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    resharded: tuple[str, ...] = field(default=(), metadata=LATER)

    def __post_init__(self) -> None:
        if self.limits.follows_free_memory:
            raise ValueError("memory_budget='auto' follows the free memory of running ranks; a schedule needs a number of bytes")

    def __str__(self) -> str:
        from .text import render  # the drawing room is above this one; only printing leads there

        return render(self)
