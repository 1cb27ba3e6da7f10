"""A planning pass of one's own: launch no gather more than a few steps before it is waited for.

    torchrun --nproc-per-node 2 examples/custom_pass.py --steps-ahead 4

The pipeline launches each gather as late as the costs allow. On a link that is slow by those costs that can be early, and what has
arrived early takes memory. This pass puts a cap on it, as FSDP's rate limiter does: memory first, whatever the costs say. It needs
no torch: a pass sees a `Schedule` and returns one. How to write such a pass, and how to test it: docs/passes.md.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import zfx
from zfx.ir import Instruction, Schedule
from zfx.passes import PIPELINE, plan
from zfx.replay import replay


def prefetch_at_most(schedule: Schedule, *, num_steps: int) -> Schedule:
    """Launch every gather at most `num_steps` steps before it is waited for.

        step            0    1    2    3    4
        before          gather . . . . . .  wait
        num_steps = 2             gather .  wait

    A launch that moves goes to the end of its new point, or before the first launch or wait there; all else stays where it is.

    Guarantee: at no moment is more held than before, so limits that were respected still are: a gather that moves only starts later
    to take memory. Launches keep their order, since they and the waits were in order. Cost: linear.
    """
    waits = {i.bucket: i.point for i in schedule.instructions if i.kind == "wait"}
    order: list[Instruction] = []
    moved: deque[Instruction] = deque()
    for i in schedule.instructions:
        while moved and (moved[0].point < i.point or (moved[0].point == i.point and i.kind in ("all_gather", "wait"))):
            order.append(moved.popleft())
        if i.kind == "all_gather" and waits[i.bucket] - i.point > num_steps:
            moved.append(replace(i, point=waits[i.bucket] - num_steps))
        else:
            order.append(i)
    return replace(schedule, instructions=tuple(order))


def most_steps_ahead(schedule: Schedule) -> int:
    waits = {i.bucket: i.point for i in schedule.instructions if i.kind == "wait"}
    return max((waits[i.bucket] - i.point for i in schedule.instructions if i.kind == "all_gather"), default=0)


def mean_gathered_bytes(schedule: Schedule) -> float:
    """Over the steps, each while it runs."""
    held = [state.gathered_bytes + state.packing_bytes for state in replay(schedule) if state.step is not None]
    return sum(held) / len(held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps-ahead", type=int, default=4, help="most steps between a launch and its wait")
    num_steps = parser.parse_args().steps_ahead

    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh())))
    slow = zfx.Link(latency_us=1_000.0, bytes_per_us=100.0)
    model = zfx.compile(
        model,
        limits=zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0, prefetch_bucket_size=0),
        costs=zfx.CostModel(gather=slow, reduce=slow),
        passes=[*PIPELINE, partial(prefetch_at_most, num_steps=num_steps)],
    )
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        x = torch.randn(64, 512)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    capped = model.zfx.schedules[0]
    usual = plan(capped.program, capped.limits)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
        for name, schedule in (("usual", usual), ("capped", capped)):
            print(
                f"{name:8}gathers launched up to {most_steps_ahead(schedule)} steps ahead, "
                f"{mean_gathered_bytes(schedule):,.0f} bytes gathered on average"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
