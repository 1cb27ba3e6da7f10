"""What is said about a schedule is true: lives are what is held, and the verifier refuses "no earlier" and "kept instead"."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zfx.costs import CostModel, Link
from zfx.ir import Bucket, Instruction, Limits, Parameter, Program, Schedule, Step
from zfx.passes import gather_on_demand, plan
from zfx.reasons import Story, tell
from zfx.replay import replay, walk
from zfx.verify import RULES

from .strategies import chain, link_costs, problems
from .test_dump import schedules
from .test_text import mlp


def network(num_layers: int = 6, *, limits: Limits | None = None) -> Schedule:
    """A planned perceptron that has it all: packs, stalls, what is kept over the turn and what is gathered again, reductions."""
    link = Link(50.0, 2_000.0)
    costs = CostModel(link, link, launch_us=4.0, pack_threshold_bytes=4_096)
    parameters, forward, backward = [], [], []
    for i in range(num_layers):
        weight, bias, held = f"layers.{i}.weight", f"layers.{i}.bias", 100_000 * (i + 1)
        parameters += [Parameter(weight, 65_536, 262_144, 262_144), Parameter(bias, 256, 1_024, 1_024)]
        forward += [
            Step(f"forward.addmm_{i}", "forward", "aten.addmm.default", (weight, bias), (), held, 180.0),
            Step(f"forward.relu_{i}", "forward", "aten.relu.default", (), (), held + 50_000, 20.1),
        ]
        backward += [
            Step(f"backward.mm_{2 * i + 1}", "backward", "aten.mm.default", (weight,), (), held, 180.0),
            Step(f"backward.mm_{2 * i}", "backward", "aten.mm.default", (), (weight,), held, 180.0),
            Step(f"backward.sum_{i}", "backward", "aten.sum.dim_IntList", (), (bias,), held, 12.3),
        ]
    steps = (*forward, Step("turn", "turn", other_bytes=600_000, duration_us=30.0), *reversed(backward))
    program = Program(tuple(parameters), steps, 4, static_bytes=789_504, costs=costs)
    loose = Limits(max_live_parameters=250_000, param_persistence_threshold=1_000, memory_budget=2_900_000)
    return plan(program, limits or loose)


def test_a_schedule_in_sentences() -> None:
    """`w1` is gathered again; both reductions are packed; all by hand."""
    schedule = mlp(kept=False)
    story = tell(replace(schedule, program=replace(schedule.program, costs=link_costs(2.0, 128.0))))
    assert [c.why for c in story.collectives] == [
        (
            "For step 0 (f0), the first to read w0, one of its 3, launched right before.",
            "Exposed: compute waits 4.5 us for it.",
            "No earlier: the forward starts here.",
        ),
        (
            "For step 1 (f1), the first to read it, launched 1 step and 8.5 us before.",
            "Queues 4.5 us behind bucket 0.",
            "Exposed: compute waits 4.0 us for it.",
            "No earlier: the forward starts here.",
        ),
        (
            "For step 4 (g2), the first to read it, launched 2 steps and 4.0 us before.",
            "Exposed: compute waits 4.0 us for it.",
            "No earlier: one step before, w1 is still there.",
        ),
        (
            "The last of its 2 gradients is complete after step 3 (g1); launched right after.",
            "Exposed: compute waits 6.0 us for it.",
        ),
        (
            "The last of its 2 gradients is complete after step 5 (g3); launched right after.",
            "Exposed: compute waits 6.0 us for it.",
        ),
    ]


def test_lives_in_sentences() -> None:
    again, kept = tell(mlp(kept=False)), tell(mlp(kept=True))
    reads = [(life.parameter, life.reads) for life in again.lives]
    assert reads == [("w0", (0,)), ("b0", (0,)), ("b1", (1,)), ("w1", (1,)), ("w1", (4,))]
    assert [life.why for life in again.lives if life.parameter == "w1"] == [
        (
            "Released right after its last read, step 1 (f1). Gathered again as bucket 4: step 4 (g2) reads it again; "
            "256 B are free for 0.0 us meanwhile.",
        ),
        ("Released right after its last read, step 4 (g2). Nothing reads it later.",),
    ]
    (life,) = (life for life in kept.lives if life.parameter == "w1")
    assert life.reads == (1, 4)
    assert life.why == (
        "Kept across the turn: gathering it again would take 0.2 us.",
        "Released right after its last read, step 4 (g2). Nothing reads it later.",
    )


def test_the_limit_that_forbids_an_earlier_launch_is_named() -> None:
    """`b` is launched right when `a` is gone, since both do not fit; in elements, then in bytes."""
    steps = (Step("f", "forward", reads=("a",), other_bytes=7), Step("g", "forward"), Step("h", "forward", reads=("b",)))
    program = Program((Parameter("a", 4, 16), Parameter("b", 5, 20)), steps)
    buckets = (Bucket(0, "all_gather", ("a",)), Bucket(1, "all_gather", ("b",)))
    run = (
        Instruction("all_gather", 0, ("a",), 0),
        Instruction("wait", 0, ("a",), 0),
        Instruction("release", 1, ("a",)),
        Instruction("all_gather", 1, ("b",), 1),
        Instruction("wait", 2, ("b",), 1),
        Instruction("release", 3, ("b",)),
    )
    for limits, words in (
        (Limits(max_live_parameters=8), "9 elements would be live during step 0 (f), the limit is 8"),
        (Limits(memory_budget=42), "43 bytes would be held during step 0 (f), the limit is 42"),
    ):
        (*_, last) = tell(Schedule(program, limits, buckets, run)).collectives[1].why
        assert last == f"No earlier: one step before, {words}."
    assert "No earlier" not in " ".join(tell(Schedule(program, Limits(9), buckets, run)).collectives[1].why)


def test_what_is_never_read_escapes_or_is_never_waited_for() -> None:
    program = Program((Parameter("w", 4, 16), Parameter("v", 4, 16)), (Step("f", "forward", reads=("w",)),), escapes=("w",))
    buckets = (Bucket(0, "all_gather", ("w",)), Bucket(1, "all_gather", ("v",)))
    run = (
        Instruction("all_gather", 0, ("w",), 0),
        Instruction("wait", 0, ("w",), 0),
        Instruction("all_gather", 0, ("v",), 1),
        Instruction("release", 1, ("v",)),
    )
    story = tell(Schedule(program, Limits(), buckets, run))
    assert [c.why for c in story.collectives][1] == (
        "No step reads it.",
        "Nothing waits for it.",
        "No earlier: the forward starts here.",
    )
    assert [life.why for life in story.lives] == [
        ("Never released: an alias of it leaves the program.",),
        ("Released; no step reads it. Nothing reads it later.",),
    ]


def test_a_long_gap_within_a_phase_says_why_it_is_kept() -> None:
    steps = (Step("a", "forward", reads=("w",)), Step("b", "forward", duration_us=900.0), Step("c", "forward", reads=("w",)))
    run = (Instruction("all_gather", 0, ("w",), 0), Instruction("wait", 0, ("w",), 0), Instruction("release", 3, ("w",)))
    schedule = Schedule(Program((Parameter("w", 4, 2_048),), steps), Limits(), (Bucket(0, "all_gather", ("w",)),), run)
    assert tell(schedule).lives[0].why == (
        "Kept from step 0 (a) to step 2 (c), 2.0 KiB for 900.0 us: gathering it again would take 101.0 us.",
        "Released right after its last read, step 2 (c). Nothing reads it later.",
    )


@pytest.mark.parametrize("window", ["first", "middle", "last"])
def test_what_is_carried_has_no_gather_or_no_release(window: str) -> None:
    carried_in, carried_on = window in ("middle", "last"), window in ("first", "middle")
    program = Program((Parameter("w", 4, 16),), (Step("f", "forward", reads=("w",)),), window=window)  # type: ignore[arg-type]
    buckets = () if carried_in else (Bucket(0, "all_gather", ("w",)),)
    run = () if carried_in else (Instruction("all_gather", 0, ("w",), 0), Instruction("wait", 0, ("w",), 0))
    run += () if carried_on else (Instruction("release", 1, ("w",)),)
    (life,) = tell(Schedule(program, Limits(), buckets, run, carried=("w",))).lives
    assert (life.gather is None) == carried_in and life.reads == (0,)
    assert (life.why[-1] == "Stays gathered for the next micro-batch.") == carried_on


def test_for_ever_is_refused() -> None:
    program = Program((), (Step("f", "forward", duration_us=float("inf")),))
    with pytest.raises(ValueError, match="for ever"):
        tell(Schedule(program, Limits()))


def check_lives(story: Story) -> None:
    """Lives say at every moment exactly what the replay says, and collectives follow their spans."""
    for place, state in enumerate(replay(story.schedule)):
        assert {life.parameter for life in story.lives if life.first <= place < life.end} == state.live
        assert story.elements[place] == (state.gathered_elements, state.packing_elements)
    moments = story.simulation.moments
    for life in story.lives:
        reads = [m.point for m in moments[life.first : life.end] if m.instruction is None]
        assert life.reads == tuple(t for t in reads if life.parameter in story.schedule.program.steps[t].reads)
    assert [c.span for c in story.collectives] == list(story.simulation.spans)
    for collective in story.collectives:
        launch = moments[collective.launch].instruction
        assert launch is not None and (launch.kind, launch.bucket) == (collective.span.kind, collective.span.bucket)
        if collective.wait is not None:
            wait = moments[collective.wait].instruction
            assert wait is not None and wait.bucket == launch.bucket and collective.wait > collective.launch


@settings(max_examples=40)
@given(problems())
def test_lives_are_what_is_held(problem: tuple[Program, Limits]) -> None:
    check_lives(tell(plan(*problem)))


@settings(max_examples=40)
@given(schedules())
def test_any_schedule_is_told_or_refused(schedule: Schedule) -> None:
    try:
        story = tell(schedule)
    except ValueError as error:
        assert "for ever" in str(error)
    else:
        for row in (*story.collectives, *story.lives):
            assert row.why and all(sentence.isprintable() for sentence in row.why)


def broken(schedule: Schedule) -> bool:
    return any(True for rule in ("max_live_parameters", "memory_budget") for _ in RULES[rule](schedule))


@settings(max_examples=40)
@given(problems(busy=True))
def test_no_earlier_means_that_the_verifier_would_refuse_it(problem: tuple[Program, Limits]) -> None:
    schedule = plan(*problem)
    assert not broken(schedule)
    for collective in tell(schedule).collectives:
        if not any(re.match("No earlier: one step before, .* the limit is", sentence) for sentence in collective.why):
            continue
        events = [event for _, event in walk(schedule)]
        launch = events[collective.launch]
        assert isinstance(launch, Instruction)
        rest = [i for i in schedule.instructions if i is not launch]
        place = next(k for k, i in enumerate(rest) if i.point >= launch.point)
        moved = (*rest[:place], replace(launch, point=launch.point - 1), *rest[place:])
        assert broken(replace(schedule, instructions=moved))


@settings(max_examples=40)
@given(problems(busy=True), st.data())
def test_kept_instead_means_that_the_verifier_would_refuse_it(problem: tuple[Program, Limits], data: st.DataObject) -> None:
    """The parameter is taken out of its second gather and out of its release: what is left of the schedule breaks the limit."""
    schedule = plan(*problem)
    story = tell(schedule)
    rows = [life for life in story.lives if any(sentence.startswith("Kept instead") for sentence in life.why)]
    if not rows:
        return
    life = data.draw(st.sampled_from(rows))
    after = next(one for one in story.lives if one.parameter == life.parameter and one.first >= life.end)
    events = [event for _, event in walk(schedule)]
    (sentence,) = (text for text in life.why if text.startswith("Kept instead"))
    found = re.search(r"([\d,]+) (elements|bytes) would be", sentence)
    assert found is not None
    number = int(found[1].replace(",", ""))
    size = next(p for p in schedule.program.parameters if p.name == life.parameter)
    states = list(replay(schedule))[life.end : after.first]
    held = [s.num_elements + size.num_elements if found[2] == "elements" else s.total_bytes + size.num_bytes for s in states]
    limit = schedule.limits.max_live_parameters if found[2] == "elements" else schedule.limits.memory_budget
    assert number == max(held) and limit is not None and number > limit
    assert isinstance(events[life.end], Instruction)


def test_a_real_plan_gives_reasons_of_all_kinds() -> None:
    story = tell(network())
    text = "\n".join(sentence for row in (*story.collectives, *story.lives) for sentence in row.why)
    phrases = ("Exposed:", "Hidden:", "No earlier: the", "Kept across the turn", "Gathered again as bucket", "complete after")
    assert [phrase for phrase in phrases if phrase not in text] == []


def test_a_thousand_layers() -> None:
    story = tell(gather_on_demand(Schedule(chain(1_000), Limits(max_live_parameters=60, max_reuse_distance=0))))
    assert len(story.lives) == len([c for c in story.collectives if c.span.kind == "all_gather"]) == 2_000
