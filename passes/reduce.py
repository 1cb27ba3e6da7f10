"""Which gradients are reduced together.

    completes           a       b       c
    alone               [=a=]   [=b=]   [=c=]      reduce_scatter ... wait_reduce
    bucketed            (a      [==ab==]           a is held unreduced until b is complete
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zfx.ir import Parameter, Schedule

from .memory import Profile, byte_room, gathered_bytes
from .timeline import Reduction, Timeline, completions_of, read, turn_of, write


def bucket_reductions(schedule: Schedule) -> Schedule:
    """Partition the gradients, in order of completion, into buckets; each is launched right after its last member.

    A gradient joins the open bucket while that has less than `costs.bucket_bytes`, has at most `reduce_bucket_size` elements
    with it, both are complete on the same side of the turn, and `memory_budget` allows to hold the others until then.
    Members below `costs.pack_threshold_bytes` travel packed if there are two or more.

    Guarantee: fits the limits if the argument does with every gradient reduced alone. Every reduction is waited for where it
    is launched; `wait_reductions` lets them overlap. Depends on durations never, on other bytes only under `memory_budget`.
    Cost: linear.
    Reference: Shi et al., *MG-WFBP*, 2019.
    """
    timeline = read(schedule)
    costs, limits, turn = timeline.program.costs, timeline.limits, turn_of(timeline.program)
    room = byte_room(timeline) - gathered_bytes(timeline)
    reductions: list[Reduction] = []
    members: list[Parameter] = []
    completed, held_elements, held_bytes = -1, 0, 0

    def close() -> None:
        small = [p for p in members if p.grad_bytes < costs.pack_threshold_bytes]
        packed = tuple(small) if len(small) > 1 else ()
        reductions.append(Reduction(tuple(members), completed + 1, completed + 1, packed))

    for step, gradient, later_bytes, step_bytes in _in_completion_order(timeline):
        if members:
            joins = (
                held_bytes < costs.bucket_bytes
                and held_elements + gradient.num_elements <= limits.reduce_bucket_size
                and (completed < turn) == (step < turn)
                and _holds(room, held_bytes, completed, step, step_bytes)
                and 2 * (held_bytes + gradient.grad_bytes) + later_bytes <= room.before[step + 1]
            )
            if not joins:
                close()
                members, held_elements, held_bytes = [], 0, 0
        members.append(gradient)
        held_elements += gradient.num_elements
        held_bytes += gradient.grad_bytes
        completed = step
    if members:
        close()
    return write(replace(timeline, reductions=tuple(reductions)))


def _in_completion_order(timeline: Timeline) -> Iterator[tuple[int, Parameter, int, int]]:
    """(step, gradient, bytes of the gradients that the step completes after it, bytes of all that the step completes)."""
    for step, gradients in enumerate(completions_of(timeline.program)):
        step_bytes = later_bytes = sum(p.grad_bytes for p in gradients)
        for gradient in gradients:
            later_bytes -= gradient.grad_bytes
            yield step, gradient, later_bytes, step_bytes


def _holds(room: Profile, num_bytes: int, start: int, stop: int, step_bytes: int) -> bool:
    """Whether gradients complete since step `start` can be held until step `stop`, which completes `step_bytes` more."""
    if start == stop:
        return True
    return num_bytes <= min(*room.before[start + 1 : stop + 1], *room.during[start + 1 : stop], room.during[stop] - step_bytes)
