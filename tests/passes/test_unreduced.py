"""Schedules of micro-batches whose gradients wait: valid for random programs, and within limits that left room for them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import programs
from zfx.errors import InfeasibleBudget
from zfx.limits import Limits
from zfx.passes import plan
from zfx.passes.unreduced import holding, joining, with_room
from zfx.replay import replay
from zfx.verify import verify


def peak(schedule) -> int:  # type: ignore[no-untyped-def]
    return max((state.total_bytes for state in replay(schedule)), default=0)


@settings(max_examples=20)
@given(programs(), st.integers(1, 3), st.integers(0, 100))
def test_all_three_are_valid_and_fit_where_room_was_left(program, widening: int, percent: int) -> None:  # type: ignore[no-untyped-def]
    completed = {name for step in program.steps for name in step.completes}
    held_bytes = {p.name: p.grad_bytes * widening for p in program.parameters}
    roomy = with_room(program, held_bytes)
    try:
        free = peak(plan(roomy, Limits(), check=verify))
        limits = Limits(memory_budget=max(1, free * percent // 100))
        schedule = replace(plan(roomy, limits, check=verify), program=program)
    except InfeasibleBudget:
        return
    held, joined = holding(schedule, held_bytes), joining(schedule, held_bytes)
    for each in (schedule, held, joined):
        verify(each)
        assert (each.kept, each.carried) == (schedule.kept, schedule.carried)
    assert all(bucket.kind == "all_gather" for bucket in held.buckets)
    assert held.program.static_bytes - program.static_bytes == sum(held_bytes[name] for name in completed)
    assert [b.parameters for b in joined.buckets] == [b.parameters for b in schedule.buckets]


def test_a_program_without_gradients_stays_as_it_is() -> None:
    from zfx.ir import Parameter, Program, Step

    program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",)),))
    schedule = plan(program, Limits())
    assert holding(schedule, {"w": 40}) == schedule == joining(schedule, {"w": 40})


