"""What every step needs, whatever is planned: if that does not fit the limits, nothing does.

    reads            a      b      a,b
    needed           a      b      a,b            each read gathers what it needs, and lets it go at once
    complete                g             h
    needed                  g,g           h,h     each gradient, and as much again while it is exchanged, alone; then its shard
                                                  is exchanged with the replicas, alone, too
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zfx.errors import InfeasibleBudget
from zfx.ir import Limits, Parameter, Program, Schedule

from .memory import Profile, bytes_left, element_room, gradient_bytes
from .timeline import Gather, Interval, Reduction, Timeline, completions_of, unique, write


@dataclass(frozen=True, slots=True)
class Demand:
    """The room that is left if nothing is held but what is needed, and the reductions, one for each gradient, that need least."""

    reductions: tuple[Reduction, ...]
    elements: Profile
    num_bytes: Profile


def demand(program: Program, limits: Limits) -> Demand:
    """What the limits leave besides what each step reads, what has escaped, and each gradient where it completes.

    Guarantee: every schedule holds at least as much at each moment as is counted here, and there is one that holds no more. So
    limits are refused here, exactly, or not at all. Cost: linear.

    Raises:
        InfeasibleBudget: a step needs more than `max_live_parameters` or `memory_budget` allows.
    """
    completed = enumerate(completions_of(program), start=1)
    reductions = tuple(Reduction((p,), point, point, point) for point, gradients in completed for p in gradients)
    timeline = Timeline(program, limits, reductions=reductions)
    elements = element_room(timeline) - _needed(program, lambda parameter: parameter.num_elements)
    _refuse(program, "max_live_parameters", limits.max_live_parameters, elements)
    num_bytes = bytes_left(timeline, lambda t: _needed(t.program, lambda parameter: parameter.num_bytes), gradient_bytes)
    if limits.memory_budget is not None:
        _refuse(program, "memory_budget", limits.memory_budget, num_bytes)
    return Demand(reductions, elements, num_bytes)


def gather_on_demand(schedule: Schedule) -> Schedule:
    """Every step gathers what it reads and releases it at once; every gradient is reduced, and waited for, where it completes.

    Parameters that escape are gathered once and never released. Only `program` and `limits` of the argument are read. It holds
    what is needed, and no more: where pipelines of one's own may begin. Cost: linear.

    Raises:
        InfeasibleBudget: a step needs more than `max_live_parameters` or `memory_budget` allows.
    """
    program = schedule.program
    least = demand(program, schedule.limits)
    parameters = {p.name: p for p in program.parameters}
    num_steps, escapes, escaped = len(program.steps), set(program.escapes), set[str]()
    gathers = []
    for t, step in enumerate(program.steps):
        for name in unique(step.reads):
            if name not in escaped:
                gathers.append(Gather((Interval(parameters[name], t, num_steps if name in escapes else t),), t, t))
        escaped |= escapes & set(step.reads)
    return write(Timeline(program, schedule.limits, tuple(gathers), least.reductions))


def _needed(program: Program, size: Callable[[Parameter], int]) -> Profile:
    """Sum of the sizes of what each step reads, and of what has escaped."""
    sizes = {parameter.name: size(parameter) for parameter in program.parameters}
    escapes, escaped, held = set(program.escapes), set(), 0
    before, during = [], []
    for step in program.steps:
        before.append(held)
        read = 0
        for name in unique(step.reads) if len(step.reads) > 1 else step.reads:
            if name not in escapes:
                read += sizes[name]
            elif name not in escaped:
                escaped.add(name)
                held += sizes[name]
        during.append(held + read)
    return Profile((*before, held), tuple(during))


def _refuse(program: Program, limit_name: str, limit: int, room: Profile) -> None:
    """The need at a step is the larger of those just before it and while it runs; the last step has those after it, too."""
    least = [min(before, during) for before, during in zip(room.before, room.during)]
    if least:
        least[-1] = min(least[-1], room.before[-1])
    for step, left in zip(program.steps, least):
        if left < 0:
            raise InfeasibleBudget(
                limit_name=limit_name,
                limit=limit,
                step=step.name,
                needed=int(limit - left),
                smallest_limit=int(limit - min(least)),
            )
