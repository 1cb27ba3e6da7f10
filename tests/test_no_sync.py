"""Gradients that wait inside `no_sync()`: the same sums, one reduction, counted memory, and no step without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zfx
from tests.harness import rank_outcomes, run_ranks
from zfx import runtime
from zfx.replay import replay
from zfx.verify import verify

RELEASED = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)
Grads = dict[str, "torch.Tensor | None"]


class Model(nn.Module):
    """A tied weight, a 0-dim one, sizes that no world divides; `late` runs in the last micro-batch only, `early` in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.early, self.late, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: torch.Tensor, last: bool) -> torch.Tensor:
        h = torch.tanh(self.mid(self.emb(ids)))
        return self.head((self.late if last else self.early)(h) * self.scale)


def build(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def loss_of(model: Any, rank: int, micro: int, last: bool) -> torch.Tensor:
    """Summed over as many tokens as this micro-batch has, over a fixed number: each weighted by its own."""
    generator = torch.Generator().manual_seed(100 * rank + micro)
    ids = torch.randint(11, (2 + (micro + rank) % 3, 5), generator=generator)
    return F.cross_entropy(model(ids[:, :-1], last).flatten(0, 1).double(), ids[:, 1:].flatten(), reduction="sum") / 16


def expected(num_micro_batches: int, dtype: torch.dtype = torch.float64) -> Grads:
    """Each rank's micro-batches added up, then the mean over ranks, as DDP does it."""
    sums = []
    for rank in range(dist.get_world_size()):
        model = build(dtype)
        for k in range(num_micro_batches):
            loss_of(model, rank, k, k == num_micro_batches - 1).backward()
        sums.append({name: p.grad for name, p in model.named_parameters()})
    names = sums[0].keys()
    return {n: None if sums[0][n] is None else sum(s[n] for s in sums) / len(sums) for n in names}  # type: ignore[misc]


def whole(model: nn.Module) -> Grads:
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


def far(wanted: Grads, found: Grads) -> float:
    """The largest difference; infinite where one has a gradient and the other has none."""
    rows = [(wanted[n], found[n]) for n in wanted]
    if any((a is None) != (b is None) for a, b in rows):
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in rows if a is not None and b is not None)


@contextlib.contextmanager
def reductions() -> Iterator[list[int]]:
    """How many gradients each launch of a reduction took. To be entered before graphs are made."""
    seen: list[int] = []
    original = runtime.reduce_scatter

    def counting(plan: Any, bucket: int, grads: Any) -> Any:
        seen.append(len(grads))
        return original(plan, bucket, grads)

    runtime.reduce_scatter = counting
    try:
        yield seen
    finally:
        runtime.reduce_scatter = original


def window(model: Any, num_micro_batches: int, waits: Callable[[int], bool]) -> None:
    for k in range(num_micro_batches):
        with model.zfx.no_sync() if waits(k) else contextlib.nullcontext():
            loss_of(model, dist.get_rank(), k, k == num_micro_batches - 1).backward()


def numbers(limits: zfx.Limits, accumulate: int, num_micro_batches: int) -> tuple[list[float], list[int], set[str]]:
    """Differences in two windows, with everything but the last waiting and then with every other; gradients reduced in the first
    window's launches; what is left waiting."""
    with reductions() as counts:
        model = zfx.compile(build(), limits=limits, accumulate=accumulate)
        wanted, differences = expected(num_micro_batches), []
        window(model, num_micro_batches, lambda k: k < num_micro_batches - 1)
        differences.append(far(wanted, whole(model)))
        first = list(counts)
        model.zero_grad()
        window(model, num_micro_batches, lambda k: k % 2 == 0 and k < num_micro_batches - 1)
        differences.append(far(wanted, whole(model)))
        left = {model._zfx_engine.held.names[i] for i in model._zfx_engine.held.values}
    return differences, first, left


@pytest.mark.parametrize(("limits", "accumulate", "num_micro_batches"), [
    (RELEASED, 1, 4),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        (zfx.Limits(), 4, 4), (RELEASED, 3, 4), (RELEASED, 4, 3), (zfx.Limits(), 1, 2), (zfx.Limits(max_live_parameters=200), 2, 5),
    )),
])  # fmt: skip
def test_what_waited_is_reduced_once_and_changes_no_bit(limits: zfx.Limits, accumulate: int, num_micro_batches: int) -> None:
    for differences, counts, left in run_ranks(2, numbers, limits, accumulate, num_micro_batches):
        assert differences[0] == 0.0, "added up in another order than a single process does"
        assert differences[1] <= 1e-10
        # emb, mid.*, late.*, scale in the last backward; early.* wait, and are reduced after it, outside of its schedule
        assert sum(counts) == 6
        assert not left


