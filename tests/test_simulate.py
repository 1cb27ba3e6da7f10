"""The simulator agrees with a brute-force oracle and with the passes' clock, loses no microsecond, and is linear."""

from __future__ import annotations

import doctest
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zfx.simulate
from tests.passes import oracle
from tests.passes.test_pipeline import calls
from tests.strategies import chain, link_costs, problems
from zfx.costs import CostModel, Link
from zfx.ir import Bucket, Instruction, Limits, Parameter, Program, Schedule, Step
from zfx.passes import plan, stages
from zfx.passes.timeline import read
from zfx.passes.timing import simulate as passes_clock
from zfx.passes.view import actual_us
from zfx.replay import replay
from zfx.simulate import CHANNELS, Moment, simulate

# A collective in one program, both channels: what each number must be is worked out by hand below.
#
#   compute  | f0: 3 | wait 0: stall, o | f1: 4 | turn | b0: 2 | o | b1: 1 | stall (wait_reduce 1)
#   gather   [0 ........ 12]
#   reduce                                                     [... 7 ...]
COSTS = CostModel(Link(2, 4), Link(1, 8), launch_us=1.0)
PROGRAM = Program(
    (Parameter("w", 10, 40, 48), Parameter("v", 2, 8)),
    (
        Step("f0", "forward", other_bytes=5, duration_us=3.0),
        Step("f1", "forward", reads=("w",), other_bytes=7, duration_us=4.0),
        Step("turn", "turn"),
        Step("b0", "backward", completes=("w",), other_bytes=3, duration_us=2.0),
        Step("b1", "backward", other_bytes=1, duration_us=1.0),
    ),
    static_bytes=100,
    costs=COSTS,
)
SCHEDULE = Schedule(
    PROGRAM,
    Limits(),
    (Bucket(0, "all_gather", ("w",), ("w",)), Bucket(1, "reduce_scatter", ("w",))),
    (
        Instruction("all_gather", 0, ("w",), 0),
        Instruction("wait", 1, ("w",), 0),
        Instruction("release", 2, ("w",)),
        Instruction("reduce_scatter", 4, ("w",), 1),
        Instruction("wait_reduce", 5, ("w",), 1),
    ),
)


def test_every_number_of_a_small_schedule() -> None:
    result = simulate(SCHEDULE)
    assert result.steps == ((0.0, 3.0, 0.0), (13.0, 17.0, 9.0), (17.0, 17.0, 0.0), (17.0, 19.0, 0.0), (20.0, 21.0, 0.0))
    assert result.spans == (
        ("all_gather", 0, 40, 0.0, 0.0, 12.0, 3.0, 9.0),
        ("reduce_scatter", 1, 48, 20.0, 20.0, 27.0, 21.0, 6.0),
    )
    assert (result.finish_us, result.compute_us, result.overhead_us, result.exposed_us) == (27.0, 10.0, 2.0, 15.0)
    assert [(m.time_us, m.point, m.instruction and m.instruction.kind, m[3:]) for m in result.moments] == [
        (0.0, 0, "all_gather", (40, 40, 0, 5, 100, 0)),
        (0.0, 0, None, (40, 40, 0, 5, 100, 0)),
        (13.0, 1, "wait", (40, 0, 0, 7, 100, 0)),
        (13.0, 1, None, (40, 0, 0, 7, 100, 0)),
        (17.0, 2, "release", (0, 0, 0, 0, 100, 0)),
        (17.0, 2, None, (0, 0, 0, 0, 100, 0)),
        (17.0, 3, None, (0, 0, 48, 3, 100, 0)),
        (20.0, 4, "reduce_scatter", (0, 0, 96, 1, 100, 0)),
        (20.0, 4, None, (0, 0, 96, 1, 100, 0)),
        (27.0, 5, "wait_reduce", (0, 0, 0, 0, 100, 0)),
    ]
    assert (result.peak, result.forward_end, result.backward_end) == (result.moments[7], result.moments[3], result.moments[8])


