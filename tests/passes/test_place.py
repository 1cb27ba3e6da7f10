"""Placement: the earliest equals brute force; launching late keeps the time and gives memory back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.passes.oracle import at_launches, byte_steps, finish, launches, waits
from tests.strategies import chain, link_costs, problems
from zfx.ir import Limits, Schedule
from zfx.passes import stages
from zfx.passes.place import launch_early, launch_late
from zfx.passes.reduce import bucket_reductions
from zfx.passes.wait import wait_reductions
from zfx.verify import collective_order, violations

DIRECT = link_costs(3.0, 4.0, pack_threshold_bytes=0)


def bucketed(problem) -> Schedule:
    return next(schedule for run, schedule in stages(*problem) if run is bucket_reductions)


def clean(schedule: Schedule) -> bool:
    return next(violations(schedule), None) is None


def placements(schedule: Schedule):
    """Every row of launch points, in bucket order, at or before the waits, that the verifier accepts."""
    ranges = [range(point + 1) for point in waits(schedule)]
    size = 1
    for choices in ranges:
        size *= len(choices)
    assume(size <= 300)
    for points in product(*ranges):
        if list(points) == sorted(points) and clean(at_launches(schedule, list(points))):
            yield list(points)


@given(problems(with_budget=False, max_steps=3, max_parameters=4))
def test_earliest_equals_brute_force(problem):
    schedule = bucketed(problem)
    everything = list(placements(schedule))
    assert launches(launch_early(schedule)) == [min(column) for column in zip(*everything)]


@given(problems(with_budget=True, max_steps=3, max_parameters=4, costs=DIRECT))
def test_earliest_equals_brute_force_under_a_budget_without_packs(problem):
    schedule = bucketed(problem)
    everything = list(placements(schedule))
    assert launches(launch_early(schedule)) == [min(column) for column in zip(*everything)]


@given(problems(with_budget=False, max_steps=3, max_parameters=4))
def test_no_placement_is_faster_than_the_earliest(problem):
    schedule = bucketed(problem)
    best = min(finish(at_launches(schedule, points)) for points in placements(schedule))
    assert finish(launch_early(schedule)) == best


@given(problems())
def test_launching_late_keeps_the_time_and_holds_no_more(problem):
    early = wait_reductions(launch_early(bucketed(problem)))
    late = launch_late(early)
    assert finish(late) == pytest.approx(finish(early), rel=1e-9)
    assert byte_steps(late) <= byte_steps(early)
    assert all(a <= b for a, b in zip(launches(early), launches(late)))
    assert clean(late)


@given(problems())
def test_launching_late_equals_moving_one_after_another_by_simulation(problem):
    """From the last gather to the first, try every later point and simulate everything."""
    early = wait_reductions(launch_early(bucketed(problem)))
    time, points, upper = finish(early), launches(early), len(problem[0].steps)
    for g in reversed(range(len(points))):
        upper = min(upper, waits(early)[g])
        for point in range(points[g], upper + 1):
            moved = [*points[:g], point, *points[g + 1 :]]
            candidate = at_launches(early, moved)
            if finish(candidate) <= time and not any(collective_order(candidate)):
                best = point
        points[g] = upper = best
    assert launches(launch_late(early)) == points


@given(problems())
def test_no_single_gather_can_move_later(problem):
    early = wait_reductions(launch_early(bucketed(problem)))
    late = launch_late(early)
    points = launches(late)
    for g, point in enumerate(points):
        if point < waits(late)[g] and (g + 1 == len(points) or point < points[g + 1]):
            moved = at_launches(late, [*points[:g], point + 1, *points[g + 1 :]])
            assert finish(moved) > finish(early) or any(collective_order(moved))


@given(problems(with_budget=False), st.integers(0, 100))
def test_more_memory_never_costs_time(problem, more):
    """The same buckets, placed under a larger limit."""
    schedule = bucketed(problem)
    limits = schedule.limits
    larger = replace(schedule, limits=replace(limits, max_live_parameters=limits.max_live_parameters + more))

    def placed(start: Schedule) -> float:
        return finish(wait_reductions(launch_late(wait_reductions(launch_early(start)))))

    assert placed(larger) <= placed(schedule) * (1 + 1e-9)


@given(problems(with_budget=True), st.integers(0, 300))
def test_a_larger_budget_never_launches_later(problem, more):
    schedule = bucketed(problem)
    larger = replace(schedule, limits=replace(schedule.limits, memory_budget=schedule.limits.memory_budget + more))
    assert all(a <= b for a, b in zip(launches(launch_early(larger)), launches(launch_early(schedule))))
    assert finish(launch_early(larger)) <= finish(launch_early(schedule))


@given(problems())
def test_waiting_again_after_launching_late_costs_nothing(problem):
    late = launch_late(wait_reductions(launch_early(bucketed(problem))))
    assert finish(wait_reductions(late)) <= finish(late) * (1 + 1e-9)


def test_a_chain_with_room_for_two_layers_prefetches_one_ahead():
    """
    step       0    1    2   turn  4    5         room for two layers of 10: while one computes, the next is on its way;
    launch     0,0  1              4    5 ...     the last stays over the turn
    """
    limits = Limits(max_live_parameters=20, max_reuse_distance=0, param_persistence_threshold=0, prefetch_bucket_size=0)
    schedule = bucketed((chain(3), limits))
    assert launches(launch_early(schedule)) == [0, 0, 1, 4, 5]
    assert waits(schedule) == [0, 1, 2, 5, 6]


def test_the_backwards_gathers_start_after_the_turn():
    limits = Limits(max_reuse_distance=0, param_persistence_threshold=0, prefetch_bucket_size=0)
    schedule = bucketed((chain(3), limits))
    assert launches(launch_early(schedule)) == [0, 0, 0, 4, 4]


def test_a_transfer_as_long_as_two_steps_is_launched_two_steps_ahead():
    costs = link_costs(100.0, float("inf"))
    limits = Limits(param_persistence_threshold=0, prefetch_bucket_size=0)
    schedule = launch_late(launch_early(bucketed((chain(2, duration_us=100.0, repeat=3, costs=costs), limits))))
    assert launches(schedule) == [0, 2]  # p1 is first read at step 3; one step of 100 us hides it


def test_buckets_that_do_not_fit_are_an_error_that_names_the_step():
    schedule = bucketed((chain(3), Limits(max_reuse_distance=0, param_persistence_threshold=0)))
    with pytest.raises(ValueError, match="does not fit the limits at its first read, step 0"):
        launch_early(replace(schedule, limits=Limits(max_live_parameters=29)))
