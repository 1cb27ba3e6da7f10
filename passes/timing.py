"""When everything happens, by the cost model: the one clock by which passes judge a schedule.

Compute runs step after step. Gathers have one channel and reductions another, each first in, first out. A collective starts
when compute has reached its launch and the one before it on its channel is over; a wait stalls compute until it is over.
Durations are fixed and compute is not slowed down by communication: an estimate, never a condition of correctness.

    compute    | s0 | s1 |     stall      | s2 |
    gathers         ^launch [====== b =====]^wait

`busy_us` of compute goes by after each wait for a gather and before each launch of a reduction. The durations of the steps are an
argument, see `view.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .timeline import Timeline, agenda, turn_of


@dataclass(frozen=True, slots=True)
class Times:
    """When things happen.

    Attributes:
        launch_us: by point, when what is gathered last there is launched.
        forward_us: when the turn begins: nothing is in flight then. `finish_us`: when all is over.
        gather_stalls_us, reduce_stalls_us: how long compute waits for each gather and each reduction.
    """

    launch_us: tuple[float, ...]
    forward_us: float
    finish_us: float
    gather_stalls_us: tuple[float, ...]
    reduce_stalls_us: tuple[float, ...]


def simulate(timeline: Timeline, durations_us: Sequence[float]) -> Times:
    """Replay the timeline. Linear in steps and buckets."""
    costs, rows = timeline.program.costs, agenda(timeline)
    gather_bytes = [gather.num_bytes for gather in timeline.gathers]
    reduce_bytes = [reduction.num_bytes for reduction in timeline.reductions]
    gathered, reduced = [0.0] * len(gather_bytes), [0.0] * len(reduce_bytes)  # when each is over
    gather_stalls, reduce_stalls = [0.0] * len(gather_bytes), [0.0] * len(reduce_bytes)
    gather_free = reduce_free = now = 0.0
    launch_us, turn, forward_us = [], turn_of(timeline.program), 0.0
    for point, duration_us in enumerate((*durations_us, 0.0)):
        launched = now
        for kind, index in rows.get(point, ()):
            if kind == "all_gather":
                gathered[index] = gather_free = max(now, gather_free) + costs.gather_us(gather_bytes[index])
            elif kind == "wait":
                gather_stalls[index] = max(0.0, gathered[index] - now)
                now = max(now, gathered[index]) + costs.busy_us(gather_bytes[index])
            elif kind == "reduce_scatter":
                now += costs.busy_us(reduce_bytes[index])
                reduced[index] = reduce_free = max(now, reduce_free) + costs.reduce_us(reduce_bytes[index])
                launched = now
            else:
                reduce_stalls[index] = max(0.0, reduced[index] - now)
                launched = now = max(now, reduced[index])
        launch_us.append(launched)
        forward_us = now if point == turn else forward_us
        now += duration_us
    return Times(tuple(launch_us), forward_us, now, tuple(gather_stalls), tuple(reduce_stalls))
