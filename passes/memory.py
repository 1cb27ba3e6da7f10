"""How much is held when: by gathers, by reductions, and what the limits leave.

Between two steps things happen in a fixed order (see `timeline.write`), so two moments a step are enough to know every
state that matters:

        point p                                                        step p
    ... release | wait_reduce, reduce_scatter | all_gather | wait  |   runs   | ...
                <------- before[p] ----------><------------ during[p] -------->

`before[p]` is the most that is held from the releases to the gathers of point p; `during[p]` the most from there to the
end of step p. A packing buffer counts in `during` of the point where it is waited for. All functions are linear.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from .timeline import Gather, Reduction, Timeline, completions_of


@dataclass(frozen=True, slots=True)
class Profile:
    """An amount at every moment: `before[p]` for points 0..len(steps), `during[p]` for steps 0..len(steps)-1."""

    before: tuple[float, ...]
    during: tuple[float, ...]

    def __sub__(self, other: Profile) -> Profile:
        return Profile(
            tuple(a - b for a, b in zip(self.before, other.before)), tuple(a - b for a, b in zip(self.during, other.during))
        )


def _held(timeline: Timeline, sizes: list[tuple[list[int], int]]) -> Profile:
    """Sum of the members' and packs' sizes while they are held; `sizes[g]` is (a size per member, the pack's size)."""
    num_steps = len(timeline.program.steps)
    before, during = [0] * (num_steps + 2), [0] * (num_steps + 2)

    def hold(size: int, launch: int, last: int) -> None:
        during[launch] += size
        before[launch + 1] += size
        during[last + 1] -= size
        before[last + 1] -= size

    for gather, (members, packing) in zip(timeline.gathers, sizes):
        for interval, size in zip(gather.members, members):
            hold(size, gather.launch, interval.last)
        if packing:
            hold(packing, gather.launch, gather.first)
    return Profile(tuple(accumulate(before))[: num_steps + 1], tuple(accumulate(during))[:num_steps])


def gathered_elements(timeline: Timeline) -> Profile:
    """Elements of gathered parameters and packing buffers."""

    def sizes(gather: Gather) -> tuple[list[int], int]:
        return [i.parameter.num_elements for i in gather.members], gather.packing_elements

    return _held(timeline, [sizes(g) for g in timeline.gathers])


def gathered_bytes(timeline: Timeline) -> Profile:
    """Bytes of gathered parameters and packing buffers."""

    def sizes(gather: Gather) -> tuple[list[int], int]:
        return [i.parameter.num_bytes for i in gather.members], gather.packing_bytes

    return _held(timeline, [sizes(g) for g in timeline.gathers])


def gradient_bytes(timeline: Timeline) -> Profile:
    """Bytes of unreduced gradients, and of what arrives from the other ranks while a reduction is in flight."""
    launched: dict[int, list[Reduction]] = defaultdict(list)
    waited: dict[int, int] = defaultdict(int)
    for reduction in timeline.reductions:
        launched[reduction.launch].append(reduction)
        if reduction.wait > reduction.launch:
            waited[reduction.wait] += 2 * reduction.num_bytes
    completed = [sum(p.grad_bytes for p in gradients) for gradients in completions_of(timeline.program)]
    before, during, held = [], [], 0
    for point in range(len(completed) + 1):
        peak = held
        held -= waited[point]
        for reduction in launched[point]:
            held += reduction.num_bytes
            peak = max(peak, held)
            if reduction.wait == point:
                held -= 2 * reduction.num_bytes
        before.append(peak)
        if point < len(completed):
            held += completed[point]
            during.append(held)
    return Profile(tuple(before), tuple(during))


def byte_room(timeline: Timeline) -> Profile:
    """What `memory_budget` leaves besides `static_bytes` and `other_bytes`; infinite without a budget.

    At point p the other bytes are those of step p, which is about to run; at the last point there are none.
    """
    budget = timeline.limits.memory_budget
    left = inf if budget is None else budget - timeline.program.static_bytes
    during = tuple(left - step.other_bytes for step in timeline.program.steps)
    return Profile((*during, left), during)


def element_room(timeline: Timeline) -> Profile:
    """What `max_live_parameters` allows, which is the same at every moment."""
    num_steps, limit = len(timeline.program.steps), timeline.limits.max_live_parameters
    return Profile((limit,) * (num_steps + 1), (limit,) * num_steps)
