"""Gather buckets: runs of the gather order, no partition of which takes less time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.passes.oracle import finish
from tests.strategies import chain, link_costs, problems
from zfx.ir import Limits, Parameter, Program, Schedule, Step
from zfx.passes.gather import bucket_gathers, merged, one_by_one
from zfx.passes.keep import keep_parameters
from zfx.passes.partition import AMORTISED
from zfx.passes.place import launch_early
from zfx.passes.timeline import read, write
from zfx.verify import verify, violations

TIGHT = Limits(param_persistence_threshold=0, max_reuse_distance=0)


def bucketed(program: Program, limits: Limits) -> Schedule:
    return bucket_gathers(keep_parameters(Schedule(program, limits)))


def names(schedule: Schedule) -> list[tuple[str, ...]]:
    return [b.parameters for b in schedule.buckets if b.kind == "all_gather"]


def partitions(length: int) -> Iterator[list[tuple[int, int]]]:
    for count in range(length):
        for cuts in combinations(range(1, length), count):
            yield list(zip((0, *cuts), (*cuts, length)))


def gathers_only(schedule: Schedule) -> Schedule:
    """Launched as early as memory allows, without any reduction: what the buckets are judged by."""
    program = schedule.program
    steps = tuple(replace(step, completes=()) for step in program.steps)
    rows = tuple(i for i in schedule.instructions if i.kind not in ("reduce_scatter", "wait_reduce"))
    buckets = tuple(b for b in schedule.buckets if b.kind == "all_gather")
    return launch_early(replace(schedule, program=replace(program, steps=steps), buckets=buckets, instructions=rows))


def fastest(schedule: Schedule) -> float:
    """The least time of all partitions that the verifier accepts, each placed as early as memory allows. Exponential.

    Buckets stay on their side of the turn.
    """
    single = one_by_one(read(schedule))
    times, turn = [], schedule.program.turn
    for runs in partitions(len(single.gathers)):
        if turn is not None and any(single.gathers[a].wait <= turn < single.gathers[b - 1].wait for a, b in runs):
            continue
        candidate = write(merged(single, runs))
        if next(violations(candidate), None) is None:
            times.append(finish(gathers_only(candidate)))
    return min(times, default=finish(gathers_only(schedule)))


@given(problems())
def test_buckets_are_consecutive_runs_launched_at_their_wait(problem):
    before = keep_parameters(Schedule(*problem))
    after = bucket_gathers(before)
    assert read(after).intervals == read(before).intervals
    assert all(g.launch == g.wait == g.members[0].first for g in read(after).gathers)
    verify(after)


# Latency is worth saving and nothing is ever packed: a packing buffer delays launches, which the program does not foresee.
DIRECT = link_costs(8.0, 1.0, pack_threshold_bytes=0, launch_us=1.0)


@given(problems(with_budget=False, uniform=True, costs=DIRECT, max_parameters=4, max_steps=4))
def test_no_partition_is_faster(problem):
    schedule = keep_parameters(Schedule(*problem))
    assume(len(read(schedule).gathers) <= 9)
    assert finish(gathers_only(bucket_gathers(schedule))) == fastest(schedule)


@given(problems(with_budget=True, uniform=True, costs=DIRECT, max_parameters=4, max_steps=3))
def test_no_partition_is_faster_under_a_budget(problem):
    schedule = keep_parameters(Schedule(*problem))
    assume(len(read(schedule).gathers) <= 8)
    assert finish(gathers_only(bucket_gathers(schedule))) == fastest(schedule)


@given(problems())
def test_no_bucket_outgrows_its_bounds(problem):
    program, limits = problem
    enough = AMORTISED * (program.costs.gather.latency_us + program.costs.launch_us)
    for gather in read(bucketed(*problem)).gathers:
        assert len(gather.members) == 1 or sum(i.parameter.num_elements for i in gather.members) <= limits.prefetch_bucket_size
        before_last = sum(i.parameter.num_bytes for i in gather.members[:-1])
        assert len(gather.members) == 1 or before_last / program.costs.gather.bytes_per_us < enough
        assert len(gather.packed) != 1
        assert all(i.parameter.num_bytes < program.costs.pack_threshold_bytes for i in gather.packed)


@given(problems())
def test_with_room_all_small_members_travel_packed(problem):
    program, limits = problem
    for gather in read(bucketed(program, replace(limits, max_live_parameters=10**6, memory_budget=None))).gathers:
        small = tuple(i for i in gather.members if i.parameter.num_bytes < program.costs.pack_threshold_bytes)
        assert gather.packed == (small if len(small) > 1 else ())


@given(problems(with_budget=False, uniform=False), st.lists(st.integers(0, 99), min_size=13, max_size=13))
def test_what_differs_between_ranks_does_not_decide(problem, noise):
    program, limits = problem
    steps = tuple(replace(s, duration_us=float(x), other_bytes=7 * x) for s, x in zip(program.steps, noise, strict=False))
    assert bucketed(replace(program, steps=steps), limits).buckets == bucketed(program, limits).buckets


def test_tight_bounds_fall_back_from_packs_to_direct_and_from_buckets_to_single_members():
    """Four layers of 10 elements whose transfers are all latency: for the forward, all that fits goes in one bucket."""
    program = chain(4, duration_us=0.0, costs=link_costs(100.0, float("inf")))

    def forward(room: int) -> list[tuple[int, int]]:
        buckets = [b for b in bucketed(program, replace(TIGHT, max_live_parameters=room)).buckets if b.kind == "all_gather"]
        return [(len(b.parameters), len(b.packed)) for b in buckets if "p3" in b.parameters or "p0" in b.parameters][:1]

    assert forward(80) == [(4, 4)]
    assert forward(79) == [(4, 0)]
    assert forward(40) == [(4, 0)]
    assert names(bucketed(program, replace(TIGHT, max_live_parameters=39)))[0] != ("p0", "p1", "p2", "p3")
    assert names(bucketed(program, replace(TIGHT, max_live_parameters=19)))[:4] == [("p0",), ("p1",), ("p2",), ("p3",)]


def test_the_first_bucket_is_small_and_the_others_grow_behind_it():
    """Compute hides what comes later, but nothing hides the first: it must not wait for the second layer."""
    program = replace(chain(16, size=1_000, duration_us=20.0, costs=link_costs(2.0, 400.0, launch_us=1.0)), uniform=True)
    sizes = [len(members) for members in names(bucketed(program, TIGHT))]
    assert sizes[0] == 1 and max(sizes) > 1


def test_free_latency_gathers_everything_alone_and_large_latency_together():
    program = chain(6, costs=link_costs(0.0, 4.0))
    assert all(len(members) == 1 for members in names(bucketed(program, TIGHT)))
    program = chain(6, costs=link_costs(1e6, 4.0))
    assert [len(members) for members in names(bucketed(program, TIGHT))] == [6, 5]


def layers(num_layers: int = 48, *, wide_us: float = 500.0) -> Program:
    """A transformer's sizes: four weights of about 1 MB and two norms of 2 kB a layer."""
    sizes = [("norm0", 512), ("q", 262_144), ("o", 262_144), ("norm1", 512), ("up", 262_144), ("down", 262_144)]
    parameters = tuple(Parameter(f"{i}.{n}", s, 4 * s, 4 * s) for i in range(num_layers) for n, s in sizes)
    steps = []
    for p in parameters:
        us = wide_us if p.num_bytes > 10_000 else 10.0
        steps.append(Step(f"f.{p.name}", "forward", "op", (p.name,), (), 0, us, us))
    steps.append(Step("turn", "turn"))
    for p in reversed(parameters):
        us = 2 * wide_us if p.num_bytes > 10_000 else 10.0
        steps.append(Step(f"b.{p.name}", "backward", "op", (p.name,), (p.name,), 0, us, us))
    return Program(parameters, tuple(steps), 2, costs=link_costs(100.0, 2_000.0, launch_us=75.0))


