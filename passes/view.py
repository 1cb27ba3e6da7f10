"""By which durations a pass judges: the one place where it is decided what may depend on a rank's own data.

    which collectives there are: keep, order, buckets, packs        `structural_us`
    where they stand: launches and waits                            `actual_us`

Ranks must issue the same collectives in the same order, but not at the same points. So only placement may look at durations that
ranks do not share. In a uniform program they share all of them, and both views are one.

The same holds of `other_bytes`, and needs no view: they bind under `memory_budget` alone, and there they decide on purpose.
A budget in bytes is a promise about each device, and is kept even where ranks differ in their data.
"""

from __future__ import annotations

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
    if limits.memory_budget is not None:
        return program
    steps: list[Step] = []
    row: list[Step] = []
    for step in program.steps:
        if row and not (step.phase == row[0].phase and step.reads == row[0].reads and not row[-1].completes):
            steps.append(_joined(row))
            row = []
        row.append(step)
    return replace(program, steps=(*steps, _joined(row)) if row else ())


def _joined(row: list[Step]) -> Step:
    duration_us, nominal_us = sum(step.duration_us for step in row), sum(step.nominal_us for step in row)
    return replace(row[-1], duration_us=duration_us, nominal_us=nominal_us) if len(row) > 1 else row[0]
