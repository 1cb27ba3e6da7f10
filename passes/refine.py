"""The last word: small changes of the whole schedule, as long as they make it faster.

The passes before this one decide one thing after another: what is kept, then buckets of gathers, then buckets of reductions, then
points. Each is best given those before it; the whole need not be. Here the whole is judged by its time, and one change may lead
to another:

    planned    keep a, reduce b at once         a cannot be kept while b's gradient is exchanged
    refined    reduce b with a, later           now it can
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from zfx.ir import Program, Schedule

from .choose import placed_again
from .moves import Choices, moves
from .place import launch_late
from .settle import settled
from .timeline import Gather, Interval, Reduction, Timeline, read, write
from .timing import Times, simulate
from .view import actual_us, condensed, rows_of, structural_us
from .wait import wait_reductions

# What one round may cost: in structures tried, for each bucket there is and in all, and in those times the points of each.
TRIALS_EACH, MAX_TRIALS, MIN_TRIALS, MAX_WORK = 24, 128, 8, 12_000
# What a round must gain for its result to be taken, as a fraction of the time; if it has fewer trials than the most, as much more.
LEAST_GAIN = 1e-3


def refine(schedule: Schedule) -> Schedule:
    """The schedule, or the fastest that a search over small changes of it finds, see `moves`.

    A search goes from the fastest structure that is known to all that are one change away from it, then from the next fastest, and
    so on, each placed by `settled`; the fastest of `MAX_TRIALS` is where the next search starts. It ends where one gains
    nothing to speak of (see `LEAST_GAIN`). A program with replicas is left alone: reductions in two stages are not settled yet; so
    is one that reshards.
    Structures are judged by the durations that all ranks share; the best is then placed by
    this rank's. Between micro-batches, what is kept and carried stays as it is, and neither forward nor backward may lose time.

    Guarantee: by `structural_us`, never slower than the argument. What it changes fits the limits. Cost: a round takes no more than
    `MAX_WORK` points to replay, whatever the program's size: large ones get few trials, and those that would get less than
    `MIN_TRIALS` none.
    Reference: Aarts and Lenstra, *Local search in combinatorial optimization*, 1997.
    """
    if schedule.program.replicas > 1 or schedule.program.reshard_to:
        return schedule
    best_us = _agreed(schedule).finish_us
    while (better := _round(schedule)) is not None:
        better_us = _agreed(better).finish_us
        if better_us >= best_us * (1 - 1e-9):  # placed by this rank's durations it is not what it was
            break
        schedule, best_us = better, better_us
    return schedule


def _agreed(schedule: Schedule) -> Times:
    """The times if all steps took what ranks agree on."""
    start, agreed_us = read(schedule), structural_us(schedule.program)
    return simulate(start if schedule.program.uniform else placed_again(start, agreed_us), agreed_us)


def _round(schedule: Schedule) -> Schedule | None:
    """A schedule that is faster by `LEAST_GAIN`, or None if none is found."""
    program, limits = schedule.program, schedule.limits
    short = condensed(program, limits)
    trials = min(MAX_TRIALS, MAX_WORK // (len(short.steps) + 1))
    if trials < MIN_TRIALS:
        return None
    gain = LEAST_GAIN * MAX_TRIALS / trials
    trials = min(trials, TRIALS_EACH * len(schedule.buckets))
    rows, start, agreed_us, before = rows_of(program, limits), read(schedule), structural_us(program), _agreed(schedule)
    found = _search(_shortened(start, short, rows), trials, before, before.finish_us * (1 - gain))
    if found is None:
        return None
    found = _lengthened(found, program, rows)
    best = settled(found, agreed_us)
    if best is None or simulate(best, agreed_us).finish_us >= before.finish_us * (1 - gain):
        return None
    if not program.uniform:
        best = settled(found, actual_us(program))
    return None if best is None else wait_reductions(launch_late(write(best)))


def _search(start: Timeline, trials: int, before: Times, below_us: float) -> Timeline | None:
    """The structure that finishes first of so many, if it does before that. What is changed next is the fastest that is known."""
    durations_us, choices = structural_us(start.program), Choices.of(start.program, start.limits)
    best, best_us = None, below_us
    seen = {_key(start)}
    queue: list[tuple[float, int, Timeline, Timeline, Times]] = []

    def tried(structure: Timeline) -> None:
        nonlocal best, best_us
        placed = settled(structure, durations_us)
        if placed is None:
            return
        times = simulate(placed, durations_us)
        heappush(queue, (times.finish_us, len(seen), structure, placed, times))
        if times.finish_us < best_us and (choices.over_turn or _no_half_slower(times, before)):
            best, best_us = structure, times.finish_us * (1 - 1e-9)

    tried(start)
    while queue and len(seen) <= trials:
        *_, structure, placed, times = heappop(queue)
        if not any((*times.gather_stalls_us, *times.reduce_stalls_us)):
            break
        for changed in moves(structure, placed, times, choices):
            if len(seen) > trials:
                break
            key = _key(changed)
            if key not in seen:
                seen.add(key)
                tried(changed)
    return best


def _no_half_slower(times: Times, before: Times) -> bool:
    """A micro-batch in the middle has its forward from one window, and its backward from another."""
    halves = ((t.forward_us, t.finish_us - t.forward_us) for t in (times, before))
    return all(now <= then * (1 + 1e-9) for now, then in zip(*halves))


def _key(structure: Timeline) -> Hashable:
    gathers = (tuple((i.parameter.name, i.first, i.last) for i in g.members) for g in structure.gathers)
    reductions = ((tuple(p.name for p in r.members), r.launch) for r in structure.reductions)
    return tuple(zip(gathers, ((g.wait, g.launch) for g in structure.gathers))), tuple(reductions)


def _shortened(timeline: Timeline, short: Program, rows: Sequence[range]) -> Timeline:
    """The structure in steps of the condensed program: without wishes."""
    starts = [row.start for row in rows]

    def row_of(step: int) -> int:
        return bisect_right(starts, step) - 1 if step < rows[-1].stop else len(rows)

    return replace(_moved(timeline, row_of, row_of, lambda point: 0), program=short)


def _lengthened(timeline: Timeline, program: Program, rows: Sequence[range]) -> Timeline:
    """The structure in steps of the program itself."""
    starts = [*(row.start for row in rows), len(program.steps)]
    lasts = [*(row.stop - 1 for row in rows), len(program.steps)]
    return replace(_moved(timeline, starts.__getitem__, lasts.__getitem__, starts.__getitem__), program=program)


def _moved(
    timeline: Timeline, first: Callable[[int], int], last: Callable[[int], int], launch: Callable[[int], int]
) -> Timeline:
    def interval(i: Interval) -> Interval:
        return Interval(i.parameter, first(i.first), last(i.last))

    gathers = (
        Gather(tuple(map(interval, g.members)), launch(g.launch), first(g.wait)) for g in timeline.gathers
    )
    points = [launch(r.launch) for r in timeline.reductions]
    reductions = (Reduction(r.members, point, point, point) for r, point in zip(timeline.reductions, points))
    return replace(timeline, gathers=tuple(gathers), reductions=tuple(reductions), carried=tuple(map(interval, timeline.carried)))
