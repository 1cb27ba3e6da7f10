"""Refining never costs time, keeps what must be kept, and finds what the passes before it cannot, against exhaustive search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.optimum import least_time
from tests.passes.oracle import finish, launches, waits
from tests.strategies import link_costs, problems
from zfx.ir import Limits, Parameter, Program, Schedule, Step
from zfx.passes import PIPELINE, REFINED, plan
from zfx.passes.refine import refine
from zfx.passes.slack import add_slack
from zfx.passes.view import structural_us
from zfx.verify import verify

EVERYWHERE = Limits(max_reuse_distance=2**62, param_persistence_threshold=0, prefetch_bucket_size=0, reduce_bucket_size=0)
BEFORE = tuple(run for run in PIPELINE if run is not add_slack)
REFINING = (*BEFORE, refine)


@given(problems(uniform=True, windows=("only", "first", "last")))
def test_refining_never_costs_time(problem):
    schedule = plan(*problem, passes=BEFORE)
    refined = refine(schedule)
    verify(refined)
    assert finish(refined) <= finish(schedule) * (1 + 1e-9)
    if problem[0].window != "only":
        assert (refined.kept, refined.carried) == (schedule.kept, schedule.carried)


@given(problems(with_budget=False, uniform=False), st.lists(st.integers(0, 50), min_size=13, max_size=13))
def test_what_ranks_do_not_share_decides_no_collective(problem, noise):
    program, limits = problem
    steps = tuple(replace(s, duration_us=float(us)) for s, us in zip(program.steps, noise))
    one, other = (plan(p, limits, passes=REFINING) for p in (program, replace(program, steps=steps)))
    assert (one.buckets, one.kept) == (other.buckets, other.kept)


@given(problems(uniform=False, with_budget=False))
def test_structures_are_judged_by_what_ranks_agree_on(problem):
    program, limits = problem
    agreed = replace(program, steps=tuple(replace(s, duration_us=us) for s, us in zip(program.steps, structural_us(program))))
    schedule = plan(agreed, limits, passes=BEFORE)
    assert finish(refine(schedule)) <= finish(schedule) * (1 + 1e-9)


def of(forward: list[tuple[str, float]], backward: list[tuple[str, float]], sizes: dict[str, int], **costs: float) -> Program:
    """One step for each pair of what it reads and how long it takes; a gradient is complete after its last read."""
    steps = [Step(f"f{t}", "forward", reads=tuple(reads), duration_us=us) for t, (reads, us) in enumerate(forward)]
    steps.append(Step("turn", "turn"))
    for t, (reads, us) in enumerate(backward):
        done = tuple(name for name in reads if not any(name in later for later, _ in backward[t + 1 :]))
        steps.append(Step(f"b{t}", "backward", reads=tuple(reads), completes=done, duration_us=us))
    parameters = tuple(Parameter(name, size, 4 * size, 4 * size) for name, size in sizes.items())
    return Program(parameters, tuple(steps), 2, costs=link_costs(costs.get("latency_us", 0.0), 4.0), uniform=True)


def planned(program: Program, limits: Limits) -> tuple[Schedule, Schedule]:
    """Before refining and after it; which is the best there is."""
    before, after = (plan(program, limits, check=verify, passes=passes) for passes in (BEFORE, REFINING))
    best, _ = least_time(program, limits, below=finish(after) + 1)
    assert finish(after) == best < finish(before)
    return before, after


def test_a_small_gather_goes_ahead_of_a_large_one_that_does_not_fit_yet():
    """
    step      0    1        room for seven: while a (6) is held, b (6) has to wait, but c (1), read with it, need not. In order of
    reads     a    b c      first read c stands behind b
    """
    program = of([("a", 8), ("bc", 7)], [("bc", 5)], {"a": 6, "b": 6, "c": 1}, latency_us=8.0)
    before, after = planned(program, replace(EVERYWHERE, max_live_parameters=7))
    assert [b.parameters for b in before.buckets[:3]] == [("a",), ("b",), ("c",)]
    assert [b.parameters for b in after.buckets[:3]] == [("a",), ("c",), ("b",)]


def test_the_backwards_first_gather_moves_into_a_forward_that_has_room():
    """
    step      0    1    turn   b0   b1      b is needed first after the turn. While c is read there is no room for it: so it is not
    reads     b a  c           b    c       kept. But it can be gathered again before the turn, beside c's last steps
    """
    program = of([("b", 2), ("ac", 2), ("c", 10)], [("b", 2), ("c", 2)], {"a": 3, "b": 2, "c": 2})
    _, after = planned(program, replace(EVERYWHERE, max_live_parameters=5))
    turn = program.turn
    assert turn is not None and "b" in after.kept
    place = [i for i, bucket in enumerate(after.buckets) if bucket.parameters == ("b",)][1]
    assert launches(after)[place] == turn - 1 and waits(after)[place] == turn


def test_a_reduction_waits_so_that_its_parameter_can_be_kept():
    """Where a's gradient is complete there is no room to exchange it beside a, which is read again: it is exchanged afterwards."""
    program = of([("a", 4), ("b", 4)], [("b", 4), ("a", 4)], {"a": 4, "b": 2})
    steps = list(program.steps)
    steps[-2] = replace(steps[-2], reads=("a", "b"), completes=("a", "b"))
    steps[-1] = replace(steps[-1], completes=())
    program = replace(program, steps=tuple(steps))
    limits = replace(EVERYWHERE, memory_budget=16 + 8 + 16 + 8)
    before, after = planned(program, limits)
    assert sum(i.kind == "all_gather" for i in after.instructions) < sum(i.kind == "all_gather" for i in before.instructions)


@pytest.mark.parametrize("us", [0.0, float("inf")])
def test_times_without_a_least_gain_end_the_search(us):
    program = of([("a", us)], [("a", us)], {"a": 1})
    schedule = plan(replace(program, costs=link_costs(0.0, float("inf"))), EVERYWHERE, check=verify, passes=BEFORE)
    assert refine(schedule) == schedule


@settings(max_examples=25)
@given(problems(busy=True))
def test_it_ends_where_ranks_differ_with_a_schedule_that_holds(problem):
    verify(plan(*problem, passes=REFINED))
