"""Keeping: distances equal their definition, and a gap is kept exactly if it may be and there is room."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import chain, problems, programs
from zfx.ir import Limits, Parameter, Program, Schedule, Step
from zfx.passes.keep import gaps, keep_parameters
from zfx.passes.timeline import read
from zfx.replay import replay


def distance(program: Program, start: int, stop: int) -> int:
    """By definition: distinct (parameter, half) read strictly between; the turn belongs to the forward."""
    seen = {(name, s.phase == "backward") for s in program.steps[start + 1 : stop] for name in s.reads}
    size = {p.name: p.num_elements for p in program.parameters}
    return sum(size[name] for name, _ in seen)


def all_gaps(program: Program) -> dict[tuple[str, int, int], int]:
    found = {}
    for p in program.parameters:
        reads = [t for t, step in enumerate(program.steps) if p.name in step.reads]
        found.update({(p.name, a, b): distance(program, a, b) for a, b in pairwise(reads)})
    return found


def kept(program: Program, limits: Limits) -> set[tuple[str, int, int]]:
    """The gaps that the pass keeps, read off its intervals."""
    timeline = read(keep_parameters(Schedule(program, limits)))
    inside = [(i.parameter.name, i.first, i.last) for g in timeline.gathers for i in g.members]
    return {(n, a, b) for n, a, b in all_gaps(program) if any(m == n and first <= a and b <= last for m, first, last in inside)}


@given(programs())
def test_distances_equal_their_definition(program):
    assert {(g.parameter.name, g.start, g.stop): g.distance for g in gaps(program)} == all_gaps(program)


@given(programs(), st.integers(0, 40), st.integers(0, 12))
def test_with_room_a_gap_is_kept_iff_it_is_short_or_persistent_or_escapes(program, reach, threshold):
    """But for the gap over the turn of a parameter that the backward gathers again later."""
    numel = {p.name: p.numel for p in program.parameters}
    every = all_gaps(program)
    may = {gap for gap, width in every.items() if width <= reach or numel[gap[0]] <= threshold or gap[0] in program.escapes}
    turn = len(program.steps) if program.turn is None else program.turn
    again = {name for name, start, stop in every if start > turn and (name, start, stop) not in may}
    expected = {(name, start, stop) for name, start, stop in may if not (start <= turn < stop and name in again)}
    assert kept(program, Limits(max_reuse_distance=reach, param_persistence_threshold=threshold)) == expected


@given(problems())
def test_a_gap_is_given_up_only_where_the_limits_bind(problem):
    """Every wanted gap that was given up would, added back to what is held, break a limit somewhere inside."""
    program, limits = problem
    ample = replace(limits, max_live_parameters=10**6, memory_budget=None)
    schedule = keep_parameters(Schedule(program, limits))
    size = {p.name: p for p in program.parameters}
    wide = [(start + 1, stop, size[name]) for name, start, stop in kept(program, ample) - kept(program, limits)]
    for start, stop, parameter in wide:
        others = [(a, b, p) for a, b, p in wide if (a, b, p) != (start, stop, parameter)]
        if any((a <= stop and start <= b) or p == parameter for a, b, p in others):
            continue  # another one was given up here, perhaps later, which made room again; or in the backward
        tight = False
        for state in replay(schedule):
            inside = start <= state.point < stop or (state.point == stop and state.instruction is not None)
            full = state.num_elements + parameter.num_elements > limits.max_live_parameters
            if limits.memory_budget is not None:
                full |= state.total_bytes + parameter.num_bytes > limits.memory_budget
            tight |= inside and full
        assert tight


def test_the_widest_gap_is_given_up_first():
    """
    reads    a    b    c    b    a        room for two: c needs one, so one of a and b must go; a's gap is wider
             [a]       .         [a]
                  [b         b]
    """
    parameters = tuple(Parameter(n, 10, 40) for n in "abc")
    program = Program(parameters, tuple(Step(f"s{i}", "forward", reads=(n,)) for i, n in enumerate("abcba")))
    limits = Limits(max_live_parameters=20, param_persistence_threshold=0)
    assert kept(program, limits) == {("b", 1, 3)}
    assert kept(program, replace(limits, max_live_parameters=30)) == {("b", 1, 3), ("a", 0, 4)}
    assert kept(program, replace(limits, max_live_parameters=10)) == set()


def test_what_the_backward_gathers_again_is_not_kept_over_the_turn():
    """
    reads    a  | turn |  a   b   a       the first gap is 0 wide, the second |b|: if that is too wide, neither is kept
    """
    a, b = Parameter("a", 10, 40), Parameter("b", 10, 40)
    rows = [("f", "forward", ("a",)), ("turn", "turn", ()), *((f"b{i}", "backward", (n,)) for i, n in enumerate("aba"))]
    program = Program((a, b), tuple(Step(name, phase, reads=reads) for name, phase, reads in rows))
    limits = Limits(max_reuse_distance=9, param_persistence_threshold=0)
    assert kept(program, limits) == set()
    assert kept(program, replace(limits, max_reuse_distance=10)) == {("a", 0, 2), ("a", 2, 4)}


def test_persistent_parameters_are_given_up_last():
    sizes = {"a": 5, "b": 10, "c": 10}
    parameters = tuple(Parameter(n, size, 4 * size) for n, size in sizes.items())
    program = Program(parameters, tuple(Step(f"s{i}", "forward", reads=(n,)) for i, n in enumerate("abcba")))
    limits = Limits(max_live_parameters=20, param_persistence_threshold=5)
    assert kept(program, limits) == {("a", 0, 4)}


def test_a_kept_parameter_is_named_in_kept_only_if_it_spans_the_turn():
    schedule = keep_parameters(Schedule(chain(3), Limits(max_reuse_distance=20, param_persistence_threshold=0)))
    assert schedule.kept == ("p1", "p2")


@pytest.mark.parametrize("budget, expected", [(1000, 3), (8 + 80, 1), (8 + 3 * 40, 2)])
def test_memory_budget_counts_gradients_too(budget, expected):
    """A layer takes 40 bytes gathered and 80 while its gradient travels; 8 more bytes are live at every step."""
    limits = Limits(memory_budget=budget, param_persistence_threshold=0)
    schedule = keep_parameters(Schedule(chain(3), limits))
    assert len(schedule.kept) == expected
