"""Selection: equal to brute force where it claims to be exact, within the room always, and close to the bound elsewhere."""

from __future__ import annotations

from itertools import combinations
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zfx.passes.select import Hold, Room, select, sweep, without

MOMENTS = 9


def fits(holds: list[Hold], room: Room) -> bool:
    return all(
        sum(h.num_elements for h in holds if h.start <= m < h.stop) <= room.elements[m]
        and sum(h.num_bytes for h in holds if h.start <= m < h.stop) <= room.num_bytes[m]
        for m in range(len(room.elements))
    )


def best(holds: list[Hold], room: Room) -> float:
    """The most that any subset which fits saves. Exponential."""
    subsets = (list(subset) for count in range(len(holds) + 1) for subset in combinations(holds, count))
    return max(sum(h.saved_us for h in subset) for subset in subsets if fits(subset, room))


def saved(holds: list[Hold], kept: set[int]) -> float:
    return sum(holds[index].saved_us for index in kept)


spans = st.tuples(st.integers(0, MOMENTS - 1), st.integers(0, MOMENTS - 1)).map(lambda pair: (min(pair), max(pair) + 1))
rooms = st.lists(st.integers(0, 20), min_size=MOMENTS, max_size=MOMENTS)
HOLDS = st.builds(
    lambda span, elements, num_bytes, saved_us: Hold(*span, elements, num_bytes, float(saved_us)),
    spans, st.integers(0, 8), st.integers(0, 8), st.integers(0, 9),
)  # fmt: skip


@given(st.lists(HOLDS, max_size=8), rooms, rooms, st.integers(0, MOMENTS - 1))
def test_what_is_kept_fits_and_nothing_can_be_added(holds, elements, num_bytes, waist):
    room = Room(elements, num_bytes)
    kept = select(holds, room, waist)
    assert fits([holds[i] for i in kept], room)
    if len({(h.num_elements, h.num_bytes, h.saved_us) for h in holds}) <= 1:
        assert saved(holds, kept) == best(holds, room)


@given(st.lists(spans, max_size=10), rooms, st.integers(1, 8))
def test_of_equal_holds_as_many_as_possible_are_kept(rows, elements, size):
    holds = [Hold(start, stop, size, 4 * size, 1.0) for start, stop in rows]
    room = Room(elements, [inf] * MOMENTS)
    assert len(select(holds, room, 4)) == best(holds, room)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), max_size=4), rooms, st.booleans())
def test_nested_holds_are_an_exact_knapsack(rows, amounts, in_bytes):
    """Nested around moment 4, each level with its own bound on either side."""
    holds = [Hold(4 - depth, 5 + depth, size, size, float(value)) for depth, (size, value) in enumerate(rows)]
    room = Room([inf] * MOMENTS, amounts) if in_bytes else Room(amounts, [inf] * MOMENTS)
    assert saved(holds, select(holds, room, 4)) == best(holds, room)


@given(st.lists(HOLDS, max_size=8), rooms, rooms)
def test_it_is_never_worse_than_giving_up_what_ends_last(holds, elements, num_bytes):
    room = Room(elements, num_bytes)
    assert saved(holds, select(holds, room, 4)) >= saved(holds, sweep(holds, room, lambda i: -holds[i].stop))


@pytest.mark.parametrize("seed", range(3))
def test_a_large_knapsack_is_within_a_percent_of_its_bound(seed):
    """A hundred and fifty sizes around one moment, more sums than are remembered: against the fractional relaxation."""
    n, random = 150, Random(seed)
    rows = [(random.randint(1, 1_000), random.randint(1, 1_000)) for _ in range(n)]
    holds = [Hold(n - i, n + 1 + i, size, size, float(value)) for i, (size, value) in enumerate(rows)]
    room = Room([20_000] * (2 * n + 2), [inf] * (2 * n + 2))
    left, bound = 20_000.0, 0.0
    for size, value in sorted(rows, key=lambda row: row[0] / row[1]):
        bound += value * min(1.0, left / size)
        left -= min(left, size)
    kept = select(holds, room, n)
    assert fits([holds[i] for i in kept], room)
    assert saved(holds, kept) >= 0.99 * bound


@given(st.lists(HOLDS, max_size=5), rooms, rooms)
def test_the_room_that_is_left(holds, elements, num_bytes):
    left = without(Room(elements, num_bytes), holds)
    for m in range(MOMENTS):
        assert left.elements[m] == elements[m] - sum(h.num_elements for h in holds if h.start <= m < h.stop)
        assert left.num_bytes[m] == num_bytes[m] - sum(h.num_bytes for h in holds if h.start <= m < h.stop)


def test_three_small_ones_are_worth_more_than_one_large_one():
    """
    moment   0  1  2  3  4         room for ten
    large    [===========]         ten, saves 10
    small       [=====]            three each, save 4 each: together 12
    """
    holds = [Hold(0, 5, 10, 10, 10.0), *[Hold(1, 4, 3, 3, 4.0)] * 3]
    assert select(holds, Room([10] * 5, [inf] * 5), 2) == {1, 2, 3}
