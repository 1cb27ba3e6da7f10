"""Schedules of micro-batches whose gradients wait for those that follow, from the schedule that reduces them.

    reduced     reads as planned        each gradient: complete ............ reduce_scatter, wait_reduce, ...
    holding     reads as planned        each gradient: complete, added to what is held
    joining     reads as planned        each gradient: complete, joined by what is held, reduce_scatter, wait_reduce, ...

Gathers, releases and what is kept are the same in all three: whoever runs the forward need not know which backward will follow.
What is held is whole gradients, and counts: always while holding; while joining, each until the step that completes it, from
where on it is an unreduced gradient like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zfx.ir import Program, Schedule, Step

_REDUCES = ("reduce_scatter", "wait_reduce", "all_reduce", "wait_all_reduce")


def holding(schedule: Schedule, held_bytes: Mapping[str, int]) -> Schedule:
    """The schedule without reductions, over a program that completes nothing.

    Args:
        held_bytes: what is held of each gradient that is waiting, by parameter: whole, in the dtype in which it is added up.
    """
    program = schedule.program
    buckets = [bucket for bucket in schedule.buckets if bucket.kind == "all_gather"]
    places = {bucket.index: place for place, bucket in enumerate(buckets)}
    return replace(
        schedule,
        program=replace(
            program,
            parameters=tuple(replace(p, grad_bytes=0, across_bytes=0) for p in program.parameters),
            steps=tuple(replace(step, completes=()) for step in program.steps),
            static_bytes=program.static_bytes + sum(held_bytes[name] for name in _completed(program)),
        ),
        buckets=tuple(replace(bucket, index=places[bucket.index]) for bucket in buckets),
        instructions=tuple(
            replace(i, bucket=None if i.bucket is None else places[i.bucket])
            for i in schedule.instructions
            if i.kind not in _REDUCES
        ),
    )


def joining(schedule: Schedule, held_bytes: Mapping[str, int]) -> Schedule:
    """The same schedule over the program in which gradients of earlier micro-batches are held until they are joined."""
    program = schedule.program
    waiting = sum(held_bytes[name] for name in _completed(program))
    steps: list[Step] = []
    for step in program.steps:
        steps.append(replace(step, other_bytes=step.other_bytes + waiting))
        waiting -= sum(held_bytes[name] for name in step.completes)
    return replace(schedule, program=_widened(replace(program, steps=tuple(steps)), held_bytes))


def with_room(program: Program, held_bytes: Mapping[str, int]) -> Program:
    """The program with all that may wait always there: a schedule of it that fits limits makes all three fit."""
    held = sum(held_bytes[name] for name in _completed(program))
    return _widened(replace(program, static_bytes=program.static_bytes + held), held_bytes)


def _completed(program: Program) -> list[str]:
    return [name for step in program.steps for name in step.completes]


def _widened(program: Program, held_bytes: Mapping[str, int]) -> Program:
    """The same with gradients of the dtype in which they are added up."""
    completed = set(_completed(program))
    parameters = (replace(p, grad_bytes=held_bytes[p.name]) if p.name in completed else p for p in program.parameters)
    return replace(program, parameters=tuple(parameters))
