"""What `print(schedule)` and `report` show: exact on a small schedule, one line a step on any."""

from __future__ import annotations

import dataclasses
import doctest
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zfx
import zfx.dump
import zfx.text
from tests.strategies import link_costs
from zfx.certificate import Certificate
from zfx.costs import CostModel
from zfx.ir import Bucket, Instruction, Parameter, Program, Schedule, Step
from zfx.limits import Limits
from zfx.text import WIDTH, human_bytes, render, report, shorten

PAGE = Path(__file__).parents[1] / "docs" / "schedule-format.md"

#    point 0        point 1        point 2    point 3      point 4    point 5        point 6
#      | gather 0     | release norm  | wait 1   | release b    |          | release a    | reduce 2
#      | wait 0       | gather 1      |          |              |          |              | wait reduce 2
#      v reads a,norm v               v reads b  v the turn     v reads a  v completes a
A, B, NORM = Parameter("a", 100, 400, 400), Parameter("b", 50, 200), Parameter("norm", 4, 16)


def small() -> Schedule:
    """Two layers; `a` is kept across the turn; `norm` travels packed with `a`."""
    steps = (
        Step("f0", "forward", reads=("a", "norm")),
        Step("f1", "forward"),
        Step("f2", "forward", reads=("b",)),
        Step("turn", "turn"),
        Step("b0", "backward", reads=("a",)),
        Step("b1", "backward", completes=("a",), duration_us=1500.0),
    )
    buckets = (
        Bucket(0, "all_gather", ("a", "norm"), packed=("norm",)),
        Bucket(1, "all_gather", ("b",)),
        Bucket(2, "reduce_scatter", ("a",)),
    )
    instructions = (
        Instruction("all_gather", 0, ("a", "norm"), 0),
        Instruction("wait", 0, ("a", "norm"), 0),
        Instruction("release", 1, ("norm",)),
        Instruction("all_gather", 1, ("b",), 1),
        Instruction("wait", 2, ("b",), 1),
        Instruction("release", 3, ("b",)),
        Instruction("release", 5, ("a",)),
        Instruction("reduce_scatter", 6, ("a",), 2),
        Instruction("wait_reduce", 6, ("a",), 2),
    )
    return Schedule(Program((A, B, NORM), steps, world_size=2), Limits(), buckets, instructions, kept=("a",))


def mlp(*, kept: bool) -> Schedule:
    """Two layers with biases packed; `w1` is kept across the turn or gathered again; both reductions overlap the backward."""
    steps = (
        Step("f0", "forward", "aten.addmm", ("w0", "b0")),
        Step("f1", "forward", "aten.addmm", ("w1", "b1")),
        Step("turn", "turn"),
        Step("g1", "backward", "aten.mm", (), ("w1", "b1")),
        Step("g2", "backward", "aten.mm", ("w1",)),
        Step("g3", "backward", "aten.mm", (), ("w0", "b0")),
    )
    members = (("all_gather", "w0 b0 b1"), ("all_gather", "w1"), ("reduce_scatter", "w1 b1"), ("reduce_scatter", "w0 b0"))
    members += () if kept else (("all_gather", "w1"),)
    buckets = tuple(
        Bucket(i, kind, tuple(names.split()), tuple(n for n in names.split() if n[0] == "b"))
        for i, (kind, names) in enumerate(members)
    )
    rows: list[tuple[str, int, Any]] = [
        ("all_gather", 0, 0), ("all_gather", 0, 1), ("wait", 0, 0), ("wait", 1, 1), ("release", 1, "w0 b0"),
        ("release", 2, "b1" if kept else "b1 w1"), *([] if kept else [("all_gather", 2, 4), ("wait", 4, 4)]),
        ("reduce_scatter", 4, 2), ("release", 5, "w1"), ("wait_reduce", 6, 2), ("reduce_scatter", 6, 3), ("wait_reduce", 6, 3),
    ]  # fmt: skip
    instructions = tuple(
        Instruction(k, p, tuple(w.split())) if k == "release" else Instruction(k, p, buckets[w].parameters, w) for k, p, w in rows
    )
    parameters = tuple(Parameter(n, 64 if n[0] == "w" else 8, 256 if n[0] == "w" else 32, 256) for n in ("w0", "b0", "w1", "b1"))
    program = Program(parameters, steps, 2, escapes=(), static_bytes=10, costs=link_costs(0.1))
    return Schedule(program, Limits(max_live_parameters=500), buckets, instructions, ("w1",) if kept else ())


