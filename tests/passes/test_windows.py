"""Micro-batches: what is carried over the seam, counted over whole windows; and the verifier's rules for it, each one broken."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.test_pipeline import gathers
from tests.strategies import chain, problems
from tests.test_verify import broken, insert, without
from zfx.ir import Bucket, Instruction, Limits, Parameter, Program, Schedule, Step
from zfx.passes import plan, stages
from zfx.passes.keep import gaps
from zfx.passes.timeline import read, write
from zfx.replay import replay
from zfx.verify import verify

TIGHT = Limits(param_persistence_threshold=0)
WINDOWS = ("first", "middle", "last")


def windows(program: Program, limits: Limits) -> dict[str, Schedule]:
    return {window: plan(replace(program, window=window), limits, check=verify) for window in ("only", *WINDOWS)}


@pytest.mark.parametrize("n", range(1, 9))
def test_a_chain_takes_the_fewest_gathers_over_all_micro_batches(n):
    for k in range(1, n + 1):
        plans = windows(chain(n), replace(TIGHT, max_live_parameters=10 * k))
        count = {window: gathers(schedule) for window, schedule in plans.items()}
        assert count["only"] == 2 * n - k
        for num_batches in range(2, 7):
            total = count["first"] + (num_batches - 2) * count["middle"] + count["last"]
            assert total == n + (2 * num_batches - 1) * (n - k)


@given(problems(busy=True))
def test_all_windows_keep_and_carry_the_same(problem):
    plans = windows(*problem)
    assert len({plans[window].kept for window in WINDOWS}) == 1
    assert plans["only"].carried == ()
    assert len({plans[window].carried for window in WINDOWS}) == 1
    assert all(name not in problem[0].escapes for name in plans["middle"].carried)


@given(problems(busy=True), st.sampled_from(WINDOWS))
def test_every_stage_passes_the_verifier_and_reading_is_the_inverse_of_writing(problem, window):
    for _, schedule in stages(replace(problem[0], window=window), problem[1]):
        verify(schedule)
        assert write(read(schedule)) == schedule


@given(problems(busy=True), st.integers(2, 4))
def test_micro_batches_follow_on_one_another(problem, num_batches):
    """What one leaves live is what the next begins with; nothing is gathered twice in between."""
    plans = windows(*problem)
    live: frozenset[str] = frozenset()
    for window in ("first", *["middle"] * (num_batches - 2), "last"):
        schedule = plans[window]
        begins = set(schedule.carried) if window != "first" else set()
        assert begins <= live
        for state in replay(schedule):
            if state.step is not None:
                assert set(state.step.reads) <= state.live
            live = state.live
        live -= set(problem[0].escapes)
    assert not live


def seam_distance(program: Program, name: str) -> int:
    """By definition: what follows the last read, and what comes before the first one of the next micro-batch."""
    reads = [t for t, step in enumerate(program.steps) if name in step.reads]
    size = {p.name: p.num_elements for p in program.parameters}
    total = 0
    for steps in (program.steps[reads[-1] + 1 :], program.steps[: reads[0]]):
        total += sum(size[n] for n, _ in {(n, s.phase == "backward") for s in steps for n in s.reads})
    return total


@given(problems(busy=True))
def test_distances_over_the_seam_equal_their_definition(problem):
    program = replace(problem[0], window="middle")
    turn = program.turn
    found = {gap.parameter.name: gap.distance for gap in gaps(program) if gap.over_seam}
    expected = {}
    for name in (p.name for p in program.parameters):
        reads = [t for t, step in enumerate(program.steps) if name in step.reads]
        if reads and reads[0] <= turn < reads[-1]:
            expected[name] = seam_distance(program, name)
    assert found == expected


@given(problems(busy=True, with_escapes=False), st.integers(0, 40))
def test_a_seam_wider_than_the_reuse_distance(problem, reach):
    """Against the definition; nothing else is wrong where all that is kept within the window is kept over nothing."""
    schedule = plan(replace(problem[0], window="middle"), replace(problem[1], max_reuse_distance=1000))
    program, size = schedule.program, {p.name: p.num_elements for p in schedule.program.parameters}
    far = any(seam_distance(program, name) > reach for name in schedule.carried)
    for name in size:
        for a, b in pairwise([t for t, step in enumerate(program.steps) if name in step.reads]):
            let_go = any(i.kind == "release" and name in i.parameters and a < i.point <= b for i in schedule.instructions)
            inside = {(n, s.phase == "backward") for s in program.steps[a + 1 : b] for n in s.reads}
            far |= not let_go and sum(size[n] for n, _ in inside) > reach
    program = replace(program, parameters=tuple(replace(p, numel=p.num_elements) for p in program.parameters))
    limits = replace(schedule.limits, max_reuse_distance=reach, param_persistence_threshold=0)
    assert ("reuse_distance" in broken(replace(schedule, program=program, limits=limits))) == far


def size_of(program: Program, name: str) -> int:
    return next(p.numel for p in program.parameters if p.name == name)


@given(problems(busy=True))
def test_the_planner_carries_nothing_over_a_seam_wider_than_the_reuse_distance(problem):
    program, limits = replace(problem[0], window="middle"), replace(problem[1], param_persistence_threshold=0)
    for name in plan(program, limits).carried:
        assert seam_distance(program, name) <= limits.max_reuse_distance or size_of(program, name) == 0


# -------------------------------------------------------------------------------------------------------------- the verifier


def middle(window: str = "middle") -> Schedule:
    """
    forward  p0 p1 p2 | turn | backward  p2 p1 p0       room for two: p2 and p1 stay over the turn, p0 and p1 over the seam
    """
    schedule = plan(replace(chain(3), window=window), replace(TIGHT, max_live_parameters=20), check=verify)
    assert schedule.carried == ("p0", "p1")
    return schedule


def place_of(schedule: Schedule, kind: str, name: str) -> int:
    return next(i for i, row in enumerate(schedule.instructions) if row.kind == kind and name in row.parameters)


def test_what_is_carried_may_be_read_and_released():
    schedule = middle()
    assert not any("p0" in b.parameters and b.kind == "all_gather" for b in schedule.buckets[:1])
    assert broken(schedule) == set()
    first = next(replay(schedule))
    assert {"p0", "p1"} <= first.live and first.packing_elements == 0


def test_carrying_in_the_only_window():
    schedule = plan(chain(3), TIGHT, check=verify)
    assert broken(replace(schedule, carried=("p0",))) == {"carried"}


def test_a_middle_window_that_does_not_get_what_it_reads():
    assert broken(replace(middle(), carried=("p1",))) >= {"gathered_before_use", "release_after_wait"}


def test_something_carried_that_is_gathered_while_it_is_live():
    schedule = middle()
    bucket = Bucket(len(schedule.buckets), "all_gather", ("p0",))
    again = [Instruction(kind, 0, ("p0",), bucket.index) for kind in ("all_gather", "wait")]
    assert "gathered_once" in broken(replace(insert(schedule, 0, *again), buckets=(*schedule.buckets, bucket)))


def test_something_carried_that_is_released_before_its_use():
    schedule = middle()
    assert "no_use_after_release" in broken(insert(schedule, 0, Instruction("release", 0, ("p0",))))


@pytest.mark.parametrize("window", ["first", "middle"])
def test_something_carried_that_is_not_live_in_the_end(window):
    schedule = middle(window)
    end = len(schedule.program.steps)
    assert broken(insert(schedule, len(schedule.instructions), Instruction("release", end, ("p0",)))) == {"carried"}


@pytest.mark.parametrize("window", ["first", "middle"])
def test_something_live_in_the_end_that_is_not_carried(window):
    schedule = middle(window)
    unread = Parameter("unread", 0, 0)
    program = replace(schedule.program, parameters=(*schedule.program.parameters, unread))
    bucket = Bucket(len(schedule.buckets), "all_gather", ("unread",))
    end = len(program.steps)
    rows = [Instruction(kind, end, ("unread",), bucket.index) for kind in ("all_gather", "wait")]
    leaked = insert(replace(schedule, program=program, buckets=(*schedule.buckets, bucket)), len(schedule.instructions), *rows)
    assert broken(leaked) == {"nothing_leaked"}


def test_something_carried_that_is_still_in_flight_in_the_end():
    schedule = middle("first")
    place = place_of(schedule, "wait", "p0")
    wait = schedule.instructions[place]
    late = insert(without(schedule, place), len(schedule.instructions) - 1, replace(wait, point=len(schedule.program.steps)))
    assert "waited_before_use" in broken(late)
    assert "carried" in broken(without(schedule, place))


def test_the_last_window_that_does_not_release():
    schedule = middle("last")
    assert "nothing_leaked" in broken(without(schedule, max(pick_all(schedule, "release", "p0"))))


def pick_all(schedule: Schedule, kind: str, name: str) -> list[int]:
    return [i for i, row in enumerate(schedule.instructions) if row.kind == kind and name in row.parameters]


def test_something_that_escapes_is_not_carried():
    program = replace(chain(2), window="first", escapes=("p0",))
    schedule = plan(program, TIGHT, check=verify)
    assert schedule.carried == ("p1",)
    assert broken(replace(schedule, carried=("p0", "p1"))) == {"carried"}


def test_unknown_names_are_carried():
    assert "names" in broken(replace(middle(), carried=("p0", "p1", "nobody")))


def test_what_is_carried_counts_for_the_limits():
    schedule = middle()
    assert "max_live_parameters" in broken(replace(schedule, limits=replace(schedule.limits, max_live_parameters=19)))
    assert next(replay(schedule)).gathered_elements == 20


def test_a_seam_is_as_wide_as_what_is_read_around_it():
    """
    reads    a b c | turn | c b a        a lies at the seam; b's seam is 2|a| wide, c's 2|a| + 2|b|
    """
    parameters = tuple(Parameter(n, size, 4 * size) for n, size in (("a", 1), ("b", 2), ("c", 4)))
    rows = [*(("forward", n) for n in "abc"), ("turn", ""), *(("backward", n) for n in "cba")]
    steps = tuple(Step(f"s{i}", phase, reads=tuple(n)) for i, (phase, n) in enumerate(rows))  # type: ignore[arg-type]
    program = Program(parameters, steps, window="first")
    for reach, expected in ((0, ("a",)), (1, ("a",)), (2, ("a", "b")), (5, ("a", "b")), (6, ("a", "b", "c"))):
        schedule = plan(program, Limits(max_reuse_distance=reach, param_persistence_threshold=0), check=verify)
        assert schedule.carried == expected
        if expected != ("a",):
            shorter = replace(schedule, limits=replace(schedule.limits, max_reuse_distance={2: 1, 5: 1, 6: 5}[reach]))
            assert "reuse_distance" in broken(shorter)
