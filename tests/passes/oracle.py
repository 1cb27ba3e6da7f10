"""A second opinion: an event simulator and a memory count that read instructions only, and share nothing with the passes."""

from __future__ import annotations

from dataclasses import replace

from zfx.ir import Instruction, Schedule


def simulate(schedule: Schedule) -> tuple[float, dict[int, float], dict[tuple[str, int], float]]:
    """(finish, end of each bucket's collective, time right before each wait).

    Two channels, first in, first out; compute runs instructions and steps in order and stalls at waits.
    """
    program = schedule.program
    sizes = {p.name: p for p in program.parameters}
    channel = {"all_gather": 0.0, "reduce_scatter": 0.0}
    ends: dict[int, float] = {}
    reached: dict[tuple[str, int], float] = {}
    now = 0.0
    pending = list(schedule.instructions)
    for point in range(len(program.steps) + 1):
        while pending and pending[0].point == point:
            instruction = pending.pop(0)
            if instruction.kind in channel:
                unit = "num_bytes" if instruction.kind == "all_gather" else "grad_bytes"
                num_bytes = sum(getattr(sizes[name], unit) for name in instruction.parameters)
                link = program.costs.gather if instruction.kind == "all_gather" else program.costs.reduce
                now += program.costs.launch_us if instruction.kind == "reduce_scatter" else 0
                start = max(now, channel[instruction.kind])
                ends[instruction.bucket] = channel[instruction.kind] = start + link.us(num_bytes)
            elif instruction.kind != "release":
                reached[instruction.kind, instruction.bucket] = now
                now = max(now, ends[instruction.bucket])
                now += program.costs.launch_us if instruction.kind == "wait" else 0
        if point < len(program.steps):
            now += program.steps[point].duration_us
    return now, ends, reached


def finish(schedule: Schedule) -> float:
    return simulate(schedule)[0]


def launches(schedule: Schedule) -> list[int]:
    return [i.point for i in schedule.instructions if i.kind == "all_gather"]


def waits(schedule: Schedule) -> list[int]:
    return [i.point for i in schedule.instructions if i.kind == "wait"]


def at_launches(schedule: Schedule, points: list[int]) -> Schedule:
    """The schedule with its gathers launched elsewhere: there right before the waits. Those that stay, stay where they are."""
    moved = dict(zip((i.bucket for i in schedule.instructions if i.kind == "all_gather"), points))
    rank = {"release": 0, "wait_reduce": 1, "reduce_scatter": 1, "all_gather": 1, "wait": 3}
    rows: list[tuple[int, int, Instruction]] = []
    for i in schedule.instructions:
        goes = i.kind == "all_gather" and moved[i.bucket] != i.point
        rows.append((moved[i.bucket], 2, replace(i, point=moved[i.bucket])) if goes else (i.point, rank[i.kind], i))
    return replace(schedule, instructions=tuple(row[2] for row in sorted(rows, key=lambda row: row[:2])))


def peak_elements(schedule: Schedule) -> int:
    """Most elements gathered or in packs, counted by names after every instruction. Quadratic, and plain."""
    size = {p.name: p.num_elements for p in schedule.program.parameters}
    peak, live, packs = 0, set(), {}
    for instruction in schedule.instructions:
        if instruction.kind == "all_gather":
            live |= set(instruction.parameters)
            packs[instruction.bucket] = sum(size[name] for name in schedule.buckets[instruction.bucket].packed)
        elif instruction.kind == "wait":
            packs.pop(instruction.bucket)
        elif instruction.kind == "release":
            live -= set(instruction.parameters)
        peak = max(peak, sum(size[name] for name in live) + sum(packs.values()))
    return peak


def byte_steps(schedule: Schedule) -> int:
    """Gathered bytes summed over the steps that they are held for."""
    size = {p.name: p.num_bytes for p in schedule.program.parameters}
    total, since = 0, {}
    for instruction in schedule.instructions:
        if instruction.kind == "all_gather":
            since.update(dict.fromkeys(instruction.parameters, instruction.point))
        elif instruction.kind == "release":
            total += sum(size[name] * (instruction.point - since.pop(name)) for name in instruction.parameters)
    return total + sum(size[name] * (len(schedule.program.steps) - point) for name, point in since.items())