def table(text: str) -> list[str]:
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.endswith("before the step")) + 1 :]


def deep(num_layers: int = 40) -> Schedule:
    """Long names, and five things to say before each step."""
    names = [f"model.decoder.layers.{i}.self_attention.query_projection.weight" for i in range(num_layers)]
    steps = tuple(
        Step(f"forward.scaled_dot_product_attention_{i}", "forward", "aten._scaled_dot_product.default", (n,))
        for i, n in enumerate(names)
    )
    buckets = tuple(Bucket(i, "all_gather", (n,)) for i, n in enumerate(names))
    instructions = [
        i
        for p, n in enumerate(names)
        for i in (
            Instruction("all_gather", p, (n,), p),
            Instruction("wait", p, (n,), p),
            Instruction("release", p + 1, (n,)),
            Instruction("wait_reduce", p, (n,), p),
            Instruction("reduce_scatter", p, (n,), p),
        )
    ]
    return Schedule(Program(tuple(Parameter(n, 10, 40) for n in names), steps), Limits(), buckets, tuple(instructions))


def test_the_live_column_is_what_each_step_sees() -> None:
    found = [re.search(r"(\d+) B", line) for line in table(render(small()))]
    assert [int(match[1]) for match in found] == [416, 600, 600, 400, 400, 0, 0]
    assert "peak         150 elements, 600 B at step 1 (f1)" in render(small())
    packs = replace(small(), instructions=small().instructions[:1])
    assert "peak         108 elements, 432 B at step 0 (f0)" in render(packs)  # norm counts twice until it is unpacked


def test_render_of_a_small_schedule() -> None:
    assert str(small()) == render(small()) == "\n".join([
        "zfx schedule: 2 ranks, 6 steps",
        "parameters   3 with 154 elements, 616 B",
        "limits       defaults",
        "gathers      3 in 2 buckets, 616 B on each rank",
        "reductions   1 in 1 bucket, 400 B on each rank",
        "peak         150 elements, 600 B at step 1 (f1)",
        "kept         1 across the turn, 400 B: a",
        "certificate  time 1.08 of the bound (binds: critical path), volume 1.00, memory 1.00",
        "step       name       op       live  before the step",
        "   0 fwd   f0                 416 B  gather 0: a +1 packed; wait 0",
        "   1 fwd   f1                 600 B  release norm; gather 1: b",
        "   2 fwd   f2                 600 B  wait 1",
        "   3 turn  turn               400 B  release b",
        "   4 bwd   b0                 400 B",
        "   5 bwd   b1                   0 B  release a",
        " end                            0 B  reduce 2: a; wait reduce 2",
    ])


def test_report_of_a_small_schedule() -> None:
    assert report(small()).splitlines() == [
        "ranks                2",
        "steps                3 forward, 2 backward",
        "parameters           3 with 154 elements, 616 B",
        "gathered peak        150 elements, 600 B at step 1 (f1)",
        "max_live_parameters  1,000,000,000 elements, 0.0% used at the peak",
        "memory peak          800 B: gradients 800 B, after the last step",
        "end of forward       600 B: parameters 600 B",
        "end of backward      800 B: gradients 800 B",
        "kept                 1 across the turn, 400 B: a",
        "gathers              3 in 2 buckets, 616 B on each rank",
        "reductions           1 in 1 bucket, 400 B on each rank",
        "mean bucket          308 B gathered, 400 B reduced",
        "communication        300.5 us estimated: gathers 200.3 us, reductions 100.2 us",
        "step time            2.0 ms estimated: compute 1.5 ms, launches 150.0 us, exposed communication 300.5 us",
        "certificate          time 1.08 of the bound; binds: critical path",
        "                     volume 1.00 of the bound; binds: first reads",
        "                     memory 1.00 of the bound; binds: reduction of a",
    ]


