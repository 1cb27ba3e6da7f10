"""Where each reduction is waited for: late enough to overlap, early enough to give its bytes back.

    point            p       p+1     p+2     p+3
    reduce_scatter   k               k+1
    in flight        [======k======] [===k+1 ...
    wait_reduce                      k               the first point where k is over by the cost model
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from zfx.ir import Schedule

from .memory import Profile, bytes_left, gathered_bytes
from .timeline import Timeline, completions_of, read, turn_of, write
from .timing import GatherQueue
from .view import actual_us


class _Flight:
    """The reductions in flight while the steps are replayed, and the clock. Local to one call of `wait_reductions`."""

    def __init__(self, timeline: Timeline) -> None:
        self._costs, self._reductions = timeline.program.costs, timeline.reductions
        self._across = timeline.program.replicas > 1
        self.waits: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.queue: deque[tuple[int, float]] = deque()  # reductions, and when each is over
        self.averaging: deque[tuple[int, float]] = deque()  # all-reduces, the same
        self.now = self._channel = self._across_channel = 0.0
        self.held_bytes = 0  # by what is in flight; by a reduction as much as its all-reduce will hold, if that is more

    def launch(self, index: int) -> None:
        num_bytes = self._reductions[index].num_bytes
        self.now += self._costs.busy_us(num_bytes)
        self._channel = max(self._channel, self.now) + self._costs.reduce_us(num_bytes)
        self.queue.append((index, self._channel))
        self.held_bytes += self._reductions[index].peak_bytes

    def land(self, point: int) -> None:
        """Wait here for the oldest reduction; where there are replicas, its all-reduce is launched."""
        index, end = self.queue.popleft()
        self.waits[index] = self.done[index] = point
        self.now = max(self.now, end)
        self.held_bytes -= self._reductions[index].peak_bytes
        if self._across:
            num_bytes = self._reductions[index].across_bytes
            self.now += self._costs.busy_us(num_bytes)
            self._across_channel = max(self._across_channel, self.now) + self._costs.all_reduce_us(num_bytes)
            self.averaging.append((index, self._across_channel))
            self.held_bytes += num_bytes

    def finish(self, point: int) -> None:
        """Wait here for the oldest all-reduce."""
        index, end = self.averaging.popleft()
        self.done[index] = point
        self.now = max(self.now, end)
        self.held_bytes -= self._reductions[index].across_bytes

    def land_arrived(self, point: int) -> None:
        while self.queue and self.queue[0][1] <= self.now:
            self.land(point)

    def finish_arrived(self, point: int) -> None:
        while self.averaging and self.averaging[0][1] <= self.now:
            self.finish(point)

    def land_until(self, point: int, room: float) -> None:
        """Wait for the oldest until what is held fits the room: for all-reduces once no reduction is in flight."""
        while (self.queue or self.averaging) and self.held_bytes > room:
            (self.land if self.queue else self.finish)(point)


def wait_reductions(schedule: Schedule) -> Schedule:
    """Wait for each reduction at the first point where, by the cost model, it is over.

    Earlier, if bucket k+2 is launched (at most two are in flight), if `memory_budget` needs the bytes back, or if the forward
    ends; all are waited for after the last step. Where there are replicas the all-reduce is launched there, and waited for by the
    same rule, but that any number may be in flight.

    Guarantee: fits the limits if the argument does with every reduction waited for at its launch. Without a budget, no wait
    but those three kinds ever stalls. Cost: linear.
    Reference: the mirror of gathering, Hutchinson, Sanders, Vitter, *Duality between prefetching and queued writing with
    parallel disks*, 2005.
    """
    return write(wait_when_over(read(schedule), actual_us(schedule.program)))


def wait_when_over(timeline: Timeline, durations_us: Sequence[float]) -> Timeline:
    """`wait_reductions` on a timeline, for the durations given."""
    program = timeline.program
    num_steps, turn = len(program.steps), turn_of(program)
    room = bytes_left(timeline, gathered_bytes)
    completed = [sum(p.grad_bytes for p in gradients) for gradients in completions_of(program)] + [0]
    launched: dict[int, list[int]] = {}
    for index, reduction in enumerate(timeline.reductions):
        launched.setdefault(reduction.launch, []).append(index)
    gathers = GatherQueue(timeline)
    flight = _Flight(timeline)
    pending = 0
    for point in range(num_steps + 1):
        flight.finish_arrived(point)
        flight.land_arrived(point)
        for index in launched.get(point, ()):
            reduction = timeline.reductions[index]
            pending -= reduction.num_bytes
            while len(flight.queue) > 1:
                flight.land(point)
            flight.land_until(point, room.before[point] - pending - reduction.peak_bytes)
            flight.launch(index)
            flight.land_arrived(point)
        pending += completed[point]
        while flight.queue and point in (turn, num_steps):
            flight.land(point)
        while flight.averaging and point == turn:
            flight.finish(point)
        flight.land_until(point, _next(room, point) - pending)
        flight.land_arrived(point)
        flight.now = gathers.pass_point(point, flight.now)
        if point < num_steps:
            flight.now += durations_us[point]
    end = {index: num_steps + 1 for index, _ in flight.averaging}  # nothing waits for them but the end
    return replace(
        timeline,
        reductions=tuple(
            replace(r, wait=flight.waits[i], done=end.get(i, flight.done[i])) for i, r in enumerate(timeline.reductions)
        ),
    )


def _next(room: Profile, point: int) -> float:
    """The room from the gathers of this point to the first instruction of the next; at the last point, until the end."""
    return min(room.during[point], room.before[point + 1]) if point < len(room.during) else room.before[point]
