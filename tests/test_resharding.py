"""Resharding to a smaller group after the forward: every room knows secondary shards, and 4 ranks compute what they did without."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn

import zfx
from tests.harness import run_ranks
from tests.test_live_parameters import live_bytes
from zfx.certificate import certify
from zfx.channels import Channels
from zfx.cli import run
from zfx.costs import CostModel, Link
from zfx.diff import diff
from zfx.dump import from_json, to_networkx, writer_of
from zfx.estimate import facts_of
from zfx.ir import Instruction, Limits, Program, Schedule
from zfx.passes import plan, stages
from zfx.passes.timeline import read, write
from zfx.passes.window import plan_windows
from zfx.picture import payload
from zfx.presets import costs_for
from zfx.reasons import tell
from zfx.simulate import Span, simulate
from zfx.testing import assert_valid, chain, problems
from zfx.text import report
from zfx.trace import to_trace
from zfx.verify import verify, violations
from zfx.wire import CollectiveWire

SLOW_WORLD = CostModel(gather=Link(100.0, 1.0), secondary=Link(10.0, 10.0))
NOTHING_KEPT = Limits(max_reuse_distance=0, param_persistence_threshold=0)
SMALL_BUCKETS = replace(NOTHING_KEPT, prefetch_bucket_size=60, reduce_bucket_size=60)


# ---- planning -------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(problems(reshard_to=(2, 3), replicas=(1, 2), uniform=None))
def test_random_programs(problem: tuple[Program, Limits]) -> None:
    program, bounds = problem
    for _, schedule in stages(program, bounds):
        assert_valid(schedule)
        assert write(read(schedule)) == schedule
    certificate = certify(schedule)
    assert certificate.time_ratio >= 1 and certificate.volume_ratio >= 1 and certificate.peak_ratio >= 1
    if program.uniform:
        without = plan(replace(program, reshard_to=0), bounds)
        assert simulate(schedule).finish_us <= simulate(without).finish_us * (1 + 1e-6)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(problems(reshard_to=(2, 3), windows=("only", "first", "last"), uniform=None))
def test_more_random_programs(problem: tuple[Program, Limits]) -> None:
    program, bounds = problem
    for window in ("first", "last") if program.window != "only" else ("only",):
        assert_valid(plan(replace(program, window=window), bounds))
    for schedule in plan_windows(lambda p: plan(p, bounds, check=verify), replace(program, window="only"), 3):
        assert_valid(schedule)
        assert min(certify(schedule).time_ratio, certify(schedule).volume_ratio, certify(schedule).peak_ratio) >= 1


def layers(n: int = 6, budget: int | None = None, costs: CostModel = SLOW_WORLD) -> Schedule:
    """n layers of 40 bytes on 4 ranks, in groups of 2: secondary shards have 20 bytes."""
    return plan(chain(n, costs=costs, reshard_to=2), replace(NOTHING_KEPT, memory_budget=budget), check=verify)


def gathers(schedule: Schedule) -> tuple[list[Span], list[Span]]:
    """Those from all ranks, and those from secondary shards."""
    spans = [span for span in simulate(schedule).spans if span.kind == "all_gather"]
    world, group = ([s for s in spans if schedule.buckets[s.bucket or 0].secondary == secondary] for secondary in (False, True))
    return world, group


def test_all_that_is_gathered_again_is_resharded_where_nothing_limits_bytes() -> None:
    schedule = layers()
    assert schedule.kept == ("p5",) and schedule.resharded == ("p0", "p1", "p2", "p3", "p4")
    world, again = gathers(schedule)
    assert sum(s.num_bytes for s in world) == 240 and sum(s.num_bytes for s in again) == 200
    assert all(s.end_us - s.start_us == 10 + s.num_bytes / 10 for s in again)
    held = {m.point: m.secondary for m in simulate(schedule).moments if m.instruction is None}
    assert held[0] == 20 and held[4] == held[6] == 100 and held[12] == 0


def test_a_budget_decides_how_many_are_resharded_and_who_is_kept_instead() -> None:
    costs = CostModel(gather=Link(1.0, 0.1), secondary=Link(1.0, 4.0), launch_us=0.0)
    program = chain(16, costs=costs, reshard_to=4)  # secondary shards have 10 bytes, and take a tenth of the time to be gathered
    found = []
    for budget in range(128, 128 + 16 * 40, 20):
        bounds = Limits(memory_budget=budget, param_persistence_threshold=0)
        schedule, without = plan(program, bounds, check=verify), plan(replace(program, reshard_to=0), bounds)
        times = simulate(schedule).finish_us, simulate(without).finish_us
        assert simulate(schedule).peak.total <= budget and times[0] <= times[1] * (1 + 1e-9)
        found.append((len(schedule.resharded), len(schedule.kept), times[0] / times[1]))
    assert any(resharded >= 4 and kept >= 4 for resharded, kept, _ in found)
    assert min(ratio for _, _, ratio in found) < 0.75
    assert found[-1] == (0, 16, 1.0)  # room for all


def test_nothing_is_resharded_over_a_slower_link() -> None:
    assert layers(costs=CostModel(gather=Link(10.0, 10.0), secondary=Link(100.0, 1.0))).resharded == ()
    assert layers(costs=CostModel()).resharded  # nothing is known of the link: as good as any


def test_off_is_off() -> None:
    program = chain(4)
    schedule = plan(program, NOTHING_KEPT)
    text = zfx.dump.to_json(schedule)
    assert not schedule.resharded and "secondary" not in text and "reshard" not in text
    with pytest.raises(ValueError, match="can't be divided into smaller groups of 3"):
        replace(program, world_size=8, reshard_to=3)


def changed(schedule: Schedule, **fields: Any) -> set[str | None]:
    return {error.rule for error in violations(replace(schedule, **fields))}


def test_the_verifier_knows_resharding() -> None:
    schedule = layers()
    assert not list(violations(schedule))
    rows = list(schedule.instructions)
    first = next(i for i, row in enumerate(rows) if row.kind == "reshard")
    assert "resharding" in changed(schedule, resharded=())
    assert "resharding" in changed(schedule, resharded=(*schedule.resharded, "p5"))
    assert "resharding" in changed(schedule, program=replace(schedule.program, reshard_to=0))
    assert "resharding" in changed(schedule, instructions=tuple(rows[:first] + rows[first + 1 :]))
    assert "resharding" in changed(schedule, instructions=tuple(rows[: first + 1] + rows[first:]))
    moved = [rows[first], *rows[:first], *rows[first + 1 :]]  # before its gather
    assert "resharding" in changed(schedule, instructions=tuple(moved))
    in_flight = next(i for i, row in enumerate(rows) if row.kind == "wait")
    early = [*rows[:in_flight], rows[first], rows[in_flight], *(r for i, r in enumerate(rows) if i > in_flight and i != first)]
    assert {"resharding", "happens_before"} <= changed(schedule, instructions=tuple(early))
    late = replace(rows[first], point=13)
    assert "resharding" in changed(schedule, instructions=(*rows[:first], *rows[first + 1 :], late))
    from_all = tuple(replace(b, secondary=False) for b in schedule.buckets)
    assert "resharding" in changed(schedule, buckets=from_all)
    assert "resharding" in changed(schedule, buckets=tuple(replace(b, secondary=True) for b in schedule.buckets))
    strange = Instruction("reshard", 0, ("p0",), 0)
    assert "buckets" in changed(schedule, instructions=(strange, *rows))
    tight = replace(schedule.limits, memory_budget=simulate(schedule).peak.total - 1)
    assert changed(schedule, limits=tight) == {"memory_budget"}


# ---- what runs ------------------------------------------------------------------------------------------------------------


class Uneven(nn.Module):
    """Rows that 2 and 4 ranks can't share evenly, a weight that is read in two places, a 0-dim parameter, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 7)
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 7)
        self.mix = nn.Parameter(torch.randn(7, 7).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.lonely = nn.Parameter(torch.randn(1, 7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) @ self.mix
        x = x + self.down(torch.tanh(self.up(x))) * self.scale + self.frozen + self.lonely
        return (x @ self.mix) @ self.tokens.weight.t()


def made(**options: Any) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return zfx.compile(Uneven().double(), **{"limits": SMALL_BUCKETS, "costs": SLOW_WORLD, **options})


def batches(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(13, (2, 5), generator=generator) for _ in range(num)]


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().mean()


def trained(model: nn.Module, accumulate: int = 1, waits: bool = False) -> list[torch.Tensor]:
    """Losses, gradients and parameters of two optimizer steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    out = []
    for ids in (batches(2 * accumulate)[i : i + accumulate] for i in range(0, 2 * accumulate, accumulate)):
        for number, one in enumerate(ids):
            if waits and number < accumulate - 1:
                with model.zfx.no_sync():
                    loss(model, one).backward()
            else:
                found = loss(model, one)
                found.backward()
                out.append(found.detach())
        out += [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*out, *(p.full_tensor() for p in model.parameters())]


def assert_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs))


@contextmanager
def counted(channels: Channels) -> Iterator[Counter[str]]:
    """How many gathers go over each communicator, and how many bytes they bring."""
    seen: Counter[str] = Counter()
    wires = {"world": channels.gathers, "group": channels.secondary[2]}
    before = {name: wire.all_gather for name, wire in wires.items()}

    def counting(name: str) -> Any:
        def gather(outs: Any, ins: Any) -> Any:
            seen[name] += 1
            seen[f"{name} bytes"] += sum(t.numel() * t.element_size() for t in outs)
            return before[name](outs, ins)

        return gather

    for name, wire in wires.items():
        wire.all_gather = counting(name)  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        for wire in wires.values():
            del wire.all_gather


def assert_planned(model: nn.Module) -> None:
    """What one step gathers over each communicator, and what is live at each step, is what the schedule says."""
    (ids,) = batches(1)
    with counted(model._zfx_engine.blueprint.channels) as seen:  # type: ignore[union-attr]
        loss(model, ids).backward()
    for name, spans in zip(("world", "group"), gathers(model.zfx.schedules[-1])):
        assert (seen[name], seen[f"{name} bytes"]) == (len(spans), sum(s.num_bytes for s in spans)) and len(spans) > 1
    steps, _, _ = live_bytes(model, lambda: loss(model, ids).backward())
    wrong = [row for row in steps if row[1] != row[2]]
    assert steps and not wrong, wrong


def same_numbers(options: dict[str, Any], more: dict[str, Any]) -> nn.Module:
    found = trained(resharding := made(reshard_after_forward=2, **options), **more)
    assert all(s.resharded for s in resharding.zfx.schedules if s.program.turn is not None)
    assert_equal(found, trained(made(**options), **more))
    return resharding


def refusals() -> None:
    told = {3: "does not divide the 4 ranks", 0: "at least 2", "2": "at least 2", True: "FSDP2's True"}
    for wrong, words in told.items():
        with pytest.raises(ValueError, match=words):
            made(reshard_after_forward=wrong)
    with pytest.raises(ValueError, match="does not divide the 2 ranks"):
        made(reshard_after_forward=4, replicas=2)
    with pytest.raises(zfx.RankMismatch, match="reshard_after_forward=2"):
        made(reshard_after_forward=2 if dist.get_rank() else None, timeout=20.0)


def numbers_and_bytes() -> None:
    model = same_numbers({}, {})
    assert_planned(model)
    assert {"mix", "up.weight", "scale"} <= set(model.zfx.schedules[-1].resharded)
    code = model.zfx.graphs[-1]
    assert "zfx_runtime_reshard(" in code["forward"].code and "up_weight_secondary" in code["backward"].code
    refusals()


def test_four_ranks_in_groups_of_two() -> None:
    run_ranks(4, numbers_and_bytes, timeout=240)


def loops() -> None:
    """A graph that is walked twice, two forwards before their backwards, a copy, a change in between, all ranks for a group."""
    ids, more = batches(2)
    found = []
    for options in ({}, {"reshard_after_forward": 2}):
        model = made(**options)
        first, second = loss(model, ids), loss(model, more)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        with model.zfx.reference():
            loss(model, ids).backward()
        loss(copy.deepcopy(model), ids).backward()
        found.append([p.grad.full_tensor() for p in model.parameters() if p.grad is not None])
        late = loss(model, ids)
        with torch.no_grad():
            model.up.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="was modified by an inplace operation"):
            late.backward()
    assert_equal(*found)
    loss(everything := made(reshard_after_forward=4), ids).backward()
    assert not everything.zfx.schedules[-1].resharded


def real_collectives() -> None:
    """What runs on NCCL, here over gloo's own collectives: the same numbers."""
    wire_for, manager = zfx.channels.wire_for, zfx.wire._coalescing_manager
    zfx.channels.wire_for = CollectiveWire
    zfx.wire._coalescing_manager = lambda group, device, async_ops: manager(group, None, async_ops)  # as gloo knows it
    try:
        same_numbers({"timeout": 59.0}, {})
    finally:
        zfx.channels.wire_for, zfx.wire._coalescing_manager = wire_for, manager


def wider() -> None:
    for limits in (NOTHING_KEPT, Limits(max_reuse_distance=150, param_persistence_threshold=0)):
        model = made(reshard_after_forward=2, limits=limits)
        loss(model, batches(1)[0]).backward()
        assert_planned(model)
    same_numbers({"accumulate": 3}, {"accumulate": 3})
    same_numbers({"precision": zfx.Precision(torch.bfloat16)}, {})
    same_numbers({}, {"accumulate": 2, "waits": True})
    real_collectives()
    loops()


@pytest.mark.slow
def test_micro_batches_precision_no_sync_nccls_path_and_loops() -> None:
    run_ranks(4, wider, timeout=290)


def in_replicas() -> None:
    model = same_numbers({"replicas": 2}, {})
    assert_planned(model)


@pytest.mark.slow
def test_two_replicas_of_four_ranks_in_groups_of_two() -> None:
    run_ranks(8, in_replicas, timeout=290)


# ---- every other room -----------------------------------------------------------------------------------------------------


def test_drawings_and_figures_tell_of_it() -> None:
    on, off = layers(), plan(chain(6, costs=SLOW_WORLD), NOTHING_KEPT)
    page, lines = str(on), report(on)
    assert "4 ranks (resharded to 2)" in page and "200 B from secondary shards" in page and "reshard p0" in page
    assert "5 over the turn, 100 B in secondary shards: p0, p1, p2, p3, p4" in page and "from secondary shards: " in page
    assert "resharded            5 over the turn" in lines and "secondary 100 B" in lines
    graph = to_networkx(on)
    assert networkx.is_directed_acyclic_graph(graph) and graph.graph["reshard_to"] == 2
    reasons = Counter(facts["reason"] for _, _, facts in graph.edges(data=True))
    assert reasons["resharded"] == 5
    copies = [facts for _, facts in graph.nodes(data=True) if facts["kind"] == "reshard"]
    assert sum(facts["num_bytes"] for facts in copies) == 100 and all(facts["stream"] == "compute" for facts in copies)
    again = [facts for _, facts in graph.nodes(data=True) if facts["kind"] == "all_gather" and facts.get("secondary")]
    assert sum(facts["duration_us"] for facts in again) == sum(10 + facts["num_bytes"] / 10 for facts in again)
    trace = json.loads(to_trace(on))
    assert max(event["args"].get("secondary", 0) for event in trace["traceEvents"] if event["ph"] == "C") == 100
    assert sum(event.get("cat") == "reshard" for event in trace["traceEvents"]) == len(copies)
    story = tell(on)
    drawn = payload(story, certify(on))
    assert drawn["reshard_to"] == 2 and max(drawn["moments"]["secondary"]) == 100
    assert drawn["moments"]["kind"].count("h") == len(copies)
    said = " ".join(line for what in (*story.collectives, *story.lives) for line in what.why)
    assert "From secondary shards, between 2 ranks." in said and "a secondary shard of 20 B stays" in said
    for writer in (".dot", ".graphml", ".html"):
        assert writer_of(f"x{writer}")(on)
    figures, without = facts_of(on), facts_of(off)
    assert figures["resharded"] == {"count": 5, "bytes": 100} and figures["volume"]["secondary_bytes"] == 200
    assert figures["time"]["secondary_us"] < figures["time"]["gather_us"]
    assert figures["memory"]["forward_end"]["secondary_bytes"] == 100
    assert "secondary" not in json.dumps(without) and "reshard" not in json.dumps(without)
    found = diff(off, on)
    assert found["resharded"] == {"added": ["p0", "p1", "p2", "p3", "p4"]} and found["totals"]["secondary_bytes"] == (0, 200)


def test_presets_price_the_smaller_group() -> None:
    costs = costs_for("h100", "nvlink:8,ib", 64, reshard_to=8)
    assert costs.secondary == costs_for("h100", "nvlink:8,ib", 8).gather and costs_for("h100", "nvlink:8,ib", 64).secondary is None
    assert costs.gather_us(2**30, secondary=True) < costs.gather_us(2**30)
    ethernet = costs_for("h100", "nvlink:8,eth100", 64, reshard_to=8)
    assert ethernet.gather_us(2**30, secondary=True) < ethernet.gather_us(2**30) / 10
    with pytest.raises(ValueError, match="can't be divided into groups of 7"):
        costs_for("h100", "nvlink:8,ib", 64, reshard_to=7)


TARGET = """
import torch
from torch import nn

def net():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), torch.randn(4, 512)
"""


def test_zfx_plan_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "target.py").write_text(TARGET)
    target, schedule = f"{tmp_path / 'target.py'}:net", tmp_path / "schedule.json"
    options = ["--optimizer", "none", "--max-reuse-distance", "0", "--param-persistence-threshold", "0", "--json"]
    group = ["--reshard-after-forward", "8"]
    assert run(["plan", target, "--world-size", "16", *group, *options, "--out", str(schedule)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["reshard_to"] == 8 and answer["resharded"]["count"] > 3 and "resharded to 8" in answer["costs"]
    assert from_json(schedule.read_text()).resharded and run(["verify", str(schedule)]) == 0
    capsys.readouterr()
    assert run(["plan", target, "--world-size", "12", *group, *options]) == 2
    assert "does not divide the 12 ranks" in capsys.readouterr().out
    assert run(["plan", target, "--find-world-size", *group, *options]) == 0
    assert "reshard_to" not in json.loads(capsys.readouterr().out)  # one rank is enough