def test_header_names_changed_limits_and_counts_what_is_gathered_again() -> None:
    schedule = small()
    again = (Instruction("all_gather", 4, ("b",), 3), Instruction("release", 5, ("b",)))
    schedule = replace(
        schedule,
        limits=Limits(max_live_parameters=1234, memory_budget=9_000_000),
        buckets=(*schedule.buckets, Bucket(3, "all_gather", ("b",))),
        instructions=(*schedule.instructions, *again),
        kept=(),
    )
    text = render(schedule)
    assert "limits       max_live_parameters=1,234, memory_budget=9,000,000\n" in text
    assert "gathers      4 in 3 buckets, 816 B on each rank, 1 of them again\n" in text
    assert "kept         nothing across the turn\n" in text


def test_peak_in_elements_and_in_bytes_may_be_at_different_steps() -> None:
    program = Program((Parameter("half", 100, 200), Parameter("double", 50, 400)), (Step("s0", "forward"), Step("s1", "forward")))
    rows = (("all_gather", 0, "half"), ("release", 1, "half"), ("all_gather", 1, "double"))
    schedule = Schedule(program, Limits(), (), tuple(Instruction(k, p, (n,)) for k, p, n in rows))
    assert "peak         100 elements at step 0 (s0), 400 B at step 1 (s1)" in render(schedule)


@pytest.mark.parametrize(
    ("members", "packed", "words"),
    [
        (("a",), (), "gather 0: a"),
        (("a", "b", "norm"), (), "gather 0: a +2"),
        (("norm", "a", "b"), ("norm",), "gather 0: a +1 +1 packed"),
        (("a", "b", "norm"), ("b", "norm"), "gather 0: a +2 packed"),
        (("a", "b", "norm"), ("a", "b", "norm"), "gather 0: packed a +2"),
        (("norm",), ("norm",), "gather 0: packed norm"),
    ],
)
def test_how_a_bucket_is_written(members: tuple[str, ...], packed: tuple[str, ...], words: str) -> None:
    bucket = Bucket(0, "all_gather", members, packed)
    schedule = replace(small(), buckets=(bucket,), instructions=(Instruction("all_gather", 0, members, 0),))
    assert table(render(schedule))[0].endswith("  " + words)


def test_neighbouring_releases_are_one_phrase_but_others_stay_in_order() -> None:
    rows = (("release", ("a",)), ("release", ("b",)), ("wait", ("b",)), ("release", ("norm",)))
    schedule = replace(small(), instructions=tuple(Instruction(k, 2, n, 1 if k == "wait" else None) for k, n in rows))
    assert next(line for line in table(render(schedule)) if " f2 " in line).endswith("  release a +1; wait 1; release norm")


def test_quiet_steps_are_folded_and_full_unfolds_them() -> None:
    steps = tuple(Step(f"f{i}", "forward") for i in range(20)) + (Step("turn", "turn"),)
    instructions = tuple(Instruction("all_gather", p, ("a",), 0) for p in (3, 5, 20))
    schedule = Schedule(Program((A,), steps), Limits(), (), instructions)
    first_words = [line.split()[:2] for line in table(render(schedule))]
    assert first_words == [["...", "3"], ["3", "fwd"], ["4", "fwd"], ["5", "fwd"], ["...", "14"], ["20", "turn"]]
    assert [line.split()[0] for line in table(render(schedule, full=True))] == [str(i) for i in range(21)]
    assert "400 B" in table(render(schedule))[4]  # a fold says what is live in it, as its steps do


def test_lines_fit_and_columns_are_straight() -> None:
    lines = render(deep()).splitlines()
    assert max(map(len, lines)) <= WIDTH
    rows = table(render(deep()))
    assert len(rows) == 41
    live = {re.search(r"\d+ B", row).end() for row in rows}
    assert len(live) == 1
    assert "17." in rows[17]  # the layer survives abbreviation
    whole = table(render(deep(), full=True))
    assert "model.decoder.layers.17.self_attention.query_projection.weight" in whole[17]
    assert not any(row.endswith("..") for row in whole)


