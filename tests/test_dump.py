"""JSON reads back exactly and refuses the rest by name; the graph, DOT and GraphML say the same as the schedule."""

from __future__ import annotations

import copy
import doctest
import itertools
import json
import math
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import networkx as nx
import pydot
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zfx.dump
from zfx.certificate import certify
from zfx.costs import CostModel, Link, Rate
from zfx.dump import from_dict, from_json, save, to_dict, to_dot, to_json, to_networkx
from zfx.ir import Bucket, Instruction, Kind, Parameter, Program, Schedule, Step
from zfx.limits import Limits

from .strategies import link_costs
from .test_text import deep, mlp, small

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # pydot calls pyparsing by its old names

ODD = ("", '"', "\\", 'a\\"', "50%s", "a\nb\r\tc", "\x00\x1b", "é漢😀", "&amp;", "<b>", "a:b", "{x|y}", "\\N", "\ufffe", "]]>")

COLLECTIVES = ("all_gather", "reduce_scatter")
KINDS = get_args(Kind)
WELL_FORMED = {"kept": mlp(kept=True), "again": mlp(kept=False), "small": small()}

texts = st.one_of(st.sampled_from(ODD), st.text(max_size=6))
whole = st.one_of(st.integers(-3, 3), st.integers(0, 2**70))
sizes = st.one_of(st.integers(0, 3), st.integers(0, 2**70))
numbers = st.floats(allow_nan=False)
rates = st.floats(0, exclude_min=True)
links = st.builds(Link, st.floats(0), rates)
compute = st.builds(Rate, st.text(max_size=3), st.floats(0), rates, rates)
kinds_of_compute = st.lists(compute, min_size=1, max_size=2, unique_by=lambda r: r.kind)
costs = st.builds(
    CostModel,
    gather=links,
    reduce=links,
    rates=kinds_of_compute.map(tuple),
    launch_us=st.floats(0),
    pack_threshold_bytes=sizes,
    nominal_tokens=sizes,
    source=st.text(max_size=3),
    busy_bytes_per_us=rates,
    all_reduce=links,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule that its types allow, mostly nonsense, with odd names."""
    names = draw(st.lists(texts, unique=True, max_size=4))
    some = st.lists(st.sampled_from(names), max_size=3).map(tuple) if names else st.just(())
    anyone = st.one_of(some, st.lists(texts, max_size=2).map(tuple))
    phases = draw(st.sampled_from(["", "f", "fff", "ft", "ftb", "ftbb", "tb"]))
    phase = {"f": "forward", "t": "turn", "b": "backward"}
    labels = draw(st.lists(texts, unique=True, min_size=len(phases), max_size=len(phases)))
    program = Program(
        tuple(Parameter(n, draw(sizes), draw(sizes), draw(sizes), draw(whole), draw(sizes)) for n in names),
        tuple(Step(n, phase[p], draw(texts), draw(some), draw(some), draw(whole), draw(numbers)) for n, p in zip(labels, phases)),
        6 * draw(whole), draw(some), draw(whole), draw(costs), replicas=draw(st.sampled_from([1, 1, 2, 3])),
    )  # fmt: skip
    kinds = st.sampled_from(KINDS)
    index = st.one_of(st.none(), st.integers(-1, 3))
    return Schedule(
        program,
        Limits(*(draw(sizes) for _ in range(5)), draw(st.none() | sizes)),
        tuple(draw(st.lists(st.builds(Bucket, whole, st.sampled_from(COLLECTIVES), anyone, anyone), max_size=3))),
        tuple(draw(st.lists(st.builds(Instruction, kinds, st.integers(-1, 5), anyone, index), max_size=6))),
        draw(anyone),
    )


odd = Schedule(
    Program(
        tuple(Parameter(n, 1, 4, 4) for n in ODD),
        tuple(Step(n, "forward", n, ODD, (), 1, 0.1 + 0.2) for n in ODD),
        costs=link_costs(float("inf"), 1e308, rates=(Rate("é", 0.0, 5e-324, 1.0),)),
    ),
    Limits(),
    (Bucket(0, "all_gather", ODD, ODD[1:]),),
    (Instruction("all_gather", 0, ODD, 0), Instruction("wait", 0, ODD, 0), Instruction("release", 99, ODD)),
    ODD,
)

@given(schedules())
@settings(max_examples=100)
@example(odd)
@example(deep(3))
def test_json_reads_back_exactly(schedule: Schedule) -> None:
    text = to_json(schedule)
    assert from_json(text) == schedule
    assert to_json(from_json(text)) == text
    assert text.isascii()
    json.loads(text, parse_constant=pytest.fail)


@given(schedules())
@settings(max_examples=30)
def test_the_certificate_is_the_schedules_own(schedule: Schedule) -> None:
    data, certificate = to_dict(schedule), asdict(certify(schedule))
    plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in certificate.items()}
    assert data["certificate"] == plain
    assert str(to_networkx(schedule).graph) == str(
        {"world_size": schedule.program.world_size, "replicas": schedule.program.replicas, **certificate}
    )  # str: nan is nan


def test_floats_and_infinities_survive_and_integers_in_their_place_are_the_same_bytes() -> None:
    steps = tuple(Step(str(i), "forward", duration_us=x) for i, x in enumerate((0.1, 1 / 3, 5e-324, 1e308, float("inf"), 3)))
    back = from_json(to_json(Schedule(Program((), steps), Limits())))
    assert [s.duration_us.hex() for s in back.program.steps] == [float(s.duration_us).hex() for s in steps]
    three, third = (replace(odd, program=replace(odd.program, costs=link_costs(x))) for x in (3, 3.0))
    assert three == third and to_json(three) == to_json(third)
    nan = to_json(Schedule(Program((), (Step("s", "forward", duration_us=float("nan")),)), Limits()))
    assert to_json(from_json(nan)) == nan


def test_the_envelope_and_a_field_of_each_record() -> None:
    data = json.loads(to_json(WELL_FORMED["kept"]))
    assert (data["format"], data["version"]) == ("zfx.schedule", 3)
    assert data["buckets"][0] == {"index": 0, "kind": "all_gather", "parameters": ["w0", "b0", "b1"], "packed": ["b0", "b1"]}
    assert data["limits"]["memory_budget"] is None and data["kept"] == ["w1"]


def edited(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(to_dict(WELL_FORMED["kept"]))
    *parents, last = path.split("/")
    target: Any = data
    for key in parents:
        target = target[int(key) if key.isdigit() else key]
    if value is ...:
        del target[last]
    else:
        target[int(last) if last.isdigit() else last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "other", 'not a zfx schedule: "format" must be "zfx.schedule", got \'other\''),
        ("version", 4, "version 4, this zfx reads up to 3"),
        ("version", 2, "version 2, this zfx reads version 3: plan it again"),
        ("version", True, '"version" must be a whole number'),
        ("version", "1", '"version" must be a whole number'),
        ("surprise", 1, "schedule has unknown fields ['surprise']; its fields are program, limits, buckets, instructions, kept"),
        ("instructions/0/point", ..., "schedule.instructions[0] lacks the fields ['point']"),
        ("instructions/0/point", 1.0, "schedule.instructions[0].point must be a whole number, got 1.0"),
        ("instructions/0/point", True, "schedule.instructions[0].point must be a whole number, got True"),
        ("instructions/0/bucket", "0", "schedule.instructions[0].bucket must be a whole number, got '0'"),
        ("instructions/0/kind", "free", "schedule.instructions[0].kind must be one of all_gather, wait"),
        ("instructions/0/kind", ["wait"], "schedule.instructions[0].kind must be one of all_gather, wait"),
        ("instructions/0", None, "schedule.instructions[0] must be an object, got None"),
        ("instructions", {}, "schedule.instructions must be a list, got {}"),
        ("program", [], "schedule.program must be an object, got []"),
        ("program/steps/2/name", 7, "schedule.program.steps[2].name must be Unicode text, got 7"),
        ("program/steps/2/name", "\ud800", "schedule.program.steps[2].name must be Unicode text"),
        ("program/steps/2/reads", "w0", "schedule.program.steps[2].reads must be a list, got 'w0'"),
        ("program/steps/1/reads", ["nobody"], "schedule.program: step 'f1' names unknown parameters ['nobody']"),
        ("program/steps/2/phase", "forward", "schedule.program: steps must be forward"),
        ("program/steps/2/duration_us", "fast", "schedule.program.steps[2].duration_us must be a number, got 'fast'"),
        ("program/steps/2/duration_us", 10**400, "schedule.program.steps[2].duration_us must be a number"),
        ("program/parameters/0/num_bytes", -1, "schedule.program.parameters[0]: w0: sizes must not be negative"),
        ("limits/memory_budget", -1, "schedule.limits: Limits.memory_budget must not be negative"),
        ("limits/memory_budget", [], "schedule.limits.memory_budget must be a whole number, got []"),
        ("kept/0", None, "schedule.kept[0] must be Unicode text, got None"),
        ("certificate", ..., "schedule lacks the fields ['certificate']"),
        ("certificate", 1, "schedule.certificate must be an object, got 1"),
        ("certificate/volume_bound_bytes", ..., "schedule.certificate lacks the fields ['volume_bound_bytes']"),
        ("certificate/honest", True, "schedule.certificate has unknown fields ['honest']"),
        ("certificate/peak_bytes", "1", "schedule.certificate.peak_bytes must be a whole number, got '1'"),
        ("certificate/volume_bound_bytes", 577, "schedule.certificate.volume_bound_bytes is 577, but this schedule gives 576"),
        ("certificate/time_us", 1.0, "schedule.certificate.time_us is 1.0, but this schedule gives"),
        ("certificate/time_binds", "luck", "schedule.certificate.time_binds is 'luck', but this schedule gives"),
        ("program/steps/2/duration_us", 1e6, "schedule.certificate.time_us is"),
        ("program/parameters/0/num_bytes", 10**400, "schedule.certificate: sizes are too large to be reckoned with"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_dict(edited(path, value))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a zfx schedule"),
        ("{", "not a zfx schedule"),
        ("null", '"format" must be'),
        ("[1]", '"format" must be'),
        ('"zfx.schedule"', '"format" must be'),
        ("{}", '"format" must be "zfx.schedule", got None'),
        ('{"format": "zfx.schedule"}', '"version" must be'),
        ('{"format": "zfx.schedule", "version": 3}', "schedule lacks the fields ['buckets', 'carried',"),
        ('{"format": "zfx.schedule", "format": "x"}', "a key stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format":' + "[" * 900 + "]" * 900 + "}", '"format" must be'),
        ("NaN", "NaN is not JSON"),
        ("9" * 5000, "not a zfx schedule"),
    ],
)
def test_hostile_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_json(text)
    assert message in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
@settings(max_examples=100)
def test_any_value_anywhere_is_read_or_refused_with_a_value_error(data: st.DataObject) -> None:
    document = copy.deepcopy(to_dict(WELL_FORMED["kept"]))
    target: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(target)) if isinstance(target, dict) else st.integers(0, len(target) - 1))
        if not isinstance(target[key], (dict, list)) or not target[key] or data.draw(st.integers(0, 3)) == 0:
            break
        target = target[key]
    target[key] = data.draw(json_values)
    try:
        schedule = from_dict(document)
    except ValueError:
        return
    again = from_json(to_json(schedule))
    assert to_json(again) == to_json(schedule)


def test_what_json_cannot_hold_is_refused_when_writing() -> None:
    for bad in (replace(odd, kept=("\ud800",)), replace(odd, kept=["a"]), replace(odd, kept=(1,)), replace(odd, program=None)):
        with pytest.raises(ValueError, match=r"schedule\.(kept|program)"):
            to_json(bad)


def reasons(graph: nx.MultiDiGraph, reason: str) -> set[tuple[str, str, tuple[str, ...]]]:
    name = {n: d["name"] if d["kind"] != "release" else f"release {' '.join(d['parameters'])}" for n, d in graph.nodes(data=True)}
    return {(name[u], name[v], d["parameters"]) for u, v, d in graph.edges(data=True) if d["reason"] == reason}


@pytest.mark.parametrize("schedule", WELL_FORMED.values(), ids=WELL_FORMED)
def test_graph_of_a_good_schedule_is_acyclic_and_gives_its_order_back(schedule: Schedule) -> None:
    graph = to_networkx(schedule)
    assert nx.is_directed_acyclic_graph(graph)
    assert len(graph) == len(schedule.program.steps) + len(schedule.instructions)
    order = list(nx.lexicographical_topological_sort(graph, key=lambda n: graph.nodes[n]["position"]))
    assert order == list(graph)
    instructions = [n for n in order if n.startswith("instruction")]
    assert instructions == [f"instruction_{i}" for i in range(len(schedule.instructions))]
    compute = [n for n in order if graph.nodes[n]["stream"] == "compute"]
    assert all(graph.has_edge(a, b, "program order") for a, b in itertools.pairwise(compute))


@pytest.mark.parametrize("schedule", WELL_FORMED.values(), ids=WELL_FORMED)
def test_every_read_and_every_reuse_is_ordered_by_the_graph(schedule: Schedule) -> None:
    """Any topological order will do: a read has its gather before it, its release after it, and the next gather after that."""
    graph = to_networkx(schedule)
    facts = graph.nodes
    for node in graph:
        for name in facts[node]["parameters"] if facts[node]["kind"] == "step" else ():
            kinds = {facts[n]["kind"] for n in nx.ancestors(graph, node) if name in facts[n]["parameters"]}
            assert {"all_gather", "wait"} <= kinds
            assert "release" in {facts[n]["kind"] for n in nx.descendants(graph, node) if name in facts[n]["parameters"]}
        if facts[node]["kind"] == "release":
            later = [n for n in graph if facts[n]["kind"] == "all_gather" and facts[n]["position"] > facts[node]["position"]]
            assert all(n in nx.descendants(graph, node) for n in later)


def test_each_reason_joins_what_it_says() -> None:
    graph = to_networkx(WELL_FORMED["again"])
    assert reasons(graph, "reads") == {
        ("wait 0", "f0", ("w0", "b0")), ("wait 1", "f1", ("w1",)), ("wait 0", "f1", ("b1",)), ("wait 4", "g2", ("w1",)),
    }  # fmt: skip
    assert reasons(graph, "release after last read") == {
        ("f0", "release w0 b0", ("w0", "b0")), ("f1", "release b1 w1", ("b1", "w1")), ("g2", "release w1", ("w1",)),
    }  # fmt: skip
    assert reasons(graph, "gathered again") == {("release b1 w1", "all_gather 4", ("w1",))}
    assert reasons(graph, "completes") == {
        ("g1", "reduce_scatter 2", ("w1", "b1")), ("g3", "reduce_scatter 3", ("w0", "b0")),
    }  # fmt: skip
    pairs = {(a, b) for a, b, _ in reasons(graph, "arrival")}
    assert pairs == {(f"all_gather {i}", f"wait {i}") for i in (0, 1, 4)} | {
        (f"reduce_scatter {i}", f"wait_reduce {i}") for i in (2, 3)
    }
    assert {(a, b) for a, b, _ in reasons(graph, "launch")} == {
        ("release b1 w1", "all_gather 4"), ("wait 4", "reduce_scatter 2"), ("wait_reduce 2", "reduce_scatter 3"),
    }  # fmt: skip
    assert ("all_gather 0", "all_gather 1", ()) in reasons(graph, "program order")


def test_facts_of_nodes() -> None:
    facts = to_networkx(WELL_FORMED["kept"]).nodes
    assert facts["instruction_0"] == {
        "kind": "all_gather", "name": "all_gather 0", "op": "zfx.all_gather", "point": 0, "position": 0, "phase": "forward",
        "stream": "gather", "parameters": ("w0", "b0", "b1"), "num_bytes": 320, "duration_us": 0.1 + 320 / 2000, "bucket": 0,
    }  # fmt: skip
    reduction = next(d for _, d in facts(data=True) if d["kind"] == "reduce_scatter")
    assert (reduction["stream"], reduction["num_bytes"], reduction["phase"]) == ("reduce", 512, "backward")
    release = next(d for _, d in facts(data=True) if d["kind"] == "release")
    assert (release["stream"], release["num_bytes"], release["duration_us"], "bucket" in release) == ("compute", 288, 0.0, False)


def test_edges_of_a_broken_schedule_run_against_its_order() -> None:
    """Waiting for what is launched later is a cycle; reducing what is not complete is an edge from a later place."""
    rows = [i for i in WELL_FORMED["again"].instructions if (i.kind, i.bucket) != ("all_gather", 4)]
    late_gather = replace(WELL_FORMED["again"], instructions=(*rows, Instruction("all_gather", 5, ("w1",), 4)))
    assert not nx.is_directed_acyclic_graph(to_networkx(late_gather))
    kept = WELL_FORMED["kept"]
    early = tuple(replace(i, point=3) if (i.kind, i.bucket) == ("reduce_scatter", 2) else i for i in kept.instructions)
    graph = to_networkx(replace(kept, instructions=early))
    place = graph.nodes(data="position")
    assert {(u, r) for u, v, r in graph.edges(keys=True) if place[u] > place[v]} == {("step_3", "completes")}


def shown(quoted: str) -> str:
    """What Graphviz draws for a quoted string."""
    assert quoted[0] == quoted[-1] == '"'
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], quoted[1:-1], flags=re.S).replace("&amp;", "&")


@given(schedules())
@settings(max_examples=15)
@example(odd)
@example(WELL_FORMED["again"])
def test_dot_is_read_by_pydot_with_every_node_and_edge(schedule: Schedule) -> None:
    text = to_dot(schedule)
    (dot,) = pydot.graph_from_dot_data(text)
    graph = to_networkx(schedule)
    nodes = {n.get_name(): n for cluster in dot.get_subgraphs() for n in cluster.get_nodes()}
    assert set(nodes) == set(graph)
    assert [(e.get_source(), e.get_destination()) for e in dot.get_edges()] == [(u, v) for u, v, _ in graph.edges]
    assert all(node.get("label")[0] == '"' for node in nodes.values())


def test_dot_shows_names_as_they_are_and_groups_streams() -> None:
    names = ['say "hi"', "back\\slash", "end\\", "&amp;", "50%", "é漢", "\\N", "<b>"]
    steps = tuple(Step(n, "forward") for n in names)
    (dot,) = pydot.graph_from_dot_data(to_dot(Schedule(Program((), steps), Limits())))
    compute, _gather, _reduce = dot.get_subgraphs()
    assert [shown(n.get("label")) for n in compute.get_nodes()] == [f"{i} {n}" for i, n in enumerate(names)]
    (dot,) = pydot.graph_from_dot_data(to_dot(WELL_FORMED["kept"]))
    labels = {s.get_name(): [shown(n.get("label")) for n in s.get_nodes()] for s in dot.get_subgraphs()}
    assert labels['"cluster_gather"'] == ["all_gather 0\nw0\nb0\nb1", "all_gather 1\nw1"]
    assert labels['"cluster_reduce"'] == ["reduce_scatter 2\nw1\nb1", "reduce_scatter 3\nw0\nb0"]
    colors = {n.get("fillcolor") for s in dot.get_subgraphs() for n in s.get_nodes()}
    assert len(colors) == 6


@given(schedule=schedules())
@settings(max_examples=25)
@example(schedule=odd)
@example(schedule=WELL_FORMED["again"])
def test_graphml_reads_back(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    path = tmp_path_factory.getbasetemp() / "schedule.graphml"
    save(schedule, path)
    back, graph = nx.read_graphml(path, force_multigraph=True), to_networkx(schedule)
    assert set(back) == set(graph)
    assert len({key for _, _, key in back.edges(keys=True)}) == graph.number_of_edges()  # XML wants ids to be unique
    assert sorted((u, v, d["reason"]) for u, v, d in back.edges(data=True)) == sorted(graph.edges(keys=True))
    for node, facts in graph.nodes(data=True):
        found = back.nodes[node]
        assert tuple(json.loads(found["parameters"])) == facts["parameters"]
        for key in ("kind", "point", "position", "phase", "stream", "num_bytes", "duration_us"):
            assert found[key] == facts[key], key
        assert ("bucket" in found) == ("bucket" in facts)
    if not any(re.search(r"[^ -~]", s.name) for s in schedule.program.steps):
        assert [back.nodes[n].get("name", "") for n in graph] == [graph.nodes[n]["name"] for n in graph]


def test_save_chooses_by_suffix(tmp_path: Path) -> None:
    schedule = WELL_FORMED["kept"]
    for name in ("a.json", "b.dot", "C.JSON", "d.v2.json", "e.graphml"):
        save(schedule, tmp_path / name)
    assert from_json((tmp_path / "a.json").read_text("ascii")) == schedule
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "C.JSON").read_bytes() == (tmp_path / "d.v2.json").read_bytes()
    assert (tmp_path / "b.dot").read_text("utf-8") == to_dot(schedule)
    save(schedule, str(tmp_path / "a2.graphml"))
    assert (tmp_path / "a2.graphml").read_bytes() == (tmp_path / "e.graphml").read_bytes()


@pytest.mark.parametrize("name", ["s.svg", "s.txt", "s", "json", "s.json.gz", "s."])
def test_other_suffixes_are_refused_and_leave_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.json, \.dot, \.graphml") as caught:
        save(WELL_FORMED["kept"], tmp_path / name)
    assert name in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_old_file_and_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="kept"):
        save(replace(odd, kept=(1,)), path)
    seen = []

    def refuse(source: str, target: str) -> None:
        seen.append((Path(source).read_text(), Path(source).parent, target, path.read_text()))
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="disk full"):
            save(odd, path)
    assert seen == [(to_json(odd), tmp_path, str(path), "old")]  # whole, beside its target, before the old one goes
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"] and path.read_text() == "old"
    with pytest.raises(FileNotFoundError):
        save(odd, tmp_path / "nowhere" / "s.json")


def test_save_writes_through_a_link_with_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    save(odd, tmp_path / "link.json")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "link.json").is_symlink() and from_json((tmp_path / "real.json").read_text()) == odd
    assert (tmp_path / "real.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(zfx.dump).failed == 0
