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

from .memory import peak_bytes
from .place import earliest_launches, launched_late
from .timeline import Timeline, read, reduction_events, with_launches, write
from .view import actual_us
from .wait import wait_when_over

# Gathers and reductions have a channel each in the cost model, but often one link in the machine: then each has half of it.
_SLOWDOWN = 2.0


def add_slack(schedule: Schedule) -> Schedule:
    """Wait for each reduction, and launch each gather, as if links were half as fast, as far as the peak of all bytes stays.

    Guarantee: the simulated finish is not later and the peak of all bytes not higher than before; no gather is launched later,
    no reduction is waited for earlier; the limits are respected if they were. With replicas it is the all-reduces that are waited
    for later, as they are launched where their reductions are waited for. Cost: linear, but for `launch_late`'s logarithm.
    """
    timeline = read(schedule)
    program, limits, peak = timeline.program, timeline.limits, peak_bytes(timeline)
    slow = replace(
        timeline,
        program=replace(program, costs=program.costs.on_slower_links(_SLOWDOWN)),
        limits=replace(limits, memory_budget=peak),
    )
    slow = wait_when_over(with_launches(slow, earliest_launches(slow)), actual_us(program))
    slow = launched_late(slow, actual_us(program))
    launches = [min(gather.launch, late.launch) for gather, late in zip(timeline.gathers, slow.gathers)]
    # At each moment those in flight are the youngest few, as many as either the one or the other has: both of which fit.
    reductions = tuple(
        replace(r, wait=max(r.wait, s.wait) if program.replicas == 1 else r.wait, done=max(r.done, s.done))
        for r, s in zip(timeline.reductions, slow.reductions)
    )
    relaxed = _as_far_ahead(timeline, with_launches(replace(timeline, reductions=reductions), launches))
    no_higher = all(peak_bytes(relaxed, ready) <= peak_bytes(timeline, ready) for ready in (True, False))
    return write(relaxed) if no_higher else schedule


def _as_far_ahead(before: Timeline, after: Timeline) -> Timeline:
    """Gathers that stay at their point are launched ahead of the same reductions and waits, as far as those stay there too."""
    then, now, gathers = reduction_events(before), reduction_events(after), []
    for old, gather in zip(before.gathers, after.gathers):
        if old.ahead and gather.launch == old.launch:
            row, behind = now[gather.launch], set(then[gather.launch][-old.ahead :])
            gather = replace(gather, ahead=next((len(row) - i for i, event in enumerate(row) if event in behind), 0))
        gathers.append(gather)
    return replace(after, gathers=tuple(gathers))
