"""A schedule as data: JSON that reads back exactly, a networkx graph, DOT and GraphML. docs/schedule-format.md is the reference.

The graph says what must happen before what. Steps, `wait`, `release` and `wait_reduce` stand in a row on the compute stream; each
collective stands on its own stream, between the compute node after which it is launched and the one that waits for it:

    compute   ... step ------> step ------> wait ------> step ------> release ...
                    | launch                  ^  | reads   ^  | release after last read
    gather          +-----> all_gather -------+  +---------+  ...
                                       arrival
    reduce, all_reduce      (the latter where there are replicas)

An edge for a wait, or for a gradient, is drawn wherever its two ends stand: a schedule that waits for a later launch has a cycle.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import networkx as nx

from .certificate import Certificate, certify
from .ir import Instruction, Parameter, Schedule, Step
from .picture import to_html
from .records import Derived, Form, write_whole
from .replay import bucket_of
from .simulate import CHANNELS, channels_of, link_of
from .text import by_point, printable, shorten
from .trace import to_trace

_FORM = Form(Schedule, "schedule", version=3, again="plan it again", derived=Derived("certificate", Certificate, certify))
FORMAT, VERSION = _FORM.format, _FORM.version

_STREAMS = {channel.launch: channel.name for channel in CHANNELS}
_WAITS = {channel.launch: channel.wait for channel in CHANNELS}
_COLORS = {
    "step": "white",
    "all_gather": "lightblue",
    "wait": "lightcyan",
    "reshard": "paleturquoise",
    "release": "lightgrey",
    "reduce_scatter": "orange",
    "wait_reduce": "moccasin",
    "all_reduce": "lightsalmon",
    "wait_all_reduce": "mistyrose",
}
_EDGE_STYLES = {
    "program order": "color=grey40",
    "launch": "color=steelblue, style=dashed",
    "arrival": "color=steelblue, penwidth=2",
    "reads": "color=forestgreen, constraint=false",
    "release after last read": "color=grey60, style=dotted, constraint=false",
    "gathered again": "color=purple, style=dotted, constraint=false",
    "resharded": "color=steelblue, style=dotted, constraint=false",
    "completes": "color=orangered",
    "reduced": "color=orangered",
}
_NOT_IN_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """The schedule, and its certificate, as plain dicts, lists, strings and numbers: what `to_json` writes.

    Raises:
        ValueError: a value is not of the type that its field declares, or a name is not valid Unicode.
    """
    return _FORM.to_dict(schedule)


def from_dict(data: Mapping[str, Any]) -> Schedule:
    """The schedule that `to_dict` took apart. It is checked for form only; whether it is a good schedule is for the verifier.

    Raises:
        ValueError: not this format, another version, a field is missing, unknown or of a wrong type, the program itself is not
            possible, or the certificate is another schedule's. The message names the place, e.g. `schedule.program.steps[3].phase`.
    """
    return _FORM.from_dict(data)


def to_json(schedule: Schedule) -> str:
    """The schedule as JSON, ASCII only; equal schedules give equal text, and `from_json` gives an equal schedule back.

    Raises:
        ValueError: as `to_dict`.

    Example:
        >>> from zfx.ir import Limits, Program
        >>> schedule = Schedule(Program((), (), world_size=4), Limits())
        >>> from_json(to_json(schedule)) == schedule
        True
    """
    return _FORM.to_json(schedule)


def from_json(text: str) -> Schedule:
    """The schedule that `to_json` wrote.

    Raises:
        ValueError: the text is not JSON, repeats a key, or as `from_dict`.
    """
    return _FORM.from_json(text)


def to_networkx(schedule: Schedule) -> nx.MultiDiGraph:
    """What must happen before what, as a graph: a node for each step and each instruction.

    Every node has `kind` ("step", or the instruction's), `name`, `op`, `point` (for a step, its index), `position` (its place in
    execution order), `phase`, `stream`, `parameters`, `num_bytes`, `duration_us`, and `bucket` if it has one. Every edge has
    `reason` (also its key) and `parameters`. docs/schedule-format.md says what each means.

    For a schedule that the verifier accepts the graph is acyclic, each topological order of it may be executed, and the
    lexicographical one by `position` is the schedule's own order.

    Example:
        >>> from zfx.ir import Limits, Program
        >>> to_networkx(Schedule(Program((), (Step("forward.relu", "forward"),)), Limits())).nodes["step_0"]["stream"]
        'compute'
    """
    program = schedule.program
    smaller = {"reshard_to": program.reshard_to} if program.reshard_to else {}
    graph = nx.MultiDiGraph(world_size=program.world_size, replicas=program.replicas, **smaller, **asdict(certify(schedule)))
    steps, number = schedule.program.steps, itertools.count()
    parameters = {p.name: p for p in schedule.program.parameters}
    nodes: list[tuple[str, Step | Instruction]] = []
    for point, instructions in enumerate(by_point(schedule)):
        phase = steps[min(point, len(steps) - 1)].phase if steps else "forward"
        for instruction in instructions:
            nodes.append((f"instruction_{next(number)}", instruction))
            facts = _instruction_facts(schedule, instruction, parameters)
            graph.add_node(nodes[-1][0], position=len(nodes) - 1, phase=phase, **facts)
        if point < len(steps):
            nodes.append((f"step_{point}", steps[point]))
            graph.add_node(nodes[-1][0], position=len(nodes) - 1, **_step_facts(steps[point], point))
    edges: dict[tuple[str, str, str], list[str]] = {}
    _order_edges(nodes, edges)
    _value_edges(nodes, edges)
    for (before, after, reason), names in edges.items():
        graph.add_edge(before, after, key=reason, reason=reason, parameters=tuple(dict.fromkeys(names)))
    return graph


def to_dot(schedule: Schedule) -> str:
    """The graph of `to_networkx` in Graphviz's language: a cluster for each stream, a colour for each kind.

    Example:
        >>> from zfx.ir import Limits, Program
        >>> print(to_dot(Schedule(Program((), ()), Limits())).splitlines()[0])
        digraph "zfx schedule" {
    """
    graph = to_networkx(schedule)
    lines = [
        'digraph "zfx schedule" {',
        *(f"  {name}={_quote(str(value))};" for name, value in graph.graph.items()),
        '  rankdir=TB; node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10];',
    ]
    for stream in ("compute", *(channel.name for channel in channels_of(schedule))):
        lines.append(f'  subgraph "cluster_{stream}" {{')
        lines.append(f"    label={_quote(stream)}; color=grey80;")
        for node, facts in graph.nodes(data=True):
            if facts["stream"] == stream:
                label, tip = _quote(_label(facts)), _quote(", ".join(facts["parameters"]) or facts["name"])
                lines.append(f"    {node} [label={label}, tooltip={tip}, fillcolor={_COLORS[facts['kind']]}];")
        lines.append("  }")
    for before, after, facts in graph.edges(data=True):
        tip = _quote(": ".join(filter(None, (facts["reason"], ", ".join(facts["parameters"])))))
        lines.append(f"  {before} -> {after} [tooltip={tip}, {_EDGE_STYLES[facts['reason']]}];")
    return "\n".join([*lines, "}", ""])


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write the schedule to a file whose suffix says how: .json, .dot, .graphml, .html or .trace.json.

    The file appears whole or not at all.

    Raises:
        ValueError: another suffix, or as `to_dict`, `picture.to_html` and `trace.to_trace`.
        OSError: the file cannot be written.
    """
    write_whole(path, writer_of(path)(schedule))


def writer_of(path: str | os.PathLike[str]) -> Callable[[Schedule], bytes]:
    """What makes the content of such a file.

    Raises:
        ValueError: no known suffix.
    """
    name = os.path.basename(os.fspath(path)).lower()
    suffix = next((s for s in _WRITERS if name.endswith(s)), None)
    if suffix is None:
        raise ValueError(f"cannot save a schedule as {os.fspath(path)!r}: the suffix must be one of {', '.join(_WRITERS)}")
    return _WRITERS[suffix]


def _graphml(schedule: Schedule) -> bytes:
    """GraphML holds no tuples and XML no control characters: names become JSON lists, odd characters backslash escapes."""

    def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
        texts = {k: json.dumps(v) if isinstance(v, tuple) else v for k, v in facts.items()}
        return {k: _NOT_IN_XML.sub(lambda m: printable(m[0]), v) if isinstance(v, str) else v for k, v in texts.items()}

    graph, source = nx.MultiDiGraph(), to_networkx(schedule)
    graph.graph.update(plain(source.graph))
    graph.add_nodes_from((node, plain(facts)) for node, facts in source.nodes(data=True))
    for number, (before, after, facts) in enumerate(source.edges(data=True)):
        graph.add_edge(before, after, key=f"edge_{number}", **plain(facts))
    file = io.BytesIO()
    nx.write_graphml_xml(graph, file)  # not write_graphml: the bytes must not depend on whether lxml is installed
    return file.getvalue()


# A name takes the first suffix that fits.
_WRITERS: dict[str, Callable[[Schedule], bytes]] = {
    ".trace.json": lambda schedule: to_trace(schedule).encode("ascii"),
    ".html": lambda schedule: to_html(schedule).encode("utf-8"),
    ".json": lambda schedule: to_json(schedule).encode("ascii"),
    ".dot": lambda schedule: to_dot(schedule).encode("utf-8"),
    ".graphml": _graphml,
}


def _step_facts(step: Step, index: int) -> dict[str, Any]:
    return {
        "kind": "step", "name": step.name, "op": step.op, "point": index, "phase": step.phase, "stream": "compute",
        "parameters": step.reads, "num_bytes": step.other_bytes, "duration_us": step.duration_us,
    }  # fmt: skip


def _instruction_facts(schedule: Schedule, instruction: Instruction, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    kind, bucket = instruction.kind, instruction.bucket
    known = [parameters[name] for name in instruction.parameters if name in parameters]
    size = next((channel.size for channel in CHANNELS if kind in (channel.launch, channel.wait)), "num_bytes")
    num_bytes = sum(schedule.program.secondary_bytes(p) if kind == "reshard" else getattr(p, size) for p in known)
    link = next((link_of(schedule, channel, instruction) for channel in CHANNELS if kind == channel.launch), None)
    found = bucket_of(schedule, bucket)
    facts = {
        "kind": kind, "name": kind if bucket is None else f"{kind} {bucket}", "op": f"zfx.{kind}", "point": instruction.point,
        "stream": _STREAMS.get(kind, "compute"), "parameters": instruction.parameters, "num_bytes": num_bytes,
        "duration_us": link.us(num_bytes) if link else 0.0,
    }  # fmt: skip
    if found is not None and found.secondary:
        facts["secondary"] = True
    return facts if bucket is None else {**facts, "bucket": bucket}


def _order_edges(nodes: list[tuple[str, Step | Instruction]], edges: dict[tuple[str, str, str], list[str]]) -> None:
    """Program order on each stream, and each collective's launch from the compute node that stands before it."""
    last: dict[str, str] = {}
    for node, what in nodes:
        stream = "compute" if isinstance(what, Step) else _STREAMS.get(what.kind, "compute")
        if stream in last:
            edges[last[stream], node, "program order"] = []
        if stream != "compute" and "compute" in last:
            edges[last["compute"], node, "launch"] = []
        last[stream] = node


def _value_edges(nodes: list[tuple[str, Step | Instruction]], edges: dict[tuple[str, str, str], list[str]]) -> None:
    """Who gathers, reads, frees, completes and reduces which parameter."""
    launched: dict[tuple[str, int | None], str] = {}
    reductions: dict[str, list[str]] = {}
    for node, what in nodes:
        if isinstance(what, Instruction) and what.kind in _STREAMS:
            launched[_WAITS[what.kind], what.bucket] = node
            if what.kind == "reduce_scatter":
                for name in what.parameters:
                    reductions.setdefault(name, []).append(node)
    arrived: dict[str, str] = {}
    reduced: dict[int | None, str] = {}
    last_read: dict[str, str] = {}
    freed: dict[str, str] = {}
    resharded: dict[str, str] = {}

    def link(before: str | None, after: str, reason: str, *names: str) -> None:
        if before is not None:
            edges.setdefault((before, after, reason), []).extend(names)

    for node, what in nodes:
        if isinstance(what, Step):
            for name in what.reads:
                link(arrived.get(name), node, "reads", name)
                last_read[name] = node
            for name in what.completes:
                for reduction in reductions.get(name, ()):
                    link(node, reduction, "completes", name)
        elif what.kind == "all_reduce":
            link(reduced.get(what.bucket), node, "reduced", *what.parameters)
        elif what.kind in _WAITS.values():
            link(launched.get((what.kind, what.bucket)), node, "arrival", *what.parameters)
            if what.kind == "wait_reduce":
                reduced[what.bucket] = node
            if what.kind == "wait":
                arrived.update(dict.fromkeys(what.parameters, node))
        elif what.kind == "release":
            for name in what.parameters:
                link(last_read.pop(name, None) or arrived.get(name), node, "release after last read", name)
                arrived.pop(name, None)
                freed[name] = node
        elif what.kind == "all_gather":
            for name in what.parameters:
                link(freed.get(name), node, "gathered again", name)
                link(resharded.get(name), node, "resharded", name)
        elif what.kind == "reshard":
            for name in what.parameters:
                link(arrived.get(name), node, "reads", name)
                resharded[name] = node


def _label(facts: Mapping[str, Any]) -> str:
    head = f"{facts['point']} {shorten(facts['name'], 40)}" if facts["kind"] == "step" else facts["name"]
    if facts["kind"] == "step":
        return head + (f"\n{shorten(facts['op'], 40)}" if facts["op"] else "")
    names = [shorten(name, 40) for name in facts["parameters"][:3]]
    more = len(facts["parameters"]) - len(names)
    return "\n".join([head, *names, *([f"+{more}"] if more else [])])


def _quote(text: str) -> str:
    """A DOT string that Graphviz shows as the text: it reads backslashes and `&` as escapes; other odd characters are spelt out."""
    lines = [printable(line).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'
