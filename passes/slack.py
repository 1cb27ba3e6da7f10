"""Room for error: launch earlier and wait later than the cost model asks, where that costs no memory.

    step                     0    1    2    3    4    5
    just in time                         ===g                launched so late that it arrives at the step that reads it
    on half a link                    ======g                what if the link is twice as slow, since a reduction shares it?
    with slack                        ===...g                launched for the slow link: on the planned one it arrives early

A schedule that is right to the microsecond stalls on every transfer that takes one longer; what arrives early only takes room that
nothing else wants.
"""

from __future__ import annotations

from dataclasses import replace

from zfx.ir import Schedule

from .memory import bytes_left, gathered_bytes, gradient_bytes
from .place import earliest_launches, latest_launches
from .timeline import Timeline, read, with_launches, write
from .view import actual_us
from .wait import wait_when_over

# Gathers and reductions have a channel each in the cost model, but often one link in the machine: then each has half of it.
_SLOWDOWN = 2.0


def add_slack(schedule: Schedule) -> Schedule:
    """Wait for each reduction, and launch each gather, as if links were half as fast, as far as the peak of all bytes stays.

    Guarantee: the simulated finish is not later and the peak of all bytes not higher than before; no gather is launched later,
    no reduction is waited for earlier; the limits are respected if they were. Cost: linear, but for `launch_late`'s logarithm.
    """
    timeline = read(schedule)
    program, limits = timeline.program, timeline.limits
    slow = replace(
        timeline,
        program=replace(program, costs=program.costs.on_slower_links(_SLOWDOWN)),
        limits=replace(limits, memory_budget=_peak_bytes(timeline)),
    )
    slow = wait_when_over(with_launches(slow, earliest_launches(slow)), actual_us(program))
    launches = [min(gather.launch, point) for gather, point in zip(timeline.gathers, latest_launches(slow))]
    # At each moment those in flight are the youngest few, as many as either the one or the other has: both of which fit.
    reductions = tuple(replace(r, wait=max(r.wait, s.wait)) for r, s in zip(timeline.reductions, slow.reductions))
    return write(with_launches(replace(timeline, reductions=reductions), launches))


def _peak_bytes(timeline: Timeline) -> int:
    budget = 1  # any number will do: how far it is overdrawn is what is asked
    left = bytes_left(replace(timeline, limits=replace(timeline.limits, memory_budget=budget)), gathered_bytes, gradient_bytes)
    return budget - int(min((*left.before, *left.during)))
