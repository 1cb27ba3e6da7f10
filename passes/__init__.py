"""Passes: from a captured program to a schedule, and from a schedule to a graph.

The life of a plan, in order. Each entry is one file, and its docstring states the problem, the guarantee and the cost.

    extract.py   two graphs -> `Program`, durations by duration.py                   (needs torch; not imported here)
    demand.py    gather_on_demand    the schedule that holds least; refuses limits that nothing fits
    keep.py      keep_parameters     which reads share one gather
    gather.py    bucket_gathers      which gathers are launched together
    reduce.py    bucket_reductions   which gradients are reduced together
    place.py     launch_early        each gather as early as memory allows: the shortest time
    wait.py      wait_reductions     where each reduction is waited for
    place.py     launch_late         each gather as late as time allows: less memory
    lower.py     `Schedule` -> graphs with collectives                               (needs torch; not imported here)

    timeline.py, memory.py, timing.py    what the passes think in: intervals, bytes held, microseconds

The contract of a planning pass: `Schedule -> Schedule`, pure; program, limits and costs are in the schedule. From
`gather_on_demand` on, *every* schedule between two passes is complete and passes the verifier: a pass only ever replaces a
right schedule by a better one. No pass reads a name for anything but identity, a clock, a rank or a random number: equal
arguments give equal bytes on every rank. Which collectives there are, and in which order each kind is launched, depends on the
parameters, their order of use and the limits alone (on `other_bytes` too if `memory_budget` is set), so that ranks with
differently shaped data issue the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zfx.ir import Limits, Program, Schedule

from .demand import gather_on_demand
from .gather import bucket_gathers
from .keep import keep_parameters
from .place import launch_early, launch_late
from .reduce import bucket_reductions
from .wait import wait_reductions

Pass = Callable[[Schedule], Schedule]

# Reductions are waited for twice: launching late gives memory back, which lets them overlap for longer.
PIPELINE: tuple[Pass, ...] = (
    gather_on_demand,
    keep_parameters,
    bucket_gathers,
    bucket_reductions,
    launch_early,
    wait_reductions,
    launch_late,
    wait_reductions,
)


def stages(program: Program, limits: Limits) -> Iterator[tuple[Pass, Schedule]]:
    """Each pass of `PIPELINE` with the schedule that it returned."""
    schedule = Schedule(program, limits)
    for run in PIPELINE:
        schedule = run(schedule)
        yield run, schedule


def plan(program: Program, limits: Limits, *, check: Callable[[Schedule], object] | None = None) -> Schedule:
    """The schedule of a program under limits.

    Args:
        check: called with the schedule before it is returned; `zfx.verify.verify` in production.

    Raises:
        InfeasibleBudget: no schedule fits the limits.

    Example:
        >>> from zfx.ir import Parameter, Step
        >>> program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",)),))
        >>> [(i.kind, i.point) for i in plan(program, Limits()).instructions]
        [('all_gather', 0), ('wait', 0), ('release', 1)]
    """
    schedule = Schedule(program, limits)
    for run in PIPELINE:
        schedule = run(schedule)
    if check is not None:
        check(schedule)
    return schedule


__all__ = ["PIPELINE", "Pass", "plan", "stages"]
