"""A compiled model leaves nothing behind: neither itself, nor tensors, however often one is made, trained and dropped."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from tests.harness import live_tensors, run_ranks
from zfx.ir import Program, Schedule
from zfx.runtime import Plan

NUM_TIMES = 3
NUM_STEPS = 3


class Small(nn.Module):
    """Large and small parameters, a tie, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(64, 128), nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        self.head = nn.Linear(128, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        x = self.embedding(ids)
        return self.head(x + self.inner(x))


def train_and_drop(keep: list[torch.Tensor] | None = None) -> weakref.ref[nn.Module]:
    import zfx

    model = zfx.compile(Small(), dist.get_world_size(), limits=zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(NUM_STEPS):
        loss = model(torch.arange(6) + step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if keep is not None:
        keep.append(next(iter(model.parameters())).detach())
    return weakref.ref(model)


def num_plans() -> int:
    """Captured graphs and schedules that are alive, with all that belongs to them."""
    return sum(type(thing) in (fx.Graph, fx.GraphModule, fx.Node, Program, Schedule, Plan) for thing in gc.get_objects())


def churn() -> tuple[list[bool], list[tuple[int, int]], list[int]]:
    """Whether each model died, (number, bytes) of live tensors, and plans alive: at the start and after each; a job.

    The start comes after a first model, which fills caches that are made once for the life of a process.
    """
    died, live, plans = [], [], []
    for _ in range(NUM_TIMES + 1):
        ref = train_and_drop()
        gc.collect()
        died.append(ref() is None)
        live.append(live_tensors())
        plans.append(num_plans())
    return died, live, plans


def first_model() -> tuple[int, int]:
    """Bytes of live tensors before and after the first model of a process group; a job."""
    gc.collect()
    before = live_tensors()[1]
    train_and_drop()
    gc.collect()
    return before, live_tensors()[1]


def leak() -> tuple[tuple[int, int], tuple[int, int]]:
    """What a leak of one parameter looks like; a job."""
    kept: list[torch.Tensor] = []
    train_and_drop()
    gc.collect()
    before = live_tensors()
    train_and_drop(kept)
    gc.collect()
    return before, live_tensors()


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_left_of_a_model(world_size: int) -> None:
    for died, live, plans in run_ranks(world_size, churn, timeout=200):
        assert all(died), f"models {[i for i, dead in enumerate(died) if not dead]} of {len(died)} are still alive"
        grown = any(a > b for a, b in zip(live[-1], live[0]))
        assert not grown, f"(tensors, bytes) after the first model {live[0]}, after {NUM_TIMES} more {live[-1]}"
        assert plans == [0] * len(plans), f"graphs, nodes and schedules that are alive after each model: {plans}"


def test_the_first_model_leaves_no_more_than_small_caches() -> None:
    ((before, after),) = run_ranks(1, first_model)
    assert after - before < 4096, f"{before} bytes before, {after} after: a parameter is {64 * 128 * 4} bytes"


def test_a_leak_would_be_noticed() -> None:
    ((before, after),) = run_ranks(1, leak)
    assert after[0] > before[0] and after[1] - before[1] >= 64 * 128 * 4
