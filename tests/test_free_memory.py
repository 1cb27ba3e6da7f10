"""`Limits(memory_budget="auto")`: every rank measures, all of them plan with the least, and no schedule ever says "auto"."""

from __future__ import annotations

import copy
import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx
import zfx.free_memory
from tests.harness import live_tensors, rank_outcomes, run_ranks
from zfx.dump import from_json, to_json
from zfx.free_memory import budget_bytes, free_bytes
from zfx.ir import Schedule
from zfx.passes import plan
from zfx.replay import replay
from zfx.shard import Layout
from zfx.testing import chain

AUTO = zfx.Limits(memory_budget="auto", max_reuse_distance=0, param_persistence_threshold=0)


# ---------------------------------------------------------------------------------------------------------------- without ranks


def test_the_shards_belong_to_the_budget_and_the_optimizer_and_the_margin_do_not() -> None:
    trained, frozen = Layout("w", (10, 7), torch.float32, 4), Layout("v", (3, 5), torch.bfloat16, 4)
    shards = 3 * 7 * 4 + 1 * 5 * 2  # bytes, padding included
    assert budget_bytes(100_000, [(trained, True), (frozen, False)]) == (100_000 + shards) * 95 // 100 - 2 * 3 * 7 * 4
    assert budget_bytes(1_000, []) == 950
    assert budget_bytes(0, [(trained, True)]) == 0


def test_a_rank_on_the_cpu_has_its_part_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_bytes(torch.device("cpu"), 1) < total
    monkeypatch.setattr(zfx.free_memory, "_available_bytes", lambda: 1_000)
    assert [free_bytes(torch.device("cpu"), n) for n in (1, 3, 8)] == [1_000, 333, 125]


def test_systems_without_proc_are_asked_otherwise_or_said_not_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_file(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", no_such_file)
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 30, "SC_PAGE_SIZE": 100}.__getitem__)
    assert free_bytes(torch.device("cpu"), 2) == 1_500

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    with pytest.raises(ValueError, match="give memory_budget in bytes"):
        free_bytes(torch.device("cpu"), 2)


@pytest.mark.parametrize("value", ["Auto", "", "80GB"])
def test_no_other_word_is_a_budget(value: str) -> None:
    with pytest.raises(ValueError, match="memory_budget must be a whole number"):
        zfx.Limits(memory_budget=value)  # type: ignore[arg-type]


def test_no_schedule_says_auto() -> None:
    for make in (lambda: Schedule(chain(2), AUTO), lambda: plan(chain(2), AUTO)):
        with pytest.raises(ValueError, match="a schedule needs a number of bytes"):
            make()
    text = to_json(plan(chain(2), zfx.Limits(memory_budget=12_345)))
    with pytest.raises(ValueError, match=r"schedule.limits.memory_budget must be a whole number, got 'auto'"):
        from_json(text.replace("12345", '"auto"'))


def test_without_a_process_group_a_number_is_asked_for() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="without a process group, give bytes"):
        zfx.compile(model, world_size=2, limits=AUTO)
    assert type(model) is nn.Linear
    zfx.compile(model, world_size=2, limits=replace(AUTO, memory_budget=10**6)).zfx.plan(torch.ones(2, 4))


# ------------------------------------------------------------------------------------------------------------------ on two ranks


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))


WHOLE = 6 * 32 * 32 * 4
FREE = {0: 90_000, 1: 60_000}


def train(limits: zfx.Limits) -> tuple[Schedule, list[torch.Tensor]]:
    model = zfx.compile(stack(), limits=limits, timeout=20)
    model(torch.full((4, 32), 1.0 + dist.get_rank())).square().mean().backward()
    (schedule,) = model.zfx.schedules
    assert copy.deepcopy(model).zfx.limits == model.zfx.limits == schedule.limits
    return schedule, [p.grad.full_tensor() for p in model.parameters()]


