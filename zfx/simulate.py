"""The simulator: a schedule run against the clock, event by event, with what it holds all the while.

It follows the definitions at the top of `ir.py`, takes what is held from `replay.py`, and shares no code with the passes.

    compute   | s0 | s1 |    exposed    |o| s2 |            o: busy_us, booked where a gather is waited for
    gather         ^launch [==== b ====]^wait
    reduce                                                     and where a reduction or an all-reduce is launched
    all_reduce

Each channel is a queue, first in, first out, beside compute. Every microsecond until the finish is one of three things: a step that
runs, a launch's overhead, or compute that waits for a collective, which is what is called exposed. What the figures assume: steps
last as long as the program says, compute and communication do not slow each other down, and memory is taken at the launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .costs import Link
from .ir import Instruction, Kind, Schedule
from .replay import bucket_of, replay


@dataclass(frozen=True, slots=True)
class Channel:
    """A queue of transfers beside compute.

    Attributes:
        name: e.g. "gather".
        launch, wait: the instructions that put a transfer into the queue, and that stall compute until it is over.
        books: the one of the two at which `CostModel.busy_us` of compute time is booked.
        size: the field of `Parameter` that says how many bytes each member brings.
        link: the field of `CostModel` that says how long they take; see `link_of`.
    """

    name: str
    launch: Kind
    wait: Kind
    books: Kind
    size: str
    link: str


CHANNELS = (
    Channel("gather", "all_gather", "wait", "wait", "num_bytes", "gather"),
    Channel("reduce", "reduce_scatter", "wait_reduce", "reduce_scatter", "grad_bytes", "reduce"),
    Channel("all_reduce", "all_reduce", "wait_all_reduce", "all_reduce", "across_bytes", "all_reduce"),
)


def link_of(schedule: Schedule, channel: Channel, instruction: Instruction) -> Link:
    """What a collective goes over: its channel's link, but for gathers from secondary shards, which have one of their own."""
    bucket, costs = bucket_of(schedule, instruction.bucket), schedule.program.costs
    if channel.launch == "all_gather":
        return costs.gather_link(bucket is not None and bucket.secondary)
    link: Link = getattr(costs, channel.link)
    return link


class StepTime(NamedTuple):
    """When a step runs, and how long compute waited for collectives between the step before and this one."""

    start_us: float
    end_us: float
    exposed_us: float


class Span(NamedTuple):
    """One collective.

    Attributes:
        kind, bucket: those of the instruction that launches it.
        num_bytes: what its channel carries for it.
        launch_us: when compute has launched it; `start_us`: when its channel is free, too; `end_us`: when it is over.
        wait_us: when compute asks for it (never: `end_us`).
        exposed_us: how long compute then waits.
    """

    kind: Kind
    bucket: int | None
    num_bytes: int
    launch_us: float
    start_us: float
    end_us: float
    wait_us: float
    exposed_us: float


