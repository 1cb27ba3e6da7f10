"""How much is held when: by gathers, by reductions, and what the limits leave.

Between two steps things happen in a fixed order (see `timeline.write`), so two moments a step are enough to know every
state that matters:

        point p                                                        step p
    ... release | wait_reduce, reduce_scatter | all_gather | wait | reshard  |   runs   | ...
                <------- before[p] ----------><----------------- during[p] ------------->

`before[p]` is the most that is held from the releases to the gathers of point p; `during[p]` the most from there to the
end of step p. A packing buffer, or a secondary shard, counts in `during` of the point where it is waited for. All functions are
linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from zfx.ir import Parameter

from .timeline import Event, Reshard, Timeline, agenda, completions_of, reduction_events


@dataclass(frozen=True, slots=True)
class Profile:
    """An amount at every moment: `before[p]` for points 0..len(steps), `during[p]` for steps 0..len(steps)-1."""

    before: tuple[float, ...]
    during: tuple[float, ...]

    def __sub__(self, other: Profile) -> Profile:
        return Profile(
            tuple(a - b for a, b in zip(self.before, other.before)), tuple(a - b for a, b in zip(self.during, other.during))
        )


def gathered_elements(timeline: Timeline) -> Profile:
    """Elements of gathered parameters and packing buffers."""
    return _held(timeline, lambda parameter: parameter.num_elements)


def gathered_bytes(timeline: Timeline) -> Profile:
    """Bytes of gathered parameters, packing buffers and secondary shards."""
    return _held(timeline, lambda parameter: parameter.num_bytes, timeline.reshards)


def secondary_bytes(timeline: Timeline) -> Profile:
    """Bytes of secondary shards alone: those that the gathers of this timeline take from."""
    return _held(replace(timeline, gathers=(), carried=()), lambda parameter: 0, timeline.reshards)


def _held(timeline: Timeline, size: Callable[[Parameter], int], reshards: Iterable[Reshard] = ()) -> Profile:
    num_steps = len(timeline.program.steps)
    before, during = [0] * (num_steps + 2), [0] * (num_steps + 2)

    def hold(amount: int, launch: int, last: int) -> None:
        during[max(launch, 0)] += amount
        before[launch + 1] += amount
        during[last + 1] -= amount
        before[last + 1] -= amount

    for interval in timeline.carried:
        hold(size(interval.parameter), -1, interval.last)
    for gather in timeline.gathers:
        for interval in gather.members:
            hold(size(interval.parameter), gather.launch, interval.last)
        hold(sum(size(interval.parameter) for interval in gather.packed), gather.launch, gather.wait)
    for reshard in reshards:
        hold(timeline.program.secondary_bytes(reshard.parameter), reshard.start, reshard.until)
    return Profile(tuple(accumulate(before))[: num_steps + 1], tuple(accumulate(during))[:num_steps])


def gradient_bytes(timeline: Timeline) -> Profile:
    """Bytes of unreduced gradients, and of what arrives from the other ranks while a reduction or an all-reduce is in flight."""
    events = reduction_events(timeline)
    completed = [sum(p.grad_bytes for p in gradients) for gradients in completions_of(timeline.program)]
    before, during, held = [], [], 0
    for point in range(len(completed) + 1):
        peak = held
        for event in events.get(point, ()):
            held += _more_gradient_bytes(timeline, event)
            peak = max(peak, held)
        before.append(peak)
        if point < len(completed):
            held += completed[point]
            during.append(held)
    return Profile(tuple(before), tuple(during))


def _more_gradient_bytes(timeline: Timeline, event: Event) -> int:
    kind, index = event
    reduction = timeline.reductions[index]
    if kind == "reduce_scatter":
        return reduction.num_bytes
    if kind == "wait_reduce":
        return -2 * reduction.num_bytes
    return reduction.across_bytes if kind == "all_reduce" else -reduction.across_bytes


def peak_bytes(timeline: Timeline, ready: bool = True) -> int:
    """The most bytes that are held at any moment, gathers that are launched ahead of reductions included.

    Where a point must be `ready` for its step, what the step takes besides counts there as well, as in `byte_room`.
    """
    program, rows, gathered = timeline.program, agenda(timeline), gathered_bytes(timeline)
    completed = [sum(p.grad_bytes for p in gradients) for gradients in completions_of(program)]
    peak = gradients = 0
    for point, before in enumerate(gathered.before):
        other = program.steps[point].other_bytes if point < len(program.steps) else 0
        here = int(before) + (other if ready else 0)
        peak = max(peak, here + gradients)
        for kind, index in rows.get(point, ()):
            if kind == "all_gather":
                here += timeline.gathers[index].num_bytes + timeline.gathers[index].packing_bytes
            elif kind != "wait":
                gradients += _more_gradient_bytes(timeline, (kind, index))
            peak = max(peak, here + gradients)
        if point < len(program.steps):
            gradients += completed[point]
            peak = max(peak, int(gathered.during[point]) + other + gradients)
    return program.static_bytes + peak


def byte_room(timeline: Timeline) -> Profile:
    """What `memory_budget` leaves besides `static_bytes` and `other_bytes`; infinite without a budget.

    At point p the other bytes are those of step p, which is about to run; at the last point there are none.
    """
    budget = timeline.limits.memory_budget
    if budget is None:
        num_steps = len(timeline.program.steps)
        return Profile((inf,) * (num_steps + 1), (inf,) * num_steps)
    left = budget - timeline.program.static_bytes
    during = tuple(left - step.other_bytes for step in timeline.program.steps)
    return Profile((*during, left), during)


def bytes_left(timeline: Timeline, *held: Callable[[Timeline], Profile]) -> Profile:
    """What is left of `byte_room` besides these; without a budget nothing needs to be counted."""
    room = byte_room(timeline)
    if timeline.limits.memory_budget is not None:
        for amount in held:
            room = room - amount(timeline)
    return room


def element_room(timeline: Timeline) -> Profile:
    """What `max_live_parameters` allows, which is the same at every moment."""
    num_steps, limit = len(timeline.program.steps), timeline.limits.max_live_parameters
    return Profile((limit,) * (num_steps + 1), (limit,) * num_steps)
