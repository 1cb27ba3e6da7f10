"""The trace says what the simulation says, in a form that Perfetto reads without dropping anything."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

import zfx.trace
from zfx.certificate import certify
from zfx.dump import save
from zfx.ir import Limits, Program, Schedule
from zfx.passes import plan
from zfx.simulate import Moment, channels_of, simulate
from zfx.trace import THREADS, to_trace

from .strategies import problems
from .test_dump import schedules
from .test_reasons import network

FIELDS = {
    "M": {"args"},
    "X": {"args", "dur", "cat"},
    "C": {"args"},
    "s": {"cat", "id"},
    "t": {"cat", "id"},
    "f": {"cat", "id", "bp"},
}
KINDS = ("parameters", "packing", "gradients", "activations", "shards", "total")


def strictly(text: str) -> dict[str, Any]:
    """JSON without NaN, infinity, or a key that stands twice."""

    def pairs(rows: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in rows}) == len(rows)
        return dict(rows)

    def constant(name: str) -> None:
        raise AssertionError(name)

    assert text.isascii()
    return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)


def nanoseconds(us: float) -> int:
    return int(us * 1000)  # as Perfetto reads a number: cut off, not rounded


def check(schedule: Schedule) -> list[dict[str, Any]]:
    trace = strictly(to_trace(schedule))
    events, result = trace["traceEvents"], simulate(schedule)
    latest = 0.0
    for event in events:
        assert set(event) == {"ph", "name", "pid", "tid", "ts"} | FIELDS[event["ph"]], event
        assert isinstance(event["name"], str) and event["pid"] == 1 and event["tid"] in THREADS.values()
        assert isinstance(event["ts"], float) and event["ts"] >= latest
        latest = event["ts"]
    threads = ("phase", "compute", *(channel.name for channel in channels_of(schedule)))
    assert {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"} == {name: THREADS[name] for name in threads}
    slices = [e for e in events if e["ph"] == "X"]
    for event in slices:
        start, end = round(event["args"]["start_us"] * 1000), round(event["args"]["end_us"] * 1000)
        assert (nanoseconds(event["ts"]), nanoseconds(event["dur"])) == (start, end - start)
    steps = [e for e in slices if e["tid"] == THREADS["compute"] and "index" in e["args"]]
    assert [(e["args"]["start_us"], e["args"]["end_us"]) for e in steps] == [(t.start_us, t.end_us) for t in result.steps]
    for thread, kind in (("gather", "all_gather"), ("reduce", "reduce_scatter"), ("all_reduce", "all_reduce")):
        row = [e["args"] for e in slices if e["tid"] == THREADS[thread]]
        spans = [s for s in result.spans if s.kind == kind]
        exact = [(a["start_us"], a["end_us"], a["bytes"], a["launch_us"], a["wait_us"], a["exposed_us"]) for a in row]
        assert exact == [(s.start_us, s.end_us, s.num_bytes, s.launch_us, s.wait_us, s.exposed_us) for s in spans]
    stand_open(slices)
    return events


def stand_open(slices: list[dict[str, Any]]) -> None:
    """Two slices of one thread never overlap in part: the later one would be dropped."""
    open_until: dict[int, int] = defaultdict(int)
    for event in slices:
        start = nanoseconds(event["ts"])
        assert start >= open_until[event["tid"]], event
        open_until[event["tid"]] = start + nanoseconds(event["dur"])


def arrows(events: list[dict[str, Any]]) -> dict[int, list[tuple[str, str]]]:
    """What each flow binds to: the slice that began last on its thread, as far as the file has been read."""
    top: dict[int, str] = {}
    found: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            top[event["tid"]] = event["name"]
        elif event["ph"] in "stf":
            found[event["id"]].append((event["ph"], top[event["tid"]]))
    return found


def test_a_plan_as_a_trace(tmp_path: Path) -> None:
    schedule = network()
    events = check(schedule)
    expected = {}
    for number, span in enumerate(simulate(schedule).spans):
        channel = "gather" if span.kind == "all_gather" else "reduce"
        name = f"{channel} {span.bucket}"
        expected[number] = [("s", f"launch {name}"), ("t", name), ("f", f"wait {name}")]
    assert arrows(events) == expected
    save(schedule, tmp_path / "step.trace.json")
    assert (tmp_path / "step.trace.json").read_text("ascii") == to_trace(schedule)
    trace, certificate = json.loads(to_trace(schedule)), certify(schedule)
    assert trace["otherData"]["time_bound_us"] == certificate.time_bound_us
    assert trace["otherData"]["peak_bytes"] == certificate.peak_bytes == max(e["args"]["total"] for e in events if e["ph"] == "C")


def test_memory_counters_are_the_moments() -> None:
    def held(moment: Moment) -> dict[str, int]:
        return {name: getattr(moment, name) for name in KINDS}

    schedule = network()
    moments = [(m.time_us, held(m)) for m in simulate(schedule).moments]
    changed = [row for i, row in enumerate(moments) if i == 0 or row[1] != moments[i - 1][1]]
    counters = [(e["ts"], e["args"]) for e in check(schedule) if e["ph"] == "C"]
    assert [args for _, args in counters] == [args for _, args in changed]
    assert [nanoseconds(ts) for ts, _ in counters] == [round(us * 1000) for us, _ in changed]


@settings(max_examples=40)
@given(problems(replicas=(1, 2)))
@example((Program((), ()), Limits()))
def test_any_plan_is_a_sound_trace(problem: tuple[Program, Limits]) -> None:
    schedule = plan(*problem)
    events = check(schedule)
    flows = arrows(events)
    assert len(flows) == len(simulate(schedule).spans)
    for row in flows.values():
        assert [kind for kind, _ in row] == ["s", "t", "f"]
        assert row[0][1] == f"launch {row[1][1]}" and row[2][1] == f"wait {row[1][1]}"


@settings(max_examples=40)
@given(schedules())
def test_any_schedule_is_a_trace_or_refused(schedule: Schedule) -> None:
    try:
        text = to_trace(schedule)
    except ValueError as error:
        assert "for ever" in str(error)
    else:
        strictly(text)


@given(st.integers(0, 10**15))
def test_nanoseconds_survive_being_read(number: int) -> None:
    us = zfx.trace._microseconds(number)
    assert int(us * 1000) == round(us * 1000) == number
