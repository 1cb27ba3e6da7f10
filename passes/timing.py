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

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .timeline import Timeline


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
    costs = timeline.program.costs
    launched: dict[int, list[int]] = defaultdict(list)
    waited: dict[int, list[int]] = defaultdict(list)
    for index, reduction in enumerate(timeline.reductions):
        launched[reduction.launch].append(index)
        if reduction.wait > reduction.launch:
            waited[reduction.wait].append(index)
    ends: list[float] = []
    gathers = GatherQueue(timeline)
    launch_us, now = [], 0.0
    for point, duration_us in enumerate((*durations_us, 0.0)):
        for index in waited.get(point, ()):
            now = max(now, ends[index])
        for index in launched.get(point, ()):
            now += costs.busy_us(timeline.reductions[index].num_bytes)
            begin = max(now, ends[-1]) if ends else now
            ends.append(begin + costs.reduce_us(timeline.reductions[index].num_bytes))
            if timeline.reductions[index].wait == point:
                now = max(now, ends[index])
        launch_us.append(now)
        now = gathers.pass_point(point, now) + duration_us
    return Times(tuple(launch_us), now)