def test_odd_names_stay_on_one_line() -> None:
    odd = ["", "a\nb", 'q"', "50%", "\x1b[31m", "\ud800", "é漢", "..", "\u2028", "x" * 300]
    steps = tuple(Step(n or "empty", "forward", n, (n,)) for n in odd)
    instructions = tuple(Instruction("all_gather", i, (n,), i) for i, n in enumerate(odd))
    schedule = Schedule(Program(tuple(Parameter(n, 1, 4) for n in odd), steps), Limits(), (), instructions, kept=tuple(odd))
    for full in (False, True):
        text = render(schedule, full=full)
        assert len(table(text)) == len(odd)
        assert len(text.splitlines()) == len(text.split("\n"))
        text.encode("utf-8")
        assert "\x1b" not in text
    assert max(map(len, render(schedule).splitlines())) <= WIDTH


def test_broken_and_empty_schedules_can_be_looked_at() -> None:
    empty = Schedule(Program((), ()), Limits())
    assert "0 elements, 0 B after the last step" in render(empty) and report(empty)
    broken = replace(
        small(),
        instructions=(
            Instruction("all_gather", 99, ("nobody",), 17),
            Instruction("wait", -3, (), None),
            Instruction("release", 0, ("nobody", "a")),
            Instruction("all_gather", 2, (), -1),
        ),
    )
    assert [line.split("  ")[-1].strip() for line in table(render(broken)) if ":" in line or "wait" in line] == [
        "wait ?; release nobody +1",
        "gather -1: nothing",
        "gather 17: nobody",
    ]
    assert report(broken)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1048524, "1023.9 KiB"), (1048525, "1.0 MiB"), (3 * 2**40, "3.0 TiB")],
)
def test_human_bytes(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_shorten_keeps_numbers_and_never_exceeds_the_width() -> None:
    name = "model.layers.17.self_attn.q_proj.weight"
    assert [shorten(name, w) for w in (39, 33, 22)] == [name, "m.l.17.self_attn.q_proj.weight", "m.l.17.s.q_proj.weight"]
    for width in range(3, 45):
        assert len(shorten(name, width)) <= width
    assert shorten(name, 14) == "m.l.17.s.q.w"
    assert shorten("aten.some_long_operator_2", 12) == "..operator_2"


def test_examples_in_docstrings_and_on_the_page() -> None:
    assert doctest.testmod(zfx.text).failed == 0
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 15 and results.failed == 0


def test_version_3_has_these_fields_and_the_page_explains_each() -> None:
    """If this fails, a field of `zfx.ir` changed: raise VERSION, and change docs/schedule-format.md."""
    assert zfx.dump.VERSION == 3
    records = (Schedule, Program, Parameter, Step, CostModel, Limits, Bucket, Instruction, Certificate)
    fields = {cls.__name__: [f.name for f in dataclasses.fields(cls)] for cls in records}
    sections = {
        title: re.findall(r"^\| `(\w+)` \|", body, re.M)
        for title, body in re.findall(r"^### ([\w.]+).*?\n(.*?)(?=^##)", PAGE.read_text("utf-8"), re.M | re.S)
    }
    page = {
        "Schedule": ["format", "version", "certificate", *fields["Schedule"]], "Certificate": fields["Certificate"],
        "Program": fields["Program"], "Limits": fields["Limits"],
        "Parameter": fields["Parameter"], "Step": fields["Step"], "CostModel": fields["CostModel"],
        "Bucket": fields["Bucket"], "Instruction": fields["Instruction"],
    }  # fmt: skip
    names = ("schedule", "certificate", "program", "limits", "program.parameters", "program.steps", "program.costs")
    titles = (*names, "buckets", "instructions")
    assert {k: v for k, v in sections.items() if k in titles} == dict(zip(titles, page.values()))


def test_a_schedule_that_was_not_captured_is_a_value_error() -> None:
    model = zfx.compile(torch.nn.Linear(2, 2), world_size=2)
    with pytest.raises(ValueError, match="nothing is captured yet"):
        model.zfx.report()
    model.zfx.plan(torch.randn(1, 2))
    assert model.zfx.report(0) == model.zfx.report(-1) == report(model.zfx.schedules[0])
    for index in (1, 7, -2):
        with pytest.raises(ValueError, match=f"there is no schedule {index}: 1 captured so far"):
            model.zfx.report(index)
