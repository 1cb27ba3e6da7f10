"""Lower bounds: what no schedule of a program under its limits can beat, in time, volume and memory.

Every bound holds for all schedules that the verifier accepts, whatever they keep, in whichever order they gather, however they
bucket and wherever they launch, by the time and memory of `ir.py`. Nothing is sampled, nothing is assumed of the planner, and no
code is shared with it. A program that is one window of several may have anything carried into it that fits.

Volume. A parameter is gathered for its first read, and again for a later one unless it was kept over the gap between the two:

    step         0    1    2    3    4    5
    reads        a    b    c    c    b    a
    gap of b              [=======]                 while c is read, a and b stay only as far as there is room beside c;
    gap of a         [=================]            what does not fit is gathered again: a first, which is needed last

If bytes could be split, letting go of what is needed last would be best, for every prefix of the program at once (Belady's rule,
and the optimum of the linear program). A parameter cannot be split, so schedules may need a little more.

Time. Step t runs after step t - 1, and after everything has been gathered that the steps up to t need. And of what the steps s to t
read, no more than there is room for is there while s runs; the rest is launched after s, and has arrived before t:

    compute   | s |            | t |
    gather        [=== rest ===]                    rest = what s to t read, less the room at s

Gradients are the mirror image: of what completes from s on, no more than there is room for is still unreduced while t runs; and
after step t all is still to be reduced that completes from there on. The longest path through all this is a bound; so are the
totals of compute and of each channel. A bound counts as few collectives as bucket sizes and memory allow.

References: Belady, *A study of replacement algorithms for a virtual-storage computer*, 1966; Cao, Felten, Karlin, Li, *A study of
integrated prefetching and caching strategies*, 1995; Hutchinson, Sanders, Vitter, *Duality between prefetching and queued writing
with parallel disks*, 2005.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import accumulate
from typing import Protocol

from .costs import CostModel, Link
from .ir import Program, Schedule
from .limits import Limits
from .verify import reuse_distances

_ROUNDING = 1e-9
_MOST_BITS = 2**20  # of subset sums, times different sizes: above that it takes too long, and matters little


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no schedule can beat. Names say what binds.

    Attributes:
        times_us: every bound on the time by its name; the plainest first, which is the one to name where several bind.
        volume_bytes, volume_binds: the fewest bytes that are gathered, and why it isn't fewer.
        peaks_bytes: what must be held at some time, by what needs it.
    """

    times_us: dict[str, float]
    volume_bytes: int
    volume_binds: str
    peaks_bytes: dict[str, int]


def bounds_of(schedule: Schedule) -> Bounds:
    """The bounds for all schedules of this one's program and limits; the rest of it is not looked at.

    Cost: O(n log n) in steps and reads.
    """
    program, limits = schedule.program, schedule.limits
    events = _events(program, limits)
    measures = _measures(program, limits, events)
    volume = _volume(schedule, events, measures)
    return Bounds(_times(schedule, events, measures, volume), volume.total_bytes, volume.binds, _peaks(program))


# ------------------------------------------------------------------------------------------------------- what must be held


@dataclass(frozen=True, slots=True)
class _Event:
    """A step, or a reduction that must be over before the next step, since its gradient would not fit beside that.

    Attributes:
        reads: the parameters that are read.
        held_bytes: what every schedule holds meanwhile, parameters apart.
        duration_us: the least that it takes.
        step: the index of the step; None for a reduction.
    """

    reads: frozenset[str]
    held_bytes: int
    duration_us: float
    step: int | None = None


def _steps(program: Program) -> list[_Event]:
    size, completing = _sizes(program, "grad_bytes"), [0] * (len(program.steps) + 1)
    for name, (first, last) in _completions(program).items():
        completing[first] += size[name]
        completing[last + 1] -= size[name]
    return [
        _Event(frozenset(step.reads), program.static_bytes + step.other_bytes + num_bytes, step.duration_us, t)
        for t, (step, num_bytes) in enumerate(zip(program.steps, accumulate(completing)))
    ]


