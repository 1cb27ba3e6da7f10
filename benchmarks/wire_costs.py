"""What zfx's own wire costs between two ranks: gathers alone, reductions alone, and both at once, which may share one link.

What they take from compute is measured beside compute: how much longer the same products take while bytes travel. CPU time would
say too little: the kernel's network stack works for whoever happens to run, and gloo's threads push compute off its core.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zfx.bucket import Transfers
from zfx.channels import channels_for
from zfx.costs import Link
from zfx.shard import Layout

BUCKET_BYTES, BUCKETS = 4 * 2**20, 8


@dataclass(frozen=True)
class Burst:
    """Collectives of `BUCKET_BYTES`, launched at once: bytes in all (gathered or unreduced), and seconds."""

    num_bytes: int
    seconds: float

    @property
    def sent_mb_per_s(self) -> float:
        """Of two ranks, each sends half."""
        return self.num_bytes / 2 / self.seconds / 1e6


@dataclass(frozen=True)
class Wire:
    """What zfx's own wire does on this link, at its best: bounds follow from it.

    `tiny_s` and `tiny_cpu_s` are time and CPU time of a gather of 8 bytes, `busy_s` is what `both` takes from compute.
    """

    gathers: Burst
    reductions: Burst
    both: Burst
    tiny_s: float
    tiny_cpu_s: float
    busy_s: float

    def costs(self) -> dict[str, Any]:
        """The part of a `CostModel` that this tells."""
        links = {"gather": self.gathers, "reduce": self.reductions}
        return {kind: Link(self.tiny_s * 1e6, burst.num_bytes / burst.seconds / 1e6) for kind, burst in links.items()} | {
            "launch_us": self.tiny_cpu_s * 1e6,
            "busy_bytes_per_us": self.both.num_bytes / (self.busy_s * 1e6),
        }


class _Compute:
    """Matrix products of a small model, to be disturbed."""

    def __init__(self) -> None:
        self._x, self._weight = torch.rand(512, 768), torch.rand(768, 3072)
        self.seconds(3)
        self.unit_s = self.seconds(10) / 10

    def seconds(self, times: int, launch: Callable[[], list[Any]] = list) -> float:
        """Of so many products, and what was launched before them."""
        dist.barrier()
        start = time.perf_counter()
        pending = launch()
        for _ in range(times):
            torch.mm(self._x, self._weight)
        for transfer in pending:
            transfer.wait()
        return time.perf_counter() - start


def measure_wire(timeout_s: float, num_rounds: int = 12) -> Wire:
    """Measure on two ranks, all kinds in turn. A collective call."""
    channels = channels_for(init_device_mesh("cpu", (2,)), timeout_s)
    n = BUCKET_BYTES // 4 // 2
    bucket = Transfers([Layout("bucket", (2 * n,), torch.float32, world_size=2)], [False])
    tiny_bucket = Transfers([Layout("tiny", (2,), torch.float32, world_size=2)], [False])
    shard, whole = torch.zeros(n), torch.zeros(2 * n)

    def gathers() -> list[Any]:
        return [bucket.all_gather(channels.gathers, [shard]) for _ in range(BUCKETS)]

    def reductions() -> list[Any]:
        return [bucket.reduce_scatter(channels.reductions, [whole]) for _ in range(BUCKETS)]

    launches = {"gathers": gathers, "reductions": reductions, "both": lambda: [*gathers(), *reductions()]}
    bursts: dict[str, list[float]] = defaultdict(list)
    tiny, busy, compute = [], [], _Compute()
    for _ in range(num_rounds):
        for name, launch in launches.items():
            bursts[name].append(compute.seconds(0, launch))
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        tiny_bucket.all_gather(channels.gathers, [shard[:1]]).wait()
        tiny.append((time.perf_counter() - start, time.process_time() - cpu))
        times = 1 + int(1.5 * bursts["both"][-1] / compute.unit_s)
        busy.append(compute.seconds(times, launches["both"]) - compute.seconds(times))
    num_bytes = {"gathers": BUCKETS * BUCKET_BYTES, "reductions": BUCKETS * BUCKET_BYTES, "both": 2 * BUCKETS * BUCKET_BYTES}
    tiny_s, tiny_cpu_s = map(min, zip(*tiny))
    return Wire(
        **{name: Burst(num_bytes[name], min(seconds)) for name, seconds in bursts.items()},
        tiny_s=tiny_s,
        tiny_cpu_s=tiny_cpu_s,
        busy_s=max(statistics.median(busy), 1e-6),
    )
