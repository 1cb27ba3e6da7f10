"""What a pass thinks in: live intervals, in gathers, and reductions. Read from a schedule, written back as instructions.

A `Schedule` is what runs: a row of instructions. To decide, a pass wants the same facts by parameter:

    step         0    1    2    3    4    5    6
    reads        a    a    b    -    b    a
    interval a   [====]                   [===]         two intervals: a is gathered twice
    interval b             [==========]                 one interval: b is kept from step 2 to step 4

`read` and `write` are inverse to each other on every schedule that a pass returns. Both are linear in the schedule's size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from zfx.costs import CostModel
from zfx.ir import Bucket, Instruction, Kind, Limits, Parameter, Program, Schedule


@dataclass(frozen=True, slots=True)
class Interval:
    """One parameter gathered once: live for all its reads from step `first` to step `last`.

    `last` is `len(steps)` for what is never released.
    """

    parameter: Parameter
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Intervals that are launched together at point `launch` and waited for together at point `wait`.

    `wait` is at most the first read of any member, and of any member of a later gather: the channel is first in, first out.
    Those in `packed` travel in one packing buffer. It is launched `ahead` of so many of what reductions do at its point; 0: last.
    All members come from secondary shards, or none does.
    """

    members: tuple[Interval, ...]
    launch: int
    wait: int
    packed: tuple[Interval, ...] = ()
    ahead: int = 0
    secondary: bool = False

    def us(self, costs: CostModel) -> float:
        """What it takes once its channel is free."""
        return costs.gather_us(self.num_bytes, self.secondary)

    @property
    def num_bytes(self) -> int:
        return sum(i.parameter.num_bytes for i in self.members)

    @property
    def packing_bytes(self) -> int:
        return sum(i.parameter.num_bytes for i in self.packed)

    @property
    def packing_elements(self) -> int:
        return sum(i.parameter.num_elements for i in self.packed)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Gradients whose reduction is launched together at point `launch` and waited for at point `wait`.

    Where there are replicas, its all-reduce over them is launched right after that wait, and waited for at point `done`. If that
    is the same point, nothing comes between; `len(steps) + 1` is after everything else that happens after the last step. Without
    replicas, `done` is `wait`.
    """

    members: tuple[Parameter, ...]
    launch: int
    wait: int
    done: int
    packed: tuple[Parameter, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(p.grad_bytes for p in self.members)

    @property
    def across_bytes(self) -> int:
        return sum(p.across_bytes for p in self.members)

    @property
    def peak_bytes(self) -> int:
        """The most that it holds once it is launched: gradients and what arrives for them, or what the all-reduce brings."""
        return max(2 * self.num_bytes, self.across_bytes)


@dataclass(frozen=True, slots=True)
class Reshard:
    """A secondary shard: copied just before step `start`, held until the last gather from it is waited for at point `until`."""

    parameter: Parameter
    start: int
    until: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule by parameter. Gathers and reductions stand in the order in which they are launched.

    `carried` are the intervals that began in an earlier micro-batch: live from point 0, and never gathered here.
    """

    program: Program
    limits: Limits
    gathers: tuple[Gather, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    carried: tuple[Interval, ...] = ()

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Those that are gathered here, in launch order."""
        return tuple(interval for gather in self.gathers for interval in gather.members)

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """The secondary shards that its gathers take from, each copied where the forward reads its parameter for the last time."""
        until = {i.parameter.name: gather.wait for gather in self.gathers if gather.secondary for i in gather.members}
        if not until:
            return ()
        turn = turn_of(self.program)
        brought = (i for gather in self.gathers if gather.wait <= turn for i in gather.members)
        last = {i.parameter.name: i for i in (*self.carried, *brought) if i.parameter.name in until}
        return tuple(Reshard(i.parameter, i.last, until[name]) for name, i in last.items())


def turn_of(program: Program) -> int:
    """The turn step; `len(steps)` without a backward, so that every point is one of the forward's."""
    turn = program.turn
    return len(program.steps) if turn is None else turn


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, in order of first appearance."""
    return tuple(dict.fromkeys(names))


def reads_of(program: Program) -> dict[str, list[int]]:
    """The steps that read each parameter, ascending."""
    reads: dict[str, list[int]] = defaultdict(list)
    for t, step in enumerate(program.steps):
        for name in step.reads:
            steps = reads[name]
            if not steps or steps[-1] != t:
                steps.append(t)
    return reads


def completions_of(program: Program) -> list[tuple[Parameter, ...]]:
    """The gradients that each step completes. A gradient that several steps name is complete at the last of them."""
    parameters = {p.name: p for p in program.parameters}
    last = {name: t for t, step in enumerate(program.steps) for name in step.completes}
    return [tuple(parameters[n] for n in unique(s.completes) if last[n] == t) for t, s in enumerate(program.steps)]


def read(schedule: Schedule) -> Timeline:
    """The schedule by parameter. Expects a schedule that the verifier accepts."""
    program = schedule.program
    parameters = {p.name: p for p in program.parameters}
    reads = reads_of(program)
    num_steps = len(program.steps)
    launches: dict[int, int] = {}
    waits: dict[int, int] = {}
    done = _done(schedule)
    arrives = program.window in ("middle", "last")
    owner: dict[str, int | None] = dict.fromkeys(schedule.carried) if arrives else {}  # name -> the bucket that brought it
    carried = tuple(owner)
    last: dict[tuple[int | None, str], int] = {}
    seen: dict[int, int] = defaultdict(int)  # by point, what reductions have done there so far
    behind: dict[int, int] = {}  # by gather, how much of that stands before it
    for instruction in schedule.instructions:
        if instruction.kind in ("reduce_scatter", "wait_reduce", "all_reduce", "wait_all_reduce"):
            seen[instruction.point] += 1
        if instruction.bucket is None:
            last.update({(owner[name], name): instruction.point - 1 for name in instruction.parameters})
        elif instruction.kind in ("all_gather", "reduce_scatter"):
            launches[instruction.bucket] = instruction.point
            if instruction.kind == "all_gather":
                behind[instruction.bucket] = seen[instruction.point]
                owner.update(dict.fromkeys(instruction.parameters, instruction.bucket))
        elif instruction.kind in ("wait", "wait_reduce"):
            waits[instruction.bucket] = instruction.point
    gathers, reductions = [], []
    for bucket in schedule.buckets:
        launch, wait, packed = launches[bucket.index], waits[bucket.index], set(bucket.packed)
        if bucket.kind == "all_gather":
            members = []
            for name in bucket.parameters:
                first = reads[name][bisect_left(reads[name], launch)]
                members.append(Interval(parameters[name], first, last.get((bucket.index, name), num_steps)))
            together = tuple(i for i in members if i.parameter.name in packed)
            ahead = seen[launch] - behind[bucket.index]
            gathers.append(Gather(tuple(members), launch, wait, together, ahead, bucket.secondary))
        else:
            gradients = tuple(parameters[name] for name in bucket.parameters)
            small = tuple(p for p in gradients if p.name in packed)
            reductions.append(Reduction(gradients, launch, wait, done.get(bucket.index, wait), small))
    held = tuple(Interval(parameters[name], reads[name][0], last.get((None, name), num_steps)) for name in carried)
    return Timeline(program, schedule.limits, tuple(gathers), tuple(reductions), held)


def _done(schedule: Schedule) -> dict[int | None, int]:
    """`Reduction.done` by bucket: behind everything else that happens after the last step, or where it stands."""
    others, found = -1, dict[int | None, int]()
    num_steps = len(schedule.program.steps)
    for place, instruction in enumerate(schedule.instructions):
        if instruction.kind != "wait_all_reduce":
            others = place
    for place, instruction in enumerate(schedule.instructions):
        if instruction.kind == "wait_all_reduce":
            last = instruction.point == num_steps and place > others
            found[instruction.bucket] = num_steps + 1 if last else instruction.point
    return found


Event = tuple[Kind, int]  # an instruction, and the index of the gather or reduction that it is for


def agenda(timeline: Timeline) -> dict[int, list[Event]]:
    """By point, what is done there besides releasing, in order; at `len(steps) + 1` what comes last of all.

    The order at a point is the one that holds least. What frees comes first, what allocates last:

        release  ->  wait_reduce  ->  reduce_scatter (each with its wait_reduce, if that is due here)  ->  all_gather  ->  wait

    but for gathers that are launched `ahead`, which gives the channel more time where there is room for it. `release` stands
    before `wait_reduce` because it never blocks; launches stand before `wait` so that the next bucket is in the queue while this
    one is waited for. `reshard` comes after all that, where what the step reads is there. With replicas, `all_reduce` follows on
    its `wait_reduce`, and so does its `wait_all_reduce` if that is due here; one that was launched at an earlier point is waited
    for right after the releases. Those that nothing waits for before the end come last of all, so that no launch stands behind
    them.
    """
    rows = reduction_events(timeline)
    for index, gather in enumerate(timeline.gathers):
        row = rows[gather.launch]
        row.insert(len(row) - gather.ahead, ("all_gather", index))
    for index, gather in enumerate(timeline.gathers):
        rows[gather.wait].append(("wait", index))
    return rows


def reduction_events(timeline: Timeline) -> dict[int, list[Event]]:
    """What of the `agenda` is done for reductions."""
    sections: dict[tuple[int, int], list[Event]] = defaultdict(list)
    across = timeline.program.replicas > 1
    for index, reduction in enumerate(timeline.reductions):
        launch, wait, done = reduction.launch, reduction.wait, reduction.done
        sections[launch, 2].append(("reduce_scatter", index))
        section = sections[wait, 2 if wait == launch else 1]
        section.append(("wait_reduce", index))
        if across:
            section.append(("all_reduce", index))
            (section if done == wait else sections[done, 0]).append(("wait_all_reduce", index))
    rows: dict[int, list[Event]] = defaultdict(list)
    for point, section_number in sorted(sections):
        rows[point] += sections[point, section_number]
    return rows


def write(timeline: Timeline) -> Schedule:
    """The timeline as instructions: at each point the releases, then what `agenda` says, and then what is resharded there."""
    program = timeline.program
    num_steps, turn = len(program.steps), turn_of(program)
    rows: dict[int, list[Instruction]] = defaultdict(list)
    gathers = [tuple(i.parameter.name for i in gather.members) for gather in timeline.gathers]
    reductions = [tuple(p.name for p in reduction.members) for reduction in timeline.reductions]
    packs = [*(tuple(i.parameter.name for i in g.packed) for g in timeline.gathers)]
    packs += [tuple(p.name for p in r.packed) for r in timeline.reductions]
    kinds: list[Literal["all_gather", "reduce_scatter"]] = ["all_gather"] * len(gathers)
    kinds += ["reduce_scatter"] * len(reductions)
    secondary = [*(gather.secondary for gather in timeline.gathers), *(False for _ in reductions)]
    buckets = tuple(Bucket(*row) for row in zip(range(len(kinds)), kinds, (*gathers, *reductions), packs, secondary))
    for point, events in sorted(agenda(timeline).items()):
        at = min(point, num_steps)
        for kind, index in events:
            bucket = buckets[index if kind in ("all_gather", "wait") else len(gathers) + index]
            rows[at].append(Instruction(kind, at, bucket.parameters, bucket.index))
    resharded: dict[int, list[str]] = defaultdict(list)
    for reshard in timeline.reshards:
        resharded[reshard.start].append(reshard.parameter.name)
    for point, members in resharded.items():
        rows[point].append(Instruction("reshard", point, tuple(members)))
    secondaries = {name for members in resharded.values() for name in members}
    released: dict[int, list[str]] = defaultdict(list)
    kept: set[str] = set()
    carried = {interval.parameter.name for interval in timeline.carried}
    escapes = set(program.escapes)
    arrivals = [(0, interval) for interval in timeline.carried]
    arrivals += [(gather.wait, interval) for gather in timeline.gathers for interval in gather.members]
    for arrival, interval in arrivals:
        name = interval.parameter.name
        if interval.last < num_steps:
            released[interval.last + 1].append(name)
        elif name not in escapes:
            carried.add(name)
        if arrival <= turn <= interval.last and turn < num_steps:
            kept.add(name)
    for point, members in released.items():
        rows[point].insert(0, Instruction("release", point, tuple(members)))
    return Schedule(
        program,
        timeline.limits,
        buckets,
        tuple(instruction for point in sorted(rows) for instruction in rows[point]),
        tuple(p.name for p in program.parameters if p.name in kept),
        tuple(p.name for p in program.parameters if p.name in carried),
        tuple(p.name for p in program.parameters if p.name in secondaries),
    )


def with_launches(timeline: Timeline, launches: Iterable[int]) -> Timeline:
    """The same gathers, launched at other points: there last of all."""
    return replace(timeline, gathers=tuple(replace(g, launch=p, ahead=0) for g, p in zip(timeline.gathers, launches)))