def _events(program: Program, limits: Limits) -> list[_Event]:
    """The steps, and the reductions between them that `memory_budget` forces."""
    steps, budget, costs = _steps(program), limits.memory_budget, program.costs
    if budget is None:
        return steps
    completed: dict[int, list[int]] = defaultdict(list)  # by the next step
    size = _sizes(program, "grad_bytes")
    for name, (_, last) in _completions(program).items():
        if size[name]:
            completed[last + 1].append(size[name])
    events = []
    for t, (step, need) in enumerate(zip(steps, _needs(program, steps, _sizes(program, "num_bytes")))):
        gradients = completed[t]
        if sum(gradients) > budget - step.held_bytes - need:
            first = min(gradients, default=0)  # held twice while it is reduced, and the others once
            held_bytes = program.static_bytes + program.steps[t].other_bytes + sum(gradients) + first
            events.append(_Event(frozenset(), held_bytes, costs.launch_us + costs.reduce_us(first)))
        events.append(step)
    return events


def _sizes(program: Program, unit: str) -> dict[str, int]:
    return {p.name: getattr(p, unit) for p in program.parameters}


def _completions(program: Program) -> dict[str, tuple[int, int]]:
    """For each gradient the first and the last step that completes it. It is held in between, and reduced after that."""
    found: dict[str, tuple[int, int]] = {}
    for t, step in enumerate(program.steps):
        found.update({name: (found.get(name, (t, t))[0], t) for name in step.completes})
    return found


def _needs(program: Program, events: list[_Event], size: dict[str, int]) -> list[int]:
    """By event, the size of what it reads and of what has escaped: gathered in every schedule."""
    escapes, not_yet, escaped, needs = set(program.escapes), set(program.escapes), 0, []
    for event in events:
        escaped += sum(size[name] for name in event.reads & not_yet)
        not_yet -= event.reads
        needs.append(escaped + sum(size[name] for name in event.reads - escapes))
    return needs


def _peaks(program: Program) -> dict[str, int]:
    """Each step while it runs; each gradient while it is reduced, and held twice, wherever the least else is held."""
    steps, size = _steps(program), _sizes(program, "grad_bytes")
    needs = _needs(program, steps, _sizes(program, "num_bytes"))
    peaks = {"shards": program.static_bytes}
    peaks |= {f"step {step.name}": e.held_bytes + need for step, e, need in zip(program.steps, steps, needs)}
    least_from = list(accumulate([0, *(step.other_bytes for step in reversed(program.steps))], min))[::-1]
    for name, (_, last) in _completions(program).items():
        peaks[f"reduction of {name}"] = program.static_bytes + least_from[last + 1] + 2 * size[name]
    return peaks


# -------------------------------------------------------------------------------------------------- what the limits leave


@dataclass(frozen=True, slots=True)
class _Measure:
    """One hard limit.

    Attributes:
        name: its field in `Limits`.
        size: what each parameter takes of it.
        spare: by event, what it leaves beside all that must be held.
        room: by event, the most of `spare` that other parameters than those it reads can fill.
        bytes_of_one: the fewest bytes of parameters that one unit of size can stand for.
    """

    name: str
    size: dict[str, int]
    spare: list[int]
    room: list[int]
    bytes_of_one: Fraction


def _measures(program: Program, limits: Limits, events: list[_Event]) -> list[_Measure]:
    elements, num_bytes = _sizes(program, "num_elements"), _sizes(program, "num_bytes")
    least = min((Fraction(num_bytes[name], n) for name, n in elements.items() if n), default=Fraction(0))
    left = [limits.max_live_parameters] * len(events)
    rows = [("max_live_parameters", elements, left, least)]
    if limits.memory_budget is not None:
        rows.append(("memory_budget", num_bytes, [limits.memory_budget - m.held_bytes for m in events], Fraction(1)))
    measures = []
    for name, size, left, least in rows:
        spare = [room - need for room, need in zip(left, _needs(program, events, size))]
        totals = _Totals(size, max(spare, default=0))
        room = [totals.up_to(space, event.reads) for space, event in zip(spare, events)]
        measures.append(_Measure(name, size, spare, room, least))
    return measures


