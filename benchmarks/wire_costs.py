"""What zfx's own wire costs between two ranks: gathers alone, reductions alone, and both at once, which may share one link."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zfx.channels import channels_for
from zfx.costs import Link

BUCKET_BYTES, BUCKETS = 4 * 2**20, 8


@dataclass(frozen=True)
class Burst:
    """Collectives of `BUCKET_BYTES`, launched at once: bytes in all (gathered or unreduced), seconds, CPU seconds of this rank."""

    num_bytes: int
    seconds: float
    cpu_s: float

    @property
    def sent_mb_per_s(self) -> float:
        """Of two ranks, each sends half."""
        return self.num_bytes / 2 / self.seconds / 1e6


@dataclass(frozen=True)
class Wire:
    """What zfx's own wire does on this link, at its best: bounds follow from it. `tiny_s` is the time of a gather of 8 bytes."""

    gathers: Burst
    reductions: Burst
    both: Burst
    tiny_s: float

    def costs(self) -> dict[str, Any]:
        """The part of a `CostModel` that this tells."""
        links = {"gather": self.gathers, "reduce": self.reductions}
        return {kind: Link(self.tiny_s * 1e6, burst.num_bytes / burst.seconds / 1e6) for kind, burst in links.items()} | {
            "launch_us": self.busy_s * 1e6,
            "busy_bytes_per_us": math.inf,
        }

    @property
    def busy_s(self) -> float:
        """CPU seconds that one collective of `BUCKET_BYTES` takes."""
        return self.both.cpu_s / (2 * BUCKETS)


def measure_wire(timeout_s: float, num_rounds: int = 12) -> Wire:
    """Measure on two ranks, all kinds in turn. A collective call."""
    channels = channels_for(init_device_mesh("cpu", (2,)), timeout_s)
    n = BUCKET_BYTES // 4 // 2
    shard, whole, buffers = torch.zeros(n), torch.zeros(2 * n), [torch.zeros(2, n) for _ in range(BUCKETS)]

    def gathers() -> list[Callable[[], Any]]:
        return [channels.gathers.all_gather([buffer], [shard]) for buffer in buffers]

    def reductions() -> list[Callable[[], Any]]:
        return [channels.reductions.reduce_scatter([whole], [n], [None], 2) for _ in buffers]

    launches = {"gathers": gathers, "reductions": reductions, "both": lambda: [*gathers(), *reductions()]}
    bursts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    tiny = []
    for _ in range(num_rounds):
        for name, launch in launches.items():
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            for wait in launch():
                wait()
            bursts[name].append((time.perf_counter() - start, time.process_time() - cpu))
        dist.barrier()
        start = time.perf_counter()
        channels.gathers.all_gather([buffers[0][:, :1]], [shard[:1]])()
        tiny.append(time.perf_counter() - start)
    num_bytes = {"gathers": BUCKETS * BUCKET_BYTES, "reductions": BUCKETS * BUCKET_BYTES, "both": 2 * BUCKETS * BUCKET_BYTES}
    return Wire(
        **{name: Burst(num_bytes[name], *map(min, zip(*pairs))) for name, pairs in bursts.items()},
        tiny_s=min(tiny),
    )
