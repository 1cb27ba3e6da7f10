"""Passes: from a captured program to a schedule, and from a schedule to a graph.

The life of a plan, in order. Each entry is one file, and its docstring states the problem, the guarantee and the cost.

    extract.py   two graphs -> `Program`, durations by duration.py                   (needs torch; not imported here)
    keep.py      keep_parameters     which reads share one gather; refuses limits that nothing fits
    gather.py    bucket_gathers      which gathers are launched together
    reduce.py    bucket_reductions   which gradients are reduced together
    place.py     launch_early        each gather as early as memory allows: the shortest time
    wait.py      wait_reductions     where each reduction is waited for
    place.py     launch_late         each gather as late as time allows: less memory
    choose.py    choose_fastest      never slower than a simple rule (baselines.py)
    slack.py     add_slack           earlier than needed, where that costs no memory
    lower.py     `Schedule` -> graphs with collectives                               (needs torch; not imported here)

    demand.py    gather_on_demand    the schedule that holds least: where lists of one's own may begin
    refine.py    refine              small changes of the whole, while they make it faster; in REFINED alone

    timeline.py, memory.py, timing.py    what the passes think in: intervals, bytes held, microseconds
    view.py                              what may depend on a rank's own data, and what may not
    select.py, partition.py              what to hold on to; how to cut a row into buckets
    settle.py, moves.py                  where a given structure stands best; what refining may try next
    window.py                            the micro-batches between two optimizer steps
    duration.py, nodes.py                what extract.py and lower.py ask of a captured node   (need torch)

The contract of a planning pass: `Schedule -> Schedule`, pure; program, limits and costs are in the schedule. From the
first one on, *every* schedule between two passes is complete and passes the verifier: a pass only ever replaces a
right schedule by a better one. No pass reads a name for anything but identity, a clock, a rank or a random number: equal
arguments give equal bytes on every rank. Which collectives there are, and in which order each kind is launched, depends on
what ranks share alone, see `view.py`, so that ranks with differently shaped data issue the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zfx.errors import PassError, ScheduleError, ZfxError
from zfx.ir import Limits, Program, Schedule

from .choose import choose_fastest
from .demand import gather_on_demand
from .gather import bucket_gathers
from .keep import keep_parameters
from .place import launch_early, launch_late
from .reduce import bucket_reductions
from .refine import refine
from .slack import add_slack
from .wait import wait_reductions

Pass = Callable[[Schedule], Schedule]

# Reductions are waited for twice: launching late gives memory back, which lets them overlap for longer.
PIPELINE: tuple[Pass, ...] = (
    keep_parameters,
    bucket_gathers,
    bucket_reductions,
    launch_early,
    wait_reductions,
    launch_late,
    wait_reductions,
    choose_fastest,
    add_slack,
)

# `compile(passes=zfx.passes.REFINED)`: nearer to the best schedule, for more time spent on planning.
REFINED: tuple[Pass, ...] = (*PIPELINE[:-1], refine, add_slack)


def stages(program: Program, limits: Limits, passes: Sequence[Pass] = PIPELINE) -> Iterator[tuple[Pass, Schedule]]:
    """Each pass with the schedule that it returned.

    Raises:
        PassError: a pass raised, or did not return a schedule of this program under these limits.
    """
    schedule = Schedule(program, limits)
    for run in passes:
        schedule = _result(run, schedule)
        yield run, schedule


def plan(
    program: Program,
    limits: Limits,
    *,
    check: Callable[[Schedule], object] | None = None,
    passes: Sequence[Pass] = PIPELINE,
) -> Schedule:
    """The schedule of a program under limits.

    Args:
        check: called with the schedule before it is returned; `zfx.verify.verify` in production.
        passes: what to run in place of `PIPELINE`, from the empty schedule on. `check` then sees every pass's schedule, so that
            its `ScheduleError` names the pass that broke a rule.

    Raises:
        InfeasibleBudget: no schedule fits the limits.
        PassError: a pass raised, or did not return a schedule of this program under these limits.
        ValueError: no passes.

    Example:
        >>> from zfx.ir import Parameter, Step
        >>> program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",)),))
        >>> [(i.kind, i.point) for i in plan(program, Limits()).instructions]
        [('all_gather', 0), ('wait', 0), ('release', 1)]
    """
    if not passes:
        raise ValueError("passes must name at least one pass; zfx.passes.PIPELINE is the usual list")
    own = tuple(passes) != PIPELINE
    for run, schedule in stages(program, limits, passes):
        if check is not None and own:
            try:
                check(schedule)
            except ScheduleError as error:
                raise error.after(name_of(run)) from None
    if check is not None and not own:
        check(schedule)
    return schedule


def name_of(run: Pass) -> str:
    """A pass's name for messages: its function's, inside a `functools.partial` too, or its class's."""
    run = getattr(run, "func", run)
    return getattr(run, "__name__", type(run).__name__)


def _result(run: Pass, schedule: Schedule) -> Schedule:
    try:
        result = run(schedule)
    except ZfxError:
        raise
    except Exception as error:
        raise PassError(name_of(run), f"raised {type(error).__name__}: {error}") from error
    if not isinstance(result, Schedule):
        raise PassError(name_of(run), f"returned {type(result).__name__}, not a Schedule")
    for part in ("program", "limits"):
        if getattr(result, part) != getattr(schedule, part):
            raise PassError(name_of(run), f"returned a schedule of another {part}; a pass may only change what is done with it")
    return result


__all__ = ["PIPELINE", "REFINED", "Pass", "gather_on_demand", "name_of", "plan", "stages"]
