"""Channels: the communicators of one set of ranks. Gathers, reductions and agreement never queue behind each other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._compat import default_store
from .agreement import Agreement
from .wire import Wire, wire_for


@dataclass(frozen=True, slots=True)
class Channels:
    """One communicator a direction, and one for agreement."""

    gathers: Wire
    reductions: Wire
    agreement: Agreement


_NEVER = timedelta(days=30)
_channels: dict[tuple[Any, ...], Channels] = {}
_unfinished: list[Channels] = []  # an operation of theirs waits for a rank that never came: destroying the group would wait with it


def channels_for(mesh: DeviceMesh, timeout_s: float) -> Channels:
    """Made once for a set of ranks and a timeout, and shared by every engine on them. A collective call the first time."""
    ranks = tuple(dist.get_process_group_ranks(mesh.get_group()))
    world = dist.group.WORLD
    key = (id(world), ranks, mesh.device_type, timeout_s)
    found = _channels.get(key)
    if found is not None and found.agreement.broken is None and found.agreement.store is default_store():
        return found
    for old in [k for k, c in _channels.items() if c.agreement.store is not default_store()]:
        gone = _channels.pop(old)  # its process group is gone
        if gone.agreement.broken is not None:
            _unfinished.append(gone)
    backend = dist.get_backend(mesh.get_group())
    # agreement counts its patience itself: see `Agreement._finish`
    groups = [
        dist.new_group(list(ranks), timeout=limit, backend=kind, use_local_synchronization=len(ranks) != dist.get_world_size())
        for kind, limit in ((backend, timedelta(seconds=timeout_s)), (backend, timedelta(seconds=timeout_s)), ("gloo", _NEVER))
    ]
    name = groups[2].group_name  # the same on all its ranks, whatever else a process has done
    made = Channels(wire_for(groups[0]), wire_for(groups[1]), Agreement(groups[2], default_store(), f"zfx/{name}", timeout_s))
    _channels[key] = made
    return made
