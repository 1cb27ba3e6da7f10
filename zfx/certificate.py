"""The certificate: a schedule beside what no schedule of the same program under the same limits can beat: in time, volume, memory.

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
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import accumulate

from .costs import Link
from .ir import Program, Schedule
from .limits import Limits
from .simulate import simulate
from .verify import reuse_distances

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a schedule takes, the least that any could take, and what it is that binds.

    Attributes:
        time_us: the simulated time of the step.
        volume_bytes: bytes gathered on each rank. Reductions are not counted: every schedule reduces the same.
        peak_bytes: most that is held at any moment: parameters, packing, gradients, activations and shards.
        time_binds: "compute", "gather channel", "reduce channel", "first gather + compute + last reduction" or "critical path".
        volume_binds: "first reads", or the limits that force parameters to be gathered again.
        peak_binds: the step that needs so much, or the reduction.
    """

    time_us: float
    time_bound_us: float
    time_binds: str
    volume_bytes: int
    volume_bound_bytes: int
    volume_binds: str
    peak_bytes: int
    peak_bound_bytes: int
    peak_binds: str

    @property
    def time_ratio(self) -> float:
        """Achieved over bound: at least 1 for every schedule that the verifier accepts."""
        return _ratio(self.time_us, self.time_bound_us)

    @property
    def volume_ratio(self) -> float:
        return _ratio(self.volume_bytes, self.volume_bound_bytes)

    @property
    def peak_ratio(self) -> float:
        return _ratio(self.peak_bytes, self.peak_bound_bytes)


def certify(schedule: Schedule) -> Certificate:
    """The certificate of a schedule. A time that misses its bound by less than one part in 1e9 is rounding, and equal to it.

    Cost: O(n log n) in steps and reads.
    Reference: Belady, *A study of replacement algorithms for a virtual-storage computer*, 1966; Cao, Felten, Karlin, Li, *A study
    of integrated prefetching and caching strategies*, 1995; Hutchinson, Sanders, Vitter, *Duality between prefetching and queued
    writing with parallel disks*, 2005.

    Example:
        >>> from zfx.ir import Bucket, Instruction, Parameter, Step
        >>> program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",), duration_us=5.0),))
        >>> run = tuple(Instruction(kind, 0, ("w",), 0) for kind in ("all_gather", "wait")) + (Instruction("release", 1, ("w",)),)
        >>> certificate = certify(Schedule(program, Limits(), (Bucket(0, "all_gather", ("w",)),), run))
        >>> certificate.time_ratio, certificate.time_binds, certificate.volume_bound_bytes
        (1.0, 'first gather + compute + last reduction', 40)
    """
    simulation = simulate(schedule)
    measures = _measures(schedule.program, schedule.limits)
    volume = _volume(schedule, measures)
    times = _times(schedule, measures, volume)
    time_us, time_bound_us = simulation.finish_us, max(times.values())
    if math.isclose(time_us, time_bound_us, rel_tol=_ROUNDING):
        time_bound_us = time_us
    peak_bound_bytes, peak_binds = max(_peaks(schedule.program), key=lambda row: row[0])
    return Certificate(
        time_us,
        time_bound_us,
        next(name for name, us in times.items() if us >= time_bound_us or math.isclose(us, time_bound_us, rel_tol=_ROUNDING)),
        sum(span.num_bytes for span in simulation.spans if span.kind == "all_gather"),
        volume.total_bytes,
        volume.binds,
        simulation.peak.total,
        peak_bound_bytes,
        peak_binds,
    )


def _ratio(achieved: float, bound: float) -> float:
    return 1.0 if achieved == bound else achieved / bound if bound else math.inf


# ------------------------------------------------------------------------------------------------------ what the limits leave


@dataclass(frozen=True, slots=True)
class _Measure:
    """One hard limit.

    Attributes:
        name: its field in `Limits`.
        size: what each parameter takes of it.
        spare: by step, what the limit leaves beside all that must be there while the step runs.
        bytes_of_one: the fewest bytes of parameters that one unit of size can stand for.
    """

    name: str
    size: dict[str, int]
    spare: list[int]
    bytes_of_one: Fraction


def _measures(program: Program, limits: Limits) -> list[_Measure]:
    num_bytes = {p.name: p.num_bytes for p in program.parameters}
    size = {p.name: p.num_elements for p in program.parameters}
    spare = [limits.max_live_parameters - need for need in _needs(program, size)]
    least = min((Fraction(num_bytes[name], n) for name, n in size.items() if n), default=Fraction(0))
    measures = [_Measure("max_live_parameters", size, spare, least)]
    if limits.memory_budget is not None:
        spare = [limits.memory_budget - held for held in _held(program)]
        measures.append(_Measure("memory_budget", num_bytes, spare, Fraction(1)))
    return measures


