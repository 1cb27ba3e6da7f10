"""Where each reduction is waited for: late enough to overlap, early enough to give its bytes back.

    point            p       p+1     p+2     p+3
    reduce_scatter   k               k+1
    in flight        [======k======] [===k+1 ...
    wait_reduce                      k               the first point where k is over by the cost model
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zfx.ir import Schedule

from .memory import bytes_left, gathered_bytes
from .timeline import Timeline, completions_of, read, turn_of, write
from .view import actual_us


def wait_reductions(schedule: Schedule) -> Schedule:
    """Wait for each reduction at the first point where, by the cost model, it is over.

    Earlier, if bucket k+2 is launched (at most two are in flight), if `memory_budget` needs the bytes back, or if the forward
    ends; all are waited for after the last step. Where there are replicas the all-reduce is launched there, and waited for by the
    same rule, but that any number may be in flight. Without replicas, gathers are launched before what reductions do at their
    point, as far as `memory_budget` allows: it takes nothing from compute, and their channel has more time.

    Guarantee: fits the limits if the argument does with every reduction waited for at its launch. Without a budget, no wait
    but those three kinds ever stalls. Cost: linear.
    Reference: the mirror of gathering, Hutchinson, Sanders, Vitter, *Duality between prefetching and queued writing with
    parallel disks*, 2005.
    """
    return write(wait_when_over(read(schedule), actual_us(schedule.program)))


def wait_when_over(timeline: Timeline, durations_us: Sequence[float]) -> Timeline:
    """`wait_reductions` on a timeline, for the durations given."""
    num_steps, turn = len(timeline.program.steps), turn_of(timeline.program)
    room = bytes_left(timeline, gathered_bytes)
    completed = [sum(p.grad_bytes for p in gradients) for gradients in completions_of(timeline.program)] + [0]
    launched: dict[int, list[int]] = defaultdict(list)
    for index, reduction in enumerate(timeline.reductions):
        launched[reduction.launch].append(index)
    gathered: dict[int, deque[int]] = defaultdict(deque)
    waited: dict[int, list[int]] = defaultdict(list)
    for index, gather in enumerate(timeline.gathers):
        gathered[gather.launch].append(index)
        waited[gather.wait].append(index)
    flight = _Flight(timeline)
    for point, done in enumerate(completed):
        if flight.reducing or flight.averaging or point in gathered or point in launched or point in waited:
            flight.arrive(point, gathered.get(point, ()), launched.get(point, ()), room.before[point])
            if point in (turn, num_steps):
                flight.land_all(averaged=point == turn)
            flight.make_room((min(room.during[point], room.before[point + 1]) if point < num_steps else room.before[point]) - done)
            flight.leave(waited.get(point, ()))
        flight.pending += done
        if point < num_steps:
            flight.now += durations_us[point]
    for index, _ in flight.averaging:
        flight.done[index] = num_steps + 1  # nothing waits for them but the end
    reductions = tuple(replace(r, wait=w, done=d) for r, w, d in zip(timeline.reductions, flight.waits, flight.done))
    gathers = tuple(g if g.ahead == ahead else replace(g, ahead=ahead) for g, ahead in zip(timeline.gathers, flight.ahead))
    return replace(timeline, gathers=gathers, reductions=reductions)


class _Flight:
    """What is in flight while the steps are replayed, and the clock. Local to one call of `wait_when_over`."""

    def __init__(self, timeline: Timeline) -> None:
        self._costs, self._across = timeline.program.costs, timeline.program.replicas > 1
        self._reduce_bytes = [reduction.num_bytes for reduction in timeline.reductions]
        self._peak_bytes = [reduction.peak_bytes for reduction in timeline.reductions]
        self._across_bytes = [reduction.across_bytes for reduction in timeline.reductions]
        self._gather_bytes = [gather.num_bytes for gather in timeline.gathers]
        self._gather_us = [gather.us(self._costs) for gather in timeline.gathers]
        self._held_bytes = [gather.num_bytes + gather.packing_bytes for gather in timeline.gathers]
        self.waits, self.done = [0] * len(timeline.reductions), [0] * len(timeline.reductions)
        self.ahead = [0] * len(timeline.gathers)
        self.now, self.pending = 0.0, 0
        self.reducing: deque[tuple[int, float]] = deque()  # reductions, and when they are over
        self.averaging: deque[tuple[int, float]] = deque()  # all-reduces, the same
        self._flying = 0  # what both hold; a reduction as much as its all-reduce will, if that is more
        self._gathered: dict[int, float] = {}  # when what is gathered is there
        self._gather_free = self._reduce_free = self._across_free = 0.0
        self._point, self._room, self._here = 0, 0.0, 0
        self._todo: deque[int] = deque()  # gathers of this point
        self._later = 0  # what the reductions of this point that are still to be launched need at the most, one after another
        self._events = 0  # what reductions have done at this point
        self._launched_after: list[tuple[int, int]] = []

    def arrive(self, point: int, gathers: Iterable[int], reductions: Sequence[int], room: float) -> None:
        """Come to a point, and launch its reductions. `room`: for gradients, and for gathers of this point launched before them."""
        self._point, self._room, self._todo = point, room, deque(gathers)
        self._here = self._events = 0
        self._launched_after.clear()
        later = [0]  # by reductions that are left
        for index in reversed(reductions):
            num_bytes = self._reduce_bytes[index]
            later.append(max(self._peak_bytes[index], later[-1]) - num_bytes)
        self._later = later[-1]  # before anything lands: a gather may be launched ahead of that
        while self.averaging and self.averaging[0][1] <= self.now:
            self._finish()
        self._land_arrived()
        for index in reductions:
            self._later = later.pop()
            self._reduce(index)
        self._later = 0

    def make_room(self, room: float) -> None:
        """Wait for the oldest until gradients take no more than that: for all-reduces once no reduction is in flight."""
        while (self.reducing or self.averaging) and self._flying + self.pending > room:
            self._wait()
        self._land_arrived()

    def land_all(self, averaged: bool) -> None:
        """Wait for all reductions; and, if `averaged`, for their all-reduces."""
        while self.reducing:
            self._land()
        while self.averaging and averaged:
            self._finish()

    def leave(self, waits: Iterable[int]) -> None:
        """Launch the other gathers of this point, and wait for those that are due."""
        while self._todo:
            self._gather()
        for index, after in self._launched_after:
            self.ahead[index] = self._events - after
        for index in waits:
            self.now = max(self.now, self._gathered.pop(index)) + self._costs.busy_us(self._gather_bytes[index])

    def _reduce(self, index: int) -> None:
        num_bytes = self._reduce_bytes[index]
        self._gather_what_fits()
        more_bytes = self._peak_bytes[index] - num_bytes
        while len(self.reducing) > 1:
            self._land()
        while (self.reducing or self.averaging) and self._flying + self.pending + more_bytes + self._here > self._room:
            self._wait()
        self.now += self._costs.busy_us(num_bytes)
        self._reduce_free = max(self.now, self._reduce_free) + self._costs.reduce_us(num_bytes)
        self.reducing.append((index, self._reduce_free))
        self._flying += self._peak_bytes[index]
        self.pending -= num_bytes
        self._events += 1
        self._land_arrived()

    def _wait(self) -> None:
        (self._land if self.reducing else self._finish)()

    def _land(self) -> None:
        """Wait here for the oldest reduction; where there are replicas, its all-reduce is launched."""
        self._gather_what_fits()
        index, end = self.reducing.popleft()
        self.waits[index] = self.done[index] = self._point
        self.now = max(self.now, end)
        self._flying -= self._peak_bytes[index]
        self._events += 1
        if self._across:
            num_bytes = self._across_bytes[index]
            self.now += self._costs.busy_us(num_bytes)
            self._across_free = max(self.now, self._across_free) + self._costs.all_reduce_us(num_bytes)
            self.averaging.append((index, self._across_free))
            self._flying += num_bytes

    def _finish(self) -> None:
        """Wait here for the oldest all-reduce."""
        index, end = self.averaging.popleft()
        self.done[index] = self._point
        self.now = max(self.now, end)
        self._flying -= self._across_bytes[index]

    def _land_arrived(self) -> None:
        while self.reducing and self.reducing[0][1] <= self.now:
            self._land()

    def _gather_what_fits(self) -> None:
        while self._todo and not self._across:
            held = self._here + self._held_bytes[self._todo[0]] + self.pending
            if max(self._flying, self._later) + held > self._room:
                break
            self._gather()

    def _gather(self) -> None:
        index = self._todo.popleft()
        self._gather_free = max(self.now, self._gather_free) + self._gather_us[index]
        self._gathered[index] = self._gather_free
        self._here += self._held_bytes[index]
        self._launched_after.append((index, self._events))
