"""Where each reduction is waited for: late enough to overlap, early enough to give its bytes back.

    point            p       p+1     p+2     p+3
    reduce_scatter   k               k+1
    in flight        [======k======] [===k+1 ...
    wait_reduce                      k               the first point where k is over by the cost model
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zfx.ir import Schedule

from .memory import Profile, bytes_left, gathered_bytes
from .timeline import Timeline, completions_of, read, turn_of, write
from .timing import GatherQueue
from .view import actual_us


@dataclass(slots=True)
class _Flight:
    """The reductions in flight while the steps are replayed, and the clock. Local to one call of `wait_reductions`."""

    waits: dict[int, int]
    queue: deque[tuple[int, int, float]]
    now: float = 0.0
    num_bytes: int = 0

    def land(self, point: int) -> None:
        """Wait here for the oldest."""
        index, num_bytes, end = self.queue.popleft()
        self.waits[index] = point
        self.now = max(self.now, end)
        self.num_bytes -= num_bytes

    def land_arrived(self, point: int) -> None:
        while self.queue and self.queue[0][2] <= self.now:
            self.land(point)


def wait_reductions(schedule: Schedule) -> Schedule:
    """Wait for each reduction at the first point where, by the cost model, it is over.

    Earlier, if bucket k+2 is launched (at most two are in flight), if `memory_budget` needs the bytes back, or if the forward
    ends; all are waited for after the last step.

    Guarantee: fits the limits if the argument does with every reduction waited for at its launch. Without a budget, no wait
    but those three kinds ever stalls. Cost: linear.
    Reference: the mirror of gathering, Hutchinson, Sanders, Vitter, *Duality between prefetching and queued writing with
    parallel disks*, 2005.
    """
    return write(wait_when_over(read(schedule), actual_us(schedule.program)))


def wait_when_over(timeline: Timeline, durations_us: Sequence[float]) -> Timeline:
    """`wait_reductions` on a timeline, for the durations given."""
    program, costs = timeline.program, timeline.program.costs
    num_steps, turn = len(program.steps), turn_of(program)
    room = bytes_left(timeline, gathered_bytes)
    completed = [sum(p.grad_bytes for p in gradients) for gradients in completions_of(program)] + [0]
    launched: dict[int, list[tuple[int, int]]] = {}
    for index, reduction in enumerate(timeline.reductions):
        launched.setdefault(reduction.launch, []).append((index, reduction.num_bytes))
    gathers = GatherQueue(timeline)
    flight = _Flight({}, deque())
    pending, channel = 0, 0.0
    for point in range(num_steps + 1):
        flight.land_arrived(point)
        for index, num_bytes in launched.get(point, ()):
            while flight.queue and (
                len(flight.queue) > 1 or 2 * flight.num_bytes + pending + num_bytes > room.before[point]
            ):
                flight.land(point)
            flight.now += costs.busy_us(num_bytes)
            channel = max(channel, flight.now) + costs.reduce_us(num_bytes)
            flight.queue.append((index, num_bytes, channel))
            flight.num_bytes += num_bytes
            pending -= num_bytes
            flight.land_arrived(point)
        pending += completed[point]
        while flight.queue and (point in (turn, num_steps) or 2 * flight.num_bytes + pending > _next(room, point)):
            flight.land(point)
        flight.land_arrived(point)
        flight.now = gathers.pass_point(point, flight.now)
        if point < num_steps:
            flight.now += durations_us[point]
    reductions = tuple(replace(r, wait=flight.waits[i]) for i, r in enumerate(timeline.reductions))
    return replace(timeline, reductions=reductions)


def _next(room: Profile, point: int) -> float:
    """The room from the gathers of this point to the first instruction of the next."""
    return min(room.during[point], room.before[point + 1])