def replicas() -> tuple[float, int]:
    """On 2 x 2 ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = zfx.compile(build(), mesh=mesh, limits=RELEASED)
    window(model, 3, lambda k: k < 2)
    return far(expected(3), whole(model)), len(model._zfx_engine.held.values)


@pytest.mark.slow
def test_with_replicas() -> None:
    for distance, left in run_ranks(4, replicas):
        assert distance <= 1e-10 and not left


@pytest.mark.slow
def test_three_ranks() -> None:
    for differences, counts, left in run_ranks(3, numbers, RELEASED, 1, 4):
        assert max(differences) <= 1e-10 and sum(counts) == 6 and not left


def odd_uses() -> list[str]:
    """One model after the other, on ranks with data of their own; what went wrong, in words."""
    wrong = []

    def check(name: str, wanted: Any, found: Any) -> None:
        if wanted != found:
            wrong.append(f"{name}: {found}, not {wanted}")

    rank = dist.get_rank()
    three = expected(3)
    model: Any = zfx.compile(build(), limits=RELEASED)

    losses = [loss_of(model, rank, k, k == 2) for k in range(3)]  # what counts is where the backward runs
    with model.zfx.no_sync(), model.zfx.no_sync():  # and it nests
        losses[0].backward()
        losses[1].backward()
        check("no .grad while waiting", True, all(p.grad is None for p in model.parameters()))
    losses[2].backward()
    check("three forwards first", 0.0, far(three, whole(model)))

    model.zero_grad()
    with model.zfx.no_sync():
        loss_of(model, rank, 0, False).backward()
        params = [p for n, p in model.named_parameters() if not n.startswith(("unused", "late"))]
        asked = torch.autograd.grad(loss_of(model, rank, 1, False), params)
        check("autograd.grad returns", len(params), sum(g is not None for g in asked))
    held = sum(float(v.abs().sum()) for v in model._zfx_engine.held.values.values())
    torch.autograd.grad(loss_of(model, rank, 1, False), params)
    check("autograd.grad takes nothing", held, sum(float(v.abs().sum()) for v in model._zfx_engine.held.values.values()))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.to_local().clone() for p in model.parameters()]
    try:
        optimizer.step()
        wrong.append("a step while gradients wait was allowed")
    except zfx.LoopError as error:
        check("says so", True, "no_sync" in str(error) and "mid" in str(error) + " mid")
    check("nothing moved", True, all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters())))
    model.zero_grad()
    window(model, 3, lambda k: k < 2)
    check("after dropping", 0.0, far(three, whole(model)))
    optimizer.step()

    model = zfx.compile(build(), limits=RELEASED)
    with model.zfx.reference():  # reduces at once
        window(model, 3, lambda k: k < 2)
    check("reference", True, far(three, whole(model)) <= 1e-10)
    with model.zfx.no_sync():
        with torch.no_grad():
            loss_of(model, rank, 0, False)
        model.eval()
        loss_of(model, rank, 0, False)
    check("evaluation holds nothing", {}, model._zfx_engine.held.values)
    try:
        with model.zfx.no_sync():
            raise KeyError
    except KeyError:
        check("left by an error", 0, model._zfx_engine.held.depth)

    model = zfx.compile(build(), limits=zfx.Limits(memory_budget=1_000_000))
    loss_of(model, rank, 0, False).backward()
    model.zero_grad()
    window(model, 3, lambda k: k < 2)  # planned anew, with room for what waits
    check("under a budget", 0.0, far(three, whole(model)))

    model = zfx.compile(build(torch.float32), limits=RELEASED, precision=zfx.Precision(torch.bfloat16))
    with model.zfx.no_sync():
        loss_of(model, rank, 0, False).backward()
        check("held wide", {torch.float32}, {v.dtype for v in model._zfx_engine.held.values.values()})
        loss_of(model, rank, 1, False).backward()
    loss_of(model, rank, 2, True).backward()
    waited = whole(model)
    model.zero_grad()
    window(model, 3, lambda k: False)
    check("precision", True, far(waited, whole(model)) < 2e-2)
    check("precision's gradients", {torch.float32}, {g.dtype for g in waited.values() if g is not None})
    return wrong


def test_odd_uses() -> None:
    assert run_ranks(2, odd_uses) == [[], []]


def one_rank_waits() -> None:
    model = zfx.compile(build(), limits=RELEASED, timeout=15)
    with model.zfx.no_sync() if dist.get_rank() == 0 else contextlib.nullcontext():
        loss_of(model, 0, 0, False).backward()
    loss_of(model, 0, 1, True).backward()


def test_ranks_that_do_not_wait_alike_are_told() -> None:
    for outcome in rank_outcomes(2, one_rank_waits):
        assert outcome.error and outcome.error.type_name == "RankMismatch" and "no_sync" in outcome.error.message, outcome


# ---- planned, without a process group ------------------------------------------------------------------------------------------


def planned(waits: bool, limits: zfx.Limits = RELEASED) -> Any:
    model: Any = zfx.compile(build(), 2, limits=limits)
    with model.zfx.no_sync() if waits else contextlib.nullcontext():
        return model.zfx.plan(torch.arange(12).view(3, 4), False)


def test_the_schedule_that_waits_has_no_reduction_and_counts_what_is_held() -> None:
    reduces, waits = planned(False), planned(True)
    verify(waits)
    assert [b.kind for b in waits.buckets] == ["all_gather"] * len(waits.buckets)
    assert [b.parameters for b in waits.buckets] == [b.parameters for b in reduces.buckets if b.kind == "all_gather"]
    assert waits.kept == reduces.kept
    trained = {name for step in reduces.program.steps for name in step.completes}
    held = sum(p.numel * 8 for p in reduces.program.parameters if p.name in trained)
    assert held == sum(p.numel() * 8 for n, p in build().named_parameters() if n in trained) > 0
    assert waits.program.static_bytes == reduces.program.static_bytes + held
    assert not any(step.completes for step in waits.program.steps)


def test_a_budget_counts_what_waits() -> None:
    def peak(schedule: Any) -> int:
        return max(state.total_bytes for state in replay(schedule))

    enough = peak(planned(False))
    with_budget = zfx.Limits(memory_budget=enough, max_reuse_distance=0, param_persistence_threshold=0)
    assert peak(planned(False, with_budget)) <= enough
    with pytest.raises(zfx.InfeasibleBudget) as caught:
        planned(True, with_budget)
    smallest = zfx.Limits(memory_budget=caught.value.smallest_limit, max_reuse_distance=0, param_persistence_threshold=0)
    assert enough < peak(planned(True, smallest)) <= caught.value.smallest_limit
