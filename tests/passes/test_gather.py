"""Gather buckets: a partition of the gather order, every boundary of which a rule explains."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import chain, problems
from zfx.ir import CostModel, Limits, Parameter, Program, Schedule, Step
from zfx.passes.demand import gather_on_demand
from zfx.passes.gather import bucket_gathers
from zfx.passes.keep import keep_parameters
from zfx.passes.timeline import read
from zfx.verify import verify


def bucketed(program: Program, limits: Limits) -> Schedule:
    return bucket_gathers(keep_parameters(gather_on_demand(Schedule(program, limits))))


def names(schedule: Schedule) -> list[tuple[str, ...]]:
    return [b.parameters for b in schedule.buckets if b.kind == "all_gather"]


@given(problems())
def test_buckets_are_consecutive_runs_launched_at_their_first_read(problem):
    before = keep_parameters(gather_on_demand(Schedule(*problem)))
    after = bucket_gathers(before)
    order = [i for g in read(before).gathers for i in g.members]
    assert [i for g in read(after).gathers for i in g.members] == order
    assert all(g.launch == g.first for g in read(after).gathers)
    verify(after)


@given(problems())
def test_with_room_every_boundary_is_explained(problem):
    program, limits = problem
    limits = replace(limits, max_live_parameters=10**6, memory_budget=None)
    gathers = read(bucketed(program, limits)).gathers
    turn = program.turn if program.turn is not None else len(program.steps)
    for left, right in pairwise(gathers):
        newcomer = right.members[0]
        elements = sum(i.parameter.num_elements for i in left.members) + newcomer.parameter.num_elements
        closed = left.num_bytes >= program.costs.bucket_bytes
        too_many = elements > limits.prefetch_bucket_size
        other_phase = (left.first > turn) != (newcomer.first > turn)
        earlier = [i for g in gathers for i in g.members if i.parameter == newcomer.parameter and i.last < newcomer.first]
        still_live = any(i.last >= left.first for i in earlier)
        assert closed or too_many or other_phase or still_live


@given(problems())
def test_no_bucket_outgrows_its_bounds(problem):
    program, limits = problem
    for gather in read(bucketed(*problem)).gathers:
        assert len(gather.members) == 1 or sum(i.parameter.num_elements for i in gather.members) <= limits.prefetch_bucket_size
        assert len(gather.members) == 1 or sum(i.parameter.num_bytes for i in gather.members[:-1]) < program.costs.bucket_bytes
        assert len(gather.packed) != 1
        assert all(i.parameter.num_bytes < program.costs.pack_threshold_bytes for i in gather.packed)


@given(problems())
def test_with_room_all_small_members_travel_packed(problem):
    program, limits = problem
    for gather in read(bucketed(program, replace(limits, max_live_parameters=10**6, memory_budget=None))).gathers:
        small = tuple(i for i in gather.members if i.parameter.num_bytes < program.costs.pack_threshold_bytes)
        assert gather.packed == (small if len(small) > 1 else ())


@given(problems(with_budget=False), st.lists(st.integers(0, 99), min_size=13, max_size=13))
def test_what_differs_between_ranks_does_not_decide(problem, noise):
    program, limits = problem
    steps = tuple(replace(s, duration_us=float(x), other_bytes=7 * x) for s, x in zip(program.steps, noise, strict=False))
    assert bucketed(replace(program, steps=steps), limits).buckets == bucketed(program, limits).buckets


def test_tight_bounds_fall_back_from_packs_to_direct_and_from_buckets_to_single_members():
    """Four layers of 10 elements, gathered for the forward in pairs if both fit with their pack, else without, else alone."""
    program = chain(4, costs=CostModel(bucket_bytes=80))
    limits = Limits(param_persistence_threshold=0, max_reuse_distance=0)

    def forward(room: int) -> tuple[list[tuple[str, ...]], list[int]]:
        buckets = [b for b in bucketed(program, replace(limits, max_live_parameters=room)).buckets if b.kind == "all_gather"]
        return [b.parameters for b in buckets[:2]], [len(b.packed) for b in buckets[:2]]

    assert forward(40) == ([("p0", "p1"), ("p2", "p3")], [2, 2])
    assert forward(39) == ([("p0", "p1"), ("p2", "p3")], [0, 0])
    assert forward(20) == ([("p0", "p1"), ("p2", "p3")], [0, 0])
    assert forward(19) == ([("p0",), ("p1",)], [0, 0])


def test_an_interval_does_not_join_a_bucket_launched_while_its_parameter_is_live():
    """
    reads    a    b    a        a's second gather may not share the launch of b's if that is at a's first read
    """
    a, b = Parameter("a", 1, 4), Parameter("b", 9, 36)
    program = Program((a, b), tuple(Step(f"s{i}", "forward", reads=(n,)) for i, n in enumerate("aba")))
    limits = Limits(max_reuse_distance=0, param_persistence_threshold=0)
    assert names(bucketed(program, limits)) == [("a", "b"), ("a",)]


def test_buckets_do_not_cross_the_turn():
    limits = Limits(max_reuse_distance=0, param_persistence_threshold=0)
    assert names(bucketed(chain(3), limits)) == [("p0", "p1", "p2"), ("p1", "p0")]


def test_two_packs_waited_for_at_one_step_are_counted_together():
    parameters = tuple(Parameter(f"p{i}", 10, 40) for i in range(4))
    program = Program(parameters, (Step("s", "forward", reads=("p0", "p1", "p2", "p3")),), costs=CostModel(bucket_bytes=80))
    packs = [b.packed for b in bucketed(program, Limits(max_live_parameters=60)).buckets]
    assert packs == [("p0", "p1"), ()]
