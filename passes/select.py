"""Which values to hold on to, where there is not room for all: intervals with sizes, under a room that changes over time.

    moment     0    1    2    3    4    5    6          each hold is worth what it saves, if it is held throughout
    a          [=================]
    b               [=====]                             room at 2 for two of the four: which?
    c               [=================]
    d                    [====]

Moments that no hold begins or ends between are one *segment*; its room is the least of theirs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, nlargest
from itertools import accumulate, pairwise
from math import inf
from typing import Any

# How many partial sums the knapsack remembers. It is exact up to there; beyond, it forgets those of least reduced profit.
MAX_SUMS = 256


@dataclass(frozen=True, slots=True)
class Hold:
    """To hold so much over the moments `start` .. `stop - 1` saves `saved_us`."""

    start: int
    stop: int
    num_elements: int
    num_bytes: int
    saved_us: float


@dataclass(frozen=True, slots=True)
class Room:
    """What there is room for at each moment."""

    elements: Sequence[float]
    num_bytes: Sequence[float]


def select(holds: Sequence[Hold], room: Room, waist: int) -> set[int]:
    """The holds to keep, by index: as much saved as possible, within the room at every moment.

    Args:
        waist: a moment at which many holds overlap, one inside the other: the turn, or the seam between two micro-batches.

    Guarantee: fits, and nothing more can be added where it ends. It is optimal if everything fits; if all holds are of one size
    and worth; and if all hold at the waist, nested, in one unit of size, with at most `MAX_SUMS` undominated sums. Else it is the
    best of three: the knapsack at the waist, greedily by time saved per byte and moment, and giving up what ends last.
    Cost: O(holds * log(holds)), and `MAX_SUMS` for each hold at the waist if there are several sizes.
    References: Faigle and Nawijn, *Note on scheduling intervals on-line*, 1995 (equal sizes); Nemhauser and Ullmann,
    *Discrete dynamic programming and capital allocation*, 1969 (the knapsack).
    """
    cuts, holds, room = _segments(holds, room)
    every = range(len(holds))
    kept = _sweep(holds, every, room, lambda index: -holds[index].stop)
    if len(kept) == len(holds) or len({(hold.num_elements, hold.num_bytes, hold.saved_us) for hold in holds}) == 1:
        return kept

    def density(index: int) -> float:
        byte_moments = holds[index].num_bytes * (cuts[holds[index].stop] - cuts[holds[index].start])
        return holds[index].saved_us / byte_moments if byte_moments else inf

    tower = _knapsack(holds, room, bisect_right(cuts, waist) - 1)
    choices = [kept, _sweep(holds, every, room, density), _sweep(holds, tower, room, density)]
    choices = [_fill(holds, choice, room) for choice in choices]
    return max(choices, key=lambda choice: sum(holds[index].saved_us for index in sorted(choice)))


def sweep(holds: Sequence[Hold], room: Room, worth: Callable[[int], Any]) -> set[int]:
    """The holds to keep if, wherever there is too much, the open one of least worth is given up. Cost: O(holds * log(holds))."""
    _, holds, room = _segments(holds, room)
    return _sweep(holds, range(len(holds)), room, worth)


def _segments(holds: Sequence[Hold], room: Room) -> tuple[list[int], list[Hold], Room]:
    """The moments that cut the row, and holds and room in numbers of segments."""
    cuts = sorted({moment for hold in holds for moment in (hold.start, hold.stop)})
    place = {moment: index for index, moment in enumerate(cuts)}
    least = Room(*([min(row[a:b]) for a, b in pairwise(cuts)] for row in (room.elements, room.num_bytes)))
    return cuts, [replace(hold, start=place[hold.start], stop=place[hold.stop]) for hold in holds], least


def _sweep(holds: Sequence[Hold], allowed: Iterable[int], room: Room, worth: Callable[[int], Any]) -> set[int]:
    """From the first segment to the last: where there is too much, the open hold of least worth is given up."""
    starting: dict[int, list[int]] = defaultdict(list)
    stopping: dict[int, list[int]] = defaultdict(list)
    for index in allowed:
        starting[holds[index].start].append(index)
        stopping[holds[index].stop].append(index)
    kept: set[int] = set()
    worst: list[tuple[Any, int]] = []
    elements = num_bytes = 0
    for segment, (max_elements, max_bytes) in enumerate(zip(room.elements, room.num_bytes)):
        for index in stopping.get(segment, ()):
            if index in kept:
                elements -= holds[index].num_elements
                num_bytes -= holds[index].num_bytes
        for index in starting.get(segment, ()):
            kept.add(index)
            heappush(worst, (worth(index), index))
            elements += holds[index].num_elements
            num_bytes += holds[index].num_bytes
        while elements > max_elements or num_bytes > max_bytes:
            index = heappop(worst)[1]
            if holds[index].stop > segment:
                kept.remove(index)
                elements -= holds[index].num_elements
                num_bytes -= holds[index].num_bytes
    return kept


def _fill(holds: Sequence[Hold], kept: set[int], room: Room) -> set[int]:
    """What was given up for something that was itself given up later may fit again."""
    rest = [index for index in range(len(holds)) if index not in kept]
    return kept | _sweep(holds, rest, without(room, [holds[index] for index in sorted(kept)]), lambda index: -holds[index].stop)


def without(room: Room, held: Iterable[Hold]) -> Room:
    """The room that is left besides what is held. Holds beyond the last moment go on at the first."""
    size = len(room.elements)
    elements, num_bytes = [0] * (2 * size + 1), [0] * (2 * size + 1)
    for hold in held:
        for row, amount in ((elements, hold.num_elements), (num_bytes, hold.num_bytes)):
            row[hold.start] += amount
            row[hold.stop] -= amount
    rows = (list(accumulate(row)) for row in (elements, num_bytes))
    left = zip((room.elements, room.num_bytes), rows)
    return Room(*([have - now - wrapped for have, now, wrapped in zip(row, held, held[size:])] for row, held in left))


def _knapsack(holds: Sequence[Hold], room: Room, waist: int) -> set[int]:
    """The best subset of those that hold at the waist, which lie one inside the other.

        moment    0   1   2   w   4   5   6
        outer     [=======================]        from the outermost to the innermost: the sum so far must fit wherever
        middle        [===============]            nothing further inside holds, on both sides, so each level has
        inner             [=======]                a bound of its own

    Undominated (size, saving) pairs are extended by one hold after another. Where there are too many, those stay that save most
    beyond what their size would save at the marginal rate, that of the last hold to fit if the best by rate come first.
    """
    tower = [i for i, hold in enumerate(holds) if hold.start <= waist < hold.stop]
    tower.sort(key=lambda i: (holds[i].start, -holds[i].stop))
    in_bytes = min(room.num_bytes[waist : waist + 1], default=inf) < inf
    marginal = _marginal_rate([holds[i] for i in tower], room, waist, in_bytes)
    nothing: tuple[int, float, int, int, object] = (0, 0.0, 0, 0, None)  # size, saving, elements, bytes, what is in it
    sums = [nothing]
    for i, inner in zip(tower, (*tower[1:], None)):
        hold = holds[i]
        start, stop = (holds[inner].start, holds[inner].stop) if inner is not None else (waist + 1, waist + 1)
        spans = (slice(hold.start, start), slice(min(stop, hold.stop), hold.stop))
        max_elements = min((min(row, default=inf) for row in (room.elements[span] for span in spans)), default=inf)
        max_bytes = min((min(row, default=inf) for row in (room.num_bytes[span] for span in spans)), default=inf)
        size = hold.num_bytes if in_bytes else hold.num_elements
        longer = [
            (total + size, saved + hold.saved_us, elements + hold.num_elements, num_bytes + hold.num_bytes, (i, chosen))
            for total, saved, elements, num_bytes, chosen in sums
        ]
        fits = [s for s in (*longer, *sums) if s[2] <= max_elements and s[3] <= max_bytes] or [nothing]
        fits.sort(key=lambda s: (s[0], -s[1]))  # stable: of equals, the one that has the innermost
        sums, best = [], -1.0
        for candidate in fits:
            if candidate[1] > best:
                sums.append(candidate)
                best = candidate[1]
        if len(sums) > MAX_SUMS:
            sums = nlargest(MAX_SUMS, sums, key=lambda s: s[1] - marginal * s[0])
    chosen: set[int] = set()
    rest = max(sums, key=lambda s: s[1])[4]
    while isinstance(rest, tuple):
        chosen.add(rest[0])
        rest = rest[1]
    return chosen


def _marginal_rate(tower: Sequence[Hold], room: Room, waist: int, in_bytes: bool) -> float:
    """What the room at the waist is worth by its last unit, were holds divisible."""
    left = min((room.num_bytes if in_bytes else room.elements)[waist : waist + 1], default=inf)
    rows = sorted(((hold.num_bytes if in_bytes else hold.num_elements, hold.saved_us) for hold in tower), key=_rate, reverse=True)
    for size, saved_us in rows:
        left -= size
        if left < 0:
            return saved_us / size
    return 0.0


def _rate(row: tuple[int, float]) -> float:
    return row[1] / row[0] if row[0] else inf
