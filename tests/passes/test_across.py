"""Programs with replicas: what every pass returns is whole, on time by three clocks, bounded; and what damages it is found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.strategies import chain, problems
from tests.test_verify import broken, insert, move, pick, without
from zfx.certificate import certify
from zfx.costs import CostModel, Link
from zfx.dump import from_json, to_dot, to_json, to_networkx
from zfx.errors import InfeasibleBudget
from zfx.ir import Limits, Program, Schedule
from zfx.passes import gather_on_demand, plan, stages
from zfx.passes.baselines import BASELINES
from zfx.passes.place import launch_late
from zfx.passes.timeline import read, write
from zfx.passes.timing import simulate as passes_clock
from zfx.passes.view import actual_us
from zfx.picture import payload
from zfx.reasons import tell
from zfx.simulate import simulate
from zfx.testing import assert_valid, smallest_budget
from zfx.text import render, report
from zfx.trace import to_trace
from zfx.verify import verify, violations

REPLICAS = {"replicas": (2, 3), "windows": ("only", "first", "last"), "uniform": None}
few = settings(max_examples=30)
STAGES = ("reduce_scatter", "wait_reduce", "all_reduce", "wait_all_reduce")


def schedules(**options: object) -> st.SearchStrategy[Schedule]:
    return problems(busy=True, max_parameters=4, max_steps=4, replicas=(2, 3), **options).map(lambda problem: plan(*problem))


def clocked(schedule: Schedule) -> float:
    """A third opinion on the time: three queues, read off the instructions."""
    program, now, free, ends = schedule.program, 0.0, dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0.0), {}
    unit = {"all_gather": "num_bytes", "reduce_scatter": "grad_bytes", "all_reduce": "across_bytes"}
    link = {"all_gather": program.costs.gather, "reduce_scatter": program.costs.reduce, "all_reduce": program.costs.all_reduce}
    waits = {"wait": "all_gather", "wait_reduce": "reduce_scatter", "wait_all_reduce": "all_reduce"}
    sizes = {p.name: p for p in program.parameters}
    pending = list(schedule.instructions)
    for point in range(len(program.steps) + 1):
        while pending and pending[0].point == point:
            i = pending.pop(0)
            now += program.costs.launch_us if i.kind in ("reduce_scatter", "all_reduce") else 0
            if i.kind in free:
                num_bytes = sum(getattr(sizes[name], unit[i.kind]) for name in i.parameters)
                free[i.kind] = ends[i.kind, i.bucket] = max(now, free[i.kind]) + link[i.kind].us(num_bytes)
            elif i.kind in waits:
                now = max(now, ends[waits[i.kind], i.bucket])
                now += program.costs.launch_us if i.kind == "wait" else 0
        now += program.steps[point].duration_us if point < len(program.steps) else 0
    return now


@given(problems(**REPLICAS))
def test_every_pass_returns_a_whole_schedule(problem: tuple[Program, Limits]) -> None:
    for _, schedule in stages(*problem):
        assert_valid(schedule)
        assert write(read(schedule)) == schedule
        assert simulate(schedule).finish_us == clocked(schedule)
        assert simulate(schedule).finish_us == passes_clock(read(schedule), actual_us(schedule.program)).finish_us
        certificate = certify(schedule)
        assert min(certificate.time_ratio, certificate.volume_ratio, certificate.peak_ratio) >= 1


@given(problems(replicas=(2, 3)))
def test_baselines_are_whole_and_none_is_faster(problem: tuple[Program, Limits]) -> None:
    program, limits = problem
    program = replace(program, uniform=True)
    best = simulate(plan(program, limits)).finish_us
    for rule in BASELINES:
        schedule = rule(program, limits)
        assert_valid(schedule)
        assert best <= simulate(schedule).finish_us * (1 + 1e-9)


@given(problems(replicas=(2, 3)))
def test_launching_late_costs_no_time(problem: tuple[Program, Limits]) -> None:
    *_, (_, schedule) = stages(*problem)
    assert simulate(launch_late(schedule)).finish_us <= simulate(schedule).finish_us * (1 + 1e-9)


@given(problems(replicas=(2, 3), with_budget=False))
def test_limits_are_refused_exactly(problem: tuple[Program, Limits]) -> None:
    program, limits = problem
    least = smallest_budget(program)
    verify(gather_on_demand(Schedule(program, replace(limits, memory_budget=least))))
    assume(least > 0 and program.steps)
    with pytest.raises(InfeasibleBudget) as caught:
        gather_on_demand(Schedule(program, replace(limits, memory_budget=least - 1)))
    assert caught.value.smallest_limit == least


@given(problems(replicas=(2, 3), with_budget=False), st.integers(2, 5))
def test_durations_decide_no_collective(problem: tuple[Program, Limits], factor: int) -> None:
    program, limits = problem
    steps = tuple(replace(step, duration_us=factor * step.duration_us, other_bytes=0) for step in program.steps)
    one, other = (plan(p, limits) for p in (program, replace(program, steps=steps)))
    assert (one.buckets, one.kept) == (other.buckets, other.kept)


# ---- numbers by hand ------------------------------------------------------------------------------------------------------

# Backward steps take 50 us, a reduction 40, an all-reduce 100: the first all-reduce starts when the first reduction has arrived,
# runs beside the next backward step and beyond, and the others queue behind it.
#
#   compute     | b1 50 |o| b0 50   |o|
#   reduce                [ 40 ]      [ 40 ]
#   all_reduce                   [o]   [ 100 .......][ 100 .......]
SLOW_ACROSS = CostModel(gather=Link(0, 1e9), reduce=Link(40, 1e9), all_reduce=Link(100, 1e9), launch_us=0.0)
ONE_BY_ONE = Limits(reduce_bucket_size=0, max_reuse_distance=0, param_persistence_threshold=0)


def test_the_all_reduce_overlaps_what_follows() -> None:
    schedule = plan(chain(3, replicas=2, costs=SLOW_ACROSS), ONE_BY_ONE, check=verify)
    spans = {kind: [s for s in simulate(schedule).spans if s.kind == kind] for kind in ("reduce_scatter", "all_reduce")}
    assert [round(s.start_us - 150) for s in spans["reduce_scatter"]] == [50, 100, 150]
    # each may be launched at the first point after its reduction's arrival: 90 -> 100, 140 -> 150, and at the end
    assert [round(s.launch_us - 150) for s in spans["all_reduce"]] == [100, 150, 190]
    assert [round(s.start_us - 150) for s in spans["all_reduce"]] == [100, 200, 300]
    assert simulate(schedule).finish_us == pytest.approx(150 + 400)
    kinds = [i.kind for i in schedule.instructions if i.kind in STAGES]
    assert kinds[-3:] == ["wait_all_reduce"] * 3, "nothing is waited for before all is launched"
    assert certify(schedule).time_binds == "critical path"


def test_all_reduces_can_be_what_binds() -> None:
    costs = replace(SLOW_ACROSS, all_reduce=Link(1000, 1e9))
    certificate = certify(plan(chain(3, replicas=2, costs=costs, duration_us=0.0), ONE_BY_ONE))
    assert (certificate.time_binds, certificate.time_ratio) == ("all-reduce channel", 1.0)


# ---- what damages a schedule ------------------------------------------------------------------------------------------------


@few
@given(schedules(), st.data(), st.sampled_from(["all_reduce", "wait_all_reduce"]))
def test_a_dropped_half(schedule: Schedule, data: st.DataObject, kind: str) -> None:
    found = broken(without(schedule, pick(data, schedule, kind)))
    assert "averaged_over_replicas" in found
    assert ("launched_once" in found) == (kind == "all_reduce")


@few
@given(schedules(), st.data())
def test_no_all_reduce_at_all(schedule: Schedule, data: st.DataObject) -> None:
    pick(data, schedule, "all_reduce")
    rows = tuple(i for i in schedule.instructions if "all_reduce" not in i.kind)
    assert broken(replace(schedule, instructions=rows)) == {"averaged_over_replicas"}
    assert broken(replace(schedule, program=replace(schedule.program, replicas=1))) >= {"averaged_over_replicas"}


@few
@given(schedules(), st.data())
def test_an_all_reduce_before_its_reduction_has_arrived(schedule: Schedule, data: st.DataObject) -> None:
    place = pick(data, schedule, "all_reduce")
    bucket = schedule.instructions[place].bucket
    start = next(p for p, i in enumerate(schedule.instructions) if i.kind == "reduce_scatter" and i.bucket == bucket)
    moved = replace(schedule.instructions[place], point=schedule.instructions[start].point)
    found = broken(insert(without(schedule, place), start + 1, moved))
    assert {"averaged_over_replicas", "happens_before"} <= found


@few
@given(schedules(), st.data())
def test_an_all_reduce_that_is_waited_for_too_early_or_twice(schedule: Schedule, data: st.DataObject) -> None:
    place = pick(data, schedule, "wait_all_reduce")
    wait = schedule.instructions[place]
    start = next(p for p, i in enumerate(schedule.instructions) if i.kind == "all_reduce" and i.bucket == wait.bucket)
    early = insert(without(schedule, place), start, replace(wait, point=schedule.instructions[start].point))
    assert {"averaged_over_replicas", "launched_once"} <= broken(early)
    assert {"averaged_over_replicas", "launched_once"} <= broken(insert(schedule, place, wait))


@few
@given(schedules(), st.data())
def test_two_all_reduces_swapped(schedule: Schedule, data: st.DataObject) -> None:
    places = [place for place, i in enumerate(schedule.instructions) if i.kind == "all_reduce"]
    assume(len(places) > 1)
    k = data.draw(st.integers(0, len(places) - 2))
    rows = list(schedule.instructions)
    a, b = places[k], places[k + 1]
    rows[a], rows[b] = replace(rows[b], point=rows[a].point), replace(rows[a], point=rows[b].point)
    assert "collective_order" in broken(replace(schedule, instructions=tuple(rows)))


def test_an_all_reduce_on_the_other_side_of_the_turn() -> None:
    program = chain(1, replicas=2)
    steps = (replace(program.steps[0], completes=("p0",)), program.steps[1], replace(program.steps[2], completes=()))
    schedule = plan(replace(program, steps=steps), ONE_BY_ONE, check=verify)
    place = next(p for p, i in enumerate(schedule.instructions) if i.kind == "wait_all_reduce")
    moved = move(schedule, place, 3)
    assert "turn" in broken(moved)
    place = next(p for p, i in enumerate(moved.instructions) if i.kind == "all_reduce")
    assert "turn" in broken(move(moved, place, 2))


def test_what_the_verifier_says() -> None:
    schedule = plan(chain(1, replicas=2), ONE_BY_ONE)
    rows = tuple(i for i in schedule.instructions if "all_reduce" not in i.kind)
    (error,) = violations(replace(schedule, instructions=rows))
    assert (error.rule, error.parameter) == ("averaged_over_replicas", "p0") and "all_reduce never runs" in str(error)
    alone = plan(chain(1), ONE_BY_ONE)
    spare = tuple(replace(alone.instructions[-1], kind=kind) for kind in STAGES[2:])
    errors = list(violations(replace(alone, instructions=(*alone.instructions, *spare))))
    assert {e.rule for e in errors} == {"averaged_over_replicas"} and "there are no replicas" in str(errors[0])


# ---- in every room ----------------------------------------------------------------------------------------------------------


def test_every_room_shows_it() -> None:
    schedule = plan(chain(3, replicas=2, costs=SLOW_ACROSS), ONE_BY_ONE)
    data = json.loads(to_json(schedule))
    assert data["version"] == 3 and data["program"]["replicas"] == 2 and data["program"]["parameters"][0]["across_bytes"] == 20
    assert from_json(to_json(schedule)) == schedule
    with pytest.raises(ValueError, match="4 ranks can't be divided among 3 replicas"):
        from_json(to_json(schedule).replace('"replicas": 2', '"replicas": 3'))

    text = render(schedule, full=True)
    assert "4 ranks (2 replicas of 2)" in text and "all-reduces  3 in 3 buckets, 60 B on each rank" in text
    assert "wait reduce 5; all reduce 5" in text and "wait all reduce 5" in text
    assert "all-reduces 300.0 us" in report(schedule)

    graph = to_networkx(schedule)
    streams = {facts["stream"] for _, facts in graph.nodes(data=True)}
    assert streams == {"compute", "gather", "reduce", "all_reduce"} and graph.graph["replicas"] == 2
    reasons = {reason for _, after, reason in graph.edges(keys=True) if graph.nodes[after]["kind"] == "all_reduce"}
    assert reasons == {"program order", "launch", "reduced"}
    assert 'subgraph "cluster_all_reduce"' in to_dot(schedule)

    events = json.loads(to_trace(schedule))["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "all_reduce" and e["tid"] == 5] == [f"all_reduce {k}" for k in (5, 6, 7)]
    story = tell(schedule)
    why = [c.why for c in story.collectives if c.span.kind == "all_reduce"]
    assert why[0][0] == "Adds up over 2 replicas what reduction 5 has brought." and "Queues" in why[1][1]
    page = payload(story, certify(schedule))
    assert page["replicas"] == 2 and page["collectives"]["kind"].count("a") == 3 and page["parameters"]["across_bytes"] == [20] * 3
    assert page["moments"]["kind"].count("f") == 3


def test_without_replicas_no_room_speaks_of_it() -> None:
    schedule = plan(chain(3), ONE_BY_ONE)
    for shown in (render(schedule), report(schedule), to_dot(schedule), to_trace(schedule)):
        assert "all_reduce" not in shown and "all-reduce" not in shown
