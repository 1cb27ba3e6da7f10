"""Lower bounds: what no schedule of a program under its limits can beat, in time, volume and memory.

Every bound holds for all schedules that the verifier accepts, whatever they keep, in whichever order they gather, however they
bucket and wherever they launch, by the time and memory of `ir.py`. Nothing is sampled, nothing is assumed of the planner, and no
code is shared with it. A program that is one window of several may have anything carried into it that fits.

Volume. A parameter is gathered for its first read, and again for a later one unless it was kept over the gap between the two:

    step         0    1    2    3    4    5
    reads        a    b    c    c    b    a
    gap of b              [=======]                 while c is read, a and b stay only as far as there is room beside c;
    gap of a         [=================]            what does not fit is gathered again: a first, which is needed last

If bytes could be split, letting go of what is needed last would be best, for every prefix of the program at once (Belady's rule,
and the optimum of the linear program). A parameter cannot be split, so schedules may need a little more.

Time. Step t runs after step t - 1, and after everything has been gathered that the steps up to t need. And of what the steps s to t
read, no more than there is room for is there while s runs; the rest is launched after s, and has arrived before t:

    compute   | s |            | t |
    gather        [=== rest ===]                    rest = what s to t read, less the room at s

Gradients are the mirror image: of what completes from s on, no more than there is room for is still unreduced while t runs; and
after step t all is still to be reduced that completes from there on. The longest path through all this is a bound; so are the
totals of compute and of each channel. A bound counts as few collectives as bucket sizes and memory allow.

Where parameters may be resharded, first reads are gathered from all ranks, as ever. All that is gathered again counts as if it came
from secondary shards that take no room, and over a link as good as the better of the two in everything. So volume and memory are
bounded as without resharding, and time by less than some schedule may need.

References: Belady, *A study of replacement algorithms for a virtual-storage computer*, 1966; Cao, Felten, Karlin, Li, *A study of
integrated prefetching and caching strategies*, 1995; Hutchinson, Sanders, Vitter, *Duality between prefetching and queued writing
with parallel disks*, 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Schedule
from .held import events_of, peaks_of
from .room import measures_of
from .times import times_of
from .volume import volume_of


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no schedule can beat. Names say what binds.

    Attributes:
        times_us: every bound on the time by its name; the plainest first, which is the one to name where several bind.
        volume_bytes, volume_binds: the fewest bytes that are gathered, and why it isn't fewer.
        peaks_bytes: what must be held at some time, by what needs it.
    """

    times_us: dict[str, float]
    volume_bytes: int
    volume_binds: str
    peaks_bytes: dict[str, int]


def bounds_of(schedule: Schedule) -> Bounds:
    """The bounds for all schedules of this one's program and limits; the rest of it is not looked at.

    Cost: O(n log n) in steps and reads.
    """
    program, limits = schedule.program, schedule.limits
    events = events_of(program, limits)
    measures = measures_of(program, limits, events)
    volume = volume_of(schedule, events, measures)
    return Bounds(times_of(schedule, events, measures, volume), volume.total_bytes, volume.binds, peaks_of(program))


__all__ = ["Bounds", "bounds_of"]
