"""Which gradients are reduced together.

    completes           a       b       c
    alone               [=a=]   [=b=]   [=c=]      reduce_scatter ... wait_reduce
    bucketed            (a      [==ab==]           a is held unreduced until b is complete
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf

from zfx.costs import Link
from zfx.ir import Parameter, Program, Schedule

from .memory import bytes_left, gathered_bytes
from .partition import Candidate, State, enough_bytes, partition
from .place import earliest_launches
from .timeline import Reduction, Timeline, completions_of, read, turn_of, with_launches, write
from .timing import simulate
from .view import structural_us


def bucket_reductions(schedule: Schedule) -> Schedule:
    """Partition the gradients, in order of completion, into buckets; each is launched right after its last member.

    A bucket has at most `reduce_bucket_size` elements, all complete on the same side of the turn, and `memory_budget` allows to
    hold the first until the last is complete. The partition that finishes first is chosen; among equals, the one that holds least
    bytes times steps, then the one with the fewest buckets. Time is that of reductions beside compute that launches and waits for
    the gathers as it does without reductions; where it stalls for them, launching takes no extra time, which the dynamic
    program does not foresee. With replicas, time is that of the slower of the two stages, and of both for the last bucket. Members
    below `costs.pack_threshold_bytes` travel packed if there are two or more.

    Guarantee: fits the limits if the argument does with every gradient reduced alone. Every reduction is waited for where it
    is launched; `wait_reductions` lets them overlap. Optimal where `partition` is, among buckets that are closed once larger
    ones would save next to nothing (`enough_bytes`). Depends on what ranks share, see `structural_us`. Cost: linear.
    References: Shi et al., *MG-WFBP*, 2019; the mirror of gathering: Hutchinson, Sanders, Vitter, *Duality between prefetching and
    queued writing with parallel disks*, 2005.
    """
    timeline = read(schedule)
    row = list(completion_order(schedule.program))
    runs = _cheapest_runs(timeline, row, structural_us(timeline.program))
    return write(launched_when_complete(timeline, row, runs))


def launched_when_complete(
    timeline: Timeline, row: Sequence[tuple[int, Parameter]], runs: Sequence[tuple[int, int]]
) -> Timeline:
    """Each run of the completion order as one reduction, launched and waited for right after its last member; small ones packed."""
    reductions = []
    for start, stop in runs:
        members = tuple(gradient for _, gradient in row[start:stop])
        small = tuple(p for p in members if p.grad_bytes < timeline.program.costs.pack_threshold_bytes)
        point = row[stop - 1][0] + 1
        reductions.append(Reduction(members, point, point, point, small if len(small) > 1 else ()))
    return replace(timeline, reductions=tuple(reductions))


def completion_order(program: Program) -> Iterator[tuple[int, Parameter]]:
    """(step, gradient that it completes)."""
    for step, gradients in enumerate(completions_of(program)):
        for gradient in gradients:
            yield step, gradient


def farthest(timeline: Timeline, row: Sequence[tuple[int, Parameter]], enough: float) -> list[int]:
    """By gradient, the end of the longest bucket that may begin with it, and that holds less than `enough` before its last."""
    turn, limit, rooms = turn_of(timeline.program), timeline.limits.reduce_bucket_size, _rooms(timeline, row)
    elements = list(accumulate((gradient.num_elements for _, gradient in row), initial=0))
    num_bytes = list(accumulate((gradient.grad_bytes for _, gradient in row), initial=0))
    across_bytes = list(accumulate((gradient.across_bytes for _, gradient in row), initial=0))
    reach, stop = [], 0
    for start, (first, _) in enumerate(row):
        stop = max(stop, start + 1)
        while (
            stop < len(row)
            and num_bytes[stop] - num_bytes[start] < enough
            and elements[stop + 1] - elements[start] <= limit
            and (first < turn) == (row[stop][0] < turn)
            and num_bytes[stop] - num_bytes[start] <= rooms[stop][0]
            and max(2 * (num_bytes[stop + 1] - num_bytes[start]), across_bytes[stop + 1] - across_bytes[start]) <= rooms[stop][1]
        ):
            stop += 1
        reach.append(stop)
    return reach


def _rooms(timeline: Timeline, row: Sequence[tuple[int, Parameter]]) -> list[tuple[float, float]]:
    """By gradient: the room for those before it in its bucket, from the completion of the one before it to its own; and the room
    for twice the bucket, if it ends with this gradient, where it is launched."""
    room = bytes_left(timeline, gathered_bytes)
    left: dict[int, int] = defaultdict(int)
    for step, gradient in row:
        left[step] += gradient.grad_bytes
    rooms: list[tuple[float, float]] = []
    before = -1
    for step, gradient in row:
        unreduced = inf
        if 0 <= before < step:
            stretch = (*room.before[before + 1 : step + 1], *room.during[before + 1 : step], room.during[step] - left[step])
            unreduced = min(stretch)
        left[step] -= gradient.grad_bytes
        rooms.append((unreduced, room.before[step + 1] - left[step]))
        before = step
    return rooms


def _cheapest_runs(
    timeline: Timeline, row: Sequence[tuple[int, Parameter]], durations_us: Sequence[float]
) -> list[tuple[int, int]]:
    costs = timeline.program.costs
    gathering = with_launches(replace(timeline, reductions=()), earliest_launches(timeline))
    times = simulate(gathering, durations_us)
    points = [step + 1 for step, _ in row]
    link = _link(timeline.program)
    extend = _Extend(timeline.program, link, row, [times.launch_us[point] for point in points])
    reach = farthest(timeline, row, enough_bytes(link, costs.launch_us))
    return partition(len(row), reach, extend, lambda state: max(times.finish_us + state.delay_us, state.channel_us))


def _link(program: Program) -> Link:
    """The time of a reduction. With replicas it has two stages, which follow on each other like two stations of a belt: the slower
    one says how many pass."""
    reduce, across = program.costs.reduce, program.costs.all_reduce
    num_bytes, across_bytes = (sum(getattr(p, size) for p in program.parameters) for size in ("grad_bytes", "across_bytes"))
    if program.replicas == 1 or not num_bytes or not across_bytes:
        return reduce
    bytes_per_us = min(reduce.bytes_per_us, across.bytes_per_us * num_bytes / across_bytes)
    return Link(max(reduce.latency_us, across.latency_us), bytes_per_us)


class _Extend:
    """One more bucket: from the state before its first member to the state after its launch. Two at most are in flight."""

    def __init__(self, program: Program, link: Link, row: Sequence[tuple[int, Parameter]], reached_us: Sequence[float]) -> None:
        self._costs, self._link, self._reached_us, self._row = program.costs, link, reached_us, row
        self._across = program.replicas > 1
        self._across_bytes = list(accumulate((gradient.across_bytes for _, gradient in row), initial=0))
        sizes = [gradient.grad_bytes for _, gradient in row]
        self._bytes = list(accumulate(sizes, initial=0))
        self._byte_steps = list(accumulate((size * step for size, (step, _) in zip(sizes, row)), initial=0))

    def __call__(self, state: State, start: int, stops: Sequence[int]) -> Iterator[tuple[int, Candidate]]:
        link, row, reached_us = self._link, self._row, self._reached_us
        for stop in stops:
            num_bytes, step = self._bytes[stop] - self._bytes[start], row[stop - 1][0]
            stretch = num_bytes * step - (self._byte_steps[stop] - self._byte_steps[start])
            now = max(reached_us[stop - 1] + state.delay_us, state.before_us) + self._costs.busy_us(num_bytes)
            end = max(now, state.channel_us) + link.latency_us + num_bytes / link.bytes_per_us
            if self._across and stop == len(row):
                end += self._other_stage_us(start)
            order = (now - reached_us[stop - 1], state.stretch + stretch, state.count + 1)
            yield stop, (end, order, state.channel_us, step + 1, start)

    def _other_stage_us(self, start: int) -> float:
        """What the last bucket, from `start` on, still takes once it has passed the slower stage, or before."""
        num_bytes, across_bytes = self._bytes[-1] - self._bytes[start], self._across_bytes[-1] - self._across_bytes[start]
        both_us = self._costs.reduce_us(num_bytes) + self._costs.all_reduce_us(across_bytes)
        return max(0.0, both_us + self._costs.busy_us(across_bytes) - self._link.us(num_bytes))
