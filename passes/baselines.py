"""How others place the same collectives, as schedules: what the planner is compared with, and never slower than.

    everything_early   each gather as early as memory allows           [a][b][c][d] at once, then whatever fits
    deepspeed_rule     a window of so many elements runs ahead         [a]+[b c] | [d e] ...
    fsdp2_rule         a block at a time, one block ahead              [block 0][block 1] | [block 2] | ...

Each states its rule as it would run, and falls back to less prefetching (or keeping) only where the limits, which those systems
do not have, would be broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zfx.ir import Limits, Program, Schedule

from .gather import farthest, merged
from .keep import Gap, allowed, gaps, keep_widest_last
from .place import earliest_launches
from .reduce import completion_order, launched_when_complete
from .reduce import farthest as farthest_reductions
from .timeline import Timeline, turn_of, with_launches, write
from .view import actual_us
from .wait import wait_when_over

Runs = list[tuple[int, int]]


def everything_early(program: Program, limits: Limits) -> Schedule:
    """What fits is kept, the widest gap is given up first, and every parameter is gathered and reduced alone, at the earliest."""
    timeline = keep_widest_last(program, limits, _within(program, limits))
    return _placed(timeline, [(i, i + 1) for i in range(len(timeline.gathers))], None, lambda first, member: False)


def deepspeed_rule(program: Program, limits: Limits) -> Schedule:
    """DeepSpeed's ZeRO-3 with a complete trace: where a step fetches what it reads, the next of the trace are fetched, too.

    A fetch gathers all that the step reads in one coalesced collective. Then, at the same point, a second one takes the next in
    order while it has at most `prefetch_bucket_size` elements and at most `max_live_parameters` are available. What is read again
    within `max_reuse_distance` is kept, and so is what is persistent. Gradients fill a bucket up to `reduce_bucket_size`.
    Left out: persistent parameters are gathered once a step here, and a step stands for a submodule.
    """
    timeline = keep_widest_last(program, limits, _within(program, limits))
    runs, not_before = _fetches(timeline)
    return _placed(timeline, runs, not_before, lambda first, member: True)


def fsdp2_rule(program: Program, limits: Limits) -> Schedule:
    """FSDP2 with a unit for each block: a unit is gathered whole, while the one before it computes, and released after use.

    A unit is what shares the prefix of its names up to the first number (`layers.3.mlp.up` belongs to `layers.3`); the rest is
    the root's, which is kept until the end of the backward. Units are gathered in order of first use; members of one that do
    not follow on each other in that order are gathered apart. Each unit's gradients are reduced together.
    """
    turn = turn_of(program)

    def stays(gap: Gap) -> bool:
        return not unit_of(gap.parameter.name) or (gap.start <= turn) == (gap.stop <= turn)

    timeline = keep_widest_last(program, limits, [gap for gap in _within(program, limits) if stays(gap)])
    names = [interval.parameter.name for interval in timeline.intervals]
    reach = _reach(timeline)
    runs: Runs = []
    start = 0
    while start < len(names):
        stop = start + 1
        while stop < reach[start] and unit_of(names[stop]) == unit_of(names[start]):
            stop += 1
        runs.append((start, stop))
        start = stop
    not_before = [0, *(timeline.gathers[start].wait for start, _ in runs)][: len(runs)]
    return _placed(timeline, runs, not_before, lambda first, member: unit_of(first) == unit_of(member))


BASELINES: tuple[Callable[[Program, Limits], Schedule], ...] = (deepspeed_rule, fsdp2_rule, everything_early)


def unit_of(name: str) -> str:
    """The block that a parameter belongs to, "" for the root's own.

    Example:
        >>> unit_of("model.layers.3.mlp.up.weight"), unit_of("embed.weight")
        ('model.layers.3', '')
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


def _within(program: Program, limits: Limits) -> list[Gap]:
    """The gaps that may be kept. None of these systems keeps anything over the seam between micro-batches."""
    return [gap for gap in allowed(gaps(program, adjacent=limits.memory_budget is not None), program, limits) if not gap.over_seam]


def _reach(timeline: Timeline) -> list[int]:
    return farthest(timeline, earliest_launches(timeline), lambda gather: float("inf"))


def _fetches(timeline: Timeline) -> tuple[Runs, list[int]]:
    """DeepSpeed's fetches, and the points at which they are issued."""
    gathers, limits = timeline.gathers, timeline.limits
    launches, reach = earliest_launches(timeline), _reach(timeline)
    sizes = [gather.members[0].parameter.num_elements for gather in gathers]
    released = sorted((gather.members[0].last + 1, size) for gather, size in zip(gathers, sizes))
    runs: Runs = []
    points: list[int] = []
    fetched, gone, available = 0, 0, 0

    def fetch(start: int, stop: int, point: int) -> None:
        nonlocal fetched, available
        runs.append((start, stop))
        points.append(point)
        fetched = stop
        available += sum(sizes[start:stop])

    for index, gather in enumerate(gathers):
        point = gather.wait
        while gone < len(released) and released[gone][0] <= point:
            available -= released[gone][1]
            gone += 1
        if fetched <= index:
            stop = index + 1
            while stop < reach[index] and gathers[stop].wait == point:
                stop += 1
            fetch(index, stop, point)
        last_here = index + 1 == len(gathers) or gathers[index + 1].wait > point
        if last_here and fetched < len(gathers):
            start, stop, elements = fetched, fetched, 0
            while (
                stop < reach[start]
                and launches[stop] <= point
                and elements + sizes[stop] <= min(limits.prefetch_bucket_size, limits.max_live_parameters - available)
            ):
                elements += sizes[stop]
                stop += 1
            if stop > start:
                fetch(start, stop, point)
    return runs, points


def _placed(timeline: Timeline, runs: Runs, not_before: Sequence[int] | None, joins: Callable[[str, str], bool]) -> Schedule:
    """The buckets launched at `not_before`, or as soon as there is room from then on. Gradients join while `joins` says so."""
    gathering = merged(timeline, runs)
    gathering = with_launches(gathering, earliest_launches(gathering, not_before))
    row = list(completion_order(gathering.program))
    reach = farthest_reductions(gathering, row, float("inf"))
    reductions: Runs = []
    start = 0
    while start < len(row):
        stop = start + 1
        while stop < reach[start] and joins(row[start][1].name, row[stop][1].name):
            stop += 1
        reductions.append((start, stop))
        start = stop
    reducing = launched_when_complete(gathering, row, reductions)
    return write(wait_when_over(reducing, actual_us(timeline.program)))
