"""What the limits leave beside what must be held."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from ..ir import Program
from ..limits import Limits
from .held import Event, needs_of, sizes_of

MOST_BITS = 2**20  # of subset sums, times different sizes: above that it takes too long, and matters little


@dataclass(frozen=True, slots=True)
class Measure:
    """One hard limit.

    Attributes:
        name: its field in `Limits`.
        size: what each parameter takes of it.
        spare: by event, what it leaves beside all that must be held.
        room: by event, the most of `spare` that other parameters than those it reads can fill.
        bytes_of_one: the fewest bytes of parameters that one unit of size can stand for.
    """

    name: str
    size: dict[str, int]
    spare: list[int]
    room: list[int]
    bytes_of_one: Fraction


def measures_of(program: Program, limits: Limits, events: list[Event]) -> list[Measure]:
    elements, num_bytes = sizes_of(program, "num_elements"), sizes_of(program, "num_bytes")
    least = min((Fraction(num_bytes[name], n) for name, n in elements.items() if n), default=Fraction(0))
    left = [limits.max_live_parameters] * len(events)
    rows = [("max_live_parameters", elements, left, least)]
    if limits.memory_budget is not None:
        rows.append(("memory_budget", num_bytes, [limits.memory_budget - m.held_bytes for m in events], Fraction(1)))
    measures = []
    for name, size, left, least in rows:
        spare = [room - need for room, need in zip(left, needs_of(program, events, size))]
        totals = Totals(size, max(spare, default=0))
        room = [totals.up_to(space, event.reads) for space, event in zip(spare, events)]
        measures.append(Measure(name, size, spare, room, least))
    return measures


class Totals:
    """The totals that some of the sizes have: subset sums, as bits of a number. Where they are too many, multiples of the gcd."""

    def __init__(self, size: dict[str, int], most: int) -> None:
        self._size = size
        self._unit = math.gcd(*size.values()) or 1
        self._counts = Counter(filter(None, size.values()))
        self._most = max(0, min(most, sum(size.values())) // self._unit)
        self._exact = self._most * len(self._counts) <= MOST_BITS
        self._sums: dict[tuple[int, ...], int] = {}

    def up_to(self, room: int, without: Iterable[str] = ()) -> int:
        """The largest that is at most `room`, of the sizes of other names than those."""
        units = max(0, min(room // self._unit, self._most))
        if not self._exact:
            return units * self._unit
        sums = self._sums_of(tuple(sorted(self._size[name] for name in without)))
        return ((sums & ((2 << units) - 1)).bit_length() - 1) * self._unit

    def _sums_of(self, without: tuple[int, ...]) -> int:
        if without not in self._sums:
            sums, mask = 1, (2 << self._most) - 1
            for size, count in (self._counts - Counter(without)).items():
                power = 1
                while count > 0 and min(power, count) * size // self._unit <= self._most:
                    sums |= (sums << (min(power, count) * size // self._unit)) & mask
                    count -= power
                    power *= 2
            self._sums[without] = sums
        return self._sums[without]
