"""What every schedule holds, step by step, and the reductions that memory forces between two steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from ..ir import Program
from ..limits import Limits


@dataclass(frozen=True, slots=True)
class Event:
    """A step, or a reduction that must be over before the next step, since its gradient would not fit beside that.

    Attributes:
        reads: the parameters that are read.
        held_bytes: what every schedule holds meanwhile, parameters apart.
        duration_us: the least that it takes.
        step: the index of the step; None for a reduction.
    """

    reads: frozenset[str]
    held_bytes: int
    duration_us: float
    step: int | None = None


def steps_of(program: Program) -> list[Event]:
    size, completing = sizes_of(program, "grad_bytes"), [0] * (len(program.steps) + 1)
    for name, (first, last) in completions_of(program).items():
        completing[first] += size[name]
        completing[last + 1] -= size[name]
    return [
        Event(frozenset(step.reads), program.static_bytes + step.other_bytes + num_bytes, step.duration_us, t)
        for t, (step, num_bytes) in enumerate(zip(program.steps, accumulate(completing)))
    ]


def events_of(program: Program, limits: Limits) -> list[Event]:
    """The steps, and the reductions between them that `memory_budget` forces."""
    steps, budget, costs = steps_of(program), limits.memory_budget, program.costs
    if budget is None:
        return steps
    completed: dict[int, list[int]] = defaultdict(list)  # by the next step
    size = sizes_of(program, "grad_bytes")
    for name, (_, last) in completions_of(program).items():
        if size[name]:
            completed[last + 1].append(size[name])
    events = []
    for t, (step, need) in enumerate(zip(steps, needs_of(program, steps, sizes_of(program, "num_bytes")))):
        gradients = completed[t]
        if sum(gradients) > budget - step.held_bytes - need:
            first = min(gradients, default=0)  # held twice while it is reduced, and the others once
            held_bytes = program.static_bytes + program.steps[t].other_bytes + sum(gradients) + first
            events.append(Event(frozenset(), held_bytes, costs.launch_us + costs.reduce_us(first)))
        events.append(step)
    return events


def sizes_of(program: Program, unit: str) -> dict[str, int]:
    return {p.name: getattr(p, unit) for p in program.parameters}


def completions_of(program: Program) -> dict[str, tuple[int, int]]:
    """For each gradient the first and the last step that completes it. It is held in between, and reduced after that."""
    found: dict[str, tuple[int, int]] = {}
    for t, step in enumerate(program.steps):
        found.update({name: (found.get(name, (t, t))[0], t) for name in step.completes})
    return found


def needs_of(program: Program, events: list[Event], size: dict[str, int]) -> list[int]:
    """By event, the size of what it reads and of what has escaped: gathered in every schedule."""
    escapes, not_yet, escaped, needs = set(program.escapes), set(program.escapes), 0, []
    for event in events:
        escaped += sum(size[name] for name in event.reads & not_yet)
        not_yet -= event.reads
        needs.append(escaped + sum(size[name] for name in event.reads - escapes))
    return needs


def peaks_of(program: Program) -> dict[str, int]:
    """Each step while it runs; each gradient while it is reduced, and held twice, wherever the least else is held."""
    steps, size = steps_of(program), sizes_of(program, "grad_bytes")
    needs = needs_of(program, steps, sizes_of(program, "num_bytes"))
    peaks = {"shards": program.static_bytes}
    peaks |= {f"step {step.name}": e.held_bytes + need for step, e, need in zip(program.steps, steps, needs)}
    least_from = list(accumulate([0, *(step.other_bytes for step in reversed(program.steps))], min))[::-1]
    for name, (_, last) in completions_of(program).items():
        peaks[f"reduction of {name}"] = program.static_bytes + least_from[last + 1] + 2 * size[name]
    return peaks
