"""The baselines do what their rule says, obey the limits, and never beat the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from tests.passes.oracle import finish, launches, waits
from tests.strategies import chain, link_costs, problems
from zfx.ir import Limits, Program, Schedule
from zfx.passes import plan
from zfx.passes.baselines import BASELINES, deepspeed_rule, everything_early, fsdp2_rule, unit_of
from zfx.passes.view import condensed
from zfx.verify import verify

TIGHT = Limits(max_reuse_distance=0, param_persistence_threshold=0)
EVERY_RULE = pytest.mark.parametrize("rule", BASELINES)


def members(schedule: Schedule, kind: str = "all_gather") -> list[tuple[str, ...]]:
    return [b.parameters for b in schedule.buckets if b.kind == kind]


@EVERY_RULE
@given(problem=problems())
def test_a_baseline_is_valid_under_any_limits(rule, problem):
    verify(rule(*problem))


@EVERY_RULE
@given(problem=problems(uniform=True))
def test_none_is_faster_than_the_planner(rule, problem):
    assert finish(plan(*problem)) <= finish(rule(*problem)) * (1 + 1e-9)


@EVERY_RULE
@given(problem=problems(uniform=False))
def test_none_is_faster_by_what_ranks_agree_on(rule, problem):
    """Where durations are what ranks agree on, the structure that was chosen by them is what runs."""
    program, limits = problem
    agreed = replace(program, steps=tuple(replace(s, duration_us=s.nominal_us) for s in program.steps))
    assert finish(plan(agreed, limits)) <= finish(rule(agreed, limits)) * (1 + 1e-9)


def blocks(n: int) -> Program:
    """A chain in which p0 is the root's, and every other pair of layers is a block of its own."""
    program = chain(n, costs=link_costs(10.0, 4.0))
    new = {f"p{i}": f"blocks.{(i - 1) // 2}.w{i}" if i else "embed" for i in range(n)}
    return replace(
        program,
        parameters=tuple(replace(p, name=new[p.name]) for p in program.parameters),
        steps=tuple(
            replace(s, reads=tuple(new[n] for n in s.reads), completes=tuple(new[n] for n in s.completes)) for s in program.steps
        ),
    )


def test_a_unit_is_a_block():
    assert [unit_of(name) for name in ("h.0.a.1.w", "norm.weight", "layers.12.q")] == ["h.0", "", "layers.12"]


def test_fsdp2_gathers_a_block_while_the_one_before_it_computes():
    """
    step      0       1 2         3 4    turn    6 7         8 9         10
    reads     embed   block 0     block 1        block 1     block 0     embed     the root is kept
    """
    schedule = fsdp2_rule(blocks(5), replace(TIGHT, max_reuse_distance=10**6))
    block0, block1 = ("blocks.0.w1", "blocks.0.w2"), ("blocks.1.w3", "blocks.1.w4")
    assert members(schedule) == [("embed",), block0, block1, block1[::-1], block0[::-1]]
    assert schedule.kept == ("embed",)
    assert list(zip(launches(schedule), waits(schedule))) == [(0, 0), (0, 1), (1, 3), (6, 6), (6, 8)]
    assert members(schedule, "reduce_scatter") == [block1[::-1], block0[::-1], ("embed",)]


def test_deepspeed_fetches_what_a_step_reads_and_a_window_behind_it():
    """The window is two layers: at each step the next two, as far as the turn. p0 is fetched alone, for it is read at once."""
    limits = replace(TIGHT, prefetch_bucket_size=20)
    schedule = deepspeed_rule(chain(6), limits)
    forward = members(schedule)[:4]
    assert forward == [("p0",), ("p1", "p2"), ("p3", "p4"), ("p5",)]
    assert list(zip(launches(schedule), waits(schedule)))[:4] == [(0, 0), (0, 1), (1, 3), (2, 5)]


def test_deepspeed_prefetches_no_more_than_may_be_live():
    schedule = deepspeed_rule(chain(6), replace(TIGHT, max_live_parameters=20, prefetch_bucket_size=20))
    assert members(schedule)[:3] == [("p0",), ("p1",), ("p2",)]
    assert launches(schedule)[:3] == [0, 0, 1]


def test_everything_early_is_launched_at_the_start_of_its_half():
    schedule = everything_early(chain(3), TIGHT)
    assert members(schedule) == [("p0",), ("p1",), ("p2",), ("p1",), ("p0",)]
    assert launches(schedule) == [0, 0, 0, 4, 4]


@EVERY_RULE
@given(problem=problems(with_budget=False, uniform=True))
def test_the_condensed_program_takes_the_same_time(rule, problem):
    program, limits = problem
    assert finish(rule(condensed(program, limits), limits)) == finish(rule(program, limits))


def test_rows_that_read_the_same_are_condensed():
    assert len(condensed(chain(3, repeat=4), TIGHT).steps) == 3 + 1 + 3
    assert condensed(chain(3, repeat=4), replace(TIGHT, memory_budget=10**6)) == chain(3, repeat=4)
