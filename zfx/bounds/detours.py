"""Paths from one event through a channel to a later one, which memory forces."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from heapq import heappop, heappush
from typing import Protocol

from ..ir import Schedule
from .held import Event, sizes_of
from .rest import Rest
from .room import Measure, Totals
from .volume import cheapest_link, gather_shares_of, least_share_of_byte


def detours_of(schedule: Schedule, events: list[Event], measures: list[Measure], rest: Rest) -> list[Detour]:
    """Gathers by parameter, from the start, from the forward's last step and from the turn; reductions where bytes are limited."""
    turn = schedule.program.turn
    landmarks = [m for m, event in enumerate(events) if event.step in (0, turn, turn - 1 if turn else 0)]
    detours: list[Detour] = [Return(schedule, events, measure) for measure in measures]
    detours += [Refill(schedule, events, measure, since) for measure in measures for since in landmarks]
    if schedule.limits.memory_budget is not None:
        detours.append(Drain(schedule, events, measures[-1], rest))
    return detours


class Detour(Protocol):
    """Paths from the end of an earlier event through a channel to a later one, along the row of events."""

    def ready_us(self, t: int) -> float:
        """When t can start at the earliest. Called for each event in turn."""
        ...

    def leave(self, s: int, now: float) -> None:
        """s can be over at this time at the earliest. Called after `ready_us` of the same event."""


class Return:
    """Paths from the last event s beside which a parameter does not fit to the next step t that reads it: it is launched after s.

    Kept for that are the events after which all have more to spare, in order.
    """

    def __init__(self, schedule: Schedule, events: list[Event], measure: Measure) -> None:
        self._launch_us, self._events, self._measure = schedule.program.costs.launch_us, events, measure
        self._link = cheapest_link(schedule.program)
        self._num_bytes, self._escapes = sizes_of(schedule.program, "num_bytes"), set(schedule.program.escapes)
        self._read_at: dict[str, int] = {}
        self._spare: list[int] = []
        self._ends: list[tuple[int, float]] = []

    def ready_us(self, t: int) -> float:
        launched_after: dict[int, int] = defaultdict(int)
        for name in self._events[t].reads:
            read_at = self._read_at.get(name, -1)
            place = bisect_left(self._spare, self._measure.size[name]) - 1
            if place >= 0 and self._ends[place][0] > read_at and (read_at < 0 or name not in self._escapes):
                launched_after[place] += self._num_bytes[name]
            self._read_at[name] = t
        ready, num_bytes = -math.inf, 0
        for place in sorted(launched_after, reverse=True):
            num_bytes += launched_after[place]
            ready = max(ready, self._ends[place][1] + self._link.us(num_bytes) + self._launch_us)
        return ready

    def leave(self, s: int, now: float) -> None:
        while self._spare and self._spare[-1] >= self._measure.spare[s]:
            self._spare.pop()
            self._ends.pop()
        self._spare.append(self._measure.spare[s])
        self._ends.append((s, now))


class Refill:
    """Paths from the end of a event s through the gather channel to a event t, both at the event `since` or later.

    `P(t)`: the size of all that is read from `since` to t, each parameter once. Beside what s reads itself there is room for
    `room(s)`, so `P(t) - P(s) - room(s)` is launched after s, in one collective or more, and over before t. Since only the
    difference of `P(t)` and `Q(s) = P(s) + room(s)` counts, one s is the best for all t, among those with `Q(s) < P(t)`.
    """

    def __init__(self, schedule: Schedule, events: list[Event], measure: Measure, since: int) -> None:
        program, link = schedule.program, cheapest_link(schedule.program)
        self._since, self._room = since, measure.room
        self._latency_us, self._launch_us = link.latency_us, program.costs.launch_us
        one = float(measure.bytes_of_one)
        share = least_share_of_byte(program, gather_shares_of(program, schedule.limits))
        self._us_in_one = one / link.bytes_per_us
        self._us_in_many = self._us_in_one + one * share * self._latency_us
        self._new = first_read_since(events, set(program.escapes), measure.size, since)
        self._read = 0
        self._later: list[tuple[int, float]] = []
        self._in_one = self._in_many = -math.inf

    def ready_us(self, t: int) -> float:
        self._read += self._new[t]
        while self._later and self._later[0][0] < self._read:
            held, end_us = heappop(self._later)
            self._in_one = max(self._in_one, end_us - held * self._us_in_one)
            self._in_many = max(self._in_many, end_us - held * self._us_in_many)
        in_one = self._in_one + self._read * self._us_in_one + self._latency_us
        return max(in_one, self._in_many + self._read * self._us_in_many) + self._launch_us

    def leave(self, s: int, now: float) -> None:
        if s >= self._since:
            heappush(self._later, (self._read + self._room[s], now))


def first_read_since(events: list[Event], escapes: set[str], size: dict[str, int], since: int) -> list[int]:
    """By event after `since`, the size of what is read there and was not read from `since` on; what escapes, not ever before."""
    seen: set[str] = set()
    new = []
    for m, event in enumerate(events):
        new.append(sum(size[name] for name in event.reads - seen) if m > since else 0)
        seen |= event.reads if m >= since else event.reads & escapes
    return new


class Drain:
    """Paths from the end of a step s through the reduce channel to a step t: the mirror image of `Refill`.

    Of what completes from s on and before t, all that does not fit beside t has been launched after s and is over before t.
    """

    def __init__(self, schedule: Schedule, events: list[Event], measure: Measure, rest: Rest) -> None:
        costs = schedule.program.costs
        self._events, self._latency_us, self._launch_us = events, costs.reduce.latency_us, costs.launch_us
        self._us_of_byte = 1 / costs.reduce.bytes_per_us
        totals = Totals(sizes_of(schedule.program, "grad_bytes"), max(measure.spare, default=0))
        self._room = [totals.up_to(spare) for spare in measure.spare]
        self._completed = [rest.num_bytes[0] - left for left in rest.num_bytes]  # before each event
        self._best: list[float] = []

    def ready_us(self, t: int) -> float:
        if self._events[t].step is None:  # it holds what has just completed, which is no more than complete here
            return -math.inf
        too_much = self._completed[t] - self._room[t]
        number = bisect_left(self._completed, too_much, hi=t)
        if not number:
            return -math.inf
        return self._best[number - 1] + too_much * self._us_of_byte + self._latency_us + self._launch_us

    def leave(self, s: int, now: float) -> None:
        best = now - self._completed[s] * self._us_of_byte
        self._best.append(max(best, self._best[-1]) if self._best else best)
