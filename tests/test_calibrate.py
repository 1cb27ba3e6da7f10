"""Calibration: what is measured is a sane cost model, equal on every rank, and comes back from its file exactly or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zfx
from tests.harness import run_ranks
from zfx.calibrate import _fit, calibrate, load_costs, save_costs
from zfx.costs import CostModel, Link, Rate
from zfx.ir import Schedule
from zfx.passes.duration import KINDS

COSTS = CostModel(Link(1.5, 1 / 3), Link(0.0, 7.0), (Rate("elementwise"), Rate("matmul.bfloat16", 0.1, 2.0, 3.0)), 1e-9, source="é")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(50, 24), nn.Linear(24, 48), nn.Linear(48, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.table(ids))))


# ---- the fit -----------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e4), st.floats(1e-3, 1e6), st.lists(st.integers(1, 2**40), min_size=2, max_size=8, unique=True))
def test_a_line_is_found_again(overhead: float, rate: float, sizes: list[int]) -> None:
    points = [(size, overhead + size / rate) for size in sizes]
    a, b = _fit(points)
    for size, us in points:
        assert a >= 0 and b > 0 and a + size / b == pytest.approx(us, rel=1e-3, abs=2e-3)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(1e-3, 1e9)), min_size=1, max_size=8))
def test_whatever_is_measured_gives_a_line_that_a_cost_model_takes(points: list[tuple[int, float]]) -> None:
    overhead, rate = _fit(points)
    assert math.isfinite(overhead) and math.isfinite(rate)
    Link(overhead, rate)


# ---- what is measured --------------------------------------------------------------------------------------------------


def test_alone_compute_is_measured_by_kind() -> None:
    rounds: list[tuple[int, int]] = []
    torch.set_num_threads(1)
    costs = calibrate(num_rounds=3, progress=lambda done, total, what: rounds.append((done, total)))
    assert rounds == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert costs.rates[0].kind == "elementwise" and {r.kind.split(".")[0] for r in costs.rates} == set(KINDS)
    assert (costs.gather, costs.launch_us) == (CostModel().gather, CostModel().launch_us), "no ranks, nothing to measure"
    product = costs.rate_of("matmul.float32")
    assert 1e3 < product.flops_per_us < 1e7, "between 1 GFLOP/s and 10 TFLOP/s on a core"
    assert costs.compute_us("random.float32", 0, 2**22) > costs.compute_us("elementwise.float32", 0, 2**22)
    assert "alone" in costs.source and torch.__version__ in costs.source


def on_ranks(folder: str) -> tuple[CostModel, Schedule, list[tuple[str, float, bool]], bool]:
    """Calibrate with a model's own graphs, and plan that model by the file that rank 0 wrote."""
    ids = torch.arange(12).view(3, 4)
    first = zfx.compile(Small())
    first.zfx.plan(ids)
    costs = calibrate(first.zfx.graphs, num_rounds=3)
    path = f"{folder}/{torch.distributed.get_rank()}.json"
    save_costs(costs, path)
    torch._dynamo.reset()
    model = zfx.compile(Small(), costs=path)
    model(ids).sum().backward()  # ranks would not agree on plans that differ
    schedule = model.zfx.schedules[-1]
    listed = {rate.kind for rate in costs.rates}
    steps = [(s.op, s.duration_us, any(s.op in kind for kind in listed)) for s in schedule.program.steps]
    return costs, schedule, steps, schedule.program.costs == load_costs(path) == costs


def test_ranks_measure_together_and_agree(tmp_path: Path) -> None:
    (costs, schedule, steps, same), (other, other_schedule, _, other_same) = run_ranks(2, on_ranks, str(tmp_path))
    assert costs == other and schedule == other_schedule and same and other_same
    assert costs.gather_us(2**26) + costs.busy_us(2**26) > costs.gather_us(2**14) + costs.busy_us(2**14) > 0
    assert costs.launch_us >= 0 and "2 ranks, gloo" in costs.source
    for op, duration_us, listed in steps:
        if any(product in op for product in ("mm", "gelu", "embedding")):
            assert listed and duration_us > 0, f"{op} was not timed"


def test_operators_take_what_was_measured_of_them() -> None:
    """Every operator's own rate gives its own median again, whatever limits it."""
    torch.set_num_threads(1)
    model = zfx.compile(Small(), world_size=2)
    model.zfx.plan(torch.arange(6))
    graphs = model.zfx.graphs
    costs = calibrate(graphs, num_rounds=1)
    own = [rate for rate in costs.rates if "(" in rate.kind]
    assert own and all(rate.overhead_us == 0.0 for rate in own)
    from zfx.passes.duration import duration_us, work_of

    found = 0
    for node in graphs[-1]["backward"].graph.nodes:
        work = work_of(node) if node.op == "call_function" else None
        if work is not None:
            rate = costs.rate_of(work.kind)
            assert rate.kind == work.kind and duration_us(node, costs) == rate.us(work.num_flops, work.num_bytes) > 0
            found += 1
    assert found > 5


# ---- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_exactly(tmp_path: Path) -> None:
    save_costs(COSTS, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == COSTS and load_costs(str(tmp_path / "costs.json")).source == "é"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["costs.json"], "nothing else is left"


def edited(**changes: Any) -> dict[str, Any]:
    from zfx.costs import _FORM

    data = {**_FORM.to_dict(COSTS), **changes}
    return {key: value for key, value in data.items() if value is not ...}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (edited(format="zfx.schedule"), 'not a zfx costs: "format" must be "zfx.costs", got \'zfx.schedule\''),
        ([], 'not a zfx costs: "format" must be'),
        (edited(version=3), "has version 3, this zfx reads up to 2: read it with a newer zfx"),
        (edited(version="1"), '"version" must be a whole number'),
        (edited(gather=...), r"costs lacks the fields \['gather'\]"),
        (edited(speed=1), r"costs has unknown fields \['speed'\]"),
        (edited(launch_us="fast"), "costs.launch_us must be a number, got 'fast'"),
        (edited(launch_us=-1), "costs: CostModel.launch_us must not be negative"),
        (edited(launch_us=True), "costs.launch_us must be a number, got True"),
        (edited(gather={"latency_us": 1, "bytes_per_us": 0}), "costs.gather: Link.bytes_per_us must be above 0"),
        (edited(rates=[]), "costs: CostModel.rates must name at least one"),
        (edited(rates={}), "costs.rates must be a list"),
        (edited(pack_threshold_bytes=1.5), "costs.pack_threshold_bytes must be a whole number"),
    ],
)
def test_other_files_are_refused_in_clear_words(data: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=words) as caught:
        load_costs(path)
    assert str(path) in str(caught.value), "the message names the file"
    with pytest.raises(ValueError, match=words):
        zfx.compile(Small(), 2, costs=path)


@pytest.mark.parametrize("text", ["", "{", '{"format": "zfx.costs", "format": "zfx.costs"}', "[" * 100_000, '{"format": NaN}'])
def test_what_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"costs\.json: .*(not a zfx costs|stands twice|is not JSON)"):
        load_costs(path)


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        zfx.compile(Small(), 2, costs=str(tmp_path / "none.json"))
    with pytest.raises(TypeError, match="CostModel or the path of one"):
        zfx.compile(Small(), 2, costs=3)  # type: ignore[arg-type]
