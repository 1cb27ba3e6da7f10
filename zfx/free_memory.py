"""How much memory a rank may use: what `Limits(memory_budget="auto")` becomes, once, when the model is compiled.

    |<------------------- the device, or this rank's part of the machine ------------------->|
    | taken already | shards |                             free                              |
                    |<-------------------------- budget -------------->| optimizer | margin  |

The shards are in memory already and `memory_budget` counts them, so they belong to the budget. The optimizer's state is not known
yet: room is kept for two numbers an element, as Adam has. The margin is for what nobody counts: the communicators' buffers, the
libraries' workspaces, the allocator's waste.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .agreement import Agreement
from .limits import Limits
from .shard import Layout

MARGIN_PERCENT = 5
OPTIMIZER_STATES = 2


def with_free_memory(
    limits: Limits, parameters: Sequence[tuple[Layout, bool]], device: torch.device, num_local_ranks: int, agreement: Agreement
) -> Limits:
    """The limits with `memory_budget` in bytes: the least that a rank finds, the same on all. A collective call.

    Args:
        parameters: each with whether it is trained; their shards are on the device already.
        num_local_ranks: ranks that share this machine, between which its memory is divided where the device is the CPU.

    Raises:
        RankMismatch: a rank does not come.
        ValueError: the system does not say what is free.
    """

    def measure() -> int:  # once every rank has sharded, and its whole parameters are gone
        return budget_bytes(free_bytes(device, num_local_ranks), parameters)

    return replace(limits, memory_budget=agreement.least("the free memory for memory_budget='auto'", measure))


def budget_bytes(num_free: int, parameters: Sequence[tuple[Layout, bool]]) -> int:
    """The budget where `num_free` bytes are free beside the shards; 0 if the optimizer alone would not fit.

    Example:
        >>> layout = Layout("w", (100, 10), torch.float32, world_size=4)   # 25 rows a rank: 1,000 bytes
        >>> budget_bytes(9_000, [(layout, True)])                           # 95 % of 10,000, less twice 1,000
        7500
    """
    shards = [(layout.chunk_numel * layout.dtype.itemsize, trained) for layout, trained in parameters]
    optimizer = OPTIMIZER_STATES * sum(num_bytes for num_bytes, trained in shards if trained)
    whole = num_free + sum(num_bytes for num_bytes, _ in shards)
    return max(0, whole * (100 - MARGIN_PERCENT) // 100 - optimizer)


def free_bytes(device: torch.device, num_local_ranks: int) -> int:
    """Bytes that this rank could still allocate: on a GPU what the driver has and what torch keeps unused, else its part of what
    the operating system calls available. A container's own limit is not seen."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _available_bytes() // num_local_ranks


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        raise ValueError("this system does not say how much memory is free: give memory_budget in bytes") from None