def test_a_channel_is_a_queue() -> None:
    """Both launched at point 0: the second starts when the first is over, and its wait comes after the first's overhead."""
    buckets = tuple(Bucket(i, "all_gather", (name,)) for i, name in enumerate("wv"))
    rows = [Instruction(kind, 0, b.parameters, b.index) for kind in ("all_gather", "wait") for b in buckets]
    first, second = simulate(replace(SCHEDULE, buckets=buckets, instructions=tuple(rows))).spans
    assert (first.start_us, first.end_us, first.wait_us, first.exposed_us) == (0.0, 12.0, 0.0, 12.0)
    assert (second.launch_us, second.start_us, second.end_us, second.wait_us, second.exposed_us) == (0.0, 12.0, 16.0, 13.0, 3.0)


@given(problems())
def test_equal_to_the_oracle_and_to_the_passes_clock(problem) -> None:
    """Costs and durations are whole numbers here, so that equal means equal."""
    for _, schedule in stages(*problem):
        result = simulate(schedule)
        finish, ends, reached = oracle.simulate(schedule)
        assert result.finish_us == finish == passes_clock(read(schedule), actual_us(schedule.program)).finish_us
        assert {s.bucket: s.end_us for s in result.spans} == ends
        waits = {"all_gather": "wait", "reduce_scatter": "wait_reduce"}
        assert {(waits[s.kind], s.bucket): s.wait_us for s in result.spans} == reached


@given(problems(), st.data())
def test_equal_to_the_oracle_wherever_gathers_are_launched(problem, data) -> None:
    schedule = plan(*problem)
    waits, points, least = oracle.waits(schedule), [], 0
    for wait in waits:
        points.append(least := data.draw(st.integers(least, wait)))
    moved = oracle.at_launches(schedule, points)
    assert simulate(moved).finish_us == oracle.finish(moved)


@given(problems())
def test_every_microsecond_is_compute_overhead_or_exposed(problem) -> None:
    result = simulate(plan(*problem))
    if math.isinf(result.finish_us):
        assert math.isinf(result.exposed_us)
        return
    assert result.finish_us == result.compute_us + result.overhead_us + result.exposed_us
    assert result.exposed_us == sum(span.exposed_us for span in result.spans)
    at_the_end = result.exposed_us - sum(step.exposed_us for step in result.steps)
    assert at_the_end >= 0
    assert all(a.end_us + b.exposed_us <= b.start_us for a, b in itertools.pairwise(result.steps))


@given(problems(replicas=(1, 2)))
def test_collectives_of_a_channel_follow_each_other(problem) -> None:
    result = simulate(plan(*problem))
    for channel in CHANNELS:
        spans = [s for s in result.spans if s.kind == channel.launch]
        assert all(a.end_us <= b.start_us for a, b in itertools.pairwise(spans))
        assert all(s.launch_us <= s.start_us <= s.end_us and s.launch_us <= s.wait_us for s in spans)
        assert all(s.start_us in (s.launch_us, *(e.end_us for e in spans)) for s in spans)  # no idle channel with work to do
        assert all(s.exposed_us == max(0.0, s.end_us - s.wait_us) for s in spans)


@given(problems(replicas=(1, 2)))
def test_moments_are_the_replay_by_kind(problem) -> None:
    schedule = plan(*problem)
    result, states = simulate(schedule), list(replay(schedule))
    assert [(m.point, m.instruction, m.total) for m in result.moments] == [
        (s.point, s.instruction, s.total_bytes) for s in states
    ]
    assert [m[3:6] for m in result.moments] == [(s.gathered_bytes, s.packing_bytes, s.gradient_bytes) for s in states]
    steps = schedule.program.steps
    others = [steps[m.point].other_bytes if m.point < len(steps) else 0 for m in result.moments]
    assert [(m.activations, m.shards) for m in result.moments] == [(other, schedule.program.static_bytes) for other in others]
    times = [m.time_us for m in result.moments]
    assert times == sorted(times)
    assert result.peak.total == max([schedule.program.static_bytes, *(s.total_bytes for s in states)])


