"""One rank of `shaped_link.py`: measures the link, then trains the same model under several systems, step by step in turn."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workloads import WORKLOADS, Workload

import zfx

NOTHING_KEPT = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)


def fsdp2(workload: Workload) -> nn.Module:
    model, mesh = workload.model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ours(limits: zfx.Limits, costs: zfx.CostModel | None) -> Callable[[Workload], nn.Module]:
    return lambda workload: zfx.compile(workload.model(), limits=limits, costs=costs)


@dataclass
class Trainer:
    """A model under one system, and how long the parts of its steps took, in seconds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "backward": [], "update": [], "step": [], "cpu": [], "queued": []})

    @classmethod
    def of(cls, model: nn.Module) -> Trainer:
        return cls(model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], record: bool) -> float:
        dist.barrier()
        cpu, queued, times = time.process_time(), queued_s(), [time.perf_counter()]
        loss = self.model(*batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        if record:
            parts = [after - before for before, after in zip(times, times[1:])]
            for name, value in zip(self.seconds, [*parts, times[-1] - times[0], time.process_time() - cpu, queued_s() - queued]):
                self.seconds[name].append(value)
        return float(loss.detach())


def queued_s() -> float:
    """Seconds that this thread has waited for a core so far."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workload = WORKLOADS[args.workload]
    trainers = {
        "fsdp2": Trainer.of(fsdp2(workload)),
        "zfx nothing kept": Trainer.of(ours(NOTHING_KEPT, None)(workload)),
        "zfx default limits": Trainer.of(ours(zfx.Limits(), None)(workload)),
    }
    batches = workload.batches(rank, 2)
    for round in range(-args.warmup, args.rounds):
        for name, trainer in trainers.items():
            loss = trainer.step(batches[round % 2], record=round >= 0)
            if rank == 0:
                print(round, name, loss, {k: round_(v[-1]) for k, v in trainer.seconds.items() if v}, os.getloadavg()[0], flush=True)
    dist.barrier()

def round_(x): return float(f"{x:.3f}")

if __name__ == "__main__":
    main()
