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

Rule = Callable[[Program, Limits], Schedule]


def choose_fastest(schedule: Schedule) -> Schedule:
    """The schedule, or that of a baseline that finishes earlier by the durations that all ranks share.

    Where ranks differ in their data, what is compared is how long each would take if all steps took what ranks agree on; the
    baseline is then placed anew, by the durations of this rank. Between micro-batches nothing is compared: the windows must
    keep and carry the same, and no baseline carries anything.

    Where parameters may be resharded, what would be planned if none were is compared, too: secondary shards take memory in which
    gathers could have been launched earlier.

    Guarantee: by `structural_us`, no baseline finishes earlier than what is returned (to one part in 1e9, for rounding).
    Cost: linear; three baselines of the condensed program, see `condensed`.
    """
    program, limits = schedule.program, schedule.limits
    if program.window != "only":
        return schedule
    if program.reshard_to:
        without = replace(choose_fastest(_planned(replace(program, reshard_to=0), limits)), program=program)
        return schedule if _finish_us(schedule) <= _finish_us(without) * (1 + 1e-9) else without
    fastest = _faster_rule(condensed(program, limits), limits, _finish_us(schedule))
    if fastest is None:
        return schedule
    best = fastest(program, limits)
    if not program.uniform:
        best = write(placed_again(read(best), actual_us(program)))
    return wait_reductions(launch_late(best))


def _planned(program: Program, limits: Limits) -> Schedule:
    """What the passes before this one arrive at."""
    schedule = keep_parameters(Schedule(program, limits))
    for run in (bucket_gathers, bucket_reductions, launch_early, wait_reductions, launch_late, wait_reductions):
        schedule = run(schedule)
    return schedule


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


def placed_again(timeline: Timeline, durations_us: Sequence[float]) -> Timeline:
    """The same collectives as early as possible, for other durations."""
    at_once = replace(timeline, reductions=tuple(replace(r, wait=r.launch, done=r.launch) for r in timeline.reductions))
    return wait_when_over(with_launches(at_once, earliest_launches(at_once)), durations_us)
