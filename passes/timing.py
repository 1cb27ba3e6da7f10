"""When everything happens, by the cost model: the one clock by which passes judge a schedule.

Compute runs step after step. Gathers have one channel, reductions another, and all-reduces over replicas a third, each first in,
first out. A collective starts when compute has reached its launch and the one before it on its channel is over; a wait stalls
compute until it is over.
Durations are fixed and compute is not slowed down by communication: an estimate, never a condition of correctness.

    compute    | s0 | s1 |     stall      | s2 |
    gathers         ^launch [====== b =====]^wait

`busy_us` of compute goes by after each wait for a gather and before each launch of a reduction or an all-reduce. The durations of
the steps are an argument, see `view.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .timeline import Timeline, reduction_events


class GatherQueue:
    """Replays the gathers' channel beside the compute clock, point by point."""

    def __init__(self, timeline: Timeline) -> None:
        self._costs, self._gathers = timeline.program.costs, timeline.gathers
        self._launched = self._waited = 0
        self._ends: list[float] = []

    def pass_point(self, point: int, now: float) -> float:
        """Launch and wait for what is due at this point; the time when its step can run."""
        gathers = self._gathers
        while self._launched < len(gathers) and gathers[self._launched].launch == point:
            begin = max(now, self._ends[-1]) if self._ends else now
            self._ends.append(begin + self._costs.gather_us(gathers[self._launched].num_bytes))
            self._launched += 1
        while self._waited < len(gathers) and gathers[self._waited].wait == point:
            now = max(now, self._ends[self._waited]) + self._costs.busy_us(gathers[self._waited].num_bytes)
            self._waited += 1
        return now


@dataclass(frozen=True, slots=True)
class Times:
    """`launch_us[p]`: when what is gathered at point p is launched. `finish_us`: when all is over."""

    launch_us: tuple[float, ...]
    finish_us: float


def simulate(timeline: Timeline, durations_us: Sequence[float]) -> Times:
    """Replay the timeline. Linear in steps and buckets."""
    gathers, reducing = GatherQueue(timeline), _ReductionQueues(timeline)
    launch_us, now = [], 0.0
    for point, duration_us in enumerate((*durations_us, 0.0)):
        now = reducing.pass_point(point, now)
        launch_us.append(now)
        now = gathers.pass_point(point, now) + duration_us
    return Times(tuple(launch_us), reducing.pass_point(len(launch_us), now))


class _ReductionQueues:
    """Replays the channels of reductions and all-reduces beside the compute clock, point by point."""

    def __init__(self, timeline: Timeline) -> None:
        self._costs, self._reductions = timeline.program.costs, timeline.reductions
        self._events = reduction_events(timeline)
        self._reduced: list[float] = []  # when each is over, in launch order
        self._averaged: list[float] = []

    def pass_point(self, point: int, now: float) -> float:
        """Launch and wait for what is due at this point; the time when all of it is done."""
        costs = self._costs
        for kind, number in self._events.get(point, ()):
            reduction = self._reductions[number]
            if kind == "reduce_scatter":
                now += costs.busy_us(reduction.num_bytes)
                _queue(self._reduced, now, costs.reduce_us(reduction.num_bytes))
            elif kind == "wait_reduce":
                now = max(now, self._reduced[number])
            elif kind == "all_reduce":
                now += costs.busy_us(reduction.across_bytes)
                _queue(self._averaged, now, costs.all_reduce_us(reduction.across_bytes))
            else:
                now = max(now, self._averaged[number])
        return now


def _queue(ends: list[float], now: float, duration_us: float) -> None:
    ends.append((max(now, ends[-1]) if ends else now) + duration_us)