class Moment(NamedTuple):
    """What is held right after an instruction, or while a step runs, in bytes.

    Attributes:
        time_us: when the instruction is over, or the step starts.
        point: the point of the instruction, or the index of the step.
        instruction: None while a step runs.
        parameters: gathered parameters, from all_gather to release.
        secondary: secondary shards, from reshard to the wait of the last gather from them.
        packing: packing buffers of what has not arrived yet.
        gradients: unreduced gradients, and what arrives from other ranks while their reduction or their all-reduce is in flight.
        activations: `Step.other_bytes`.
        shards: `Program.static_bytes`.
    """

    time_us: float
    point: int
    instruction: Instruction | None
    parameters: int
    packing: int
    gradients: int
    activations: int
    shards: int
    secondary: int = 0

    @property
    def total(self) -> int:
        """What `memory_budget` bounds."""
        return self.parameters + self.packing + self.gradients + self.activations + self.shards + self.secondary


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule in time. `finish_us = compute_us + overhead_us + exposed_us`, up to rounding.

    Attributes:
        finish_us: when compute is through with the last instruction.
        compute_us: the sum of all steps.
        overhead_us: the sum of what launches take from compute.
        exposed_us: the sum of what compute waits for collectives.
        steps: one a step.
        spans: one a collective, in order of launch.
        moments: one for each state of the replay, in order of execution.
        peak: the first of the moments that hold most.
        forward_end: the same among the last forward step, the turn and what is between them (the last step without a turn).
        backward_end: the same among the last step and what follows it.
    """

    finish_us: float
    compute_us: float
    overhead_us: float
    exposed_us: float
    steps: tuple[StepTime, ...]
    spans: tuple[Span, ...]
    moments: tuple[Moment, ...]
    peak: Moment
    forward_end: Moment
    backward_end: Moment


def simulate(schedule: Schedule) -> Simulation:
    """Run the schedule on its channels. Linear in steps, instructions and their parameters.

    Like `replay`, it tolerates wrong schedules: what is unknown has no size, what was never launched is not waited for.

    Example:
        >>> from zfx.ir import Bucket, CostModel, Limits, Parameter, Program, Step
        >>> from zfx.costs import Link
        >>> costs = CostModel(gather=Link(latency_us=10, bytes_per_us=4))
        >>> program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",), duration_us=5),), costs=costs)
        >>> run = tuple(Instruction(kind, 0, ("w",), 0) for kind in ("all_gather", "wait")) + (Instruction("release", 1, ("w",)),)
        >>> result = simulate(Schedule(program, Limits(), (Bucket(0, "all_gather", ("w",)),), run))
        >>> result.finish_us, result.exposed_us, result.peak.parameters
        (75.0, 20.0, 40)
    """
    clock = _Clock(schedule)
    moments = []
    for state in replay(schedule):
        if state.step is not None:
            start_us = clock.run(state.step.duration_us)
        else:
            assert state.instruction is not None
            start_us = clock.execute(state.instruction)
        others = state.gathered_bytes + state.packing_bytes + state.secondary_bytes + state.gradient_bytes
        others += schedule.program.static_bytes
        moments.append(
            Moment(
                start_us, state.point, state.instruction, state.gathered_bytes, state.packing_bytes, state.gradient_bytes,
                state.total_bytes - others, schedule.program.static_bytes, state.secondary_bytes,
            )
        )  # fmt: skip
    last = len(schedule.program.steps) - 1
    turn = schedule.program.turn
    return Simulation(
        clock.now,
        clock.compute,
        clock.overhead,
        clock.exposed,
        tuple(clock.steps),
        tuple(clock.spans),
        tuple(moments),
        peak=_most(schedule, moments),
        forward_end=_most(schedule, _between(moments, *((last, last + 1) if turn is None else (turn - 1, turn)))),
        backward_end=_most(schedule, _between(moments, last, last + 1)),
    )


def _between(moments: Iterable[Moment], first: int, last: int) -> list[Moment]:
    """From the run of step `first` to the run of step `last`."""
    return [m for m in moments if first < m.point <= last or (m.point == first and m.instruction is None)]


def _most(schedule: Schedule, moments: Iterable[Moment]) -> Moment:
    return max(moments, key=lambda m: m.total, default=Moment(0.0, 0, None, 0, 0, 0, 0, schedule.program.static_bytes))


class _Clock:
    """The clock of compute and the queues beside it."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._costs = schedule, schedule.program.costs
        self._sizes = {c.name: {p.name: getattr(p, c.size) for p in schedule.program.parameters} for c in CHANNELS}
        self._free = dict.fromkeys(self._sizes, 0.0)  # when each channel is through with its queue
        self._flying: dict[tuple[str, int | None], int] = {}  # channel and bucket -> place in `spans`
        self._stalled = 0.0  # since the last step
        self.now = self.compute = self.overhead = self.exposed = 0.0
        self.steps: list[StepTime] = []
        self.spans: list[Span] = []

    def run(self, duration_us: float) -> float:
        start_us = self.now
        self.now += duration_us
        self.compute += duration_us
        self.steps.append(StepTime(start_us, self.now, self._stalled))
        self._stalled = 0.0
        return start_us

    def execute(self, instruction: Instruction) -> float:
        for channel in CHANNELS:
            if instruction.kind == channel.wait:
                self._land(channel, instruction)
            if instruction.kind == channel.books:
                busy_us = self._costs.busy_us(self._bytes(channel, instruction))
                self.now += busy_us
                self.overhead += busy_us
            if instruction.kind == channel.launch:
                self._launch(channel, instruction)
        return self.now

    def _bytes(self, channel: Channel, instruction: Instruction) -> int:
        sizes = self._sizes[channel.name]
        return sum(sizes.get(name, 0) for name in instruction.parameters)

    def _launch(self, channel: Channel, instruction: Instruction) -> None:
        num_bytes = self._bytes(channel, instruction)
        start_us = max(self.now, self._free[channel.name])
        end_us = self._free[channel.name] = start_us + link_of(self._schedule, channel, instruction).us(num_bytes)
        self._flying[channel.name, instruction.bucket] = len(self.spans)
        self.spans.append(Span(instruction.kind, instruction.bucket, num_bytes, self.now, start_us, end_us, end_us, 0.0))

    def _land(self, channel: Channel, instruction: Instruction) -> None:
        place = self._flying.pop((channel.name, instruction.bucket), None)
        if place is None:
            return
        end_us = self.spans[place].end_us
        exposed_us = end_us - self.now if end_us > self.now else 0.0
        self.spans[place] = self.spans[place]._replace(wait_us=self.now, exposed_us=exposed_us)
        self.exposed += exposed_us
        self._stalled += exposed_us
        self.now = max(self.now, end_us)


def channels_of(schedule: Schedule) -> tuple[Channel, ...]:
    """The channels that the schedule has use for: without replicas nothing is all-reduced, by a right schedule at least."""
    across = CHANNELS[-1]
    used = schedule.program.replicas > 1 or any(i.kind in (across.launch, across.wait) for i in schedule.instructions)
    return CHANNELS if used else CHANNELS[:-1]


__all__ = ["CHANNELS", "Channel", "Moment", "Simulation", "Span", "StepTime", "channels_of", "link_of", "simulate"]
