"""One rank of `shaped_link.py`: measures the link, calibrates, then trains one model under several systems, step by step in turn.

Each step is timed from a barrier, in three parts: forward, backward, update (gradient clipping, AdamW, zero_grad). Turns make a
slow spell of the machine hit all systems alike. Rank 0 writes what it measured as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm
from wire_costs import Wire, measure_wire
from workloads import WORKLOADS, Workload

import zfx
from zfx.calibrate import calibrate
from zfx.certificate import certify
from zfx.costs import CostModel

LIMITS = {"nothing kept": zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0), "default limits": zfx.Limits()}
TIMEOUT_S = 300.0  # a rank may be slow: nothing here may depend on how slow


@dataclass
class Trainer:
    """A model under one system, and the seconds that its steps took."""

    model: nn.Module
    optimizer: torch.optim.Optimizer = field(init=False)
    seconds: dict[str, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.seconds = {name: [] for name in ("forward", "backward", "update", "step", "cpu", "queued")}
        self.sent_bytes: list[int] = []

    def step(self, batch: tuple[Tensor, Tensor], record: bool) -> None:
        dist.barrier()
        sent_bytes, cpu, queued, times = _sent_bytes(), time.process_time(), _queued_s(), [time.perf_counter()]
        loss = self.model(*batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        if record:
            parts = [after - before for before, after in pairwise(times)]
            rest = [times[-1] - times[0], time.process_time() - cpu, _queued_s() - queued]
            for values, value in zip(self.seconds.values(), [*parts, *rest]):
                values.append(value)
            self.sent_bytes.append(_sent_bytes() - sent_bytes)

    def result(self) -> dict[str, Any]:
        """Medians; for what was planned with measured costs, the plan's account of the step too."""
        schedules = self.model.zfx.schedules if hasattr(self.model, "zfx") else ()
        row: dict[str, Any] = {f"{name}_s": statistics.median(values) for name, values in self.seconds.items()}
        row["compute_s"] = statistics.median(map(sum, zip(self.seconds["forward"], self.seconds["backward"])))
        row |= {"steps_s": self.seconds["step"], "sent_bytes": statistics.median(self.sent_bytes)}
        for schedule in schedules:
            if schedule.program.costs == CostModel():
                continue  # round numbers bound nothing on this link
            certificate = certify(schedule)
            row |= {"predicted_s": certificate.time_us / 1e6, "bound_s": certificate.time_bound_us / 1e6}
            row |= {"binds": certificate.time_binds}
        return row


def fsdp2(workload: Workload) -> nn.Module:
    """FSDP2 as its tutorials have it: each block is a unit, and the rest is one; all are resharded after the forward."""
    model, mesh = workload.model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def compiled(workload: Workload, limits: zfx.Limits, costs: CostModel | None) -> nn.Module:
    return zfx.compile(workload.model(), limits=limits, costs=costs, uniform=True, timeout=TIMEOUT_S)


def calibrated(workload: Workload, batch: tuple[Tensor, Tensor], wire: Wire) -> CostModel:
    """Costs of this model's operators on this machine, and of the link as it was measured. What a collective takes from compute
    is its CPU time: gloo's threads run on the core that computes."""
    model = compiled(workload, zfx.Limits(), None)
    model.zfx.plan(*batch)
    found = [replace(calibrate(model.zfx.graphs), **wire.costs())]
    dist.broadcast_object_list(found)  # plans follow from it, and must be equal
    return found[0]


def _sent_bytes() -> int:
    """Bytes that left this rank's network namespace so far, headers included."""
    rows = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(row.split(":")[1].split()[8]) for row in rows)


def _queued_s() -> float:
    """Seconds that this thread was ready to run and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for rank 0's results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # the numbers that calibration makes up may get so small that compute slows down
    dist.init_process_group("gloo")
    rank, workload = dist.get_rank(), WORKLOADS[args.workload]
    batches = workload.batches(rank, 2)
    wire = measure_wire(TIMEOUT_S)
    costs = calibrated(workload, batches[0], wire)
    trainers = {"no communication": Trainer(workload.model()), "FSDP2": Trainer(fsdp2(workload))}
    trainers |= {f"zfx, {name}": Trainer(compiled(workload, limits, costs)) for name, limits in LIMITS.items()}
    trainers |= {f"zfx, {name}, costs by default": Trainer(compiled(workload, limits, None)) for name, limits in LIMITS.items()}
    num_warmups = 2
    for turn in tqdm(range(num_warmups + args.rounds), unit="round", disable=rank != 0):
        for trainer in trainers.values():
            trainer.step(batches[turn % 2], record=turn >= num_warmups)
    if rank == 0:
        record: dict[str, Any] = {"torch": torch.__version__, "load": os.getloadavg()[0], "latency_ms": wire.tiny_s * 1e3}
        for name in ("gathers", "reductions", "both"):
            record[f"{name}_mb_per_s"] = getattr(wire, name).sent_mb_per_s
        record["busy_ms"] = wire.busy_s * 1e3
        record["systems"] = {name: trainer.result() for name, trainer in trainers.items()}
        args.out.write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