class _Totals:
    """The totals that some of the sizes have: subset sums, as bits of a number. Where they are too many, multiples of the gcd."""

    def __init__(self, size: dict[str, int], most: int) -> None:
        self._size = size
        self._unit = math.gcd(*size.values()) or 1
        self._counts = Counter(filter(None, size.values()))
        self._most = max(0, min(most, sum(size.values())) // self._unit)
        self._exact = self._most * len(self._counts) <= _MOST_BITS
        self._sums: dict[tuple[int, ...], int] = {}

    def up_to(self, room: int, without: Iterable[str] = ()) -> int:
        """The largest that is at most `room`, of the sizes of other names than those."""
        units = max(0, min(room // self._unit, self._most))
        if not self._exact:
            return units * self._unit
        sums = self._sums_of(tuple(sorted(self._size[name] for name in without)))
        return ((sums & ((2 << units) - 1)).bit_length() - 1) * self._unit

    def _sums_of(self, without: tuple[int, ...]) -> int:
        if without not in self._sums:
            sums, mask = 1, (2 << self._most) - 1
            for size, count in (self._counts - Counter(without)).items():
                power = 1
                while count > 0 and min(power, count) * size // self._unit <= self._most:
                    sums |= (sums << (min(power, count) * size // self._unit)) & mask
                    count -= power
                    power *= 2
            self._sums[without] = sums
        return self._sums[without]


# ------------------------------------------------------------------------------------------------------------- the volume


@dataclass(frozen=True, slots=True)
class _Volume:
    """By event: the bytes that must have been gathered before it, and in how many collectives at the least."""

    num_bytes: list[float]
    num_buckets: list[int]
    total_bytes: int
    binds: str


@dataclass(frozen=True, slots=True)
class _Gap:
    """A parameter is read at step `stop`, and not between `start` and there; at -1 it may have been carried in."""

    start: int
    stop: int
    name: str


def _volume(schedule: Schedule, events: list[_Event], measures: list[_Measure]) -> _Volume:
    program, limits = schedule.program, schedule.limits
    num_bytes, shares = _sizes(program, "num_bytes"), _gather_shares(program, limits)
    share_of_byte = _share_of_byte(program, shares)
    at = {event.step: m for m, event in enumerate(events)}
    firsts, wide, gaps = _gathers(schedule)
    sure_bytes, sure_shares, sure_gathers = [0] * len(events), [0.0] * len(events), [0] * len(events)
    for gap in (*firsts, *wide):
        sure_bytes[at[gap.stop]] += num_bytes[gap.name]
        sure_shares[at[gap.stop]] += shares[gap.name]
        sure_gathers[at[gap.stop]] += 1
    places = [(at.get(gap.start, -1), at[gap.stop], gap.name) for gap in gaps]
    again = [(_given_up(places, measure), measure) for measure in measures]
    ones = [float(measure.bytes_of_one) for measure in measures]
    forced = [max(row) for row in zip(*([size * one for size in sizes] for (sizes, _), one in zip(again, ones)))]
    sums = zip(accumulate(sure_bytes), accumulate(sure_shares), accumulate(sure_gathers), forced)
    rows = [(b + f, max(_at_least(s + f * share_of_byte), int(n > 0 or f > 0))) for b, s, n, f in sums]
    most, binds = max((math.ceil(sizes[-1] * m.bytes_of_one) if sizes else 0, m.name) for sizes, m in again)
    reasons = [*(["max_reuse_distance"] if wide else []), *([binds] if most else [])]
    return _Volume(
        [row[0] for row in rows], [row[1] for row in rows], sum(sure_bytes) + most, " and ".join(reasons) or "first reads"
    )


def _gathers(schedule: Schedule) -> tuple[list[_Gap], list[_Gap], list[_Gap]]:
    """First reads; gaps over which `max_reuse_distance` lets nothing stay; the other gaps. What escapes has none."""
    program, limits = schedule.program, schedule.limits
    carried_in, escapes = program.window in ("middle", "last"), set(program.escapes)
    firsts: list[_Gap] = []
    gaps: list[_Gap] = []
    latest: dict[str, int] = {}
    for t, step in enumerate(program.steps):
        for name in dict.fromkeys(step.reads):
            gap = _Gap(latest.get(name, -1), t, name)
            if name not in latest:
                (gaps if carried_in else firsts).append(gap)
            elif name not in escapes:
                gaps.append(gap)
            latest[name] = t
    wide: set[_Gap] = set()
    if limits.max_reuse_distance < 2 * sum(p.num_elements for p in program.parameters):
        small = {p.name for p in program.parameters if p.numel <= limits.param_persistence_threshold}
        spans = sorted((gap.start, gap.stop, gap.name) for gap in gaps if gap.start >= 0 and gap.name not in small)
        wide = {_Gap(*span) for span, far in zip(spans, reuse_distances(schedule, spans)) if far > limits.max_reuse_distance}
    return firsts, [gap for gap in gaps if gap in wide], [gap for gap in gaps if gap not in wide]


def _given_up(gaps: list[tuple[int, int, str]], measure: _Measure) -> list[int]:
    """By event, the least size that is lost over gaps which end by then, if what is needed last is given up first."""
    opening: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, stop, name in gaps:
        if start + 1 < stop:
            opening[start + 1].append((stop, measure.size[name]))
    kept: dict[int, int] = defaultdict(int)  # by the event where the gaps end
    needed_last: list[int] = []
    lost, held = [0] * len(measure.room), 0
    for m, room in enumerate(measure.room):
        held -= kept.pop(m, 0)
        for stop, size in opening[m]:
            if stop not in kept:
                heappush(needed_last, -stop)
            kept[stop] += size
            held += size
        while held > room and kept:
            stop = -needed_last[0]
            amount = min(kept[stop], held - room)
            kept[stop] -= amount
            lost[stop] += amount
            held -= amount
            if not kept[stop]:
                del kept[stop]
                heappop(needed_last)
    return list(accumulate(lost))


def _gather_shares(program: Program, limits: Limits) -> dict[str, float]:
    return _shares(program, min(limits.prefetch_bucket_size, limits.max_live_parameters))


def _shares(program: Program, bucket_size: int) -> dict[str, float]:
    """How much of a bucket each parameter fills. The members of one bucket fill at most 1, whatever they are."""
    return {p.name: 1.0 if p.num_elements > bucket_size else p.num_elements / max(bucket_size, 1) for p in program.parameters}


def _share_of_byte(program: Program, shares: dict[str, float]) -> float:
    return min((shares[p.name] / p.num_bytes for p in program.parameters if p.num_bytes), default=0.0)


def _at_least(num_buckets: float) -> int:
    return math.ceil(num_buckets - _ROUNDING)


# --------------------------------------------------------------------------------------------------------------- the time


def _times(schedule: Schedule, events: list[_Event], measures: list[_Measure], volume: _Volume) -> dict[str, float]:
    """Every bound on the time, by name; the plainest first, since that is what is named where several bind."""
    costs, rest = schedule.program.costs, _Rest(schedule, events)
    num_buckets, num_bytes = max(volume.num_buckets, default=0), max(volume.num_bytes, default=0.0)
    compute_us = costs.launch_us * (num_buckets + rest.num_buckets[0]) + (num_bytes + rest.num_bytes[0]) / costs.busy_bytes_per_us
    compute_us += rest.across_busy_us
    for event in events:
        compute_us += event.duration_us if event.step is not None else 0.0
    row = _row(events, costs, volume, rest)
    bare = [(0.0, event.duration_us, 0.0) for event in events]
    return {
        "compute": compute_us,
        "gather channel": _transfer_us(costs.gather, num_buckets, num_bytes),
        "reduce channel": rest.us(0),
        **({"all-reduce channel": rest.across_us(0)} if schedule.program.replicas > 1 else {}),
        "first gather + compute + last reduction": _in_a_row(row, volume, rest, costs),
        "critical path": _longest_path(row, [], volume, rest, costs),
        "critical path under the limits": _longest_path(bare, _detours(schedule, events, measures, rest), volume, rest, costs),
    }


def _transfer_us(link: Link, num_buckets: int, num_bytes: float) -> float:
    return num_buckets * link.latency_us + num_bytes / link.bytes_per_us if num_buckets else 0.0


_Row = list[tuple[float, float, float]]  # by event: the compute time of gathers before it, its own, that of reductions after it


def _row(events: list[_Event], costs: CostModel, volume: _Volume, rest: _Rest) -> _Row:
    """The steps, and what collectives take from compute, as far as that is certain on any path to the row and away from it.

    A gather may be waited for before the path comes to the row, and a reduction launched after it has left. It takes nothing from
    the row then, but it takes its time on the channel that the path comes by, or leaves by. The lesser of the two is certain.
    """

    def least(link: Link) -> tuple[float, float]:
        return min(costs.launch_us, link.latency_us), 1 / max(costs.busy_bytes_per_us, link.bytes_per_us)

    (gather_us, gather_us_of_byte), (reduce_us, reduce_us_of_byte) = least(costs.gather), least(costs.reduce)
    gathered = [gather_us * k + gather_us_of_byte * n for k, n in zip([0, *volume.num_buckets], [0.0, *volume.num_bytes])]
    left = [reduce_us * k + reduce_us_of_byte * n for k, n in zip(rest.num_buckets, rest.num_bytes)]
    return [
        (gathered[m + 1] - gathered[m], 0.0 if event.step is None else event.duration_us, left[m] - left[m + 1])
        for m, event in enumerate(events)
    ]


class _Rest:
    """By event, what is still to be reduced once it is over: the gradients that complete there or later.

    With replicas each collective has two stages. The last to be reduced must still be all-reduced, and before the first all-reduce
    something must be reduced: the one channel's total takes at least the other's shortest collective more.
    """

    def __init__(self, schedule: Schedule, events: list[_Event]) -> None:
        program = schedule.program
        self._costs, self._across = program.costs, program.replicas > 1
        at = {event.step: m for m, event in enumerate(events)}
        size, shares = _sizes(program, "grad_bytes"), _shares(program, schedule.limits.reduce_bucket_size)
        completed: dict[int, list[str]] = defaultdict(list)
        for name, (_, last) in _completions(program).items():
            completed[at[last]].append(name)
        across = _sizes(program, "across_bytes")
        self.num_bytes, self.num_buckets, self._across_bytes = [0], [0], [0]
        self._least: list[tuple[float, float]] = [(math.inf, math.inf)]  # of either kind of bytes, in one gradient
        filled = 0.0
        for m in reversed(range(len(events))):
            filled += sum(shares[name] for name in completed[m])
            self.num_bytes.append(self.num_bytes[-1] + sum(size[name] for name in completed[m]))
            self.num_buckets.append(max(_at_least(filled), int(self.num_buckets[-1] > 0 or bool(completed[m]))))
            self._across_bytes.append(self._across_bytes[-1] + sum(across[name] for name in completed[m]))
            least = [self._least[-1], *((float(size[name]), float(across[name])) for name in completed[m])]
            self._least.append((min(row[0] for row in least), min(row[1] for row in least)))
        for row in (self.num_bytes, self.num_buckets, self._across_bytes, self._least):
            row.reverse()

    def us(self, event: int) -> float:
        reduced_us = _transfer_us(self._costs.reduce, self.num_buckets[event], self.num_bytes[event])
        if not self._across or not self.num_buckets[event]:
            return reduced_us
        link, least_bytes = self._costs.all_reduce, self._least[event][1]
        last_us = self._costs.launch_us + link.latency_us + least_bytes / link.bytes_per_us
        return max(reduced_us + last_us, self.across_us(event))

    def across_us(self, event: int) -> float:
        """The shortest reduction, and all all-reduces."""
        if not self.num_buckets[event]:
            return 0.0
        link, least_bytes = self._costs.reduce, self._least[event][0]
        first_us = link.latency_us + least_bytes / link.bytes_per_us + self._costs.launch_us
        return first_us + _transfer_us(self._costs.all_reduce, self.num_buckets[event], self._across_bytes[event])

    @property
    def across_busy_us(self) -> float:
        """Compute time that all-reduces take."""
        if not self._across:
            return 0.0
        return self._costs.launch_us * self.num_buckets[0] + self._across_bytes[0] / self._costs.busy_bytes_per_us


def _in_a_row(row: _Row, volume: _Volume, rest: _Rest, costs: CostModel) -> float:
    """What the first read needs is gathered, the steps from there to the last completion run, what is left is reduced."""
    now = finish = 0.0
    for m, (before_us, duration_us, after_us) in enumerate(row):
        now += before_us
        if volume.num_buckets[m] and not (m and volume.num_buckets[m - 1]):
            now = max(now, _transfer_us(costs.gather, volume.num_buckets[m], volume.num_bytes[m]) + costs.launch_us)
        now += duration_us
        if rest.num_buckets[m] and not rest.num_buckets[m + 1]:
            finish = now + costs.launch_us + rest.us(m)
        now += after_us
    return max(now, finish)


def _longest_path(row: _Row, detours: list[_Detour], volume: _Volume, rest: _Rest, costs: CostModel) -> float:
    """The longest path to the finish.

    It leads from the start along the row, or through all that must be gathered before an event; on along the row and detours;
    and to the finish along the row, or through all that is still to be reduced after an event.
    """
    now = finish = 0.0
    for m, (before_us, duration_us, after_us) in enumerate(row):
        now += before_us
        if volume.num_buckets[m]:
            now = max(now, _transfer_us(costs.gather, volume.num_buckets[m], volume.num_bytes[m]) + costs.launch_us)
        now = max([now, *(detour.ready_us(m) for detour in detours)]) + duration_us
        for detour in detours:
            detour.leave(m, now)
        if rest.num_buckets[m]:
            finish = max(finish, now + costs.launch_us + rest.us(m))
        now += after_us
    return max(now, finish)


def _detours(schedule: Schedule, events: list[_Event], measures: list[_Measure], rest: _Rest) -> list[_Detour]:
    """Gathers by parameter, from the start, from the forward's last step and from the turn; reductions where bytes are limited."""
    turn = schedule.program.turn
    landmarks = [m for m, event in enumerate(events) if event.step in (0, turn, turn - 1 if turn else 0)]
    detours: list[_Detour] = [_Return(schedule, events, measure) for measure in measures]
    detours += [_Refill(schedule, events, measure, since) for measure in measures for since in landmarks]
    if schedule.limits.memory_budget is not None:
        detours.append(_Drain(schedule, events, measures[-1], rest))
    return detours


class _Detour(Protocol):
    """Paths from the end of an earlier event through a channel to a later one, along the row of events."""

    def ready_us(self, t: int) -> float:
        """When t can start at the earliest. Called for each event in turn."""
        ...

    def leave(self, s: int, now: float) -> None:
        """s can be over at this time at the earliest. Called after `ready_us` of the same event."""


class _Return:
    """Paths from the last event s beside which a parameter does not fit to the next step t that reads it: it is launched after s.

    Kept for that are the events after which all have more to spare, in order.
    """

    def __init__(self, schedule: Schedule, events: list[_Event], measure: _Measure) -> None:
        self._costs, self._events, self._measure = schedule.program.costs, events, measure
        self._num_bytes, self._escapes = _sizes(schedule.program, "num_bytes"), set(schedule.program.escapes)
        self._read_at: dict[str, int] = {}
        self._spare: list[int] = []
        self._ends: list[tuple[int, float]] = []

    def ready_us(self, t: int) -> float:
        launched_after: dict[int, int] = defaultdict(int)
        for name in self._events[t].reads:
            read_at = self._read_at.get(name, -1)
            place = bisect_left(self._spare, self._measure.size[name]) - 1
            if place >= 0 and self._ends[place][0] > read_at and (read_at < 0 or name not in self._escapes):
                launched_after[place] += self._num_bytes[name]
            self._read_at[name] = t
        ready, num_bytes = -math.inf, 0
        for place in sorted(launched_after, reverse=True):
            num_bytes += launched_after[place]
            ready = max(ready, self._ends[place][1] + self._costs.gather_us(num_bytes) + self._costs.launch_us)
        return ready

    def leave(self, s: int, now: float) -> None:
        while self._spare and self._spare[-1] >= self._measure.spare[s]:
            self._spare.pop()
            self._ends.pop()
        self._spare.append(self._measure.spare[s])
        self._ends.append((s, now))


class _Refill:
    """Paths from the end of a event s through the gather channel to a event t, both at the event `since` or later.

    `P(t)`: the size of all that is read from `since` to t, each parameter once. Beside what s reads itself there is room for
    `room(s)`, so `P(t) - P(s) - room(s)` is launched after s, in one collective or more, and over before t. Since only the
    difference of `P(t)` and `Q(s) = P(s) + room(s)` counts, one s is the best for all t, among those with `Q(s) < P(t)`.
    """

    def __init__(self, schedule: Schedule, events: list[_Event], measure: _Measure, since: int) -> None:
        program, costs = schedule.program, schedule.program.costs
        self._since, self._room = since, measure.room
        self._latency_us, self._launch_us = costs.gather.latency_us, costs.launch_us
        one = float(measure.bytes_of_one)
        share = _share_of_byte(program, _gather_shares(program, schedule.limits))
        self._us_in_one = one / costs.gather.bytes_per_us
        self._us_in_many = self._us_in_one + one * share * self._latency_us
        self._new = _first_read_since(events, set(program.escapes), measure.size, since)
        self._read = 0
        self._later: list[tuple[int, float]] = []
        self._in_one = self._in_many = -math.inf

    def ready_us(self, t: int) -> float:
        self._read += self._new[t]
        while self._later and self._later[0][0] < self._read:
            held, end_us = heappop(self._later)
            self._in_one = max(self._in_one, end_us - held * self._us_in_one)
            self._in_many = max(self._in_many, end_us - held * self._us_in_many)
        in_one = self._in_one + self._read * self._us_in_one + self._latency_us
        return max(in_one, self._in_many + self._read * self._us_in_many) + self._launch_us

    def leave(self, s: int, now: float) -> None:
        if s >= self._since:
            heappush(self._later, (self._read + self._room[s], now))


def _first_read_since(events: list[_Event], escapes: set[str], size: dict[str, int], since: int) -> list[int]:
    """By event after `since`, the size of what is read there and was not read from `since` on; what escapes, not ever before."""
    seen: set[str] = set()
    new = []
    for m, event in enumerate(events):
        new.append(sum(size[name] for name in event.reads - seen) if m > since else 0)
        seen |= event.reads if m >= since else event.reads & escapes
    return new


class _Drain:
    """Paths from the end of a step s through the reduce channel to a step t: the mirror image of `_Refill`.

    Of what completes from s on and before t, all that does not fit beside t has been launched after s and is over before t.
    """

    def __init__(self, schedule: Schedule, events: list[_Event], measure: _Measure, rest: _Rest) -> None:
        costs = schedule.program.costs
        self._events, self._latency_us, self._launch_us = events, costs.reduce.latency_us, costs.launch_us
        self._us_of_byte = 1 / costs.reduce.bytes_per_us
        totals = _Totals(_sizes(schedule.program, "grad_bytes"), max(measure.spare, default=0))
        self._room = [totals.up_to(spare) for spare in measure.spare]
        self._completed = [rest.num_bytes[0] - left for left in rest.num_bytes]  # before each event
        self._best: list[float] = []

    def ready_us(self, t: int) -> float:
        if self._events[t].step is None:  # it holds what has just completed, which is no more than complete here
            return -math.inf
        too_much = self._completed[t] - self._room[t]
        number = bisect_left(self._completed, too_much, hi=t)
        if not number:
            return -math.inf
        return self._best[number - 1] + too_much * self._us_of_byte + self._latency_us + self._launch_us

    def leave(self, s: int, now: float) -> None:
        best = now - self._completed[s] * self._us_of_byte
        self._best.append(max(best, self._best[-1]) if self._best else best)