def test_the_buckets_of_a_transformer_on_loopback_are_megabytes():
    """48 layers, 192 MB: whether compute takes longer than the transfers or not, no swarm of tiny collectives comes out."""
    for wide_us in (100.0, 500.0, 2_000.0):
        program = layers(wide_us=wide_us)
        for kind, schedule in (("all_gather", bucketed(program, TIGHT)),):
            size = {p.name: p.num_bytes for p in program.parameters}
            sizes = [sum(size[n] for n in b.parameters) for b in schedule.buckets if b.kind == kind]
            assert len(sizes) < 2 * 96
            assert 1e6 < sum(sizes) / len(sizes) < 12e6
            assert max(sizes) < 12e6


def test_an_interval_does_not_join_a_bucket_launched_while_its_parameter_is_live():
    """
    reads    a    b    a        a's second gather may not share the launch of b's if that is at a's first read
    """
    a, b = Parameter("a", 1, 4), Parameter("b", 9, 36)
    program = Program((a, b), tuple(Step(f"s{i}", "forward", reads=(n,)) for i, n in enumerate("aba")))
    assert names(bucketed(program, TIGHT)) == [("a", "b"), ("a",)]


def test_buckets_do_not_cross_the_turn():
    assert names(bucketed(chain(3, costs=link_costs(1e6, 4.0)), TIGHT)) == [("p0", "p1", "p2"), ("p1", "p0")]


def test_two_packs_waited_for_at_one_step_are_counted_together():
    parameters = tuple(Parameter(f"p{i}", 10, 40) for i in range(4))
    program = Program(parameters, (Step("s", "forward", reads=("p0", "p1", "p2", "p3")),))
    limits = Limits(max_live_parameters=60, prefetch_bucket_size=20)
    packs = [b.packed for b in bucketed(program, limits).buckets]
    assert packs == [("p0", "p1"), ()]