def _needs(program: Program, size: dict[str, int]) -> list[int]:
    """By step, the size of what it reads and of what has escaped: gathered in every schedule."""
    escapes, not_yet, escaped, needs = set(program.escapes), set(program.escapes), 0, []
    for step in program.steps:
        names = set(step.reads)
        escaped += sum(size[name] for name in names & not_yet)
        not_yet -= names
        needs.append(escaped + sum(size[name] for name in names - escapes))
    return needs


def _held(program: Program) -> list[int]:
    """By step, bytes that every schedule holds while it runs."""
    needs = _needs(program, {p.name: p.num_bytes for p in program.parameters})
    return [
        program.static_bytes + step.other_bytes + need + gradients
        for step, need, gradients in zip(program.steps, needs, _completing_bytes(program))
    ]


def _completions(program: Program) -> dict[str, tuple[int, int]]:
    """For each gradient the first and the last step that completes it. It is held in between, and reduced after that."""
    found: dict[str, tuple[int, int]] = {}
    for t, step in enumerate(program.steps):
        found.update({name: (found.get(name, (t, t))[0], t) for name in step.completes})
    return found


def _completing_bytes(program: Program) -> list[int]:
    change, size = [0] * (len(program.steps) + 1), {p.name: p.grad_bytes for p in program.parameters}
    for name, (first, last) in _completions(program).items():
        change[first] += size[name]
        change[last + 1] -= size[name]
    return list(accumulate(change))[:-1]


def _in_units(room: int, sizes: Iterable[int]) -> int:
    """The most of `room` that sums of these sizes can fill: a multiple of their greatest common divisor."""
    unit = math.gcd(*sizes)
    return room // unit * unit if unit else 0


def _peaks(program: Program) -> Iterator[tuple[int, str]]:
    """What must be held at some moment, and which: while a step runs, or twice over while a gradient is reduced."""
    yield program.static_bytes, "shards"
    for held, step in zip(_held(program), program.steps):
        yield held, f"step {step.name}"
    size = {p.name: p.grad_bytes for p in program.parameters}
    others = [step.other_bytes for step in program.steps] + [0]
    least_from = list(accumulate(reversed(others), min))[::-1]
    for name, (_, last) in _completions(program).items():
        yield program.static_bytes + 2 * size[name] + least_from[last + 1], f"reduction of {name}"


# ------------------------------------------------------------------------------------------------------------------ the volume


@dataclass(frozen=True, slots=True)
class _Volume:
    """By step: the bytes that must have been gathered before it runs, and in how many collectives at the least."""

    num_bytes: list[float]
    num_buckets: list[int]
    total_bytes: int
    binds: str


@dataclass(frozen=True, slots=True)
class _Gap:
    """A parameter is read at `stop`, and not between `start` and there; at -1 it may have been carried in."""

    name: str
    start: int
    stop: int


def _volume(schedule: Schedule, measures: list[_Measure]) -> _Volume:
    program, limits = schedule.program, schedule.limits
    num_steps, num_bytes = len(program.steps), {p.name: p.num_bytes for p in program.parameters}
    shares = _gather_shares(program, limits)
    share_of_byte = _share_of_byte(program, shares)
    firsts, wide, gaps = _gathers(schedule)
    sure_bytes, sure_shares, sure_gathers = [0] * num_steps, [0.0] * num_steps, [0] * num_steps
    for name, t in (*firsts, *wide):
        sure_bytes[t] += num_bytes[name]
        sure_shares[t] += shares[name]
        sure_gathers[t] += 1
    again = [(_given_up(num_steps, gaps, m), m) for m in measures]
    forced = [max(row) for row in zip(*([size * float(m.bytes_of_one) for size in sizes] for sizes, m in again))]
    sums = zip(accumulate(sure_bytes), accumulate(sure_shares), accumulate(sure_gathers), forced)
    rows = [(b + f, max(_at_least(s + f * share_of_byte), int(n > 0 or f > 0))) for b, s, n, f in sums]
    most, binds = max((math.ceil(sizes[-1] * m.bytes_of_one) if sizes else 0, m.name) for sizes, m in again)
    reasons = [*(["max_reuse_distance"] if wide else []), *([binds] if most else [])]
    return _Volume(
        [row[0] for row in rows], [row[1] for row in rows], sum(sure_bytes) + most, " and ".join(reasons) or "first reads"
    )


