"""A schedule as a trace in Chrome's trace event format, which Perfetto (ui.perfetto.dev) opens.

    thread phase      | forward                                   | turn | backward ...
    thread compute    | launch gather 0 | wait gather 0 | step | step | release ...
    thread gather           |        gather 0       |                 arrows: launch -> collective -> wait
    thread reduce, and all_reduce if there are replicas
    counter memory    parameters, packing, gradients, activations, shards, total, in bytes, one row each; secondary, if any may be

Times are in microseconds, in whole nanoseconds: Perfetto multiplies what it reads by 1000 and cuts off the rest, so each number
is the smallest that survives that. Slices of a thread thus touch and never overlap, which Perfetto would drop. The exact times
of the simulation stand in each slice's `args`. Events are sorted by time; those of one moment stand in execution order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from .certificate import certify
from .ir import Instruction, Schedule, Step
from .reasons import Collective, Story, finite, tell
from .simulate import CHANNELS, channels_of
from .text import printable

THREADS = {"phase": 1, "compute": 2, "gather": 3, "reduce": 4, "all_reduce": 5}
_SHORT = {
    "all_gather": "launch gather",
    "wait": "wait gather",
    "reduce_scatter": "launch reduce",
    "wait_reduce": "wait reduce",
    "all_reduce": "launch all_reduce",
    "wait_all_reduce": "wait all_reduce",
}
_CHANNELS = {channel.launch: channel.name for channel in CHANNELS}
_PID = 1


def to_trace(schedule: Schedule) -> str:
    """The trace as JSON, ASCII only. Equal schedules give equal text.

    Raises:
        ValueError: by its cost model the schedule takes for ever.

    Example:
        >>> from zfx.ir import Limits, Program
        >>> trace = json.loads(to_trace(Schedule(Program((), ()), Limits())))
        >>> [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
        ['phase', 'compute', 'gather', 'reduce']
    """
    story, certificate = tell(schedule), certify(schedule)
    events = sorted((*_phases(story), *_channels(story), *_memory(story)), key=lambda event: event["ts"])
    trace = {
        "traceEvents": [*_names(schedule), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "format": "zfx.trace",
            "world_size": schedule.program.world_size,
            "replicas": schedule.program.replicas,
            **({"reshard_to": schedule.program.reshard_to} if schedule.program.reshard_to else {}),
            "costs": printable(schedule.program.costs.source),
            "finish_us": story.simulation.finish_us,
            "exposed_us": story.simulation.exposed_us,
            "time_bound_us": finite(certificate.time_bound_us),
            "volume_bytes": certificate.volume_bytes,
            "volume_bound_bytes": certificate.volume_bound_bytes,
            "peak_bytes": certificate.peak_bytes,
            "peak_bound_bytes": certificate.peak_bound_bytes,
        },
    }
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def _names(schedule: Schedule) -> Iterator[dict[str, Any]]:
    ranks = schedule.program.world_size
    yield _event("M", "process_name", 0, "phase", args={"name": f"zfx schedule, each of {ranks} rank{'' if ranks == 1 else 's'}"})
    for order, thread in enumerate(("phase", "compute", *(channel.name for channel in channels_of(schedule)))):
        yield _event("M", "thread_name", 0, thread, args={"name": thread})
        yield _event("M", "thread_sort_index", 0, thread, args={"sort_index": order})


def _phases(story: Story) -> Iterator[dict[str, Any]]:
    steps, times = story.schedule.program.steps, story.simulation.steps
    for phase in dict.fromkeys(step.phase for step in steps):
        rows = [time for step, time in zip(steps, times) if step.phase == phase]
        yield _slice(phase, phase, "phase", rows[0].start_us, rows[-1].end_us, steps=len(rows))


def _channels(story: Story) -> Iterator[dict[str, Any]]:
    """Steps, what compute spends on instructions (each begins where the one before has ended), and each collective at its launch.

    Flow events follow the slice that they belong to, and come in the order in which the arrows run, also at one moment.
    """
    steps, times = story.schedule.program.steps, story.simulation.steps
    launches = {collective.launch: number for number, collective in enumerate(story.collectives)}
    waits = {collective.wait: number for number, collective in enumerate(story.collectives)}
    now = 0.0
    for place, moment in enumerate(story.simulation.moments):
        if moment.instruction is None:
            now = times[moment.point].end_us
            yield _step(steps[moment.point], moment.point, times[moment.point].start_us, now)
            continue
        before, now = now, moment.time_us
        yield _instruction(moment.instruction, before, now)
        if place in launches:
            number = launches[place]
            collective = story.collectives[number]
            channel = _CHANNELS[collective.span.kind]
            yield _arrow("s", number, "compute", collective.span.launch_us)
            yield _collective(collective, channel)
            yield _arrow("f" if collective.wait is None else "t", number, channel, collective.span.start_us)
        elif place in waits:
            span = story.collectives[waits[place]].span
            yield _arrow("f", waits[place], "compute", max(span.wait_us, span.end_us))


def _step(step: Step, index: int, start_us: float, end_us: float) -> dict[str, Any]:
    facts = {"index": index, "op": printable(step.op), "reads": _printable(step.reads), "completes": _printable(step.completes)}
    return _slice(printable(step.name), step.phase, "compute", start_us, end_us, **facts)


def _instruction(instruction: Instruction, start_us: float, end_us: float) -> dict[str, Any]:
    facts = {"point": instruction.point, "parameters": _printable(instruction.parameters)}
    kind = instruction.kind
    if kind in ("release", "reshard"):
        more = len(instruction.parameters) - 1
        name = f"{kind} {printable(instruction.parameters[0])}" if instruction.parameters else kind
        return _slice(name + (f" +{more}" if more > 0 else ""), kind, "compute", start_us, end_us, **facts)
    return _slice(f"{_SHORT[instruction.kind]} {instruction.bucket}", instruction.kind, "compute", start_us, end_us, **facts)


def _collective(collective: Collective, channel: str) -> dict[str, Any]:
    span = collective.span
    facts = {
        "bytes": span.num_bytes,
        "launch_us": span.launch_us,
        "wait_us": span.wait_us,
        "exposed_us": span.exposed_us,
        "parameters": _printable(collective.parameters),
        "packed": len(collective.packed),
        **({"secondary": True} if collective.secondary else {}),
        "why": " ".join(collective.why),
    }
    return _slice(f"{channel} {span.bucket}", span.kind, channel, span.start_us, span.end_us, **facts)


def _memory(story: Story) -> Iterator[dict[str, Any]]:
    """A counter's row for each moment at which something has changed."""
    before = None
    kinds = ["parameters", "packing", "gradients", "activations", "shards", "total"]
    if story.schedule.program.reshard_to:
        kinds.insert(2, "secondary")
    for moment in story.simulation.moments:
        held = {name: getattr(moment, name) for name in kinds}
        if held != before:
            yield _event("C", "memory", moment.time_us, "compute", args=held)
        before = held


def _slice(name: str, category: str, thread: str, start_us: float, end_us: float, **facts: Any) -> dict[str, Any]:
    exact = {"start_us": start_us, "end_us": end_us, **facts}
    dur = _microseconds(_nanoseconds(end_us) - _nanoseconds(start_us))
    return _event("X", name, start_us, thread, dur=dur, cat=category, args=exact)


def _arrow(phase: str, number: int, thread: str, at_us: float) -> dict[str, Any]:
    """Start, step or end of the flow from a launch over its collective to its wait; it belongs to the slice that is open there."""
    enclosing = {"bp": "e"} if phase == "f" else {}
    return _event(phase, "collective", at_us, thread, cat="flow", id=number, **enclosing)


def _event(phase: str, name: str, at_us: float, thread: str, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": _PID, "tid": THREADS[thread], "ts": _microseconds(_nanoseconds(at_us)), **more}


def _nanoseconds(us: float) -> int:
    return round(us * 1000)


def _microseconds(nanoseconds: int) -> float:
    """The smallest number that, times 1000 and cut off, gives these nanoseconds."""
    us = nanoseconds / 1000
    return us if int(us * 1000) == nanoseconds else math.nextafter(us, math.inf)


def _printable(names: tuple[str, ...]) -> list[str]:
    return list(map(printable, names))


__all__ = ["THREADS", "to_trace"]
