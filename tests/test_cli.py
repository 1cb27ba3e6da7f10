"""The command line. What it prints is compared with what the library says of the same schedule; what a user can get wrong ends in
one sentence and an exit code, never in a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zfx
from zfx import dump
from zfx.cli import amount, run
from zfx.diff import diff
from zfx.errors import InfeasibleBudget
from zfx.estimate import OPTIMIZERS, estimate, facts, fits, least, optimizer_bytes
from zfx.ir import Limits, Parameter, Program, Schedule, Step
from zfx.passes import plan
from zfx.presets import costs_for
from zfx.simulate import simulate
from zfx.sweep import find_world_size, frontier
from zfx.testing import problems
from zfx.verify import verify, violations

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "examples" / "configs"
TARGET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, n=4, d=30):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

def net(batch=8):
    with torch.device("meta"):
        return Net(), torch.randn(batch, 30)

def keywords():
    return Net(), (), {"x": torch.randn(2, 30)}

def raises(): raise RuntimeError("no such\\nthing")
def nothing(): return None
def no_model(): return 3, torch.ones(1)
def odd_inputs():
    return Net(), 7
def wrong_shape():
    return Net(), torch.ones(2, 31)
def no_tensor():
    return Net(), ("text",)

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else x

def branch():
    return Branch(), torch.ones(2, 3)
def frozen():
    net = Net()
    net.requires_grad_(False)
    return net, torch.ones(2, 30)

not_callable = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    (path / "models.py").write_text(TARGET)
    (path / "broken.py").write_text("import does_not_exist\n")
    (path / "text.json").write_text("not json")
    (path / "list.json").write_text("[1]")
    (path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (path / "empty.json").write_text("{}")
    (path / "strange.json").write_text('{"model_type": "nobody_knows"}')
    (path / "vision.json").write_text('{"model_type": "vit"}')
    return path


def zfx_command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "8"}  # as under torchrun: must not matter
    command = [sys.executable, "-m", "zfx", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)


def planned(folder: Path, *arguments: str) -> dict[str, Any]:
    done = zfx_command("plan", *arguments, "--json", cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    return {"exit_code": done.returncode, **json.loads(done.stdout)}


@pytest.fixture(scope="module")
def net(folder: Path) -> dict[str, Any]:
    """One plan of the small net as a process of its own makes it; its schedule is in a.json."""
    return planned(folder, "models:net", "--world-size", "64", "--out", "a.json", "--out", "a.dot")


def captured(world_size: int = 4, target: str = "net") -> Any:
    names: dict[str, Any] = {}
    exec(TARGET, names)
    model, x = names[target]()
    return zfx.compile(model, world_size=world_size).zfx.capture(x)


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_the_plan_is_what_the_library_plans(folder: Path, net: dict[str, Any]) -> None:
    names: dict[str, Any] = {}
    exec(TARGET, names)
    model, x = names["net"]()
    schedule = dump.from_json((folder / "a.json").read_text())
    model = zfx.compile(model, world_size=64, limits=schedule.limits, costs=costs_for("h100", "nvlink:8,ib", 64))
    assert model.zfx.plan(x) == schedule
    assert (folder / "a.dot").read_text() == dump.to_dot(schedule)


def test_the_numbers_are_those_of_the_schedule(folder: Path, net: dict[str, Any]) -> None:
    schedule = dump.from_json((folder / "a.json").read_text())
    verify(schedule)
    simulation = simulate(schedule)
    memory, clock = net["memory"], net["time"]
    assert net["exit_code"] == 0 and net["fits"] and net["world_size"] == 64 == schedule.program.world_size
    for key, moment in (
        ("peak", simulation.peak),
        ("forward_end", simulation.forward_end),
        ("backward_end", simulation.backward_end),
    ):
        row = memory[key]
        assert row["total_bytes"] == moment.total
        assert row["total_bytes"] == sum(row[f"{k}_bytes"] for k in ("parameters", "packing", "gradients", "activations", "shards"))
        assert row["total_bytes"] <= memory["peak"]["total_bytes"] <= net["limits"]["memory_budget"]
    assert (clock["step_us"], clock["exposed_us"]) == (simulation.finish_us, simulation.exposed_us)
    assert clock["step_us"] == pytest.approx(clock["compute_us"] + clock["launch_us"] + clock["exposed_us"])
    assert net["volume"]["gathered_bytes"] == sum(s.num_bytes for s in simulation.spans if s.kind == "all_gather")
    assert net["certificate"]["time"]["achieved"] == simulation.finish_us
    assert all(net["certificate"][what]["ratio"] >= 1 for what in ("time", "volume", "peak"))


def test_optimizer_state_and_budget_follow_the_stated_rules(net: dict[str, Any]) -> None:
    shards = 4 * (1 * 30 + 1)  # 30 rows of 30 and 30 of 1 on 64 ranks: one row of each on every rank, padding included
    assert net["memory"]["optimizer_bytes"] == 2 * 4 * shards
    assert net["memory"]["total_bytes"] == net["memory"]["peak"]["total_bytes"] + 2 * 4 * shards
    assert net["limits"]["memory_budget"] == int(80e9 * 0.9) - 2 * 4 * shards
    program = captured().program(64, zfx.CostModel())
    assert optimizer_bytes(captured(), program, OPTIMIZERS["adamw-fp32"]) == 12 * shards
    assert optimizer_bytes(captured(), program, OPTIMIZERS["none"]) == 0
    assert optimizer_bytes(captured(), captured().program(1, zfx.CostModel()), OPTIMIZERS["adamw"]) == 2 * 4 * 4 * (900 + 30)


def test_a_budget_that_is_one_byte_short_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    command = ["plan", "models.py:net", "--world-size", "8", "--json"]
    assert run([*command, "--memory-budget", "1000"]) == 1
    answer = json.loads(capsys.readouterr().out)
    smallest = answer["error"]["smallest_limit"]
    assert not answer["fits"] and answer["error"]["limit_name"] == "memory_budget" and answer["error"]["needed"] <= smallest
    assert answer["memory"]["peak"]["total_bytes"] == smallest  # the schedule that holds least
    assert run([*command, "--memory-budget", str(smallest - 1)]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["smallest_limit"] == smallest
    assert run([*command, "--memory-budget", str(smallest)]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["peak"]["total_bytes"] <= smallest


def test_tables_say_what_the_json_says(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    command = ["plan", "models.py:net", "--world-size", "64", "--accumulate", "3"]
    assert run([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert run(command) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for value in (answer["memory"]["peak"]["total_bytes"], answer["memory"]["optimizer_bytes"], answer["volume"]["gathered_bytes"]):
        assert zfx.text.human_bytes(value) in out
    for row in ("step_us", "exposed_us", "compute_us"):
        assert zfx.text.human_time(answer["time"][row]) in out
    assert "end of forward" in out and "end of backward" in out and answer["memory"]["peak"]["step"] in out


def test_no_backward(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    for target in ("models:net", "models:frozen"):
        assert run(["plan", target, "--world-size", "8", "--no-backward", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["volume"]["reduced_bytes"] == 0 == answer["memory"]["optimizer_bytes"]
        assert answer["memory"]["backward_end"] is None
        assert answer["volume"]["gathered_bytes"] == 4 * 4 * 32 * 31  # 30 rows on 8 ranks are 32, each of 30 + 1 elements


def test_replicas(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    out = folder / "replicas.json"
    assert run(["plan", "models:net", "-n", "16", "--replicas", "2", "--json", "--out", str(out)]) == 0
    answer, schedule = json.loads(capsys.readouterr().out), dump.from_json(out.read_text())
    assert (answer["world_size"], answer["replicas"], schedule.program.num_shards) == (16, 2, 8)
    assert schedule.program.costs == costs_for("h100", "nvlink:8,ib", 16, 2)
    assert answer["volume"]["all_reduced_bytes"] == 4 * 4 * 4 * 31 and answer["time"]["all_reduce_us"] > 0  # 4 of 32 rows a rank
    assert run(["plan", "models:net", "-n", "16", "--replicas", "2"]) == 0
    shown = capsys.readouterr().out
    assert "on 16 ranks, 2 replicas of 8;" in shown and "all-reduced" in shown
    assert run(["plan", "models:net", "--find-world-size", "--replicas", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 4
    assert run(["plan", "models:net", "-n", "16", "--replicas", "3"]) == 2
    assert "--world-size 16 can't be divided among --replicas 3" in capsys.readouterr().err
    assert run(["diff", str(out), str(out), "--exit-code"]) == 0 == run(["verify", str(out)])


# ---- capture ---------------------------------------------------------------------------------------------------------


class TinyLM(nn.Module):
    """What torch traces differently on meta tensors: attention, a buffer, and the loss of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.head = nn.Linear(16, 50, bias=False)
        self.register_buffer("scale", torch.ones(16))
        self.plain = torch.ones(16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale + self.plain
        q, k, v = (p.unflatten(-1, (2, 8)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_model_on_meta_is_planned_like_a_real_one() -> None:
    real = zfx.compile(TinyLM(), world_size=3).zfx.plan(torch.zeros(2, 9, dtype=torch.long))
    with torch.device("meta"):
        model, ids = TinyLM(), torch.zeros(2, 9, dtype=torch.long)
    compiled = zfx.compile(model, world_size=3)
    assert compiled.zfx.plan(ids) == real
    assert any("nll_loss_backward" in step.op for step in real.program.steps)
    assert any("attention" in step.op for step in real.program.steps)
    assert compiled.scale.is_meta and compiled.plain.is_meta  # type: ignore[union-attr]


@pytest.mark.parametrize("world_size", [2, 3, 8, 100])
def test_one_capture_serves_every_world_size(world_size: int) -> None:
    costs = costs_for("a100", "nvlink:8,ib", world_size)
    names: dict[str, Any] = {}
    exec(TARGET, names)
    model, x = names["net"]()
    schedule = zfx.compile(model, world_size=world_size, costs=costs).zfx.plan(x)
    assert captured(7).program(world_size, costs) == schedule.program


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def test_the_frontier_keeps_every_budget_and_ends_at_the_least() -> None:
    found = captured()
    program = found.program(8, costs_for("h100", "nvlink:8,ib", 8))
    points = list(frontier(program, Limits(max_live_parameters=2**62), 1000, 5))
    assert len(points) == 5 and points[0].schedules[0].limits.memory_budget is None
    budgets = [p.schedules[0].limits.memory_budget for p in points[1:]]
    assert budgets == sorted(budgets, reverse=True)
    for point, budget in zip(points[1:], budgets):
        assert budget is not None and point.peak_bytes <= budget
    assert budgets[-1] == least(program, 0).peak_bytes
    assert fits(program, Limits(memory_budget=budgets[-1] - 1)) is not None


def test_the_sweep_is_drawn(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    assert run(["plan", "models.py:net", "--world-size", "8", "--sweep", "--points", "4", "--out", "f.svg", "--out", "f.png"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(("yes", "no")) for line in (line.rstrip() for line in lines)) == 4
    assert "<svg" in (folder / "f.svg").read_text() and (folder / "f.png").read_bytes().startswith(b"\x89PNG")


@settings(max_examples=200)
@given(
    st.integers(1, 10_000),
    st.integers(0, 500),
    st.integers(0, 1_000),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from([8, 60, 4096]),
)
def test_the_fewest_ranks_are_those_of_a_linear_search(size: int, others: int, budget: int, node: int, most: int) -> None:
    def program_at(ranks: int) -> Program:
        static = -(-size // ranks)
        return Program((Parameter("w", 1, 1),), (Step("s", "forward", reads=("w",), other_bytes=others),), ranks, (), static)

    limits = Limits(memory_budget=budget)
    found = find_world_size(program_at, lambda program: limits, node, most)
    candidates = [n for n in range(1, most + 1) if (n & (n - 1) == 0 and n < node) or n % node == 0]
    enough = [n for n in candidates if fits(program_at(n), limits) is None]
    assert found.world_size == (enough[0] if enough else None)
    if found.refused is not None:
        assert isinstance(found.refused[1], InfeasibleBudget) and fits(program_at(found.refused[0]), limits) is not None


def test_find_world_size_fits_and_one_node_fewer_does_not(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(folder)
    found = captured()

    def needed(ranks: int) -> int:
        program = found.program(ranks, zfx.CostModel())
        return least(program, 0).peak_bytes + optimizer_bytes(found, program, OPTIMIZERS["adamw"])

    memory = needed(6)
    device = f"custom:flops=1e12,bandwidth=1e12,memory={memory}"
    command = ["plan", "models.py:net", "--device", device, "--network", "pcie4:2,ib", "--margin", "0", "--json"]
    assert run([*command, "--find-world-size"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] and answer["world_size"] == next(n for n in (1, 2, 4, 6) if needed(n) <= memory) > 2
    assert run([*command, "--world-size", str(answer["world_size"])]) == 0
    assert run([*command, "--world-size", str(answer["world_size"] - 2)]) == 1
    capsys.readouterr()
    tiny = device.replace(str(memory), "5000")
    assert run([*command[:3], tiny, *command[4:], "--find-world-size"]) == 1
    assert "no number of ranks is enough" in json.loads(capsys.readouterr().out)["error"]["message"]


# ---- show, verify, diff ----------------------------------------------------------------------------------------------


def test_verify_lists_every_violation(folder: Path, net: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    schedule = dump.from_json((folder / "a.json").read_text())
    broken = replace(schedule, instructions=tuple(i for i in schedule.instructions if i.kind not in ("wait", "release")))
    dump.save(broken, folder / "broken.json")
    assert run(["verify", str(folder / "a.json")]) == 0
    assert "valid" in capsys.readouterr().out
    done = zfx_command("verify", "broken.json", cwd=folder)
    found = [str(v) for v in violations(broken)]
    assert done.returncode == 1 and len(found) > 3
    assert done.stdout.splitlines()[:-1] == found
    assert run(["verify", str(folder / "broken.json"), "--json"]) == 1
    assert [row["message"] for row in json.loads(capsys.readouterr().out)["violations"]] == found


def test_show_prints_the_schedule(folder: Path, net: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    schedule = dump.from_json((folder / "a.json").read_text())
    assert run(["show", str(folder / "a.json")]) == 0
    assert capsys.readouterr().out == f"{schedule}\n"
    assert run(["show", str(folder / "a.json"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["memory"]["peak"] == net["memory"]["peak"] and shown["time"] == net["time"]


def test_diff_says_what_changed(folder: Path, net: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    old = dump.from_json((folder / "a.json").read_text())
    new = plan(old.program, replace(old.limits, max_reuse_distance=0, param_persistence_threshold=0))
    dump.save(new, folder / "b.json")
    assert run(["diff", str(folder / "a.json"), str(folder / "a.json"), "--exit-code"]) == 0
    assert "the same" in capsys.readouterr().out
    assert run(["diff", str(folder / "a.json"), str(folder / "b.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["differences"]
    assert set(found["limits"]) == {"max_reuse_distance", "param_persistence_threshold"}
    assert found["kept"] == {"removed": [name for name in old.kept if name not in new.kept]}
    before, after = (sum(s.num_bytes for s in simulate(x).spans if s.kind == "all_gather") for x in (old, new))
    assert found["totals"]["gathered_bytes"] == [before, after]
    assert {row["parameter"] for row in found["moved"]["all_gather"]} >= set(old.kept) - set(new.kept)
    assert run(["diff", str(folder / "a.json"), str(folder / "b.json"), "--exit-code"]) == 1
    assert "max_reuse_distance" in capsys.readouterr().out


@settings(max_examples=100)
@given(problems(), problems(), st.booleans())
def test_diff_is_empty_for_equal_schedules_only(one: Any, other: Any, same_program: bool) -> None:
    schedules = []
    for program, limits in (one, (one[0] if same_program else other[0], other[1])):
        try:
            schedules.append(plan(program, limits))
        except InfeasibleBudget:
            schedules.append(Schedule(program, limits))
    a, b = schedules
    assert (diff(a, b) == {}) == (a == b)
    assert diff(a, a) == {} and bool(diff(b, a)) == bool(diff(a, b))
    if same_program and "limits" in diff(a, b):
        assert set(diff(a, b)["limits"]) == {n for n in Limits.__slots__ if getattr(a.limits, n) != getattr(b.limits, n)}


def test_measured_costs_are_planned_with(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    assert run(["calibrate", "--rounds", "1", "--out", "costs.json"]) == 0
    assert "wrote costs.json" in capsys.readouterr().out
    from zfx.calibrate import load_costs

    costs = load_costs("costs.json")
    command = ["plan", "models.py:net", "--world-size", "2", "--costs", "costs.json", "--out", "measured.json", "--json"]
    assert run(command) == 0
    assert dump.from_json((folder / "measured.json").read_text()).program.costs == costs
    assert json.loads(capsys.readouterr().out)["costs"] == costs.source


# ---- what a user can get wrong ---------------------------------------------------------------------------------------

N = ("--world-size", "8")
WRONG: dict[str, tuple[int, tuple[str, ...], str]] = {
    "unknown command": (2, ("plane",), "plane"),
    "unknown option": (2, ("plan", "models:net", "--wide"), "--wide"),
    "no ranks": (2, ("plan", "models:net"), "--world-size"),
    "two answers": (2, ("plan", "models:net", *N, "--find-world-size"), "--find-world-size"),
    "zero ranks": (2, ("plan", "models:net", "--world-size", "0"), "at least 1"),
    "ranks in words": (2, ("plan", "models:net", "--world-size", "many"), "--world-size"),
    "unknown device": (2, ("plan", "models:net", *N, "--device", "h1000"), "h100"),
    "unknown network": (2, ("plan", "models:net", *N, "--network", "string"), "string"),
    "too small a network": (2, ("plan", "models:net", *N, "--network", "nvlink:4"), "reaches 4"),
    "odd device": (2, ("plan", "models:net", *N, "--device", "custom:flops=nan"), "nan"),
    "nan margin": (2, ("plan", "models:net", *N, "--margin", "nan"), "--margin"),
    "nan budget": (2, ("plan", "models:net", *N, "--memory-budget", "nan"), "nan"),
    "negative budget": (2, ("plan", "models:net", *N, "--memory-budget", "-5"), "-5"),
    "infinite limit": (2, ("plan", "models:net", *N, "--max-live-parameters", "inf"), "inf"),
    "unknown optimizer": (2, ("plan", "models:net", *N, "--optimizer", "adam"), "adamw"),
    "unknown dtype": (2, ("plan", "models:net", *N, "--dtype", "int4"), "bfloat16"),
    "option without use": (2, ("plan", "models:net", *N, "--seq", "9"), "--seq"),
    "checkpoint without use": (2, ("plan", "models:net", *N, "--checkpoint"), "--checkpoint"),
    "one point": (2, ("plan", "models:net", *N, "--sweep", "--points", "1"), "--points"),
    "unknown suffix": (2, ("plan", "models:net", *N, "--out", "a.txt"), "a.txt"),
    "no folder": (2, ("plan", "models:net", *N, "--out", "nowhere/a.json"), "nowhere"),
    "picture of one plan": (2, ("plan", "models:net", *N, "--out", "a.png"), "a.png"),
    "unknown example": (2, ("plan", "llama", *N), "llama"),
    "unknown module": (2, ("plan", "nowhere:net", *N), "nowhere"),
    "unknown file": (2, ("plan", "nowhere.py:net", *N), "nowhere.py"),
    "file that can't be run": (2, ("plan", "broken.py:net", *N), "does_not_exist"),
    "unknown function": (2, ("plan", "models:nets", *N), "nets"),
    "no function": (2, ("plan", "models:not_callable", *N), "not_callable"),
    "odd target": (2, ("plan", "models:", *N), "models:"),
    "function that raises": (2, ("plan", "models:raises", *N), "no such"),
    "function that returns nothing": (2, ("plan", "models:nothing", *N), "NoneType"),
    "function without a model": (2, ("plan", "models:no_model", *N), "int"),
    "odd inputs": (2, ("plan", "models:odd_inputs", *N), "int"),
    "inputs of a wrong shape": (1, ("plan", "models:wrong_shape", *N), "capture"),
    "inputs of a wrong type": (1, ("plan", "models:no_tensor", *N), "capture"),
    "a branch on data": (1, ("plan", "models:branch", *N), "capture"),
    "nothing to train": (1, ("plan", "models:frozen", *N), "--no-backward"),
    "no config": (2, ("plan", "hf:nowhere.json", *N), "nowhere.json"),
    "config that is no JSON": (2, ("plan", "hf:text.json", *N), "text.json"),
    "config that is a list": (2, ("plan", "hf:list.json", *N), "list.json"),
    "config without a type": (2, ("plan", "hf:empty.json", *N), "model_type"),
    "config of an unknown type": (2, ("plan", "hf:strange.json", *N), "nobody_knows"),
    "config of no language model": (2, ("plan", "hf:vision.json", *N), "vit"),
    "no costs": (2, ("plan", "models:net", *N, "--costs", "nowhere.json"), "nowhere.json"),
    "show: no file": (2, ("show", "nowhere.json"), "nowhere.json"),
    "show: a folder": (2, ("show", "."), "."),
    "show: no text": (2, ("show", "bytes.json"), "bytes.json"),
    "show: no JSON": (2, ("show", "text.json"), "text.json"),
    "verify: no schedule": (2, ("verify", "empty.json"), "not a zfx schedule"),
    "diff: no schedule": (2, ("diff", "list.json", "list.json"), "not a zfx schedule"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_end_in_a_sentence(case: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    code, arguments, named = WRONG[case]
    monkeypatch.chdir(folder)
    assert run(arguments) == code
    told = capsys.readouterr()
    assert named in told.err and "Traceback" not in told.err and not told.out
    assert run([*arguments, "--json"]) == code
    error = json.loads(capsys.readouterr().out)
    assert error["exit_code"] == code and named in error["error"]["message"]


def test_without_the_extra_one_line_says_so(folder: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from zfx.__main__ import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr == "zfx: the command line needs typer: pip install 'zfx[cli]'\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("12", 12),
        ("1_000", 1000),
        ("1e9", 10**9),
        ("80GB", 80 * 10**9),
        ("80 GiB", 80 * 2**30),
        ("1.5k", 1500),
        ("2b", 2),
    ],
)
def test_amounts(text: str, value: int) -> None:
    assert amount(text) == value


# ---- published models --------------------------------------------------------------------------------------------------

PUBLISHED = {"llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "mixtral-8x7b": 46_702_792_704}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_have_the_published_sizes(name: str, monkeypatch: Any) -> None:
    from zfx.target import load

    monkeypatch.chdir(ROOT)
    model = load(name, seq=8).model
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def cut(name: str, layers: int, folder: Path) -> Path:
    """The same config with fewer layers."""
    path = folder / f"{name}-{layers}.json"
    path.write_text(json.dumps({**json.loads((CONFIGS / f"{name}.json").read_text()), "num_hidden_layers": layers}))
    return path


def test_experts_are_captured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cut("mixtral-8x7b", 1, folder)
    assert run(["plan", f"hf:{path}", "--seq", "64", "--world-size", "64", "--json", "--out", str(folder / "m.json")]) == 0
    steps = dump.from_json((folder / "m.json").read_text()).program.steps
    experts = [s for s in steps if "_grouped_mm" in s.op]
    assert {name for s in experts for name in s.reads} >= {
        "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
    }  # fmt: skip
    assert all(s.duration_us > 0 for s in experts)


def test_checkpointing_trades_memory_for_time(folder: Path) -> None:
    """Recomputed attention is wrapped, to replay random numbers; it costs what it costs unwrapped."""
    from zfx.target import load

    path, programs = cut("llama-3-8b", 2, folder), []
    for enable in (False, True):
        found = load(f"hf:{path}", seq=1024)  # long enough for flops to decide how long attention takes
        if enable:
            found.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        found.model.train()
        model = zfx.compile(found.model, world_size=64)
        programs.append(model.zfx.capture(**found.kwargs).program(64, costs_for("h100", "nvlink:8,ib", 64)))
    plain, recomputed = programs
    turns = [program.steps[program.turn or 0].other_bytes for program in programs]
    assert turns[1] < turns[0] and sum(s.duration_us for s in recomputed.steps) > sum(s.duration_us for s in plain.steps)
    unwrapped = {s.duration_us for s in plain.steps if s.phase == "forward" and "attention" in s.op}
    wrapped = [s for s in recomputed.steps if "rng_state" in s.op]
    assert len(wrapped) == 4 and {s.phase for s in wrapped} == {"forward", "backward"}
    assert {s.duration_us for s in wrapped} == unwrapped and min(unwrapped) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_on_many_ranks(name: str, folder: Path) -> None:
    """Volume and shards by arithmetic: every schedule gathers everything at least once, and holds its share of all of it."""
    peaks = []
    for ranks in (8, 64, 512, 1024):
        answer = planned(ROOT, name, "--seq", "2048", "--world-size", str(ranks), "--checkpoint", "--memory-budget", "none",
                         "--max-live-parameters", "3e9")  # fmt: skip
        assert answer["exit_code"] == 0
        whole = 2 * PUBLISHED[name]
        assert answer["volume"]["gathered_bytes"] >= whole and answer["volume"]["reduced_bytes"] == whole
        assert answer["memory"]["peak"]["shards_bytes"] >= 2 * whole // ranks
        peaks.append(answer["memory"]["total_bytes"])
    assert peaks == sorted(peaks, reverse=True)


def test_estimates_add_up_over_micro_batches() -> None:
    program = captured().program(8, costs_for("h100", "nvlink:8,ib", 8))
    limits = Limits()
    for accumulate in (1, 2, 5):
        found = estimate(program, limits, 0, accumulate)
        assert sum(found.repeats) == accumulate == facts(found)["accumulate"]
        by_hand = [s for s, count in zip(found.schedules, found.repeats) for _ in range(count)]
        assert found.step_us == pytest.approx(sum(simulate(s).finish_us for s in by_hand))
        assert found.peak_bytes == max(simulate(s).peak.total for s in by_hand)
