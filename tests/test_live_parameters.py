"""What is gathered at run time, counted storage by storage after every node, is what the schedule says, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import zfx
from tests.harness import run_ranks
from zfx.ir import Schedule
from zfx.passes import PIPELINE, REFINED, Pass
from zfx.passes.timeline import read, turn_of, write
from zfx.replay import replay
from zfx.runtime import GatheredMeter


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding tied to the head, blocks, an odd number of rows, a 0-dim parameter, a transposed weight that is read twice."""

    def __init__(self, dim: int = 21, layers: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(37, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.mix = nn.Parameter(torch.eye(dim))
        self.head = nn.Linear(dim, 37, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mixed = self.mix.t()
        x = self.emb(ids) @ mixed
        for block in self.blocks:
            x = block(x)
        return self.head(x @ mixed) * self.scale


LIMITS = {
    "nothing kept": zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0),
    "small kept": zfx.Limits(max_reuse_distance=0, param_persistence_threshold=100),
    "some kept": zfx.Limits(max_reuse_distance=8_000, param_persistence_threshold=0),
    "everything kept": zfx.Limits(),
    "tight": zfx.Limits(max_live_parameters=4_000, param_persistence_threshold=0),
    "small buckets": zfx.Limits(max_reuse_distance=0, prefetch_bucket_size=1_500, reduce_bucket_size=1_500),
}


def live_bytes(model: nn.Module, step: Callable[[], None]) -> tuple[list[tuple[str, int, int]], int, int]:
    """What is gathered while a compiled model runs a step: (step, measured, planned) bytes at each, and the two peaks in elements
    of 4 bytes, planned and measured."""
    for _ in range(2):  # the second step runs what the first captured
        seen: list[tuple[str, int]] = []
        with GatheredMeter() as meter:
            meter.on_node = lambda node, num_bytes: seen.append((node.meta.get("zfx_step"), num_bytes))  # noqa: B023
            step()
        assert meter.num_bytes() == 0, "something stayed gathered after the step"
    schedule = model.zfx.schedules[-1]
    states = list(replay(schedule))
    planned = {s.step.name: s.gathered_bytes + s.packing_bytes + s.secondary_bytes for s in states if s.step is not None}
    peak = max(s.num_elements for s in states)
    steps = [(name, num_bytes, planned[name]) for name, num_bytes in seen if name in planned]
    assert {name for name, _, _ in steps} == set(planned) - {"turn"}, "a step did not run"
    return steps, peak, max(num_bytes for _, num_bytes in seen) // 4


def measure(limits: zfx.Limits, grads: bool, passes: Sequence[Pass] = PIPELINE) -> tuple[list[tuple[str, int, int]], int, int]:
    torch.manual_seed(0)
    model = zfx.compile(Model(), limits=limits, passes=passes)

    def step() -> None:
        with torch.set_grad_enabled(grads):
            out = model(torch.arange(12).view(3, 4)).square().mean()
            if grads:
                out.backward()

    return live_bytes(model, step)


@pytest.mark.parametrize(("name", "world_size"), [
    *((name, 2) for name in LIMITS),
    ("tight", 3),
    *(pytest.param(name, 3, marks=pytest.mark.slow) for name in LIMITS if name != "tight"),
])
def test_live_bytes_are_those_of_the_schedule(name: str, world_size: int) -> None:
    for steps, planned_peak, measured_peak in run_ranks(world_size, measure, LIMITS[name], True):
        assert [(s, measured) for s, measured, _ in steps] == [(s, planned) for s, _, planned in steps]
        assert measured_peak <= planned_peak <= LIMITS[name].max_live_parameters


def one_of_the_backward_early(schedule: Schedule) -> Schedule:
    """Something that the backward gathers, once, is gathered before the turn, and so is kept."""
    timeline = read(schedule)
    turn, gathers = turn_of(timeline.program), timeline.gathers
    first = sum(g.wait <= turn for g in gathers)
    counts = Counter(i.parameter.name for g in gathers[first:] for i in g.members)
    index = next((i for i in range(first, len(gathers)) if all(counts[m.parameter.name] == 1 for m in gathers[i].members)), None)
    if index is None:
        return schedule
    early = replace(gathers[index], launch=turn, wait=turn)
    moved = write(replace(timeline, gathers=(*gathers[:first], early, *gathers[first:index], *gathers[index + 1 :])))
    assert len(moved.kept) > len(schedule.kept)
    return moved


def unusual() -> tuple[list[list[tuple[str, int, int]]], bool]:
    """Steps under lists of passes that place collectives as the usual list does not, and whether all gradients are equal; a job."""
    limits, seen, grads = zfx.Limits(max_reuse_distance=0, prefetch_bucket_size=600, param_persistence_threshold=0), [], []
    for passes in (PIPELINE, REFINED, [*PIPELINE, one_of_the_backward_early]):
        seen.append(measure(limits, True, passes)[0])
        torch.manual_seed(0)
        model = zfx.compile(Model(), limits=limits, passes=passes)
        model(torch.arange(12).view(3, 4)).square().mean().backward()
        grads.append([p.grad.to_local() for p in model.parameters()])
    return seen, all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other))


def test_other_lists_of_passes_hold_what_they_plan_and_change_no_bit() -> None:
    for seen, equal in run_ranks(2, unusual, timeout=200):
        assert equal and all(measured == planned for steps in seen for _, measured, planned in steps)


def test_inference_too() -> None:
    for steps, planned_peak, measured_peak in run_ranks(2, measure, LIMITS["tight"], False):
        assert [(s, measured) for s, measured, _ in steps] == [(s, planned) for s, _, planned in steps]
        assert measured_peak <= planned_peak <= 4_000


def refused(limit: int) -> tuple[int, int]:
    model = zfx.compile(Model(), limits=zfx.Limits(max_live_parameters=limit))
    with pytest.raises(zfx.InfeasibleBudget) as caught:
        model(torch.arange(4).view(1, 4))
    return caught.value.smallest_limit, caught.value.needed


def works(limit: int) -> int:
    torch.manual_seed(0)
    return max(max(0, measured) for _, _, measured in [measure(zfx.Limits(max_live_parameters=limit), True)])


def test_the_smallest_limit_works_and_one_less_does_not() -> None:
    smallest = run_ranks(2, refused, 10)[0][0]
    assert run_ranks(2, refused, smallest - 1)[0] == (smallest, smallest)
    assert run_ranks(2, works, smallest)[0] <= smallest
