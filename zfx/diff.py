"""What changed between two schedules, as data: limits, totals, what is kept, buckets, and which gathers and releases moved.

Steps are matched by name, so that schedules of two versions of a model can be compared too; a parameter's k-th gather is
compared with its k-th gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from .ir import Kind, Schedule
from .simulate import CHANNELS, simulate

_MOVES = get_args(Kind)


def diff(old: Schedule, new: Schedule) -> dict[str, Any]:
    """Both sides of everything that differs, as plain data; empty for equal schedules, and for no others.

    Keys, each only where there is a difference: "program" (facts, and names of steps and parameters that differ), "costs",
    "limits", "totals", "kept" and "carried" (added, removed), "buckets" (counts, and the members of those that only one side
    has), "moved" (by kind: parameter, from, to), and "order" where nothing differs but the order of instructions at one point.

    Example:
        >>> from zfx.ir import Limits, Program
        >>> a, b = (Schedule(Program((), ()), Limits(max_live_parameters=n)) for n in (1, 2))
        >>> diff(a, b)
        {'limits': {'max_live_parameters': (1, 2)}}
        >>> diff(a, a)
        {}
    """
    found = {
        "program": _program(old, new),
        "costs": _changed(_fields(old.program.costs), _fields(new.program.costs)),
        "limits": _changed(_fields(old.limits), _fields(new.limits)),
        "totals": _changed(_totals(old), _totals(new)),
        "kept": _sets(old.kept, new.kept),
        "carried": _sets(old.carried, new.carried),
        "resharded": _sets(old.resharded, new.resharded),
        "buckets": _buckets(old, new),
        "moved": _moved(old, new),
    }
    if not any(found.values()) and old != new:
        return {"order": "the same instructions, in another order at some points"}
    return {key: value for key, value in found.items() if value}


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _program(old: Schedule, new: Schedule) -> dict[str, Any]:
    def facts(schedule: Schedule) -> dict[str, Any]:
        program = schedule.program
        return {
            "world_size": program.world_size,
            "replicas": program.replicas,
            "reshard_to": program.reshard_to,
            "steps": len(program.steps),
            "parameters": len(program.parameters),
            "elements": sum(p.numel for p in program.parameters),
            "static_bytes": program.static_bytes,
            "window": program.window,
            "uniform": program.uniform,
            "escapes": program.escapes,
        }

    out: dict[str, Any] = _changed(facts(old), facts(new))
    for what in ("parameters", "steps"):
        rows = [{item.name: item for item in getattr(s.program, what)} for s in (old, new)]
        names = _sets(list(rows[0]), list(rows[1]))
        differ = [name for name in rows[0] if name in rows[1] and rows[0][name] != rows[1][name]]
        out |= {f"{what}_{key}": value for key, value in (*names.items(), ("that_differ", differ)) if value}
    return out


def _totals(schedule: Schedule) -> dict[str, Any]:
    simulation = simulate(schedule)
    secondary = {b.index for b in schedule.buckets if b.secondary}
    volume = {kind: sum(s.num_bytes for s in simulation.spans if s.kind == kind) for kind in (c.launch for c in CHANNELS)}
    return {
        "step_us": simulation.finish_us,
        "exposed_us": simulation.exposed_us,
        "peak_bytes": simulation.peak.total,
        "gathered_bytes": volume["all_gather"],
        "secondary_bytes": sum(s.num_bytes for s in simulation.spans if s.kind == "all_gather" and s.bucket in secondary),
        "reduced_bytes": volume["reduce_scatter"],
        "all_reduced_bytes": volume["all_reduce"],
    }


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (old[key], new[key]) for key in old if old[key] != new[key]}


def _sets(old: Sequence[str], new: Sequence[str]) -> dict[str, list[str]]:
    before, after = set(old), set(new)
    found = {"added": [name for name in new if name not in before], "removed": [name for name in old if name not in after]}
    return {key: names for key, names in found.items() if names}


def _buckets(old: Schedule, new: Schedule) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind in ("all_gather", "reduce_scatter"):
        rows = [[b.parameters for b in s.buckets if b.kind == kind] for s in (old, new)]
        if rows[0] != rows[1]:
            same = set(rows[0]) & set(rows[1])
            out[kind] = {
                "count": (len(rows[0]), len(rows[1])),
                "only_old": [list(members) for members in rows[0] if members not in same],
                "only_new": [list(members) for members in rows[1] if members not in same],
            }
    return out


def _moved(old: Schedule, new: Schedule) -> dict[str, list[dict[str, Any]]]:
    """Each launch and release that stands before another step, exists on one side only, or both."""
    out: dict[str, list[dict[str, Any]]] = {}
    for kind in _MOVES:
        before, after = _places(old, kind), _places(new, kind)
        rows = []
        for name in dict.fromkeys((*before, *after)):
            places = before.get(name, []), after.get(name, [])
            for k in range(max(map(len, places))):
                pair = [row[k] if k < len(row) else None for row in places]
                if pair[0] != pair[1]:
                    rows.append({"parameter": name, "from": pair[0], "to": pair[1]})
        if rows:
            out[kind] = rows
    return out


def _places(schedule: Schedule, kind: str) -> dict[str, list[str]]:
    """By parameter, the step before which each instruction of this kind stands."""
    steps = schedule.program.steps
    out: dict[str, list[str]] = defaultdict(list)
    for instruction in schedule.instructions:
        if instruction.kind == kind:
            place = steps[instruction.point].name if 0 <= instruction.point < len(steps) else "the end"
            for name in instruction.parameters:
                out[name].append(place)
    return out
