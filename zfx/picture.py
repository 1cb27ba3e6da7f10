"""A schedule as one HTML page: what runs on each channel, what is held meanwhile, and why.

    head       what is achieved beside what is possible (the certificate)
    lanes      phase, compute, gather, reduce, all_reduce if there are replicas, and the life of the parameter that one looks for
    memory     parameters, packing, secondary shards, gradients, activations, shards, stacked on the same time axis, with the limit
               as a line
    details    of what is selected: bytes, times, reasons

The page needs no network, and forbids itself any: its scripts are let in by their digests alone. The data stand in it as JSON,
`payload`, and everything on the page is drawn from them; names are made printable here and only ever become text there. What is
too narrow to be seen is merged while drawing, never in the data, and merged memory keeps its highest and its lowest state.

The drawing library is Apache ECharts; `zfx/assets/` holds it with its licences.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

from .certificate import Certificate, certify
from .ir import Schedule
from .reasons import Story, finite, tell
from .simulate import Moment, channels_of
from .text import printable

_KINDS = {
    "all_gather": "g", "wait": "w", "release": "r", "reduce_scatter": "d", "wait_reduce": "e", "all_reduce": "a",
    "wait_all_reduce": "f", "reshard": "h",
}  # fmt: skip


def to_html(schedule: Schedule) -> str:
    """The page. Equal schedules give equal text.

    Raises:
        ValueError: by its cost model the schedule takes for ever.

    Example:
        >>> from zfx.ir import Limits, Program
        >>> to_html(Schedule(Program((), ()), Limits())).splitlines()[0]
        '<!doctype html>'
    """
    script, library, style = _asset("picture.js"), _asset("echarts.min.js"), _asset("picture.css")
    policy = "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(map(_digest, (library, script))),
            f"style-src {_digest(style)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "policy": policy,
        "style": style,
        "library": library,
        "script": script,
        "data": _embeddable(payload(tell(schedule), certify(schedule))),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("picture.html"))


def payload(story: Story, certificate: Certificate) -> dict[str, Any]:
    """What the page draws, as plain data. Tables are dicts of columns; names are indices into `parameters` and `steps`.

    `moments.kind` has a letter for each moment: "s" for a step, else g(ather), w(ait), r(elease), d for reduce_scatter, e for
    wait_reduce, a(ll-reduce), f for wait_all_reduce, h for reshard.
    """
    schedule, simulation = story.schedule, story.simulation
    program, moments = schedule.program, simulation.moments
    index = {p.name: i for i, p in enumerate(program.parameters)}
    ops = list(dict.fromkeys(s.op for s in program.steps))
    op_index = {op: i for i, op in enumerate(ops)}

    def known(names: tuple[str, ...]) -> list[int]:
        return [index[name] for name in dict.fromkeys(names) if name in index]

    def place(moment: Moment) -> int | None:
        return moments.index(moment) if moment in moments else None

    return {
        "world_size": program.world_size,
        "replicas": program.replicas,
        **({"reshard_to": program.reshard_to} if program.reshard_to else {}),
        "channels": [channel.name for channel in channels_of(schedule)],
        "window": program.window,
        "costs": printable(program.costs.source),
        "turn": program.turn,
        "shards": program.static_bytes,
        "limits": {name: getattr(schedule.limits, name) for name in ("max_live_parameters", "memory_budget")},
        "totals": {name: getattr(simulation, name) for name in ("finish_us", "compute_us", "overhead_us", "exposed_us")},
        "marks": {name: place(getattr(simulation, name)) for name in ("peak", "forward_end", "backward_end")},
        "certificate": {
            "time": _certified(certificate.time_us, certificate.time_bound_us, certificate.time_ratio, certificate.time_binds),
            "volume": _certified(
                certificate.volume_bytes, certificate.volume_bound_bytes, certificate.volume_ratio, certificate.volume_binds
            ),
            "peak": _certified(
                certificate.peak_bytes, certificate.peak_bound_bytes, certificate.peak_ratio, certificate.peak_binds
            ),
        },
        "parameters": {
            "name": [printable(p.name) for p in program.parameters],
            "elements": [p.num_elements for p in program.parameters],
            "bytes": [p.num_bytes for p in program.parameters],
            "grad_bytes": [p.grad_bytes for p in program.parameters],
            "across_bytes": [p.across_bytes for p in program.parameters],
        },
        "ops": list(map(printable, ops)),
        "steps": {
            "name": [printable(s.name) for s in program.steps],
            "op": [op_index[s.op] for s in program.steps],
            "phase": "".join(s.phase[0] for s in program.steps),
            "reads": [known(s.reads) for s in program.steps],
            "completes": [known(s.completes) for s in program.steps],
            "start": [s.start_us for s in simulation.steps],
            "end": [s.end_us for s in simulation.steps],
        },
        "collectives": {
            "kind": "".join(_KINDS[c.span.kind] for c in story.collectives),
            "bucket": [c.span.bucket for c in story.collectives],
            "bytes": [c.span.num_bytes for c in story.collectives],
            "launch": [c.span.launch_us for c in story.collectives],
            "start": [c.span.start_us for c in story.collectives],
            "end": [c.span.end_us for c in story.collectives],
            "wait": [c.span.wait_us for c in story.collectives],
            "exposed": [c.span.exposed_us for c in story.collectives],
            "launched_at": [c.launch for c in story.collectives],
            "waited_at": [c.wait for c in story.collectives],
            "members": [known(c.parameters) for c in story.collectives],
            "packed": [len(set(c.packed)) for c in story.collectives],
            **({"secondary": [c.secondary for c in story.collectives]} if program.reshard_to else {}),
            "why": [list(c.why) for c in story.collectives],
        },
        "moments": {
            "kind": "".join("s" if m.instruction is None else _KINDS[m.instruction.kind] for m in moments),
            "time": [m.time_us for m in moments],
            "point": [m.point for m in moments],
            "parameters": [m.parameters for m in moments],
            "packing": [m.packing for m in moments],
            **({"secondary": [m.secondary for m in moments]} if program.reshard_to else {}),
            "gradients": [m.gradients for m in moments],
            "activations": [m.activations for m in moments],
            "live_elements": [gathered for gathered, _ in story.elements],
            "packing_elements": [packing for _, packing in story.elements],
        },
        "lives": [
            {
                "parameter": index[life.parameter],
                "gather": life.gather,
                "first": life.first,
                "end": life.end,
                "reads": list(life.reads),
                "why": list(life.why),
            }
            for life in story.lives
            if life.parameter in index
        ],
    }


def _certified(achieved: float, bound: float, ratio: float, binds: str) -> dict[str, Any]:
    return {"achieved": achieved, "bound": finite(bound), "ratio": finite(ratio), "binds": printable(binds)}


def _asset(name: str) -> str:
    return resources.files("zfx").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    """A script or a style as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode('utf-8')).digest()).decode('ascii')}'"


def _embeddable(data: Any) -> str:
    """JSON that may stand in an HTML `script`: ASCII, and without the characters that could end it or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


__all__ = ["payload", "to_html"]
