"""Reductions: buckets are runs of the completion order; waits come where the oracle's clock says the reduction is over."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.passes.oracle import finish, simulate
from tests.passes.test_gather import layers, partitions
from tests.strategies import chain, link_costs, problems
from zfx.costs import Link
from zfx.ir import CostModel, Limits, Program, Schedule
from zfx.passes import PIPELINE, plan, stages
from zfx.passes.gather import bucket_gathers
from zfx.passes.keep import keep_parameters
from zfx.passes.partition import AMORTISED
from zfx.passes.reduce import bucket_reductions, completion_order, launched_when_complete
from zfx.passes.slack import add_slack
from zfx.passes.timeline import read, write
from zfx.passes.wait import wait_reductions
from zfx.verify import verify, violations


def bucketed(program: Program, limits: Limits) -> Schedule:
    return next(schedule for run, schedule in stages(program, limits) if run is bucket_reductions)


def names(schedule: Schedule) -> list[tuple[str, ...]]:
    return [b.parameters for b in schedule.buckets if b.kind == "reduce_scatter"]


@given(problems())
def test_buckets_are_consecutive_runs_launched_when_complete(problem):
    schedule = bucketed(*problem)
    complete = {name: t for t, step in enumerate(problem[0].steps) for name in step.completes}
    order = [name for step in problem[0].steps for name in step.completes]
    assert [name for bucket in names(schedule) for name in bucket] == order
    for reduction in read(schedule).reductions:
        assert reduction.launch == complete[reduction.members[-1].name] + 1
    verify(schedule)


def fastest(schedule: Schedule) -> float:
    """The least time of all partitions that the verifier accepts, waited for when over. Exponential."""
    timeline, row = read(schedule), list(completion_order(schedule.program))
    times = []
    for runs in partitions(len(row)):
        candidate = write(launched_when_complete(timeline, row, runs))
        if next(violations(candidate), None) is None:
            times.append(finish(wait_reductions(candidate)))
    return min(times, default=finish(schedule))


# Parameters are gathered for nothing, so that compute never stalls and launching always takes its time; nothing is packed.
FREE_GATHERS = CostModel(Link(0.0, float("inf")), Link(8.0, 1.0), launch_us=1.0, pack_threshold_bytes=0)


@given(problems(busy=True, with_budget=False, uniform=True, with_escapes=False, costs=FREE_GATHERS))
def test_no_partition_is_faster(problem):
    before = bucket_gathers(keep_parameters(Schedule(*problem)))
    assert finish(wait_reductions(bucket_reductions(before))) == fastest(before)


@given(problems())
def test_no_bucket_outgrows_its_bounds(problem):
    program, limits = problem
    enough = AMORTISED * (program.costs.reduce.latency_us + program.costs.launch_us)
    for reduction in read(bucketed(*problem)).reductions:
        if len(reduction.members) > 1:
            assert sum(p.num_elements for p in reduction.members) <= limits.reduce_bucket_size
            assert sum(p.grad_bytes for p in reduction.members[:-1]) / program.costs.reduce.bytes_per_us < enough


@given(problems())
def test_small_members_travel_packed_if_there_are_two(problem):
    program, limits = problem
    for reduction in read(bucketed(program, limits)).reductions:
        small = tuple(p for p in reduction.members if p.grad_bytes < program.costs.pack_threshold_bytes)
        assert reduction.packed == (small if len(small) > 1 else ())


@given(problems())
def test_at_most_two_reductions_are_in_flight(problem):
    in_flight = 0
    for instruction in plan(*problem).instructions:
        in_flight += {"reduce_scatter": 1, "wait_reduce": -1}.get(instruction.kind, 0)
        assert in_flight <= 2


def test_a_third_reduction_is_not_launched_before_the_first_is_waited_for():
    """Each takes ten steps: only the cap waits, where bucket k+2 is launched."""
    program = chain(5, costs=link_costs(500.0, float("inf")))
    reductions = read(plan(program, Limits(param_persistence_threshold=0, reduce_bucket_size=0), check=verify)).reductions
    assert [r.launch for r in reductions] == [7, 8, 9, 10, 11]
    assert [r.wait for r in reductions] == [9, 10, 11, 11, 11]


@given(problems(with_budget=False))
def test_each_wait_is_at_the_first_point_where_the_reduction_is_over_or_where_it_must_be(problem):
    """Earlier would stall; later would hold bytes for nothing; a stall happens only at a launch of k+2 or at the end."""
    schedule = plan(*problem)
    _, ends, reached = simulate(schedule)
    reductions = read(schedule).reductions
    num_gathers = sum(b.kind == "all_gather" for b in schedule.buckets)
    for k, reduction in enumerate(reductions):
        stalls = reached["wait_reduce", num_gathers + k] < ends[num_gathers + k]
        after_next = reductions[k + 2].launch if k + 2 < len(reductions) else None
        if stalls:
            assert reduction.wait in (after_next, len(problem[0].steps))
        assert after_next is None or reduction.wait <= after_next


@given(problems(with_budget=False))
def test_no_reduction_waits_for_longer_than_it_takes(problem):
    """Moving a wait one point earlier makes it stall: right before that point's step, the reduction is not over."""
    schedule = plan(*problem, passes=[p for p in PIPELINE if p is not add_slack])
    _, ends, _ = simulate(schedule)
    arrival = _arrivals(schedule)
    num_gathers = sum(b.kind == "all_gather" for b in schedule.buckets)
    for k, reduction in enumerate(read(schedule).reductions):
        if reduction.wait > reduction.launch:
            assert ends[num_gathers + k] > arrival[reduction.wait - 1]


