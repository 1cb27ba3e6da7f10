"""The passes' count of what is held equals the verifier's replay of the same schedule."""

from __future__ import annotations

from hypothesis import given

from tests.strategies import problems
from zfx.passes import stages
from zfx.passes.memory import gathered_bytes, gathered_elements, gradient_bytes
from zfx.passes.timeline import read
from zfx.replay import replay


@given(problems(busy=True))
def test_profiles_equal_the_replay(problem):
    for _, schedule in stages(*problem):
        timeline = read(schedule)
        elements, num_bytes, gradients = gathered_elements(timeline), gathered_bytes(timeline), gradient_bytes(timeline)
        after = None
        for state in replay(schedule):
            held = state.gathered_bytes + state.packing_bytes
            if state.instruction is not None and state.instruction.kind == "all_gather":
                after = state  # the last one of a point holds the most: packs go where they are waited for
            elif state.instruction is not None:
                assert state.gradient_bytes <= gradients.before[state.point]
            else:
                assert gradients.during[state.point] == state.gradient_bytes
                assert num_bytes.during[state.point] >= held
                if after is not None and after.point == state.point:
                    assert elements.during[state.point] == after.num_elements
                    assert num_bytes.during[state.point] == after.gathered_bytes + after.packing_bytes
                after = None
