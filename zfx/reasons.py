"""Why a schedule does what it does: for each collective and each life of a parameter, facts in words.

A parameter's life is from the launch of a gather to the release:

    moments   all_gather ... wait ... step reads ... step reads ... release
    life      |<first                                         end>|

Every sentence is read off the schedule and its simulation, and stays true whoever planned it: what is first to read the
parameter, how long before that the gather was launched, whether compute waits for it, and whether the limits have room for the
next simplest choice (launching one step earlier, keeping until the next read). None of them says what a pass had in mind.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from .ir import Instruction, Parameter, Schedule
from .replay import bucket_of, replay
from .simulate import CHANNELS, Moment, Simulation, Span, simulate
from .text import human_bytes, human_time, printable


@dataclass(frozen=True, slots=True)
class Collective:
    """One span of the simulation, with its place in execution order.

    Attributes:
        span: when it runs.
        parameters, packed: its members, and those of them that travel in a packing buffer.
        launch, wait: indices into `Simulation.moments`; `wait` is None if nothing waits for it.
        why: sentences.
        secondary: it gathers from secondary shards.
    """

    span: Span
    parameters: tuple[str, ...]
    packed: tuple[str, ...]
    launch: int
    wait: int | None
    why: tuple[str, ...]
    secondary: bool = False


@dataclass(frozen=True, slots=True)
class Life:
    """One interval in which a parameter is gathered.

    Attributes:
        parameter: its name.
        gather: index into `Story.collectives`; None if it was carried over from the micro-batch before.
        first, end: indices into `Simulation.moments`: live from `first` on, no longer at `end` (their number, if never released).
        reads: the steps that read it.
        why: sentences.
    """

    parameter: str
    gather: int | None
    first: int
    end: int
    reads: tuple[int, ...]
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """A schedule with its simulation and its reasons.

    Attributes:
        elements: gathered elements and packing elements, one pair for each of `simulation.moments`.
        collectives: one for each of `simulation.spans`.
        lives: in order of their first moment.
    """

    schedule: Schedule
    simulation: Simulation
    elements: tuple[tuple[int, int], ...]
    collectives: tuple[Collective, ...]
    lives: tuple[Life, ...]


def tell(schedule: Schedule) -> Story:
    """Simulate the schedule and say why. Linear in its states, and in the states between two lives of a parameter.

    Raises:
        ValueError: by its cost model the schedule takes for ever.

    Example:
        >>> from zfx.ir import Bucket, Instruction, Limits, Parameter, Program, Schedule, Step
        >>> program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",), duration_us=5.0),))
        >>> run = tuple(Instruction(kind, 0, ("w",), 0) for kind in ("all_gather", "wait")) + (Instruction("release", 1, ("w",)),)
        >>> story = tell(Schedule(program, Limits(), (Bucket(0, "all_gather", ("w",)),), run))
        >>> print(*story.collectives[0].why, *story.lives[0].why, sep="\\n")
        For step 0 (mul), the first to read it, launched right before.
        Exposed: compute waits 100.0 us for it.
        No earlier: the forward starts here.
        Released right after its last read, step 0 (mul). Nothing reads it later.
    """
    simulation = simulate(schedule)
    times = (simulation.finish_us, *(t.end_us for t in simulation.steps), *(s.end_us for s in simulation.spans))
    if not all(math.isfinite(us * 1_000) for us in times):  # in nanoseconds, too
        raise ValueError("by its cost model the schedule takes for ever: there is no picture of that")
    teller = _Teller(schedule, simulation)
    collectives = teller.collectives()
    return Story(schedule, simulation, tuple(teller.elements), collectives, teller.lives(collectives))


class _Teller:
    """The indices that the sentences are read off."""

    def __init__(self, schedule: Schedule, simulation: Simulation) -> None:
        self.schedule, self.simulation = schedule, simulation
        self.program, self.limits = schedule.program, schedule.limits
        self.sizes = {p.name: p for p in schedule.program.parameters}
        states = list(replay(schedule))
        self.elements = [(s.gathered_elements, s.packing_elements) for s in states]
        self.live = [s.num_elements for s in states]
        self.totals = [m.total for m in simulation.moments]
        self.runs = [i for i, m in enumerate(simulation.moments) if m.instruction is None]  # the moment at which each step runs
        self.reads: dict[str, list[int]] = defaultdict(list)
        self.completed: dict[str, int] = {}
        for t, step in enumerate(schedule.program.steps):
            for name in dict.fromkeys(step.reads):
                self.reads[name].append(t)
            self.completed.update(dict.fromkeys(step.completes, t))

    # ------------------------------------------------------------------------------------------------------ collectives

    def collectives(self) -> tuple[Collective, ...]:
        spans, found = iter(self.simulation.spans), []
        waits: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        wait_of = {channel.launch: channel.wait for channel in CHANNELS}
        for i, moment in enumerate(self.simulation.moments):
            if moment.instruction is not None and moment.instruction.kind in wait_of.values():
                waits[moment.instruction.kind, moment.instruction.bucket].append(i)
        before: dict[str, Span] = {}
        for i, moment in enumerate(self.simulation.moments):
            instruction = moment.instruction
            if instruction is None or instruction.kind not in wait_of:
                continue
            span = next(spans)
            is_gather = instruction.kind == "all_gather"
            later = waits[wait_of[instruction.kind], instruction.bucket]
            place = bisect_left(later, i)
            wait = later[place] if place < len(later) else None
            bucket = bucket_of(self.schedule, instruction.bucket)
            secondary = bucket is not None and bucket.secondary
            why = (
                *([f"From secondary shards, between {_plural(self.program.reshard_to, 'rank')}."] if secondary else []),
                *(self._need(i, instruction, span) if is_gather else self._ready(instruction)),
                *_queue(span, before.get(instruction.kind)),
                *self._stall(span, wait),
                *(self._no_earlier(i, instruction) if is_gather else ()),
            )
            before[instruction.kind] = span
            packed = bucket.packed if bucket else ()
            found.append(Collective(span, instruction.parameters, packed, i, wait, why, secondary))
        return tuple(found)

    def _need(self, place: int, instruction: Instruction, span: Span) -> list[str]:
        """What a gather is for, and how long before it was launched."""
        point = self.simulation.moments[place].point
        rows = [(self._next_read(name, point), name) for name in instruction.parameters]
        found = [(t, name) for t, name in rows if t is not None]
        if not found:
            return ["No step reads it."]
        t, name = min(found, key=lambda row: row[0])
        what = "it" if len(instruction.parameters) == 1 else f"{printable(name)}, one of its {len(instruction.parameters)}"
        ahead = f"{_plural(t - point, 'step')} and {human_time(self.simulation.steps[t].start_us - span.launch_us)} before"
        return [f"For {self._step(t)}, the first to read {what}, launched {ahead if t > point else 'right before'}."]

    def _next_read(self, name: str, point: int) -> int | None:
        reads = self.reads[name]
        place = bisect_left(reads, point)
        return reads[place] if place < len(reads) else None

    def _ready(self, instruction: Instruction) -> list[str]:
        """Since when the gradients of a reduction are complete, or what an all-reduce adds up."""
        if instruction.kind == "all_reduce":
            return [f"Adds up over {self.program.replicas:,} replicas what reduction {instruction.bucket} has brought."]
        ends = [self.completed[name] for name in instruction.parameters if name in self.completed]
        if not ends:
            return ["No step completes its gradients."]
        delay = instruction.point - max(ends) - 1
        number = len(instruction.parameters)
        what = "The gradient is" if number == 1 else f"The last of its {number} gradients is"
        when = "right after" if delay <= 0 else f"{_plural(delay, 'step')} later"
        return [f"{what} complete after {self._step(max(ends))}; launched {when}."]

    def _stall(self, span: Span, wait: int | None) -> list[str]:
        if wait is None:
            return ["Nothing waits for it."]
        if span.exposed_us > 0:
            part = "" if span.wait_us <= span.start_us else f" of the {human_time(span.end_us - span.start_us)} that it takes"
            return [f"Exposed: compute waits {human_time(span.exposed_us)}{part or ' for it'}."]
        return [f"Hidden: over {human_time(span.wait_us - span.end_us)} before compute asks for it."]

    def _no_earlier(self, place: int, instruction: Instruction) -> list[str]:
        """What launching one step earlier would break."""
        point, turn = self.simulation.moments[place].point, self.program.turn
        if point == 0 or (turn is not None and point == turn + 1):
            return [f"No earlier: the {'forward' if point == 0 else 'backward'} starts here."]
        bucket = bucket_of(self.schedule, instruction.bucket)
        members = [self._size(name) for name in (*instruction.parameters, *(bucket.packed if bucket else ()))]
        first = self.runs[min(point, len(self.runs)) - 1]
        freed = {
            name
            for moment in self.simulation.moments[first:place]
            if moment.instruction is not None and moment.instruction.kind == "release"
            for name in moment.instruction.parameters
        }
        there = next((name for name in instruction.parameters if name in freed), None)
        if there is not None:
            return [f"No earlier: one step before, {printable(there)} is still there."]
        problem = self._too_much(first, place, members)
        return [f"No earlier: one step before, {problem}."] if problem else []

    # ------------------------------------------------------------------------------------------------------------ lives

    def lives(self, collectives: tuple[Collective, ...]) -> tuple[Life, ...]:
        moments, end = self.simulation.moments, len(self.simulation.moments)
        launches = {c.launch: number for number, c in enumerate(collectives)}
        carried = self.schedule.carried if self.program.window in ("middle", "last") else ()
        begun: dict[str, tuple[int | None, int]] = {name: (None, 0) for name in carried}
        rows: list[tuple[str, int | None, int, int]] = []
        for i, moment in enumerate(moments):
            if moment.instruction is None:
                continue
            for name in moment.instruction.parameters:
                if moment.instruction.kind == "all_gather" and name not in begun:
                    begun[name] = (launches[i], i)
                elif moment.instruction.kind == "release" and name in begun:
                    rows.append((name, *begun.pop(name), i))
        rows += [(name, *start, end) for name, start in begun.items()]
        by_name: dict[str, list[tuple[int | None, int, int]]] = defaultdict(list)
        for name, gather, first, last in rows:
            by_name[name].append((gather, first, last))
        found = []
        for name, row in by_name.items():
            for (gather, first, last), after in zip(row, [*row[1:], None]):
                reads = self._reads_within(name, first, last)
                found.append(Life(name, gather, first, last, reads, self._life(name, last, reads, after)))
        return tuple(sorted(found, key=lambda life: life.first))

    def _reads_within(self, name: str, first: int, end: int) -> tuple[int, ...]:
        reads = self.reads[name]
        return tuple(reads[bisect_left(reads, bisect_left(self.runs, first)) : bisect_left(reads, bisect_left(self.runs, end))])

    def _life(
        self, name: str, end: int, reads: tuple[int, ...], after: tuple[int | None, int, int] | None
    ) -> tuple[str, ...]:
        moments, turn = self.simulation.moments, self.program.turn
        why = []
        if turn is not None and reads and reads[0] < turn < reads[-1]:
            why.append(f"Kept across the turn: {self._saved(name)}.")
        elif (gap := self._widest_gap(reads)) and self._gap_us(gap) > self._gather_us(name):
            held = f"{human_bytes(self._size(name).num_bytes)} for {human_time(self._gap_us(gap))}"
            why.append(f"Kept from {self._step(gap[0])} to {self._step(gap[1])}, {held}: {self._saved(name)}.")
        if end == len(moments):
            carried_on = name in self.schedule.carried and self.program.window in ("first", "middle")
            escapes = "Never released: an alias of it leaves the program." if name in self.program.escapes else "Never released."
            return (*why, "Stays gathered for the next micro-batch." if carried_on else escapes)
        late = moments[end].point - reads[-1] - 1 if reads else 0
        when = "right after" if late <= 0 else f"{_plural(late, 'step')} after"
        gone = f"Released {when} its last read, {self._step(reads[-1])}." if reads else "Released; no step reads it."
        if after is None:
            return (*why, f"{gone} Nothing reads it later.")
        gather, again, _ = after
        use = self._next_read(name, moments[again].point)
        what = f"{self._step(use)} reads it again" if use is not None else "it is gathered again"
        bucket = self.simulation.spans[gather].bucket if gather is not None else None
        free = f"{human_bytes(self._size(name).num_bytes)} are free for {human_time(moments[again].time_us - moments[end].time_us)}"
        why.append(f"{gone} Gathered again as bucket {bucket}: {what}; {free} meanwhile.")
        if name in self.schedule.resharded and turn is not None and moments[end].point <= turn < moments[again].point:
            part, group = human_bytes(self.program.secondary_bytes(self._size(name))), self.program.reshard_to
            why.append(f"Resharded to {group} ranks: a secondary shard of {part} stays, so that it is gathered from those alone.")
        problem = self._too_much(end, again, [self._size(name)])
        return (*why, f"Kept instead, {problem}.") if problem else tuple(why)

    def _saved(self, name: str) -> str:
        return f"gathering it again would take {human_time(self._gather_us(name))}"

    def _gather_us(self, name: str) -> float:
        """From all ranks: what is kept has no secondary shard."""
        return self.program.costs.gather_us(self._size(name).num_bytes)

    def _widest_gap(self, reads: tuple[int, ...]) -> tuple[int, int] | None:
        return max(itertools.pairwise(reads), key=self._gap_us, default=None)

    def _gap_us(self, gap: tuple[int, int]) -> float:
        return self.simulation.steps[gap[1]].start_us - self.simulation.steps[gap[0]].end_us

    # ------------------------------------------------------------------------------------------------------------ words

    def _too_much(self, first: int, end: int, more: list[Parameter]) -> str:
        """Where the moments first..end-1 would break a limit if they held more, or an empty text."""
        budget, most = self.limits.memory_budget, self.limits.max_live_parameters
        for row, extra, limit, unit in (
            (self.live, sum(p.num_elements for p in more), most, "elements would be live"),
            (self.totals, sum(p.num_bytes for p in more), budget, "bytes would be held"),
        ):
            highest = max(row[first:end], default=0)
            if limit is not None and highest + extra > limit:
                where = self._moment(self.simulation.moments[row.index(highest, first)])
                return f"{highest + extra:,} {unit} {where}, the limit is {limit:,}"
        return ""

    def _moment(self, moment: Moment) -> str:
        if moment.instruction is None:
            return f"during {self._step(moment.point)}"
        return f"before {self._step(moment.point)}" if moment.point < len(self.program.steps) else "after the last step"

    def _step(self, t: int) -> str:
        return f"step {t} ({printable(self.program.steps[t].name)})"

    def _size(self, name: str) -> Parameter:
        return self.sizes.get(name) or Parameter(name, 0, 0)


def finite(value: float) -> float | None:
    """JSON has no infinity, which a bound or the ratio to a bound of nothing can be."""
    return value if math.isfinite(value) else None


def _queue(span: Span, before: Span | None) -> list[str]:
    """How long it stands behind the collective before it on its channel."""
    if before is None or span.start_us <= span.launch_us:
        return []
    return [f"Queues {human_time(span.start_us - span.launch_us)} behind bucket {before.bucket}."]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


__all__ = ["Collective", "Life", "Story", "finite", "tell"]
