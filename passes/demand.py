"""The first schedule: gather on demand. It holds least, so if it does not fit the limits, nothing does.

    reads          a      b      a,b
    all_gather  a      b      a,b            each read gathers what it needs ...
    release           a      b       a,b     ... and lets it go
"""

from __future__ import annotations

from zfx.errors import InfeasibleBudget
from zfx.ir import Schedule

from .memory import byte_room, gathered_bytes, gathered_elements, gradient_bytes
from .timeline import Gather, Interval, Reduction, Timeline, completions_of, unique, write


def gather_on_demand(schedule: Schedule) -> Schedule:
    """Every step gathers what it reads and releases it at once; every gradient is reduced, and waited for, where it completes.

    Parameters that escape are gathered once and never released. Only `program` and `limits` of the argument are read.

    Guarantee: at every step this holds the least that any schedule can hold: what the step reads and what has escaped, and
    (in bytes) the gradients that it completes. So limits are refused here, exactly, or not at all.
    Cost: linear.

    Raises:
        InfeasibleBudget: a step needs more than `max_live_parameters` or `memory_budget` allows.
    """
    program = schedule.program
    parameters = {p.name: p for p in program.parameters}
    num_steps, escapes, escaped = len(program.steps), set(program.escapes), set()
    gathers = []
    for t, step in enumerate(program.steps):
        for name in unique(step.reads):
            if name in escaped:
                continue
            if name in escapes:
                escaped.add(name)
            interval = Interval(parameters[name], t, num_steps if name in escapes else t)
            gathers.append(Gather((interval,), launch=t))
    completed = enumerate(completions_of(program), start=1)
    reductions = tuple(Reduction((p,), launch=point, wait=point) for point, gradients in completed for p in gradients)
    timeline = Timeline(program, schedule.limits, tuple(gathers), reductions)
    _refuse_elements(timeline)
    _refuse_bytes(timeline)
    return write(timeline)


def _refuse_elements(timeline: Timeline) -> None:
    _refuse(timeline, "max_live_parameters", timeline.limits.max_live_parameters, gathered_elements(timeline).during)


def _refuse_bytes(timeline: Timeline) -> None:
    if timeline.limits.memory_budget is None:
        return
    budget = timeline.limits.memory_budget
    room = byte_room(timeline) - gathered_bytes(timeline) - gradient_bytes(timeline)
    needed = [budget - min(before, during) for before, during in zip(room.before, room.during)]
    if needed:  # what is exchanged after the last step is booked on it
        needed[-1] = max(needed[-1], budget - room.before[-1])
    _refuse(timeline, "memory_budget", budget, needed)


def _refuse(timeline: Timeline, limit_name: str, limit: int, needed: tuple[float, ...] | list[float]) -> None:
    for step, need in zip(timeline.program.steps, needed):
        if need > limit:
            raise InfeasibleBudget(
                limit_name=limit_name, limit=limit, step=step.name, needed=int(need), smallest_limit=int(max(needed))
            )
