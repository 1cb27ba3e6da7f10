"""Never worse than a simple rule: the schedule that the passes arrived at, or that of a baseline if it is faster.

No single rule of thumb is ever far better than the planner; but its parts are chosen one after another, and what one part gains may
be lost on the next. So the whole is compared with wholes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zfx.ir import Limits, Program, Schedule

from .baselines import BASELINES
from .gather import bucket_gathers
from .keep import keep_parameters
from .place import earliest_launches, launch_early, launch_late
from .reduce import bucket_reductions
from .timeline import Timeline, read, with_launches, write
from .timing import simulate
from .view import actual_us, condensed, structural_us
from .wait import wait_reductions, wait_when_over
from .window import middle_of

# The part of a micro-batch's time that may be lost for parameters that are carried, and not gathered again.
WORTH_CARRYING = 1e-2

Rule = Callable[[Program, Limits], Schedule]


def choose_fastest(schedule: Schedule) -> Schedule:
    """The schedule, or that of a baseline that finishes earlier by the durations that all ranks share.

    Where ranks differ in their data, what is compared is how long each would take if all steps took what ranks agree on; the
    baseline is then placed anew, by the durations of this rank. The micro-batches between two optimizer steps are judged together,
    as all must keep and carry the same: a baseline, which carries nothing and takes as long in each of them, is taken for all if
    it is faster than the passes before this one in any, by `WORTH_CARRYING`: what is not carried is gathered again.

    Guarantee: by `structural_us`, no baseline finishes earlier than what is returned (to one part in 1e9, for rounding), or between
    micro-batches by more than `WORTH_CARRYING`. Cost: linear; three baselines of the condensed program, see `condensed`, and
    between micro-batches two plans of it.
    """
    program, limits = schedule.program, schedule.limits
    short = condensed(program, limits)
    planned_us = _finish_us(schedule) if program.window == "only" else _longest_us(short, limits) * (1 - WORTH_CARRYING)
    fastest = _faster_rule(short, limits, planned_us)
    if fastest is None:
        return schedule
    best = fastest(program, limits)
    if not program.uniform:
        best = write(placed_again(read(best), actual_us(program)))
    return wait_reductions(launch_late(best))


def _faster_rule(short: Program, limits: Limits, planned_us: float) -> Rule | None:
    """The rule that finishes first, and before that; None if there is none."""
    least_us, fastest, short_us = planned_us * (1 - 1e-9), None, structural_us(short)
    for rule in BASELINES:
        finish_us = simulate(wait_when_over(read(rule(short, limits)), short_us), short_us).finish_us
        if finish_us < least_us:
            least_us, fastest = finish_us, rule
    return fastest


def _finish_us(schedule: Schedule) -> float:
    """When it is over if all steps take what ranks agree on."""
    durations_us, planned = structural_us(schedule.program), read(schedule)
    return simulate(planned if schedule.program.uniform else placed_again(planned, durations_us), durations_us).finish_us


def _longest_us(short: Program, limits: Limits) -> float:
    """How long the longest of all micro-batches takes, as the passes before this one plan them: the same answer in each window."""
    agreed = (replace(step, duration_us=us) for step, us in zip(short.steps, structural_us(short)))
    short = replace(short, steps=tuple(agreed), uniform=True)
    first, last = (_planned(replace(short, window="first"), limits), _planned(replace(short, window="last"), limits))
    return max(_finish_us(schedule) for schedule in (first, middle_of(first, last), last))


def _planned(program: Program, limits: Limits) -> Schedule:
    schedule = Schedule(program, limits)
    for run in (keep_parameters, bucket_gathers, bucket_reductions, launch_early, wait_reductions, launch_late, wait_reductions):
        schedule = run(schedule)
    return schedule


def placed_again(timeline: Timeline, durations_us: Sequence[float]) -> Timeline:
    """The same collectives as early as possible, for other durations."""
    at_once = replace(timeline, reductions=tuple(replace(r, wait=r.launch, done=r.launch) for r in timeline.reductions))
    return wait_when_over(with_launches(at_once, earliest_launches(at_once)), durations_us)