def different_memory() -> tuple[list[tuple[str, int]], Schedule, bool]:
    """What a probe that finds something else on each rank is asked, the schedule that comes of it, and whether the gradients are
    those without a budget."""
    asked = []

    def probe(device: torch.device, num_local_ranks: int) -> int:
        asked.append((device.type, num_local_ranks))
        return FREE[dist.get_rank()]

    real, zfx.free_memory.free_bytes = zfx.free_memory.free_bytes, probe
    try:
        schedule, gradients = train(AUTO)
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        zfx.compile(stack(), limits=AUTO)
    finally:
        zfx.free_memory.free_bytes = real
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    _, unbounded = train(replace(AUTO, memory_budget=None))
    return asked, schedule, all(torch.equal(a, b) for a, b in zip(gradients, unbounded, strict=True))


def most_bytes(schedule: Schedule) -> int:
    return max(state.total_bytes for state in replay(schedule))


def test_ranks_that_find_different_memory_plan_with_the_least() -> None:
    budget = (FREE[1] + WHOLE // 2) * 95 // 100 - 2 * WHOLE // 2
    ranks = run_ranks(2, different_memory, timeout=180)
    assert ranks[0][1] == ranks[1][1]
    for asked, schedule, same_gradients in ranks:
        assert asked == [("cpu", 2), ("cpu", 1)] and same_gradients
        assert schedule.limits.memory_budget == budget
        assert schedule == plan(schedule.program, replace(AUTO, memory_budget=budget))
        assert most_bytes(schedule) <= budget < most_bytes(plan(schedule.program, replace(AUTO, memory_budget=None)))


def really_measured() -> tuple[int, int]:
    """The budget that is found here, and how much more than before all tensors take when it is measured."""
    model = stack()
    gc.collect()
    before, seen = live_tensors()[1], []
    real = zfx.free_memory.free_bytes

    def looking(device: torch.device, num_local_ranks: int) -> int:
        seen.append(live_tensors()[1])
        return real(device, num_local_ranks)

    zfx.free_memory.free_bytes = looking
    try:
        model = zfx.compile(model, limits=AUTO)
    finally:
        zfx.free_memory.free_bytes = real
    assert model.zfx.limits.memory_budget is not None
    return model.zfx.limits.memory_budget, seen[0] - before


def test_memory_is_measured_once_the_whole_parameters_are_gone() -> None:
    (budget, more), (other, _) = run_ranks(2, really_measured)
    assert budget == other and 0 < budget < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert -WHOLE // 2 <= more < -WHOLE // 2 + 100  # a vote or two


def auto_here_a_number_there() -> None:
    zfx.compile(stack(), limits=AUTO if dist.get_rank() == 0 else replace(AUTO, memory_budget=10**9), timeout=20)


def no_answer_on_rank_1() -> None:
    def probe(device: torch.device, num_local_ranks: int) -> int:
        if dist.get_rank() == 1:
            raise ValueError("this system does not say")
        return 10**9

    real, zfx.free_memory.free_bytes = zfx.free_memory.free_bytes, probe
    try:
        zfx.compile(stack(), limits=AUTO, timeout=8)
    finally:
        zfx.free_memory.free_bytes = real


def next_job() -> bool:
    return bool(zfx.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2)).isfinite().all())


def test_ranks_that_do_not_measure_alike_are_told() -> None:
    for outcome in rank_outcomes(2, auto_here_a_number_there, timeout=60):
        assert outcome.error and outcome.error.type_name == "RankMismatch" and "memory_budget=auto" in outcome.error.message
    first, second = rank_outcomes(2, no_answer_on_rank_1, timeout=60)
    assert second.error and second.error.first_line == "ValueError: this system does not say"
    assert first.error and first.error.type_name == "RankMismatch" and first.error.attributes["ranks"] == (1,)
    assert run_ranks(1, next_job) == [True]  # what rank 0 still waits for does not hold it up


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_torch_keeps_unused_on_a_gpu_is_free() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before = free_bytes(device, 1)
    big = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    assert before - free_bytes(device, 1) >= big.numel()
    del big
    assert torch.cuda.memory_reserved(device) >= 256 * 2**20, "still with torch"
    assert free_bytes(device, 1) == before
