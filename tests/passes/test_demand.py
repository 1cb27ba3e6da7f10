"""What every step needs: equal to its definition, and what any schedule holds."""

from __future__ import annotations

from hypothesis import given

from tests.strategies import bytes_needed, problems, smallest_max_live
from zfx.ir import Limits, Parameter, Program, Step
from zfx.passes import stages
from zfx.passes.demand import demand
from zfx.passes.memory import byte_room
from zfx.passes.timeline import Timeline
from zfx.replay import replay


@given(problems())
def test_the_room_is_what_the_definition_leaves(problem):
    program, limits = problem
    least = demand(program, limits)
    assert limits.max_live_parameters - min(least.elements.during, default=limits.max_live_parameters) == smallest_max_live(program)
    if limits.memory_budget is not None and program.steps:
        left = [limits.memory_budget - min(pair) for pair in zip(least.num_bytes.before, least.num_bytes.during)]
        left[-1] = max(left[-1], limits.memory_budget - least.num_bytes.before[-1])
        assert left == bytes_needed(program)


@given(problems(with_budget=True))
def test_no_schedule_holds_less(problem):
    program, limits = problem
    least = demand(program, limits)
    allowed = byte_room(Timeline(program, limits))
    for _, schedule in stages(program, limits):
        for state in replay(schedule):
            if state.step is not None:
                assert state.num_elements >= limits.max_live_parameters - least.elements.during[state.point]
                held = state.gathered_bytes + state.packing_bytes + state.gradient_bytes
                assert held >= allowed.during[state.point] - least.num_bytes.during[state.point]


def test_one_step_after_another():
    """
    reads    a    b    a,b
    room     2    1    0          of three
    """
    a, b = Parameter("a", 1, 4), Parameter("b", 2, 8)
    program = Program((a, b), tuple(Step(f"s{i}", "forward", reads=r) for i, r in enumerate((("a",), ("b",), ("a", "b")))))
    room = demand(program, Limits(max_live_parameters=3)).elements
    assert (room.before, room.during) == ((3, 3, 3, 3), (2, 1, 0))