def _gathers(schedule: Schedule) -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[_Gap]]:
    """First reads; reads after gaps over which `max_reuse_distance` lets nothing stay; the other gaps. What escapes has none."""
    program, limits = schedule.program, schedule.limits
    carried_in, escapes = program.window in ("middle", "last"), set(program.escapes)
    firsts, gaps = [], []
    latest: dict[str, int] = {}
    for t, step in enumerate(program.steps):
        for name in dict.fromkeys(step.reads):
            if name in latest or carried_in:
                if name not in latest or name not in escapes:
                    gaps.append(_Gap(name, latest.get(name, -1), t))
            else:
                firsts.append((name, t))
            latest[name] = t
    wide: list[_Gap] = []
    if limits.max_reuse_distance < 2 * sum(p.num_elements for p in program.parameters):
        small = {p.name for p in program.parameters if p.numel <= limits.param_persistence_threshold}
        inner = sorted((g for g in gaps if g.start >= 0 and g.name not in small), key=lambda g: (g.start, g.stop, g.name))
        distances = reuse_distances(schedule, [(g.start, g.stop, g.name) for g in inner])
        wide = [gap for gap, distance in zip(inner, distances) if distance > limits.max_reuse_distance]
    return firsts, [(gap.name, gap.stop) for gap in wide], sorted(set(gaps) - set(wide), key=lambda g: (g.start, g.stop, g.name))


def _given_up(num_steps: int, gaps: Iterable[_Gap], measure: _Measure) -> list[int]:
    """By step, the least size that is lost over gaps which end by then, if what is needed last is given up first."""
    opening: dict[int, list[_Gap]] = defaultdict(list)
    for gap in gaps:
        if gap.start + 1 < gap.stop:
            opening[gap.start + 1].append(gap)
    open_sizes: dict[int, int] = defaultdict(int)  # by the step where the gaps end
    needed_last: list[int] = []
    lost, held = [0] * num_steps, 0
    sizes = set(measure.size.values())
    for t in range(num_steps):
        held -= open_sizes.pop(t, 0)
        for gap in opening[t]:
            if gap.stop not in open_sizes:
                heappush(needed_last, -gap.stop)
            open_sizes[gap.stop] += measure.size[gap.name]
            held += measure.size[gap.name]
        excess = held - _in_units(measure.spare[t], sizes)
        while excess > 0 and open_sizes:
            stop = -needed_last[0]
            amount = min(open_sizes[stop], excess)
            lost[stop] += amount
            held -= amount
            excess -= amount
            open_sizes[stop] -= amount
            if not open_sizes[stop]:
                del open_sizes[stop]
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


# -------------------------------------------------------------------------------------------------------------------- the time


def _times(schedule: Schedule, measures: list[_Measure], volume: _Volume) -> dict[str, float]:
    """Every bound on the time, by name; the plainest first, since that is what is named where several bind."""
    program, costs = schedule.program, schedule.program.costs
    rest = _Rest(schedule)
    num_gathers = max(volume.num_buckets, default=0)
    compute_us = 0.0
    for step in program.steps:
        compute_us += step.duration_us
    return {
        "compute": compute_us + costs.launch_us * (num_gathers + rest.num_buckets[0]),
        "gather channel": _busy_us(costs.gather, num_gathers, max(volume.num_bytes, default=0.0)),
        "reduce channel": rest.us(0),
        "first gather + compute + last reduction": _in_a_row(program, volume, rest),
        "critical path": _critical_path(schedule, measures, volume, rest),
    }


def _busy_us(link: Link, num_buckets: int, num_bytes: float) -> float:
    return num_buckets * link.latency_us + num_bytes / link.bytes_per_us if num_buckets else 0.0


class _Rest:
    """By step, what is still to be reduced once it is over: the gradients that complete there or later."""

    def __init__(self, schedule: Schedule) -> None:
        program = schedule.program
        self._link, num_steps = program.costs.reduce, len(program.steps)
        size = {p.name: p.grad_bytes for p in program.parameters}
        shares = _shares(program, schedule.limits.reduce_bucket_size)
        num_bytes, filled, count = [0] * (num_steps + 1), [0.0] * (num_steps + 1), [0] * (num_steps + 1)
        for name, (_, last) in _completions(program).items():
            num_bytes[last] += size[name]
            filled[last] += shares[name]
            count[last] += 1
        sums = [list(accumulate(reversed(row)))[::-1] for row in (num_bytes, filled, count)]
        self.num_bytes = sums[0]
        self.num_buckets = [max(_at_least(share), int(number > 0)) for share, number in zip(*sums[1:])]

    def us(self, step: int) -> float:
        return _busy_us(self._link, self.num_buckets[step], self.num_bytes[step])


