"""Which reads of a parameter share one gather: a parameter is kept over a gap between two reads, or released and gathered again.

    reads     a   b   c   b   a        the gap of b is 1 parameter wide (c), the gap of a is 2 wide (b and c)
              [a             a]        kept if |b| + |c| <= max_reuse_distance
                  [b     b]            kept if |c|       <= max_reuse_distance

The width of a gap is its reuse distance: the elements of the other parameters that are read inside it. On a chain of equal
layers, a bound on it is Belady's rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from zfx.ir import Parameter, Program, Schedule

from .memory import byte_room, element_room, gathered_bytes, gathered_elements, gradient_bytes
from .timeline import Gather, Interval, Timeline, read, turn_of, unique, write


@dataclass(frozen=True, slots=True)
class Gap:
    """Two consecutive reads of a parameter, and the elements of other parameters read strictly between them."""

    parameter: Parameter
    start: int
    stop: int
    distance: int


def keep_parameters(schedule: Schedule) -> Schedule:
    """Keep parameters over the gaps that the limits allow; gather again after the others.

    A gap is kept if its distance is at most `max_reuse_distance`, or if the parameter has at most
    `param_persistence_threshold` elements. Where that does not fit `max_live_parameters` or `memory_budget`, gaps are given
    up, the widest first, persistent parameters last. Parameters kept over the turn end up in `Schedule.kept`.

    Guarantee: fits the limits if gathering on demand does. Every interval is a gather of its own, launched at its first read.
    Cost: O(reads * log(steps)).
    Reference: Belady's rule; Cao, Felten, Karlin, Li, *A study of integrated prefetching and caching strategies*, 1995.
    """
    timeline = read(schedule)
    program, limits = timeline.program, timeline.limits
    escapes = set(program.escapes)
    every = tuple(gaps(program))
    wanted = [
        gap
        for gap in every
        if gap.parameter.name not in escapes
        and (gap.distance <= limits.max_reuse_distance or gap.parameter.numel <= limits.param_persistence_threshold)
    ]
    on_demand = replace(timeline, gathers=_intervals(program, set()))
    kept = _once_kept_stays(every, turn_of(program), {(gap.parameter.name, gap.start) for gap in _that_fit(wanted, on_demand)})
    return write(replace(timeline, gathers=_intervals(program, kept)))


def gaps(program: Program) -> Iterator[Gap]:
    """Every gap with its reuse distance, in order of the later read.

    `tree` is a Fenwick tree over steps that holds the size of each (parameter, phase) at its latest read: a range sum over it
    counts each parameter once. The turn belongs to the forward. O(reads * log(steps)).
    """
    parameters = {p.name: p for p in program.parameters}
    tree = [0] * (len(program.steps) + 1)
    latest: dict[tuple[str, bool], int] = {}
    previous: dict[str, int] = {}

    def add(step: int, amount: int) -> None:
        step += 1
        while step < len(tree):
            tree[step] += amount
            step += step & -step

    def total(num_steps: int) -> int:
        amount = 0
        while num_steps > 0:
            amount += tree[num_steps]
            num_steps &= num_steps - 1
        return amount

    for t, step in enumerate(program.steps):
        names = unique(step.reads)
        for name in names:
            if name in previous:
                start = previous[name]
                yield Gap(parameters[name], start, t, total(t) - total(start + 1))
            previous[name] = t
        for name in names:
            key, size = (name, step.phase == "backward"), parameters[name].num_elements
            if key in latest:
                add(latest[key], -size)
            latest[key] = t
            add(t, size)


def _once_kept_stays(every: tuple[Gap, ...], turn: int, kept: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Give up the gap over the turn of a parameter that would be gathered again later in the backward.

    What is kept over the turn reaches the backward as a saved tensor, in the place of the shard: there is nothing left there to
    gather it from. Giving a gap up only holds less.
    """
    again = {gap.parameter.name for gap in every if gap.start > turn and (gap.parameter.name, gap.start) not in kept}
    crossing = {(gap.parameter.name, gap.start) for gap in every if gap.start <= turn < gap.stop}
    return {key for key in kept if key not in crossing or key[0] not in again}


def _intervals(program: Program, kept: set[tuple[str, int]]) -> tuple[Gather, ...]:
    """One gather an interval, in order of first read; a read extends its interval if the gap before it starts in `kept`."""
    parameters = {p.name: p for p in program.parameters}
    num_steps, escapes = len(program.steps), set(program.escapes)
    rows: list[tuple[str, int]] = []
    last: list[int] = []
    row_of: dict[str, int] = {}
    for t, step in enumerate(program.steps):
        for name in unique(step.reads):
            if name in row_of and (name in escapes or (name, last[row_of[name]]) in kept):
                last[row_of[name]] = t
            else:
                row_of[name] = len(rows)
                rows.append((name, t))
                last.append(t)
    return tuple(
        Gather((Interval(parameters[name], first, num_steps if name in escapes else end),), launch=first)
        for (name, first), end in zip(rows, last)
    )


def _that_fit(wanted: list[Gap], on_demand: Timeline) -> Iterator[Gap]:
    """The wanted gaps, less those that must be given up for the limits to hold at every moment.

    One sweep over the moments: a gap that starts is added; while too much is held, the worst open gap is given up. A gap from
    read a to read b holds its parameter in `before[a+1 .. b]` and `during[a+1 .. b-1]`: at a and b it is needed anyhow.
    """
    elements = element_room(on_demand) - gathered_elements(on_demand)
    num_bytes = byte_room(on_demand) - gathered_bytes(on_demand) - gradient_bytes(on_demand)
    threshold = on_demand.limits.param_persistence_threshold
    starting: dict[int, list[int]] = defaultdict(list)
    stopping: dict[int, list[int]] = defaultdict(list)
    for index, gap in enumerate(wanted):
        starting[gap.start + 1].append(index)
        stopping[gap.stop].append(index)
    open_gaps: set[int] = set()
    worst_first: list[tuple[bool, int, int]] = []
    held_elements = held_bytes = 0

    def close(index: int) -> None:
        nonlocal held_elements, held_bytes
        open_gaps.remove(index)
        held_elements -= wanted[index].parameter.num_elements
        held_bytes -= wanted[index].parameter.num_bytes

    def give_up(element_limit: float, byte_limit: float) -> None:
        while worst_first and (held_elements > element_limit or held_bytes > byte_limit):
            index = heappop(worst_first)[2]
            if index in open_gaps:
                close(index)

    for point in range(len(on_demand.program.steps) + 1):
        for index in starting[point]:
            gap = wanted[index]
            open_gaps.add(index)
            held_elements += gap.parameter.num_elements
            held_bytes += gap.parameter.num_bytes
            heappush(worst_first, (gap.parameter.numel <= threshold, -gap.distance, index))
        give_up(elements.before[point], num_bytes.before[point])
        for index in stopping[point]:
            if index in open_gaps:
                close(index)
                yield wanted[index]
        if point < len(elements.during):
            give_up(elements.during[point], num_bytes.during[point])


