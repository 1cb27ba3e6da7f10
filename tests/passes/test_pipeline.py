"""The pipeline: every schedule between two passes is right, limits are refused exactly, and nothing but the program decides."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.oracle import finish, peak_elements
from tests.strategies import (
    _needed,
    bytes_needed,
    chain,
    link_costs,
    problems,
    programs,
    smallest_budget,
    smallest_max_live,
)
from zfx.costs import Link
from zfx.errors import InfeasibleBudget
from zfx.ir import CostModel, Limits, Parameter, Program, Schedule, Step
from zfx.passes import PIPELINE, plan, stages
from zfx.passes.timeline import read, write
from zfx.passes.timing import simulate
from zfx.passes.view import actual_us
from zfx.verify import verify

TIGHT = Limits(param_persistence_threshold=0)


def gathers(schedule: Schedule) -> int:
    return sum(len(b.parameters) for b in schedule.buckets if b.kind == "all_gather")


@given(problems())
def test_every_stage_passes_the_verifier(problem):
    for _, schedule in stages(*problem):
        verify(schedule)
        assert peak_elements(schedule) <= schedule.limits.max_live_parameters


# Transfers outlast several steps and nearly everything is packed: reductions pile up while packs are held.
SLOW = link_costs(30.0, 1.0, pack_threshold_bytes=1000)


@given(problems(with_budget=True, busy=True, costs=SLOW))
def test_every_stage_passes_the_verifier_where_bytes_are_short_and_transfers_slow(problem):
    for _, schedule in stages(*problem):
        verify(schedule)


def test_a_gather_goes_ahead_of_reductions_only_where_all_of_them_fit_beside_it():
    """What landed at a point before its reductions were counted made room for a gather that the last of them needed."""
    reads = (("b0", "p0", ("p1", "p2", "p3")), ("b1", "p0", ()), ("b2", "p1", ("p0",)), ("b3", "p0", ()))
    steps = [*(Step(name, "forward", "op", ("p0",)) for name in ("f0", "f1")), Step("turn", "turn")]
    steps += [Step(name, "backward", "op", (read,), done) for name, read, done in reads]
    parameters = (Parameter("p0", 3, 12, 12), *(Parameter(f"p{i}", 1, 2, 2) for i in (1, 2, 3)))
    costs = CostModel(Link(30.0, 1.0), Link(30.0, 1.0), launch_us=0.0, pack_threshold_bytes=1000)
    limits = Limits(3, 0, 0, 0, 0, memory_budget=32)
    for _, schedule in stages(Program(parameters, tuple(steps), 2, costs=costs), limits):
        verify(schedule)


@given(problems())
def test_reading_what_was_written_is_the_identity(problem):
    for _, schedule in stages(*problem):
        assert write(read(schedule)) == schedule


@given(problems())
def test_the_passes_clock_is_the_oracles(problem):
    for _, schedule in stages(*problem):
        assert simulate(read(schedule), actual_us(schedule.program)).finish_us == finish(schedule)


@given(problems())
def test_every_pass_is_idempotent_and_the_plan_deterministic(problem):
    for run, schedule in stages(*problem):
        assert run(schedule) == schedule
    assert plan(*problem) == plan(*problem)


@given(programs())
def test_max_live_parameters_is_refused_exactly(program):
    smallest = smallest_max_live(program)
    plan(program, Limits(max_live_parameters=smallest), check=verify)
    if smallest > 0:
        with pytest.raises(InfeasibleBudget) as caught:
            plan(program, Limits(max_live_parameters=smallest - 1))
        needs = [_needed(program, t, "num_elements") for t in range(len(program.steps))]
        first = needs.index(smallest)  # one below the smallest: only steps that need exactly that much do not fit
        assert caught.value.limit_name == "max_live_parameters"
        assert (caught.value.step, caught.value.needed) == (program.steps[first].name, smallest)
        assert (caught.value.limit, caught.value.smallest_limit) == (smallest - 1, smallest)


@given(programs(), st.integers(1, 20))
def test_memory_budget_is_refused_exactly(program, short):
    smallest = smallest_budget(program)
    plan(program, Limits(memory_budget=smallest), check=verify)
    if smallest >= short:
        with pytest.raises(InfeasibleBudget) as caught:
            plan(program, Limits(memory_budget=smallest - short))
        needs = bytes_needed(program)
        first = next(t for t, need in enumerate(needs) if need > smallest - short)
        assert caught.value.limit_name == "memory_budget"
        assert (caught.value.step, caught.value.needed) == (program.steps[first].name, needs[first])
        assert caught.value.smallest_limit == smallest


@given(problems(), st.randoms(use_true_random=False))
def test_names_do_not_decide(problem, random):
    program, limits = problem
    names = [f"n{i}" for i in range(len(program.parameters) + len(program.steps))]
    random.shuffle(names)
    new = {p.name: names.pop() for p in program.parameters}

    def renamed(group):
        return tuple(new[name] for name in group)

    other = replace(
        program,
        parameters=tuple(replace(p, name=new[p.name]) for p in program.parameters),
        steps=tuple(
            replace(s, name=names.pop(), reads=renamed(s.reads), completes=renamed(s.completes)) for s in program.steps
        ),
        escapes=renamed(program.escapes),
    )
    plain, result = plan(program, limits), plan(other, limits)
    assert result.instructions == tuple(replace(i, parameters=renamed(i.parameters)) for i in plain.instructions)
    assert result.kept == renamed(plain.kept)


@given(problems(with_budget=False), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=13, max_size=13))
def test_collectives_do_not_depend_on_durations_or_other_bytes(problem, noise):
    program, limits = problem
    steps = tuple(replace(s, duration_us=float(d), other_bytes=o) for s, (d, o) in zip(program.steps, noise, strict=False))
    plain, noisy = plan(program, limits), plan(replace(program, steps=steps), limits)
    assert noisy.buckets == plain.buckets
    assert noisy.kept == plain.kept


def test_a_chain_without_reuse_gathers_all_but_the_last_layer_twice():
    n = 12
    assert gathers(plan(chain(n), replace(TIGHT, max_reuse_distance=0), check=verify)) == 2 * n - 1


def test_a_chain_with_everything_kept_is_zero_2():
    n = 12
    schedule = plan(chain(n), replace(TIGHT, max_reuse_distance=2 * n * 10 + 1), check=verify)
    assert gathers(schedule) == n
    assert schedule.kept == tuple(f"p{i}" for i in range(n))


@pytest.mark.parametrize("k", range(1, 13))
def test_a_chain_with_room_for_k_layers_needs_2n_minus_k_gathers(k):
    n = 12
    limits = replace(TIGHT, max_live_parameters=10 * k)
    assert gathers(plan(chain(n, costs=CostModel()), limits, check=verify)) == 2 * n - k


def test_persistent_parameters_are_gathered_once():
    program = chain(6)
    small = replace(program.parameters[0], num_elements=4, num_bytes=16, grad_bytes=16, numel=3)
    program = replace(program, parameters=(small, *program.parameters[1:]))
    schedule = plan(program, Limits(max_reuse_distance=0, param_persistence_threshold=3), check=verify)
    assert gathers(schedule) == 2 * 6 - 2
    assert "p0" in schedule.kept


def test_a_parameter_that_is_larger_than_the_limit_is_refused_by_name():
    with pytest.raises(InfeasibleBudget, match=r"step 'f0.0' needs 10 elements.*max_live_parameters=10") as caught:
        plan(chain(3), Limits(max_live_parameters=9))
    assert caught.value.smallest_limit == 10


def test_free_communication_never_stalls_and_is_gathered_just_in_time():
    costs = link_costs(0.0, float("inf"))
    schedule = plan(chain(5, costs=costs), replace(TIGHT, max_reuse_distance=0), check=verify)
    assert finish(schedule) == 10 * 50.0
    assert peak_elements(schedule) == 10


def test_free_compute_takes_the_channels_time():
    costs = link_costs(1.0, 40.0)
    limits = replace(TIGHT, max_reuse_distance=0, prefetch_bucket_size=0, reduce_bucket_size=0)
    schedule = plan(chain(5, duration_us=0.0, costs=costs), limits, check=verify)
    # 4 + 1 gathers in forward; the backward's four follow without a pause, and the last reduction comes after the last.
    assert finish(schedule) == (5 + 4) * 2.0 + 2.0


def test_a_parameter_used_everywhere_and_one_used_never():
    program = chain(4)
    shared, unused = Parameter("shared", 7, 28), Parameter("unused", 10**6, 4 * 10**6)
    steps = tuple(replace(s, reads=(*s.reads, "shared")) for s in program.steps if s.phase != "turn")
    steps = (*steps[:4], program.steps[4], *steps[4:])
    program = replace(program, parameters=(*program.parameters, shared, unused), steps=steps)
    schedule = plan(program, replace(TIGHT, max_live_parameters=17, max_reuse_distance=10), check=verify)
    buckets = [b.parameters for b in schedule.buckets if b.kind == "all_gather"]
    assert sum("shared" in b for b in buckets) == 1
    assert not any("unused" in b for b in buckets)


def test_an_empty_program_has_an_empty_schedule():
    assert plan(Program((), ()), Limits(memory_budget=0), check=verify).instructions == ()


def test_check_sees_the_schedule_that_is_returned():
    seen = []
    assert plan(chain(2), Limits(), check=seen.append) is seen[0]


def test_a_thousand_equal_layers():
    """A transfer takes two steps, compute one: in pairs, all but the first and the last hide, and pairs hold least."""
    n = 1000
    schedule = plan(chain(n, costs=link_costs()), replace(TIGHT, max_reuse_distance=0), check=verify)
    for kind in ("all_gather", "reduce_scatter"):
        sizes = [len(b.parameters) for b in schedule.buckets if b.kind == kind]
        assert max(sizes) <= 3 and sum(size == 2 for size in sizes) > 0.9 * len(sizes)
    assert finish(schedule) < 2 * n * 50.0 + 3 * 101.0


def test_twenty_thousand_steps_and_two_thousand_parameters():
    schedule = plan(chain(2000, repeat=5), Limits(max_live_parameters=1000, param_persistence_threshold=0), check=verify)
    assert len(schedule.program.steps) == 20_001
    assert gathers(schedule) == 2 * 2000 - 100


def calls(work) -> int:
    """Python and C calls that `work` makes: time, without a clock."""
    count = 0

    def hook(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("limits", [Limits(), replace(TIGHT, max_live_parameters=100), replace(TIGHT, memory_budget=4000)])
def test_planning_and_verifying_scale_linearly(limits):
    one, four = (calls(lambda n=n: plan(chain(n, repeat=3), limits, check=verify)) for n in (100, 400))
    assert four < 4 * one * 1.25


def test_the_pipeline_is_one_list_of_functions_from_schedule_to_schedule():
    schedule = Schedule(chain(3), Limits())
    for run in PIPELINE:
        schedule = run(schedule)
    assert schedule == plan(chain(3), Limits())


def test_a_step_may_name_a_parameter_twice():
    program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w", "w")),))
    assert gathers(plan(program, Limits(), check=verify)) == 1
