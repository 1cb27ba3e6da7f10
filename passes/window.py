"""The schedules of the micro-batches between two optimizer steps, from one program.

    first    gathers what it carries where that is first read, and leaves it behind
    last     finds it, and releases it after its last read
    middle   the forward of `last` and the backward of `first`: at the turn both hold the same
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zfx.errors import ScheduleError
from zfx.ir import Bucket, Instruction, Program, Schedule


def plan_windows(plan: Callable[[Program], Schedule], program: Program, num_micro_batches: int) -> tuple[Schedule, ...]:
    """One schedule for each kind of micro-batch there is: (only,), (first, last) or (first, middle, last).

    Args:
        plan: from a program to its schedule.
        program: of one micro-batch. Without a backward there is nothing to accumulate.

    Raises:
        ScheduleError: `plan` does not keep and carry the same parameters in all of them.
    """
    if num_micro_batches == 1 or program.turn is None:
        return (plan(program),)
    first, last = (plan(replace(program, window=window)) for window in ("first", "last"))
    return (first, last) if num_micro_batches == 2 else (first, middle_of(first, last), last)


def middle_of(first: Schedule, last: Schedule) -> Schedule:
    """The schedule that finds what was carried, as `last` does, and leaves it behind, as `first` does."""
    if (first.kept, first.carried, first.resharded) != (last.kept, last.carried, last.resharded):
        raise ScheduleError(
            "the first and the last micro-batch keep, carry or reshard different parameters; a pass must decide that for all of "
            "them alike",
            rule="windows",
        )
    turn = first.program.turn
    assert turn is not None
    forward = [i for i in last.instructions if i.point <= turn]
    backward = [i for i in first.instructions if i.point > turn]
    buckets: list[Bucket] = []
    renumbered: dict[tuple[bool, int | None], int] = {}
    for kind in ("all_gather", "reduce_scatter"):
        for in_backward, source, instructions in ((False, last, forward), (True, first, backward)):
            for old in (i.bucket for i in instructions if i.kind == kind):
                assert old is not None
                renumbered[in_backward, old] = len(buckets)
                buckets.append(replace(source.buckets[old], index=len(buckets)))

    def moved(instruction: Instruction, in_backward: bool) -> Instruction:
        return replace(instruction, bucket=renumbered.get((in_backward, instruction.bucket)))

    return Schedule(
        replace(first.program, window="middle"),
        first.limits,
        tuple(buckets),
        (*(moved(i, False) for i in forward), *(moved(i, True) for i in backward)),
        first.kept,
        first.carried,
        first.resharded,
    )
