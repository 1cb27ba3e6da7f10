"""Gather on demand: what each step reads, and no more."""

from __future__ import annotations

from hypothesis import given

from tests.strategies import bytes_needed, problems, smallest_max_live
from zfx.ir import Limits, Parameter, Program, Schedule, Step
from zfx.passes.demand import gather_on_demand
from zfx.replay import replay


@given(problems())
def test_holds_exactly_what_each_step_needs(problem):
    program, _ = problem
    schedule = gather_on_demand(Schedule(*problem))
    escaped: set[str] = set()
    for state in replay(schedule):
        if state.step is not None:
            escaped |= set(state.step.reads) & set(program.escapes)
            assert state.live == escaped | set(state.step.reads)
    assert max((s.num_elements for s in replay(schedule)), default=0) == smallest_max_live(program)


@given(problems())
def test_holds_the_bytes_of_the_definition(problem):
    schedule = gather_on_demand(Schedule(*problem))
    needed = [0] * len(problem[0].steps)
    for state in replay(schedule):
        t = min(state.point, len(needed) - 1)
        needed[t] = max(needed[t], state.total_bytes)
    assert needed == bytes_needed(problem[0])


def test_one_step_after_another():
    """
    reads    a    b    a,b
    live     a    b    a,b
    """
    a, b = Parameter("a", 1, 4), Parameter("b", 2, 8)
    reads = (("a",), ("b",), ("a", "b"))
    program = Program((a, b), tuple(Step(f"s{i}", "forward", reads=r) for i, r in enumerate(reads)))
    schedule = gather_on_demand(Schedule(program, Limits(max_live_parameters=3)))
    rows = [(i.point, i.kind, *i.parameters) for i in schedule.instructions]
    assert rows == [
        (0, "all_gather", "a"), (0, "wait", "a"),
        (1, "release", "a"), (1, "all_gather", "b"), (1, "wait", "b"),
        (2, "release", "b"), (2, "all_gather", "a"), (2, "all_gather", "b"), (2, "wait", "a"), (2, "wait", "b"),
        (3, "release", "a", "b"),
    ]  # fmt: skip
