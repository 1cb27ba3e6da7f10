"""Channels: the communicators of one set of ranks. Gathers, reductions, all-reduces over replicas and agreement never queue
behind each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._compat import default_store
from .agreement import Agreement
from .wire import Wire, wire_for


@dataclass(frozen=True, slots=True)
class Channels:
    """One communicator a direction, and one for agreement.

    Attributes:
        gathers, reductions: over the ranks of this rank's replica.
        agreement: over all ranks.
        across: over the ranks that hold the same shards in the other replicas; None where there are none.
        secondary: by their number, over the neighbouring ranks that share parameters once they are resharded.
    """

    gathers: Wire
    reductions: Wire
    agreement: Agreement
    across: Wire | None = None
    secondary: dict[int, Wire] = field(default_factory=dict)

    def reshard_to(self, num_ranks: int, timeout_s: float) -> None:
        """Make the communicator for so many, if it isn't there. A collective call; ranks have agreed on the number before."""
        if num_ranks not in self.secondary:
            group, own = self.gathers.group, self.gathers.rank // num_ranks * num_ranks
            ranks = sorted(dist.get_process_group_ranks(group))[own : own + num_ranks]
            self.secondary[num_ranks] = wire_for(_new_group(ranks, dist.get_backend(group), timedelta(seconds=timeout_s)))


_NEVER = timedelta(days=30)
_channels: dict[tuple[Any, ...], Channels] = {}
_unfinished: list[Channels] = []  # an operation of theirs waits for a rank that never came: destroying the group would wait with it


def channels_for(mesh: DeviceMesh, timeout_s: float) -> Channels:
    """Made once for a mesh and a timeout, and shared by every engine on it. A collective call the first time.

    Args:
        mesh: of one dimension (shard), or two (replicate, shard).
    """
    world = dist.group.WORLD
    key = (id(world), tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), mesh.device_type, timeout_s)
    found = _channels.get(key)
    if found is not None and found.agreement.broken is None and found.agreement.store is default_store():
        return found
    for old in [k for k, c in _channels.items() if c.agreement.store is not default_store()]:
        gone = _channels.pop(old)  # its process group is gone
        if gone.agreement.broken is not None:
            _unfinished.append(gone)
    limit, backend = timedelta(seconds=timeout_s), dist.get_backend(mesh.get_group(mesh.ndim - 1))
    shards = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    gathers, reductions = (wire_for(_new_group(shards, backend, limit)) for _ in range(2))
    across = None
    if mesh.ndim == 2 and mesh.size(0) > 1:
        across = wire_for(_new_group(dist.get_process_group_ranks(mesh.get_group(0)), backend, limit))
    # agreement counts its patience itself: see `Agreement._finish`
    everyone = _new_group(mesh.mesh.flatten().tolist(), "gloo", _NEVER)
    name = everyone.group_name  # the same on all its ranks, whatever else a process has done
    made = Channels(gathers, reductions, Agreement(everyone, default_store(), f"zfx/{name}", timeout_s), across)
    _channels[key] = made
    return made


def _new_group(ranks: list[int], backend: str, limit: timedelta) -> dist.ProcessGroup:
    """Over ranks in ascending order; only they have to make it, unless they are all there are."""
    ranks = sorted(ranks)
    return dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=len(ranks) != dist.get_world_size())
