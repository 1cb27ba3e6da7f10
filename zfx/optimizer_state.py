"""The state of optimizers by parameter names: out of them for a checkpoint, and back, on any number of ranks.

Torch's own `get_optimizer_state_dict` steps an optimizer that has no state yet, so that a run that is saved before its first step
goes on differently from one that is not (Adam's step count starts at 1). Here an optimizer is only read. On the way back each
tensor of state is placed as its parameter is; where it has another shape (a factored second moment), as it was placed when it was
saved.

[Note: state of 0-dim parameters] torch's `set_optimizer_state_dict` with `full_state_dict=True` gives back every 0-dim tensor as
a plain one. For a step count that is right; the moments of a 0-dim parameter, which is a replicated DTensor here, must be
DTensors as it is, or the next step stops at "mixed torch.Tensor and DTensor". So before every step of a `torch.optim` optimizer
they are made so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .errors import CheckpointError
from .plain_state import pack, unpack

COUNTERS = ("step",)  # kept by optimizers beside a parameter; torch itself tells them by this name


@dataclass(slots=True)
class OptimizerState:
    """Of all optimizers together, by parameter names, which they do not share.

    Attributes:
        tensors: parameter name -> key -> tensor.
        records: one an optimizer, as JSON: its class, its groups (with the names of their parameters), and of its state what is no
            tensor, or a tensor that is not placed as its parameter.
    """

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)


def names_of(model: nn.Module) -> dict[int, str]:
    """Each parameter's first name, by its id."""
    return {id(param): name for name, param in model.named_parameters()}


def collect(model: nn.Module, optimizers: Sequence[Optimizer]) -> OptimizerState:
    """Read the optimizers; the tensors are theirs, not copies.

    Raises:
        CheckpointError: an optimizer holds a parameter that is not the model's, or that another one holds too.
        TypeError: some of its state is neither a tensor nor plain.
    """
    found, names = OptimizerState(), names_of(model)
    for number, optimizer in enumerate(optimizers):
        what = f"optimizer {number} ({type(optimizer).__name__})"
        groups = _group_names(optimizer, names, what)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        state = optimizer.state_dict()
        record: dict[str, Any] = {"class": type(optimizer).__name__, "groups": [], "values": {}, "sharded": {}}
        for group, members in zip(state["param_groups"], groups):
            rest = {key: _plain_scalar(value) for key, value in group.items() if key != "params"}
            data, tensors = pack(rest, f"a parameter group of {what}")
            if tensors:
                raise TypeError(f"{what} keeps a tensor of more than one element in a parameter group, which can't be stored")
            record["groups"].append({"params": members, "rest": data})
        for index, entries in state["state"].items():
            _collect_parameter(found, record, names[id(params[index])], params[index], entries, what)
        found.records.append(record)
    return found


def _collect_parameter(
    found: OptimizerState, record: dict[str, Any], name: str, param: torch.Tensor, entries: Mapping[str, Any], what: str
) -> None:
    if name in found.tensors:
        raise CheckpointError(f"two optimizers hold the parameter {name!r}: its state can't be told apart by name", name=name)
    found.tensors[name] = {}
    for key, value in entries.items():
        where = f"the state {key!r} of {name!r} in {what}"
        if isinstance(value, DTensor):
            value = _without_partial(value)
            if not _placed_alike(value, param):
                record["sharded"].setdefault(name, {})[key] = _shard_dim(value)
        if isinstance(value, torch.Tensor):
            found.tensors[name][key] = value
        else:
            data, tensors = pack(value, where)
            if tensors:
                raise TypeError(f"{where} is a {type(value).__name__} that holds tensors, which can't be stored")
            record["values"].setdefault(name, {})[key] = data


