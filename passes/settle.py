"""From what is gathered and reduced together, in which order, to where it all stands: the best placement of a given structure.

    structure    gathers [a] [b c] [a]     reductions [c] [a b]             members and order; points are wishes
    settled      gathers as early as memory allows; reductions from their wish on, as soon as memory allows; waits where due
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from zfx.ir import Parameter

from .gather import packed
from .memory import bytes_left, gathered_bytes
from .place import earliest_launches, launched_late
from .timeline import Gather, Reduction, Timeline, completions_of, turn_of, with_launches
from .wait import wait_when_over


def settled(timeline: Timeline, durations_us: Sequence[float]) -> Timeline | None:
    """The structure, placed for these durations; None if it does not fit the limits.

    The launch points in the argument are wishes: a gather is launched no earlier than that, and else as early as memory allows. A
    reduction is launched at its point or, if `memory_budget` does not allow that, at the first later one where it does: until then
    the gradient is held once instead of twice. A gather that is waited for up to the turn is one of the forward's, whatever its
    members are read for. Cost: linear.
    """
    least = demanded(timeline)
    deferring = deferred(least) if gathered_once(least) else None
    if deferring is None:
        return None
    least = packed(deferring)
    try:
        placed = with_launches(least, earliest_launches(least, [gather.launch for gather in timeline.gathers]))
    except ValueError:
        return None
    placed = wait_when_over(placed, durations_us)
    if timeline.limits.memory_budget is None:
        return placed
    return wait_when_over(launched_late(placed, durations_us), durations_us)


def demanded(timeline: Timeline) -> Timeline:
    """Every gather launched where it must be waited for, and nothing packed."""
    turn = turn_of(timeline.program)
    own = [min(i.first for i in g.members) if g.wait > turn else min(turn, *(i.first for i in g.members)) for g in timeline.gathers]
    waits = list(accumulate(reversed(own), min))[::-1]
    return replace(timeline, gathers=tuple(Gather(g.members, wait, wait) for g, wait in zip(timeline.gathers, waits)))


def deferred(timeline: Timeline) -> Timeline | None:
    """Every reduction launched, and waited for, at the first point from its own on where it fits; None if that is over the turn."""
    turn, threshold = turn_of(timeline.program), timeline.program.costs.pack_threshold_bytes
    completed = [(p, step + 1) for step, gradients in enumerate(completions_of(timeline.program)) for p in gradients]
    ready = {p.name: point for p, point in completed}
    reductions: list[Reduction] = []
    point = 0
    wishes = [max(r.launch, *(ready[p.name] for p in r.members)) for r in timeline.reductions]
    if timeline.limits.memory_budget is not None:
        wishes = _first_fits(timeline, wishes, completed)
    for reduction, wish in zip(timeline.reductions, wishes):
        point = max(point, wish)
        if point > len(timeline.program.steps) or (point > turn and any(ready[p.name] <= turn for p in reduction.members)):
            return None
        small = tuple(p for p in reduction.members if p.grad_bytes < threshold)
        reductions.append(Reduction(reduction.members, point, point, point, small if len(small) > 1 else ()))
    return replace(timeline, reductions=tuple(reductions))


def _first_fits(timeline: Timeline, wishes: Sequence[int], completed: Sequence[tuple[Parameter, int]]) -> list[int]:
    """By reduction, the first point from its wish on at which it can be exchanged beside the gradients that are not reduced yet."""
    room = bytes_left(replace(timeline, reductions=()), gathered_bytes).before
    arriving: dict[int, int] = defaultdict(int)
    for parameter, point in completed:
        arriving[point] += parameter.grad_bytes
    pending, seen, point, points = 0, -1, 0, []
    for reduction, wish in zip(timeline.reductions, wishes):
        point = max(point, wish)
        while True:
            pending += sum(arriving[p] for p in range(seen + 1, point + 1))
            seen = max(seen, point)
            if point >= len(room) or pending + reduction.num_bytes <= room[point]:
                break
            point += 1
        pending -= reduction.num_bytes
        points.append(point)
    return points


def gathered_once(timeline: Timeline) -> bool:
    """Whether nothing is gathered while it is live, or in the backward though it was kept over the turn."""
    turn = turn_of(timeline.program)
    kept, ended = set[str](), {i.parameter.name: i.last for i in timeline.carried}
    for gather in timeline.gathers:
        for interval in gather.members:
            name = interval.parameter.name
            if ended.get(name, -1) >= gather.wait or (gather.wait > turn and name in kept):
                return False
            ended[name] = interval.last
            if gather.wait <= turn <= interval.last:
                kept.add(name)
    return True
