"""A row of transfers cut into runs, each run one bucket: dynamic programming over (finish time, bytes), with few states a cut.

    transfers      a  b  c  d  e  f
    cuts         0  1  2  3  4  5  6
    runs           [a][b  c  d][e  f]        a state at cut 4: delay of compute so far, end of the channel so far, how it got there

What the rest of the row can still cost depends on two numbers: how far compute is behind (`delay_us`), and when the channel is
free. Of two states at a cut, one that is no better in either is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zfx.costs import Link

# States that are remembered at a cut.
MAX_STATES = 4
# Runs of up to so many transfers are all tried; longer ones in lengths that grow by a half each, unless the row is short.
MAX_LENGTH, SHORT_ROW = 8, 48
# A bucket of several is closed once its transfer takes so many times its fixed costs: a larger one would save less than 1/24 of it.
AMORTISED = 24


@dataclass(slots=True)
class State:
    """The best known way to cut the row up to `stop`, for one end of the channel.

    Attributes:
        delay_us: how far compute is behind where it would be without any of these collectives.
        stretch: byte-steps that the members of a bucket are held for the sake of the others.
        count: number of runs.
        channel_us, before_us: when the last transfer ends, and when the one before it does.
        point: the point at which the delay grew to what it is.
        start, parent: the last run begins at this cut, at which the row stood as the parent says.
        far: an ancestor further up (see `back_to`).
    """

    delay_us: float
    stretch: int
    count: int
    channel_us: float
    before_us: float
    point: int
    start: int
    parent: State | None
    depth: int = 0
    far: State | None = None

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.depth = self.parent.depth + 1
            far = self.parent.far
            even = far is not None and far.far is not None and self.parent.depth - far.depth == far.depth - far.far.depth
            self.far = far.far if even and far is not None else self.parent

    def delay_at(self, point: int) -> float:
        """The delay of compute when it reaches `point`. Ancestors are found in logarithmic time by jumping.

        Reference: Myers, *An applicative random-access stack*, 1983.
        """
        state = self
        while state.point >= point and state.parent is not None:
            state = state.far if state.far is not None and state.far.point >= point else state.parent
        return state.delay_us


Candidate = tuple[float, tuple[float, int, int], float, int, int]  # channel end; delay, stretch, count; end before; point; start
Extend = Callable[[State, int, Sequence[int]], Iterator[tuple[int, Candidate]]]


def partition(
    length: int, reach: Sequence[int], extend: Extend, finish: Callable[[State], float]
) -> list[tuple[int, int]]:
    """The cuts of a row that finish first; among equals, with least stretch, then fewest runs.

    Args:
        reach: by cut, the furthest cut that a run from there may end at, at least one further.
        extend: from a state at a cut, for each of some later cuts, the state after a run up to there.
        finish: when all is over, from a state at the end of the row.

    Guarantee: no partition finishes earlier, for a row of at most `SHORT_ROW` transfers, as long as at no cut more than
    `MAX_STATES` states are undominated, and as far as delay and channel say all about the past (they don't where a transfer is
    launched before earlier waits; such pasts are told apart only by the delay now). Stretch and count only decide between
    equals along the way. Cost: linear: at most `MAX_STATES` states at a cut, and O(log) runs from each.
    """
    candidates: list[list[tuple[Candidate, State]]] = [[] for _ in range(length + 1)]
    states = [State(0.0, 0, 0, 0.0, 0.0, -1, 0, None)]
    for cut in range(length):
        if cut:
            states = _undominated(candidates[cut])
            candidates[cut] = []
        stops = _stops(cut, reach[cut], length)
        for state in states:
            for stop, candidate in extend(state, cut, stops):
                candidates[stop].append((candidate, state))
    if length:
        states = _undominated(candidates[length])
    best: State | None = min(states, key=lambda s: (finish(s), s.stretch, s.count))
    stop, runs = length, []
    while best is not None and best.parent is not None:
        runs.append((best.start, stop))
        stop, best = best.start, best.parent
    return runs[::-1]


def _stops(cut: int, reach: int, length: int) -> Sequence[int]:
    if length <= SHORT_ROW or reach - cut <= MAX_LENGTH:
        return range(cut + 1, reach + 1)
    stops = list(range(cut + 1, cut + MAX_LENGTH + 1))
    width = MAX_LENGTH
    while cut + width < reach:
        width += width // 2
        stops.append(min(cut + width, reach))
    return stops


def _undominated(candidates: list[tuple[Candidate, State]]) -> list[State]:
    """From the earliest end of the channel on, those that have less delay (or stretch, or count) than any before."""
    candidates.sort(key=lambda pair: pair[0])
    kept: list[tuple[Candidate, State]] = []
    for pair in candidates:
        if not kept or pair[0][1] < kept[-1][0][1]:
            kept.append(pair)
    if len(kept) > MAX_STATES:  # evenly, both ends included
        kept = [kept[i * (len(kept) - 1) // (MAX_STATES - 1)] for i in range(MAX_STATES)]
    return [
        State(delay, stretch, count, channel, before, point, start, parent)
        for (channel, (delay, stretch, count), before, point, start), parent in kept
    ]


def enough_bytes(link: Link, launch_us: float) -> float:
    """Once a bucket holds this much, one more member would save next to nothing."""
    fixed_us = link.latency_us + launch_us
    return AMORTISED * fixed_us * link.bytes_per_us if fixed_us else 0.0