@given(problems())
def test_the_two_ends_are_moments_at_the_turn_and_at_the_end(problem) -> None:
    schedule = plan(*problem)
    result, turn, num_steps = simulate(schedule), schedule.program.turn, len(schedule.program.steps)
    after = num_steps if turn is None else turn
    first = [m for m in result.moments if m.point == after or (m.point == after - 1 and m.instruction is None)]
    last = [m for m in result.moments if m.point == num_steps or (m.point == num_steps - 1 and m.instruction is None)]
    nothing = [Moment(0.0, 0, None, 0, 0, 0, 0, schedule.program.static_bytes)]
    assert result.forward_end == max(first or nothing, key=lambda m: m.total)
    assert result.backward_end == max(last or nothing, key=lambda m: m.total)


def test_an_empty_program_takes_no_time_and_holds_its_shards() -> None:
    result = simulate(Schedule(Program((), (), static_bytes=9), Limits()))
    assert (result.finish_us, result.exposed_us, result.steps, result.spans, result.moments) == (0.0, 0.0, (), (), ())
    assert result.peak == result.forward_end == result.backward_end == Moment(0.0, 0, None, 0, 0, 0, 0, 9)


def test_infinite_times_stay_infinite_and_are_never_nan() -> None:
    slow = plan(chain(3, costs=link_costs(math.inf)), Limits())
    result = simulate(slow)
    assert result.finish_us == result.exposed_us == math.inf
    everything = [x for row in (*result.spans, *result.steps) for x in row if isinstance(x, float)]
    assert not any(map(math.isnan, everything))
    free = simulate(plan(chain(3, costs=link_costs(0.0, math.inf)), Limits()))
    assert (free.finish_us, free.exposed_us) == (300.0, 0.0)


@pytest.mark.parametrize(
    "instructions",
    [
        (Instruction("wait", 0, ("w",), 0), Instruction("wait_reduce", 1, ("w",), 7)),
        (Instruction("all_gather", 99, ("nobody",), None), Instruction("release", -1, ("w",))),
        (Instruction("all_gather", 0, ("w",), 0), Instruction("all_gather", 0, ("w",), 0), Instruction("wait", 0, (), 0)),
        (Instruction("all_gather", 0, ("w",), 0), Instruction("wait_reduce", 0, ("w",), 0)),
    ],
)
def test_wrong_schedules_are_simulated_all_the_same(instructions) -> None:
    result = simulate(replace(SCHEDULE, instructions=instructions))
    assert len(result.moments) == len(instructions) + len(PROGRAM.steps)
    assert result.finish_us == result.compute_us + result.overhead_us + result.exposed_us


def test_what_nothing_waits_for_is_over_when_it_is_over() -> None:
    result = simulate(replace(SCHEDULE, instructions=SCHEDULE.instructions[:1]))
    assert (result.spans[0].wait_us, result.spans[0].exposed_us) == (12.0, 0.0)
    assert result.finish_us == 10.0


def test_a_hundred_thousand_steps() -> None:
    program = chain(2000, repeat=25)
    result = simulate(plan(program, Limits(max_live_parameters=1000)))
    assert len(result.steps) == len(program.steps) == 100_001
    assert result.finish_us == pytest.approx(result.compute_us + result.overhead_us + result.exposed_us, rel=1e-12)


def test_simulating_is_linear() -> None:
    schedules = [plan(chain(n, repeat=3), Limits(max_live_parameters=100)) for n in (100, 400)]
    one, four = (calls(lambda s=schedule: simulate(s)) for schedule in schedules)
    assert four < 4 * one * 1.1


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(zfx.simulate).failed == 0