def _in_a_row(program: Program, volume: _Volume, rest: _Rest) -> float:
    """What the first read needs is gathered, the steps from there to the last completion run, what is left is reduced."""
    costs = program.costs
    first = next((t for t, number in enumerate(volume.num_buckets) if number), None)
    last = max((t for _, t in _completions(program).values()), default=None)
    now = 0.0
    finish = 0.0
    for t, step in enumerate(program.steps):
        if t == first:
            now = max(now, _busy_us(costs.gather, volume.num_buckets[t], volume.num_bytes[t]) + costs.launch_us)
        now += step.duration_us
        if t == last:
            finish = now + costs.launch_us + rest.us(t)
    return max(now, finish)


def _critical_path(schedule: Schedule, measures: list[_Measure], volume: _Volume, rest: _Rest) -> float:
    """The longest path to the finish, over all pairs of steps between which a limit forces something to be gathered or reduced."""
    costs = schedule.program.costs
    paths: list[_Refill | _Drain] = [_Refill(schedule, m) for m in measures]
    paths += [_Drain(schedule, m, rest) for m in measures if m.name == "memory_budget"]
    now = finish = 0.0
    for t, step in enumerate(schedule.program.steps):
        if volume.num_buckets[t]:
            now = max(now, _busy_us(costs.gather, volume.num_buckets[t], volume.num_bytes[t]) + costs.launch_us)
        now = max(now, *(path.ready_us(t) for path in paths)) + step.duration_us
        for path in paths:
            path.leave(t, now)
        if rest.num_buckets[t]:
            finish = max(finish, now + costs.launch_us + rest.us(t))
    return max(now, finish)


class _Refill:
    """Paths from the end of a step s through the gather channel to the start of a step t, both in one phase.

    `P(t)`: the size of all that the phase reads up to step t, each parameter once. Beside what s reads itself there is room for
    `spare(s)`, so `P(t) - P(s) - spare(s)` is launched after s, in one collective or more, and over before t. Since only the
    difference of `P(t)` and `Q(s) = P(s) + spare(s)` counts, one s is the best for all t, among those with `Q(s) < P(t)`.
    """

    def __init__(self, schedule: Schedule, measure: _Measure) -> None:
        program, costs = schedule.program, schedule.program.costs
        self._turn, self._latency_us, self._launch_us = program.turn, costs.gather.latency_us, costs.launch_us
        sizes = set(measure.size.values())
        self._room = [_in_units(spare, sizes) for spare in measure.spare]
        self._new = _new_in_phase(program, measure.size)
        share = _share_of_byte(program, _gather_shares(program, schedule.limits))
        one = float(measure.bytes_of_one)
        self._us_in_one = one / costs.gather.bytes_per_us
        self._us_in_many = self._us_in_one + one * share * self._latency_us
        self._start_phase()

    def _start_phase(self) -> None:
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

    def leave(self, t: int, now: float) -> None:
        if t == self._turn:
            self._start_phase()
        heappush(self._later, (self._read + self._room[t], now))


def _new_in_phase(program: Program, size: dict[str, int]) -> list[int]:
    """By step, the size of what its phase reads for the first time; what escapes only once. The turn starts the backward, too."""
    seen: set[str] = set()
    escapes, new = set(program.escapes), []
    for step in program.steps:
        new.append(sum(size[name] for name in set(step.reads) - seen))
        seen |= set(step.reads)
        if step.phase == "turn":
            seen = (seen & escapes) | set(step.reads)
    return new


class _Drain:
    """Paths from the end of a step s through the reduce channel to the start of a step t: the mirror image of `_Refill`.

    What completes from s to t - 1 and does not fit in `spare(t)` has been launched after s and is over before t.
    """

    def __init__(self, schedule: Schedule, measure: _Measure, rest: _Rest) -> None:
        program, costs = schedule.program, schedule.program.costs
        self._latency_us, self._launch_us = costs.reduce.latency_us, costs.launch_us
        self._us_of_byte = 1 / costs.reduce.bytes_per_us
        sizes = {p.grad_bytes for p in program.parameters}
        self._room = [_in_units(spare, sizes) for spare in measure.spare]
        self._completed = [rest.num_bytes[0] - left for left in rest.num_bytes]  # before each step
        self._best: list[float] = []

    def ready_us(self, t: int) -> float:
        too_much = self._completed[t] - self._room[t]
        number = bisect_left(self._completed, too_much, hi=t)
        if not number:
            return -math.inf
        return self._best[number - 1] + too_much * self._us_of_byte + self._latency_us + self._launch_us

    def leave(self, t: int, now: float) -> None:
        best = now - self._completed[t] * self._us_of_byte
        self._best.append(max(best, self._best[-1]) if self._best else best)


__all__ = ["Certificate", "certify"]