def _arrivals(schedule: Schedule) -> list[float]:
    """When each point's step could start were it not for the gathers that it waits for."""
    arrivals = []
    for point in range(len(schedule.program.steps) + 1):
        first = tuple(i for i in schedule.instructions if i.point < point or (i.point == point and i.kind != "wait"))
        steps = tuple(replace(s, duration_us=s.duration_us if t < point else 0.0) for t, s in enumerate(schedule.program.steps))
        arrivals.append(finish(replace(schedule, program=replace(schedule.program, steps=steps), instructions=first)))
    return arrivals


@given(problems(with_budget=True), st.integers(0, 500))
def test_with_a_larger_budget_waiting_for_the_same_buckets_is_never_slower(problem, more):
    program, limits = problem
    schedule = bucketed(program, limits)
    larger = replace(schedule, limits=replace(limits, memory_budget=limits.memory_budget + more))
    assert finish(wait_reductions(larger)) <= finish(wait_reductions(schedule))


def test_a_budget_for_one_gradient_at_a_time_waits_at_once():
    """40 bytes of parameter, 8 others, 40 of a gradient while its step runs; 80 while it travels."""
    program = chain(4, costs=CostModel())
    limits = Limits(memory_budget=8 + 80, param_persistence_threshold=0, reduce_bucket_size=0)
    reductions = read(plan(program, limits, check=verify)).reductions
    assert all(r.wait == r.launch for r in reductions)


def test_slow_reductions_overlap_with_the_steps_that_follow():
    """Each reduction takes 75 us and each step 50: waited for two points later."""
    program = chain(4, costs=link_costs(75.0, float("inf")))
    limits = Limits(param_persistence_threshold=0, reduce_bucket_size=0)
    reductions = read(plan(program, limits, check=verify)).reductions
    # Launched at 6, 7, 8, 9; the channel serves them one after another; the last is the end, and two at most fly.
    assert [(r.launch, r.wait) for r in reductions] == [(6, 8), (7, 9), (8, 9), (9, 9)]


def test_the_buckets_of_a_transformer_on_loopback_are_megabytes():
    for wide_us in (100.0, 500.0, 2_000.0):
        sizes = [r.num_bytes for r in read(bucketed(layers(wide_us=wide_us), Limits())).reductions]
        assert 1e6 < sum(sizes) / len(sizes) < 12e6
        assert max(sizes) < 12e6