def _plain_scalar(value: Any) -> Any:
    """A learning rate that is a tensor is stored as a number, with its dtype."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"$lr": [float(value), str(value.dtype), list(value.shape)]}
    return value


def _group_names(optimizer: Optimizer, names: Mapping[int, str], what: str) -> list[list[str]]:
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise CheckpointError(
                    f"{what} holds a parameter of shape {tuple(param.shape)} in group {number} that is not one of the model's"
                )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _without_partial(value: DTensor) -> DTensor:
    if any(isinstance(p, Partial) for p in value.placements):
        return value.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in value.placements])
    return value


def _placed_alike(value: DTensor, param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and value.shape == param.shape and value.placements == param.placements


def _shard_dim(value: DTensor) -> int | None:
    return next((p.dim for p in value.placements if isinstance(p, Shard)), None)


# ---- back --------------------------------------------------------------------------------------------------------------


def targets(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    stored: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
    records: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, torch.Tensor]]:
    """Where the stored state is to be read into: parameter name -> key -> tensor. Tensors that an optimizer has already and that
    fit are used again.

    Args:
        stored: shapes and dtypes of what the checkpoint has, by parameter name and key.
        records: as `collect` made them.

    Raises:
        CheckpointError: the optimizers are not those that were saved.
    """
    names = names_of(model)
    found: dict[str, dict[str, torch.Tensor]] = {}
    if len(records) != len(optimizers):
        raise CheckpointError(f"the checkpoint holds {len(records)} optimizers, and {len(optimizers)} are to be loaded")
    for number, (optimizer, record) in enumerate(zip(optimizers, records)):
        what = f"optimizer {number} ({type(optimizer).__name__})"
        _check_record(optimizer, record, names, what)
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            name = names[id(param)]
            sharded = record.get("sharded", {}).get(name, {})
            for key, (shape, dtype) in stored.get(name, {}).items():
                there = optimizer.state[param].get(key) if param in optimizer.state else None
                made = _target(param, there, shape, dtype, key, sharded)
                found.setdefault(name, {})[key] = made
    return found


def _check_record(optimizer: Optimizer, record: Mapping[str, Any], names: Mapping[int, str], what: str) -> None:
    groups = _group_names(optimizer, names, what)
    if record.get("class") not in (None, type(optimizer).__name__):
        raise CheckpointError(f"{what} is to be loaded, and the checkpoint was written with {record['class']}")
    saved = [group["params"] for group in record["groups"]]
    if len(saved) != len(groups):
        raise CheckpointError(f"{what} has {len(groups)} parameter groups, and {len(saved)} were saved")
    for number, (mine, theirs) in enumerate(zip(groups, saved)):
        frozen = {names[id(p)] for p in optimizer.param_groups[number]["params"] if not p.requires_grad}
        if missing := [name for name in mine if name not in set(theirs) and name not in frozen]:
            raise CheckpointError(
                f"{what}: the checkpoint has no {missing[0]!r} in parameter group {number}" + _and_more(missing), name=missing[0]
            )
        if extra := [name for name in theirs if name not in set(mine)]:
            raise CheckpointError(
                f"{what}: the checkpoint has {extra[0]!r} in parameter group {number}, and the optimizer has not"
                + _and_more(extra),
                name=extra[0],
            )


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _target(
    param: torch.Tensor,
    there: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    key: str,
    sharded: Mapping[str, int | None],
) -> torch.Tensor:
    """The tensor that is there, if it fits; else a new one, placed as the parameter, or as it was when it was saved."""
    placements = _placements(param, shape, key, sharded)
    placed = list(there.placements) if isinstance(there, DTensor) else None
    if isinstance(there, torch.Tensor) and (tuple(there.shape), there.dtype, placed) == (shape, dtype, placements):
        return there
    if placements is None or not isinstance(param, DTensor):
        return torch.zeros(shape, dtype=dtype, device="cpu" if key in COUNTERS and not shape else param.device)
    return torch.distributed.tensor.zeros(shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)


def _placements(param: torch.Tensor, shape: tuple[int, ...], key: str, sharded: Mapping[str, int | None]) -> list[Any] | None:
    """None: a plain tensor."""
    if not isinstance(param, DTensor):
        return None
    if key in sharded:
        dim = sharded[key]
        return [Shard(dim) if isinstance(p, Shard) and dim is not None else Replicate() for p in param.placements]
    if key in COUNTERS and not shape:
        return None
    return list(param.placements) if shape == tuple(param.shape) else None


def apply(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    records: Sequence[Mapping[str, Any]],
) -> None:
    """Give the optimizers what was read into `targets`, in the dtypes that it was saved in."""
    names = names_of(model)
    for optimizer, record in zip(optimizers, records):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        state, groups, position = {}, [], 0
        for index, param in enumerate(params):
            name = names[id(param)]
            values = {k: unpack(v, (), f"the state {k!r} of {name!r}") for k, v in record.get("values", {}).get(name, {}).items()}
            if merged := {**tensors.get(name, {}), **values}:
                state[index] = merged
        for mine, saved in zip(optimizer.param_groups, record["groups"]):
            rest = unpack(saved["rest"], (), "a parameter group")
            count = len(mine["params"])
            groups.append({**_defaults(mine), **_tensors_again(rest, mine), "params": list(range(position, position + count))})
            position += count
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        for index, entries in state.items():  # torch casts to the dtype of the parameter; state is as it was
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and optimizer.state[params[index]][key].dtype != value.dtype:
                    optimizer.state[params[index]][key] = value


def _defaults(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _tensors_again(rest: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    out = {}
    for key, value in rest.items():
        if isinstance(value, dict) and set(value) == {"$lr"}:
            number, dtype, shape = value["$lr"]
            here = mine.get(key)
            device = here.device if isinstance(here, torch.Tensor) else None
            value = torch.full(tuple(shape), number, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        out[key] = value
    return out


# ---- [Note: state of 0-dim parameters] ---------------------------------------------------------------------------------


def _mend_scalars(optimizer: Any, args: Any, kwargs: Any) -> None:
    for param in _scalars(optimizer.param_groups):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.shape and key not in COUNTERS:
                local = value.to(param.device)
                optimizer.state[param][key] = DTensor.from_local(local, param.device_mesh, param.placements, run_check=False)


def _scalars(groups: Iterable[Mapping[str, Any]]) -> list[DTensor]:
    return [p for group in groups for p in group["params"] if isinstance(p, DTensor) and not p.shape]


register_optimizer_step_pre_hook(_mend_scalars)
