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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .timeline import Event, Timeline, agenda, turn_of


@dataclass(frozen=True, slots=True)
class Times:
    """When things happen.

    Attributes:
        launch_us: by point, when what is gathered last there is launched.
        forward_us: when the turn begins: nothing is in flight then. `finish_us`: when all is over.
        gather_stalls_us, reduce_stalls_us: how long compute waits for each gather and each reduction, its all-reduce included.
    """

    launch_us: tuple[float, ...]
    forward_us: float
    finish_us: float
    gather_stalls_us: tuple[float, ...]
    reduce_stalls_us: tuple[float, ...]


def simulate(timeline: Timeline, durations_us: Sequence[float]) -> Times:
    """Replay the timeline. Linear in steps and buckets."""
    rows, turn = agenda(timeline), turn_of(timeline.program)
    clock = _Clock(timeline)
    launch_us, forward_us = [], 0.0
    for point, duration_us in enumerate((*durations_us, 0.0)):
        clock.launched = clock.now
        clock.pass_row(rows.get(point, ()))
        launch_us.append(clock.launched)
        forward_us = clock.now if point == turn else forward_us
        clock.now += duration_us
    clock.pass_row(rows.get(len(launch_us), ()))
    return Times(tuple(launch_us), forward_us, clock.now, tuple(clock.gather_stalls), tuple(clock.reduce_stalls))


class _Clock:
    """Compute and the channels beside it, event by event. Local to one call of `simulate`."""

    def __init__(self, timeline: Timeline) -> None:
        self._costs = timeline.program.costs
        self._gather_bytes = [gather.num_bytes for gather in timeline.gathers]
        self._gather_us = [gather.us(self._costs) for gather in timeline.gathers]
        self._reduce_bytes = [reduction.num_bytes for reduction in timeline.reductions]
        self._across_bytes = [reduction.across_bytes for reduction in timeline.reductions]
        self.gather_stalls, self.reduce_stalls = [0.0] * len(self._gather_bytes), [0.0] * len(self._reduce_bytes)
        self.now = self.launched = 0.0
        self._gathered, self._reduced, self._averaged = list[float](), list[float](), list[float]()  # when each is over

    def pass_row(self, row: Iterable[Event]) -> None:
        """Launch and wait for what is due at a point."""
        costs = self._costs
        for kind, index in row:
            if kind == "all_gather":
                self._queue(self._gathered, self._gather_us[index])
                continue
            if kind == "wait":
                self.gather_stalls[index] = self._stall(self._gathered[index])
                self.now += costs.busy_us(self._gather_bytes[index])
                continue
            if kind == "reduce_scatter":
                self.now += costs.busy_us(self._reduce_bytes[index])
                self._queue(self._reduced, costs.reduce_us(self._reduce_bytes[index]))
            elif kind == "wait_reduce":
                self.reduce_stalls[index] += self._stall(self._reduced[index])
            elif kind == "all_reduce":
                self.now += costs.busy_us(self._across_bytes[index])
                self._queue(self._averaged, costs.all_reduce_us(self._across_bytes[index]))
            else:
                self.reduce_stalls[index] += self._stall(self._averaged[index])
            self.launched = self.now

    def _stall(self, end: float) -> float:
        stall = max(0.0, end - self.now)
        self.now = max(self.now, end)
        return stall

    def _queue(self, ends: list[float], duration_us: float) -> None:
        ends.append((max(self.now, ends[-1]) if ends else self.now) + duration_us)
