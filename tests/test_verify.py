"""The verifier: each kind of damage to a right schedule is found by its rule; nothing, however wrong, makes it crash."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.passes.oracle import at_launches, launches, peak_elements, waits
from tests.strategies import chain, problems, programs
from zfx.errors import ScheduleError
from zfx.ir import Bucket, Instruction, Kind, Limits, Parameter, Program, Schedule, Step
from zfx.passes import plan
from zfx.replay import replay
from zfx.verify import RULES, verify, violations

TIGHT = Limits(max_reuse_distance=0, param_persistence_threshold=0)


def broken(schedule: Schedule) -> set[str]:
    return {violation.rule for violation in violations(schedule)}


def schedules(**options: object) -> st.SearchStrategy[Schedule]:
    """Right schedules of programs that leave little out, so that there is something to damage."""
    return problems(busy=True, max_parameters=4, max_steps=4, **options).map(lambda problem: plan(*problem))


def pick(data: st.DataObject, schedule: Schedule, *kinds: str) -> int:
    """The place of a random instruction of these kinds."""
    places = [place for place, i in enumerate(schedule.instructions) if i.kind in kinds]
    assume(places)
    return data.draw(st.sampled_from(places))


def without(schedule: Schedule, place: int) -> Schedule:
    return replace(schedule, instructions=schedule.instructions[:place] + schedule.instructions[place + 1 :])


def insert(schedule: Schedule, place: int, *instructions: Instruction) -> Schedule:
    rows = schedule.instructions
    return replace(schedule, instructions=rows[:place] + instructions + rows[place:])


def move(schedule: Schedule, place: int, point: int, *, last: bool = True) -> Schedule:
    """The instruction at `place`, moved to `point`: behind (or before) all others there."""
    moved = replace(schedule.instructions[place], point=point)
    rest = without(schedule, place)
    target = sum(i.point < point or (last and i.point == point) for i in rest.instructions)
    return insert(rest, target, moved)


def reads_of(schedule: Schedule, name: str) -> list[int]:
    return [t for t, step in enumerate(schedule.program.steps) if name in step.reads]


# ------------------------------------------------------------------------------------------------------- parameters


@given(schedules(), st.data())
def test_a_dropped_gather(schedule, data):
    place = pick(data, schedule, "all_gather")
    first_time = not any(set(i.parameters) & set(schedule.instructions[place].parameters) for i in schedule.instructions[:place])
    found = broken(without(schedule, place))
    assert "launched_once" in found
    assert found & ({"gathered_before_use"} if first_time else {"gathered_before_use", "no_use_after_release"})


@given(schedules(), st.data())
def test_a_dropped_wait(schedule, data):
    found = broken(without(schedule, pick(data, schedule, "wait")))
    assert {"launched_once", "waited_before_use", "release_after_wait"} & found >= {"launched_once", "waited_before_use"}


@given(schedules(), st.data())
def test_a_wait_moved_behind_the_first_use(schedule, data):
    place = pick(data, schedule, "wait")
    point = schedule.instructions[place].point
    found = broken(move(schedule, place, point + 1, last=False))
    assert "waited_before_use" in found
    later = any(i.kind == "wait" and i.point == point for i in schedule.instructions[place + 1 :])
    assert ("happens_before" in found) == (not later)  # a later bucket of the same stream is a path, too


def test_only_a_path_orders_two_streams_and_a_later_wait_is_one():
    """The gather stream is in order: after waiting for bucket 1, bucket 0 is there too, as far as streams go."""
    schedule = plan(chain(2), Limits(prefetch_bucket_size=0), check=verify)
    gathers = [replace(i, point=0) for i in schedule.instructions if i.kind == "all_gather"]
    waits_of = {i.bucket: replace(i, point=0) for i in schedule.instructions if i.kind == "wait"}
    others = [i for i in schedule.instructions if i.kind not in ("all_gather", "wait")]
    assert broken(replace(schedule, instructions=(*gathers, waits_of[0], waits_of[1], *others))) == set()
    assert broken(replace(schedule, instructions=(*gathers, waits_of[1], *others))) == {
        "launched_once", "waited_before_use", "release_after_wait",
    }  # fmt: skip
    assert "happens_before" in broken(replace(schedule, instructions=(*gathers, waits_of[0], *others)))


@given(schedules(), st.data())
def test_a_release_moved_before_the_last_use(schedule, data):
    place = pick(data, schedule, "release")
    release = schedule.instructions[place]
    assert "no_use_after_release" in broken(move(schedule, place, release.point - 1))


@given(schedules(), st.data())
def test_a_dropped_release(schedule, data):
    place = pick(data, schedule, "release")
    names = set(schedule.instructions[place].parameters)
    found = broken(without(schedule, place))
    again = any(i.kind == "all_gather" and names & set(i.parameters) for i in schedule.instructions[place:])
    assert ("gathered_once" if again else "nothing_leaked") in found


@given(schedules(), st.data())
def test_a_release_before_its_wait(schedule, data):
    place = pick(data, schedule, "wait")
    wait = schedule.instructions[place]
    release = Instruction("release", wait.point, wait.parameters)
    assert {"release_after_wait", "happens_before"} <= broken(insert(schedule, place, release))


@given(schedules(), st.data())
def test_a_release_that_runs_twice(schedule, data):
    place = pick(data, schedule, "release")
    assert "release_after_wait" in broken(insert(schedule, place, schedule.instructions[place]))


@given(schedules(), st.data())
def test_a_parameter_gathered_while_it_is_live(schedule, data):
    place = pick(data, schedule, "wait")
    wait = schedule.instructions[place]
    bucket = Bucket(len(schedule.buckets), "all_gather", wait.parameters)
    again = [Instruction(kind, wait.point, wait.parameters, bucket.index) for kind in ("all_gather", "wait")]
    assert "gathered_once" in broken(replace(insert(schedule, place + 1, *again), buckets=(*schedule.buckets, bucket)))


def test_an_escaping_parameter_is_released():
    program = replace(chain(2), escapes=("p0",))
    schedule = plan(program, TIGHT, check=verify)
    end = len(program.steps)
    assert broken(insert(schedule, len(schedule.instructions), Instruction("release", end, ("p0",)))) == {"nothing_leaked"}


# -------------------------------------------------------------------------------------------------------- collectives


@given(schedules(), st.data(), st.sampled_from(["all_gather", "reduce_scatter"]))
def test_two_collectives_swapped(schedule, data, kind):
    places = [place for place, i in enumerate(schedule.instructions) if i.kind == kind]
    assume(len(places) > 1)
    k = data.draw(st.integers(0, len(places) - 2))
    rows = list(schedule.instructions)
    a, b = places[k], places[k + 1]
    rows[a], rows[b] = replace(rows[b], point=rows[a].point), replace(rows[a], point=rows[b].point)
    assert "collective_order" in broken(replace(schedule, instructions=tuple(rows)))


@given(schedules(), st.data())
def test_a_member_removed_from_a_bucket(schedule, data):
    bucket = data.draw(st.sampled_from(schedule.buckets))
    smaller = replace(bucket, parameters=bucket.parameters[1:], packed=())
    buckets = tuple(smaller if b is bucket else b for b in schedule.buckets)
    assert "buckets" in broken(replace(schedule, buckets=buckets))
    rows = tuple(replace(i, parameters=smaller.parameters) if i.bucket == bucket.index else i for i in schedule.instructions)
    found = broken(replace(schedule, buckets=buckets, instructions=rows))
    gathers = bucket.kind == "all_gather"
    assert found & ({"gathered_before_use", "no_use_after_release"} if gathers else {"reduced_once"})


@given(schedules(), st.data())
def test_a_pack_of_strangers(schedule, data):
    bucket = data.draw(st.sampled_from(schedule.buckets))
    buckets = tuple(replace(b, packed=("stranger",)) if b is bucket else b for b in schedule.buckets)
    assert "buckets" in broken(replace(schedule, buckets=buckets))


@given(schedules(), st.data())
def test_a_bucket_out_of_its_place(schedule, data):
    bucket = data.draw(st.sampled_from(schedule.buckets))
    buckets = tuple(replace(b, index=b.index + 1) if b is bucket else b for b in schedule.buckets)
    assert "buckets" in broken(replace(schedule, buckets=buckets))


@given(schedules(), st.data())
def test_points_that_go_back_or_out(schedule, data):
    place = pick(data, schedule, "release", "wait", "all_gather")
    point = data.draw(st.sampled_from([-1, len(schedule.program.steps) + 1]))
    rows = list(schedule.instructions)
    rows[place] = replace(rows[place], point=point)
    assert "points" in broken(replace(schedule, instructions=tuple(rows)))
    assume(schedule.instructions[0].point < schedule.instructions[-1].point)
    assert "points" in broken(replace(schedule, instructions=schedule.instructions[::-1]))


# ------------------------------------------------------------------------------------------------------------ the turn


@given(schedules(), st.data())
def test_a_wrong_kept_list(schedule, data):
    name = data.draw(st.sampled_from([p.name for p in schedule.program.parameters]))
    kept = tuple(n for n in schedule.kept if n != name) if name in schedule.kept else (*schedule.kept, name)
    assert "turn" in broken(replace(schedule, kept=kept))


def test_what_is_kept_is_gathered_again():
    """p1 stays over the turn; released after its first backward read, it may not be gathered a second time."""
    schedule = plan(chain(2, repeat=2), TIGHT, check=verify)
    assert schedule.kept == ("p1",)
    release = next(p for p, i in enumerate(schedule.instructions) if i.kind == "release" and i.parameters == ("p1",))
    point = schedule.instructions[release].point
    index = 1 + max(b.index for b in schedule.buckets if b.kind == "all_gather")
    buckets = [replace(b, index=b.index + (b.index >= index)) for b in schedule.buckets]
    buckets.insert(index, Bucket(index, "all_gather", ("p1",)))
    rows = [i if i.bucket is None or i.bucket < index else replace(i, bucket=i.bucket + 1) for i in schedule.instructions]
    again = [Instruction("release", point - 1, ("p1",))]
    again += [Instruction(kind, point - 1, ("p1",), index) for kind in ("all_gather", "wait")]
    place = next(p for p, i in enumerate(rows) if i.point >= point - 1)
    rows = [*rows[:place], *again, *rows[place:]]
    assert "turn" in broken(replace(schedule, buckets=tuple(buckets), instructions=tuple(rows)))


@given(schedules(), st.data())
def test_a_gather_moved_across_the_turn(schedule, data):
    turn = schedule.program.turn
    assume(turn is not None)
    later = [k for k, point in enumerate(launches(schedule)) if point > turn]
    assume(later)
    points = launches(schedule)
    points[data.draw(st.sampled_from(later))] = turn
    assert "turn" in broken(at_launches(schedule, points))


# ------------------------------------------------------------------------------------------------------------- gradients


@given(schedules(), st.data())
def test_a_dropped_reduction(schedule, data):
    place = pick(data, schedule, "reduce_scatter")
    assert {"reduced_once", "launched_once"} <= broken(without(schedule, place))


@given(schedules(), st.data())
def test_a_doubled_reduction(schedule, data):
    place = pick(data, schedule, "reduce_scatter")
    assert {"reduced_once", "launched_once"} <= broken(insert(schedule, place, schedule.instructions[place]))


@given(schedules(), st.data())
def test_a_reduction_launched_before_completion(schedule, data):
    place = pick(data, schedule, "reduce_scatter")
    point = schedule.instructions[place].point
    assert {"reduced_after_completion", "happens_before"} <= broken(move(schedule, place, point - 1))


@given(schedules(), st.data())
def test_a_reduction_that_is_not_waited_for(schedule, data):
    assert "launched_once" in broken(without(schedule, pick(data, schedule, "wait_reduce")))


@given(schedules(), st.data())
def test_a_reduction_waited_for_before_its_launch(schedule, data):
    place = pick(data, schedule, "reduce_scatter")
    bucket = schedule.instructions[place].bucket
    wait = next(p for p, i in enumerate(schedule.instructions) if i.kind == "wait_reduce" and i.bucket == bucket)
    early = insert(without(schedule, wait), place, replace(schedule.instructions[wait], point=schedule.instructions[place].point))
    assert "launched_once" in broken(early)


# ---------------------------------------------------------------------------------------------------------------- limits


@given(schedules(), st.data())
def test_a_launch_moved_so_that_the_limit_is_exceeded(schedule, data):
    points, peak = launches(schedule), peak_elements(schedule)
    k = data.draw(st.integers(0, len(points) - 1)) if points else 0
    assume(points)
    moved = at_launches(schedule, [*points[:k], 0, *points[k + 1 :]])
    exact = replace(moved, limits=replace(schedule.limits, max_live_parameters=peak))
    assert ("max_live_parameters" in broken(exact)) == (peak_elements(moved) > peak)


@given(schedules())
def test_max_live_parameters_is_checked_to_the_element(schedule):
    peak = peak_elements(schedule)
    assume(peak > 0)
    assert "max_live_parameters" not in broken(replace(schedule, limits=replace(schedule.limits, max_live_parameters=peak)))
    assert "max_live_parameters" in broken(replace(schedule, limits=replace(schedule.limits, max_live_parameters=peak - 1)))


@given(schedules())
def test_memory_budget_is_checked_to_the_byte(schedule):
    peak = max(state.total_bytes for state in replay(schedule))
    assume(peak > 0)
    assert "memory_budget" not in broken(replace(schedule, limits=replace(schedule.limits, memory_budget=peak)))
    assert "memory_budget" in broken(replace(schedule, limits=replace(schedule.limits, memory_budget=peak - 1)))


@given(schedules(), st.sampled_from(["prefetch_bucket_size", "reduce_bucket_size"]))
def test_a_bucket_larger_than_its_bound(schedule, field):
    kind = "all_gather" if field == "prefetch_bucket_size" else "reduce_scatter"
    size = {p.name: p.num_elements for p in schedule.program.parameters}
    sizes = [sum(size[n] for n in b.parameters) for b in schedule.buckets if b.kind == kind and len(b.parameters) > 1]
    assume(max(sizes, default=0) > 0)
    assert "bucket_size" not in broken(replace(schedule, limits=replace(schedule.limits, **{field: max(sizes)})))
    assert "bucket_size" in broken(replace(schedule, limits=replace(schedule.limits, **{field: max(sizes) - 1})))


@given(schedules(with_escapes=False), st.integers(0, 30))
def test_a_gap_longer_than_the_reuse_distance(schedule, reach):
    """Against the definition: the gaps are read off the releases, the distances off the steps."""
    program = schedule.program
    size = {p.name: p.num_elements for p in program.parameters}
    too_long = False
    for name in size:
        reads = reads_of(schedule, name)
        for a, b in pairwise(reads):
            let_go = any(i.kind == "release" and name in i.parameters and a < i.point <= b for i in schedule.instructions)
            inside = {(n, s.phase == "backward") for s in program.steps[a + 1 : b] for n in s.reads}
            too_long |= not let_go and sum(size[n] for n, _ in inside) > reach
    limits = replace(schedule.limits, max_reuse_distance=reach, param_persistence_threshold=0)
    assume(all(p.numel > 0 for p in program.parameters))  # what is empty is always persistent
    assert ("reuse_distance" in broken(replace(schedule, limits=limits))) == too_long


# -------------------------------------------------------------------------------------------------------- anything at all

NAMES = st.sampled_from(["p0", "p1", "p2", "nobody"])
ANY_NAMES = st.lists(NAMES, max_size=3).map(tuple)
KINDS = get_args(Kind)
ANY_INSTRUCTION = st.builds(
    Instruction, st.sampled_from(KINDS), st.integers(-2, 9), ANY_NAMES, st.one_of(st.none(), st.integers(-2, 4))
)
ANY_KIND = st.sampled_from(["all_gather", "reduce_scatter"])
ANY_BUCKET = st.builds(Bucket, st.integers(-2, 4), ANY_KIND, ANY_NAMES, ANY_NAMES, st.booleans())


ANY_PROGRAM = programs(replicas=(1, 2), reshard_to=(0, 2))


@given(ANY_PROGRAM, st.lists(ANY_INSTRUCTION, max_size=8), st.lists(ANY_BUCKET, max_size=3), ANY_NAMES, ANY_NAMES)
def test_nothing_crashes_the_verifier(program, rows, buckets, kept, resharded):
    schedule = Schedule(program, replace(TIGHT, memory_budget=0), tuple(buckets), tuple(rows), kept, resharded=resharded)
    for violation in violations(schedule):
        assert violation.rule in RULES
        assert violation.step is None or isinstance(violation.step, int)
    assert all(state.num_live == len(state.live) for state in replay(schedule))


def test_the_error_names_rule_step_and_parameter():
    schedule = plan(chain(2), TIGHT)
    place = next(place for place, i in enumerate(schedule.instructions) if i.kind == "release")
    release = schedule.instructions[place]
    with pytest.raises(ScheduleError) as caught:
        verify(move(schedule, place, release.point - 1))
    error = caught.value
    assert (error.rule, error.step, error.parameter) == ("no_use_after_release", release.point - 1, release.parameters[0])


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_says_itself_in_words(rule):
    assert len(RULES[rule].__doc__.split("\n")[0]) > 30


# ---------------------------------------------------------------------------------------------------------------- replay


@given(schedules())
def test_replay_shows_one_state_per_instruction_and_step_and_sums_what_is_live(schedule):
    states = list(replay(schedule))
    assert [s.instruction for s in states if s.instruction] == list(schedule.instructions)
    assert [s.step for s in states if s.step] == list(schedule.program.steps)
    size = {p.name: p for p in schedule.program.parameters}
    for state in states:
        assert state.gathered_elements == sum(size[name].num_elements for name in state.live)
        assert state.gathered_bytes == sum(size[name].num_bytes for name in state.live)
        other = state.step.other_bytes if state.step else None
        held = state.gathered_bytes + state.packing_bytes + state.gradient_bytes + schedule.program.static_bytes
        assert other is None or state.total_bytes == held + other
    assert max(s.num_elements for s in states if s.instruction) == peak_elements(schedule)
    assert states[-1].gradient_bytes == states[-1].packing_bytes == 0


def test_replay_byte_by_byte():
    """One layer: 40 bytes gathered, 40 of a gradient from step 2 on, 40 more while it travels; 8 others in a step."""
    schedule = plan(chain(1), TIGHT)
    rows = [(s.point, s.instruction.kind if s.instruction else "step", s.total_bytes) for s in replay(schedule)]
    assert rows == [
        (0, "all_gather", 48), (0, "wait", 48), (0, "step", 48), (1, "step", 40), (2, "step", 88),
        (3, "release", 40), (3, "reduce_scatter", 80), (3, "wait_reduce", 0),
    ]  # fmt: skip
    assert waits(schedule) == [0]


def test_a_program_without_a_turn_keeps_nothing():
    program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",)),))
    schedule = plan(program, Limits(), check=verify)
    assert broken(replace(schedule, kept=("w",))) == {"turn"}
