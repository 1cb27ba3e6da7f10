"""Where each gather is launched: as early as memory allows, then as late as time allows.

    step                0    1    2    3    4
    first read                         g
    memory allows       .    x    x    x           earliest: point 1
    time allows              =========g            the transfer takes two steps: launching at 1 is in time ...
    on a faster link               ===g            ... and at 2 as well, with less memory held

With the order of gathers and their releases fixed, both answers are exact, and both take linear time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from zfx.ir import Kind, Schedule

from .memory import bytes_left, element_room, gathered_bytes, gathered_elements, gradient_bytes, secondary_bytes
from .timeline import Event, Gather, Timeline, agenda, read, turn_of, with_launches, write
from .timing import simulate
from .view import actual_us


def launch_early(schedule: Schedule) -> Schedule:
    """Launch every gather at the earliest point at which it fits, with all that follows, under the limits.

    Let K(t) be the longest prefix of the gathers that, counting what is still live at t, fits at t, and k*(t) the least of K
    from t on. A gather g may be launched at t iff k*(t) > g; never before an earlier interval of one of its parameters has
    ended, nor before the turn if it is for the backward.

    Guarantee: no placement with this order and these releases launches any gather earlier, or has a shorter simulated time;
    more memory never costs time. Cost: linear (going back in time, the prefix only ever shrinks).

    Raises:
        ValueError: the gathers do not even fit when they are launched at their first reads; no earlier pass leaves such.

    Reference: Albers, Garg, Leonardi, *Minimizing stall time in single and parallel disk systems*, JACM 2000.
    """
    timeline = read(schedule)
    return write(with_launches(timeline, earliest_launches(timeline)))


def earliest_launches(timeline: Timeline, not_before: Sequence[int] | None = None) -> list[int]:
    """The point of each gather's launch in `launch_early`; `not_before` bounds them from below."""
    fits = _longest_prefixes(timeline)
    launches: list[int] = []
    point = 0
    for index, (gather, ready) in enumerate(zip(timeline.gathers, _ready_points(timeline))):
        point = max(point, ready)
        while point < len(fits) and fits[point] <= index:
            point += 1
        if point > gather.wait:
            raise ValueError(f"gather {index} does not fit the limits at its first read, step {gather.wait}")
        if not_before is not None:
            point = max(point, min(not_before[index], gather.wait))
        launches.append(point)
    return launches


def _ready_points(timeline: Timeline) -> list[int]:
    """The points before which each gather must not be launched, memory aside."""
    turn = turn_of(timeline.program)
    ended = {interval.parameter.name: interval.last + 1 for interval in timeline.carried}
    ready = []
    for gather in timeline.gathers:
        free = max(ended.get(i.parameter.name, 0) for i in gather.members)
        ready.append(max(free, turn + 1) if gather.wait > turn else free)
        ended.update({i.parameter.name: i.last + 1 for i in gather.members})
    return ready


def _longest_prefixes(timeline: Timeline) -> list[int]:
    """k*(t) for every point: how many gathers may have been launched once point t is over."""
    num_steps, gathers = len(timeline.program.steps), timeline.gathers
    carried = replace(timeline, gathers=())
    element_limit = element_room(carried) - gathered_elements(carried)
    byte_limit = bytes_left(carried, gathered_bytes, gradient_bytes, lambda _: secondary_bytes(timeline))
    arriving = _live_until(gathers)
    elements, num_bytes = [0] * len(gathers), [0] * len(gathers)  # what each gather holds at `point` if launched by then
    total_elements = total_bytes = 0
    count = len(gathers)

    def shrink(max_elements: float, max_bytes: float) -> None:
        nonlocal count, total_elements, total_bytes
        if num_steps and (max_elements < 0 or max_bytes < 0):
            raise ValueError("what is held besides gathers does not fit the limits")
        while count and (total_elements > max_elements or total_bytes > max_bytes):
            count -= 1
            total_elements -= elements[count]
            total_bytes -= num_bytes[count]

    fits = [0] * num_steps
    for point in range(num_steps, -1, -1):
        for index, more_elements, more_bytes in arriving.get(point, ()):
            elements[index] += more_elements
            num_bytes[index] += more_bytes
            if index < count:
                total_elements += more_elements
                total_bytes += more_bytes
        if point < num_steps:
            shrink(element_limit.during[point], byte_limit.during[point])
            fits[point] = count
        shrink(element_limit.before[point], byte_limit.before[point])
    return fits


