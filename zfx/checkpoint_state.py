"""What a checkpoint holds of a run, as one tree of tensors (for DCP) and one JSON document; and back.

    model.<name>                      DTensors as they are; of what is whole on every rank, rank 0's. Torch's own layout, so that
    optim.state.<name>.<key>          `dcp.load({"model": model.state_dict()}, ...)` reads it too
    shared.<i>                        tensors of the scheduler, the scaler and the extras, of rank 0
    rank.<r>.rng.<i>, .data.<i>       tensors of rank r alone: random streams, data position
    rank.<r>.buffers.<name>           buffers that differ between ranks (running statistics); rank 0's are under model.<name> too
    state.json                        all that is no tensor
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from . import optimizer_state, rng
from .errors import CheckpointError
from .plain_state import dtype_name, pack

VERSION = 1


@dataclass(slots=True)
class Run:
    """What is saved of, or loaded into. All but `model` may be missing."""

    model: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    data: Any = None
    extras: Any = None


@dataclass(slots=True)
class Collected:
    """One rank's part. `summary` goes to the other ranks, and is small."""

    tree: dict[str, Any]
    record: dict[str, Any]
    aliases: dict[str, str]
    summary: dict[str, Any]
    buffers: dict[str, torch.Tensor]


def model_entries(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """Tensors of the model's state_dict by name, each once; other names of the same ones; and what is no tensor."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    seen: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            rest[name] = value
        elif id(value) in seen:
            aliases[name] = seen[id(value)]
        else:
            seen[id(value)] = name
            tensors[name] = value.detach()
    return tensors, aliases, rest


def collect(run: Run, rank: int) -> Collected:
    """Read one rank's part of the run. The tensors are the run's own.

    Raises:
        TypeError: something is not plain data.
        CheckpointError: a parameter of an optimizer is not the model's.
    """
    tensors, aliases, rest = model_entries(run.model)
    names = {name for name, _ in run.model.named_buffers()}
    buffers = {name: t for name, t in tensors.items() if name in names and not isinstance(t, DTensor)}
    whole = {name: t for name, t in tensors.items() if rank == 0 or isinstance(t, DTensor)}
    optim = optimizer_state.collect(run.model, run.optimizers)
    shared, shared_tensors = pack(
        {
            "schedulers": [one.state_dict() for one in run.schedulers],
            "scaler": None if run.scaler is None else run.scaler.state_dict(),
            "extras": run.extras,
            "model": rest,
            "config": _config(run.model),
        },
        "the state",
    )
    own, own_tensors = {}, {}
    for part, value in (("rng", rng.streams()), ("data", None if run.data is None else run.data.state_dict())):
        own[part], numbered = pack(value, f"the state of {part}")
        own_tensors[part] = _numbered(numbered)
    tree: dict[str, Any] = {"model": whole, "rank": {str(rank): own_tensors}}
    state = {n: {k: t for k, t in entries.items() if rank == 0 or isinstance(t, DTensor)} for n, entries in optim.tensors.items()}
    tree["optim"] = {"state": state}
    if rank == 0:
        tree["shared"] = _numbered(shared_tensors)
        tree["optim"]["param_groups"] = _groups_for_torch(optim.records)
    record = {
        "version": VERSION,
        "shared": shared,
        "shared_tensors": len(shared_tensors),
        "optimizers": optim.records,
        "aliases": aliases,
        "tensors": {name: [list(t.shape), dtype_name(t.dtype)] for name, t in tensors.items()},
        "parts": _parts(run),
    }
    summary = {
        "own": {part: [data, len(own_tensors[part])] for part, data in own.items()},
        "buffers": {name: _digest(t) for name, t in buffers.items()},
        "layout": hashlib.sha256(json.dumps([record["tensors"], aliases, optim.records], sort_keys=True).encode()).hexdigest(),
    }
    return Collected(tree, record, aliases, summary, buffers)


def complete(mine: Collected, summaries: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Add what only all ranks together know.

    Raises:
        CheckpointError: ranks hold different models or optimizers.
    """
    different = [r for r, one in enumerate(summaries) if one["layout"] != summaries[0]["layout"]]
    if different:
        raise CheckpointError(
            f"rank {different[0]} has other parameters, buffers or optimizer groups than rank 0 (names, shapes, settings)",
            ranks=different,
        )
    local = [name for name, digest in summaries[0]["buffers"].items() if any(one["buffers"][name] != digest for one in summaries)]
    if local:
        mine.tree["rank"][str(rank)]["buffers"] = {name: mine.buffers[name] for name in local}
    mine.record["local_buffers"] = local
    mine.record["ranks"] = [one["own"] for one in summaries]


def _parts(run: Run) -> dict[str, Any]:
    return {
        "optimizers": len(run.optimizers),
        "schedulers": [type(one).__name__ for one in run.schedulers],
        "scaler": run.scaler is not None,
        "data": run.data is not None,
        "extras": run.extras is not None,
    }


def _numbered(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return {str(i): t for i, t in enumerate(whole)}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _groups_for_torch(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as torch's `get_optimizer_state_dict` has them, for readers that are torch alone; zfx reads the JSON."""
    groups = []
    for record in records:
        for group in record["groups"]:
            plain = {k: _plain(v) for k, v in group["rest"].items()}
            groups.append({**plain, "params": list(group["params"])})
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"$tuple"}:
        return tuple(value["$tuple"])
    if isinstance(value, dict) and set(value) == {"$lr"}:
        return value["$lr"][0]
    return value


def _config(model: nn.Module) -> Any:
    """The model's configuration as a transformers model has one, if it is plain JSON."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        return None
    try:
        found = json.loads(json.dumps(to_dict()))
    except (TypeError, ValueError):
        return None
    found.setdefault("architectures", [type(model).__name__])
    if not found["architectures"]:
        found["architectures"] = [type(model).__name__]
    return found
