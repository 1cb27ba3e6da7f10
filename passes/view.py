"""By which durations a pass judges: the one place where it is decided what may depend on a rank's own data.

    which collectives there are: keep, order, buckets, packs        `structural_us`
    where they stand: launches and waits                            `actual_us`

Ranks must issue the same collectives in the same order, but not at the same points. So only placement may look at durations that
ranks do not share. In a uniform program they share all of them, and both views are one.

The same holds of `other_bytes`, and needs no view: they bind under `memory_budget` alone, and there they decide on purpose.
A budget in bytes is a promise about each device, and is kept even where ranks differ in their data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zfx.ir import Limits, Program, Step


def structural_us(program: Program) -> tuple[float, ...]:
    """The duration of each step, equal on all ranks: for what decides which collectives there are."""
    return actual_us(program) if program.uniform else tuple(step.nominal_us for step in program.steps)


def actual_us(program: Program) -> tuple[float, ...]:
    """The duration of each step on this rank: for what decides where the collectives stand."""
    return tuple(step.duration_us for step in program.steps)


def condensed(program: Program, limits: Limits) -> Program:
    """The program with each row of steps that read the same as one step, where no budget in bytes looks into it.

        reads        a  a  a  -  -  b  b             a  -  b
        completes             a                            a is complete at the end of its row: that ends one

    What can be launched early is launched where something is released or complete, which is at the ends of rows. So every
    schedule of the one has a schedule of the other that takes the same time.
    """
    rows = rows_of(program, limits)
    if len(rows) == len(program.steps):
        return program
    return replace(program, steps=tuple(_joined(program.steps[row.start : row.stop]) for row in rows))


def rows_of(program: Program, limits: Limits) -> list[range]:
    """The steps that `condensed` makes one of, row by row."""
    if limits.memory_budget is not None:
        return [range(t, t + 1) for t in range(len(program.steps))]
    rows: list[range] = []
    start, steps = 0, program.steps
    for t, step in enumerate(steps[1:], start=1):
        if step.phase != steps[start].phase or step.reads != steps[start].reads or steps[t - 1].completes:
            rows.append(range(start, t))
            start = t
    return [*rows, range(start, len(steps))] if steps else []


def _joined(row: Sequence[Step]) -> Step:
    duration_us, nominal_us = sum(step.duration_us for step in row), sum(step.nominal_us for step in row)
    return replace(row[-1], duration_us=duration_us, nominal_us=nominal_us) if len(row) > 1 else row[0]