def _live_until(gathers: tuple[Gather, ...]) -> dict[int, list[tuple[int, int, int]]]:
    """By step: what is held for the last time there, as (gather, elements, bytes). A packing buffer goes at the wait."""
    until: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for index, gather in enumerate(gathers):
        for interval in gather.members:
            until[interval.last].append((index, interval.parameter.num_elements, interval.parameter.num_bytes))
        if gather.packed:
            until[gather.wait].append((index, gather.packing_elements, gather.packing_bytes))
    return until


def launch_late(schedule: Schedule) -> Schedule:
    """Launch every gather as late as the simulated time allows: the same time, less memory held.

    From the last gather to the first, each moves to the latest point that leaves the finish where it is. A launch is one edge of
    the event graph, from compute at point p to the transfer. The longest path through it is

        (compute reaches p)  +  transfer  +  (longest path from the transfer's end to the finish)

    The first term does not depend on this gather or later ones, as each is launched at or before its own first read; the last
    does not depend on earlier ones. So going backwards, each gather's latest point is exact without simulating again, and
    since the finish is kept after every move, so it is after all of them.

    Guarantee: the simulated finish stays (to one part in 1e9, for rounding), and no gather is launched earlier than it was. Cost:
    O(steps + gathers * log(steps)).
    Reference: Hutchinson, Sanders, Vitter, *Duality between prefetching and queued writing with parallel disks*, 2005.
    """
    return write(launched_late(read(schedule), actual_us(schedule.program)))


def launched_late(timeline: Timeline, durations_us: Sequence[float]) -> Timeline:
    """`launch_late` on a timeline, for the durations given."""
    costs, gathers, rows, num_steps = timeline.program.costs, timeline.gathers, agenda(timeline), len(durations_us)
    times, reductions = simulate(timeline, durations_us), _ReductionTails(timeline)
    deadline = times.finish_us * (1 + 1e-9)
    launches = [gather.launch for gather in gathers]
    moved: dict[int, list[float]] = defaultdict(list)  # by launch point: transfer and tail of the gathers moved there
    queue_tails: dict[int, float] = {}  # of gathers, from the start of the transfer to the finish
    latest, queue_tail = num_steps, 0.0  # queue_tail: the longest path from the start of the next transfer to the finish
    tail = 0.0  # the longest path from compute, here, to the finish
    for point in range(num_steps + 1, -1, -1):
        if point < num_steps:
            tail += durations_us[point]
        row = rows.get(point, [])
        while row and row[-1][0] == "wait":
            index = row.pop()[1]
            tail += costs.busy_us(gathers[index].num_bytes)
            queue_tail = gathers[index].us(costs) + max(queue_tail, tail)
            latest = min(latest, point)
            in_time = bisect_right(times.launch_us, deadline - queue_tail, hi=latest + 1) - 1
            if in_time > launches[index]:
                launches[index] = in_time
                moved[in_time].append(queue_tail)
            queue_tails[index] = queue_tail
            latest = launches[index] - (gathers[index].ahead > 0 and launches[index] == gathers[index].launch)
        tail = max([tail, *moved.get(point, ())])
        for kind, index in reversed(row):
            if kind != "all_gather":
                tail = reductions.pass_event(kind, index, tail)
            elif launches[index] == point:
                tail = max(tail, queue_tails[index])
    late = (g if launches[i] == g.launch else replace(g, launch=launches[i], ahead=0) for i, g in enumerate(gathers))
    return replace(timeline, gathers=tuple(late))


class _ReductionTails:
    """Longest paths to the finish that lead through reductions, taken event by event from the last to the first."""

    def __init__(self, timeline: Timeline) -> None:
        self._costs, self._reductions = timeline.program.costs, timeline.reductions
        self._ends: dict[Event, float] = {}  # the longest path from where each is waited for to the finish
        self._queue_tails = {"reduce_scatter": 0.0, "all_reduce": 0.0}

    def pass_event(self, kind: Kind, index: int, tail: float) -> float:
        """From the tail of compute after what is done for a reduction to the tail before it."""
        costs = self._costs
        if kind in ("wait_reduce", "wait_all_reduce"):
            self._ends[kind, index] = tail
            return tail
        if kind == "reduce_scatter":
            num_bytes, end = self._reductions[index].num_bytes, self._ends["wait_reduce", index]
            took_us = costs.reduce_us(num_bytes)
        else:
            num_bytes, end = self._reductions[index].across_bytes, self._ends["wait_all_reduce", index]
            took_us = costs.all_reduce_us(num_bytes)
        self._queue_tails[kind] = took_us + max(end, self._queue_tails[kind])
        return costs.busy_us(num_bytes) + max(tail, self._queue_tails[kind])
