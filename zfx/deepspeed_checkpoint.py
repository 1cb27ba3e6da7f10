"""From a ZeRO checkpoint directory of DeepSpeed (stages 1, 2, 3) to a checkpoint that `zfx.Checkpointer` loads.

The layout is the one that DeepSpeed's own `deepspeed/utils/zero_to_fp32.py` reads [1]:

    zero_pp_rank_<r>_mp_rank_00_model_states.pt    stage 3: one a rank; stages 1 and 2: one mp_rank_00_model_states.pt
        module, buffer_names          buffers; parameters are placeholders
        param_shapes                  one ordered {name: shape} a flat group
        frozen_param_shapes, frozen_param_fragments, shared_params {other name: name}, global_steps
    *zero_pp_rank_<r>_mp_rank_00_optim_states.pt   optimizer_state_dict:
        fp32_flat_groups              stage 3: rank r's slices of all parameters of a group, one after another;
                                      a parameter of n elements on w ranks is w slices of ceil(n / w), the last ones padded
        single_partition_of_fp32_groups  stages 1, 2: the r-th part of a group's parameters laid end to end
        optimizer_state_dict / base_optimizer_state   the inner optimizer: moments, flat in the same order

Files are read with `weights_only=True`. DeepSpeed pickles some objects of its own into them (an enum, a loss scaler); in their
place inert records are made, and no class of DeepSpeed, or of anyone, is imported. Files are mapped, and one parameter at a time
is put together.

[1] https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py (read at version 0.19.8)
"""

from __future__ import annotations

import json
import math
import pickle
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from . import checkpoint_folder as folder
from .checkpoint_state import VERSION
from .dcp_reader import refusal_of
from .dcp_writer import STATE, Writer
from .errors import CheckpointError
from .plain_state import dtype_name, pack
from .together import TORCH_FAILS, explained, no_warnings

_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov", "maximize", "initial_lr")


class Inert:
    """Stands where a file holds an object of DeepSpeed: keeps what it was made of, and does nothing."""

    def __new__(cls, *args: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None:
        self.args: tuple[Any, ...] = args


@dataclass(slots=True)
class _Flat:
    """Flat tensors of all ranks, group by group, and where each parameter is in them."""

    stage: int
    groups: list[list[torch.Tensor]]  # [rank][group]
    shapes: list[dict[str, tuple[int, ...]]]
    paddings: Sequence[Sequence[int]] | None

    def places(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Name to group, offset in it (stage 3: in a rank's part; else: in the whole), and shape."""
        found: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        world = len(self.groups)
        for number, shapes in enumerate(self.shapes):
            at = 0
            for position, (name, shape) in enumerate(shapes.items()):
                found[name] = (number, at, shape)
                at += -(-math.prod(shape) // world) if self.stage == 3 else math.prod(shape)
                if self.paddings is not None and self.stage != 3:
                    at += self.paddings[number][position]
            held = [flat[number].numel() for flat in self.groups]
            if at > (min(held) if self.stage == 3 else sum(held)):
                raise CheckpointError(
                    f"group {number} holds {held} elements on the ranks, too few for its parameters, which need {at}"
                )
        return found

    def value(self, flats: Sequence[Sequence[torch.Tensor]], place: tuple[int, int, tuple[int, ...]]) -> torch.Tensor:
        """One parameter's values out of tensors that are laid out so (the weights, or a moment)."""
        number, at, shape = place
        count = math.prod(shape)
        if self.stage == 3:
            part = -(-count // len(flats))
            return torch.cat([flat[number].reshape(-1)[at : at + part] for flat in flats])[:count].view(shape)
        out, start = [], 0
        for flat in flats:
            values = flat[number].reshape(-1)
            low, high = max(at - start, 0), min(at + count - start, values.numel())
            if low < high:
                out.append(values[low:high])
            start += values.numel()
        return (torch.cat(out) if out else torch.empty(0)).view(shape)


@dataclass(slots=True)
class ZeroCheckpoint:
    """An opened directory: makers of tensors by name, and facts. Nothing is put together until a maker is called."""

    directory: Path
    stage: int
    world_size: int
    step: int
    weights: dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]] = field(default_factory=dict)
    moments: dict[str, dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def convert(
    directory: Path, out: Path, progress: Callable[[str], None] = lambda name: None, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a checkpoint of the same step into `out`, for `zfx.Checkpointer(out).load(model=..., optimizer=...)`; its path.

    Args:
        directory: where the files are, or its parent with DeepSpeed's file `latest`.
        dtype: of floating-point weights and buffers. Moments stay float32.

    Raises:
        CheckpointError: a file is missing, is not such a file, or would run code when read. The message names it.
    """
    found = open_zero(directory)
    tensors: dict[str, torch.Tensor] = {}
    makers: dict[str, Callable[[], torch.Tensor]] = {}
    tree: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for name, (shape, make) in found.weights.items():
        kind = _dtype(make, dtype)
        tree["model"][name] = tensors[name] = torch.empty(shape, dtype=kind, device="meta")
        makers[f"model.{name}"] = _cast(make, kind)
    for name, entries in found.moments.items():
        tree["optim"]["state"][name] = {
            k: torch.empty(shape, dtype=torch.float32, device="meta") for k, (shape, _) in entries.items()
        }
        makers.update({f"optim.state.{name}.{k}": _cast(make, torch.float32) for k, (_, make) in entries.items()})
    record = _record(found, tensors)
    temporary, final = folder.places_for(out, found.step, secrets.token_hex(4))
    facts = {"step": found.step, "world_size": found.world_size, "from": f"DeepSpeed ZeRO stage {found.stage}"}
    aliases = {f"model.{name}": f"model.{first}" for name, first in found.aliases.items()}
    writer = Writer(temporary, final, facts, {STATE: json.dumps(record, allow_nan=False).encode()}, aliases)
    try:
        with no_warnings():
            dcp.save(tree, storage_writer=writer, planner=_Lazy(makers, progress), no_dist=True)
    except BaseException as error:
        folder.remove(temporary)
        if isinstance(error, TORCH_FAILS):
            raise explained(f"importing {directory}", error) from error
        raise
    return final


class _Lazy(DefaultSavePlanner):
    """Makes each tensor when it is written."""

    def __init__(self, makers: Mapping[str, Callable[[], torch.Tensor]], progress: Callable[[str], None]) -> None:
        super().__init__()
        self.makers, self.progress = makers, progress

    def lookup_object(self, index: MetadataIndex) -> Any:
        self.progress(index.fqn)
        return self.makers[index.fqn]()


def _dtype(make: Callable[[], torch.Tensor], wanted: torch.dtype) -> torch.dtype:
    stored: torch.dtype = getattr(make, "dtype", torch.float32)
    return wanted if stored.is_floating_point else stored


def _cast(make: Callable[[], torch.Tensor], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: make().to(dtype)


def _record(found: ZeroCheckpoint, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    extras = {"deepspeed": {"stage": found.stage, "world_size": found.world_size, "global_steps": found.step}}
    config = next((p for p in (found.directory / "config.json", found.directory.parent / "config.json") if p.is_file()), None)
    shared: dict[str, Any] = {
        "schedulers": [],
        "scaler": None,
        "extras": extras,
        "model": {},
        "config": None if config is None else json.loads(config.read_text(encoding="utf-8")),
    }
    return {
        "version": VERSION,
        "shared": pack(shared, "the state")[0],
        "shared_tensors": 0,
        "optimizers": [{"class": None, "groups": found.groups, "values": {}, "sharded": {}}] if found.groups else [],
        "aliases": found.aliases,
        "tensors": {name: [list(t.shape), dtype_name(t.dtype)] for name, t in tensors.items()},
        "parts": {"optimizers": 1 if found.groups else 0, "schedulers": [], "scaler": False, "data": False, "extras": True},
        "local_buffers": [],
        "ranks": [],
    }


# ---- reading -----------------------------------------------------------------------------------------------------------


def open_zero(directory: Path) -> ZeroCheckpoint:
    """Read what is needed to find every tensor. See `convert`."""
    directory = _resolve(directory)
    optim = _by_rank(directory)
    states = [_load(path)["optimizer_state_dict"] for path in optim]
    stage = _number(states[0].get("zero_stage"))
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{optim[0]} is not of ZeRO stage 1, 2 or 3", path=optim[0])
    wanted = states[0].get("partition_count")
    wanted = max(wanted) if isinstance(wanted, (list, tuple)) else wanted
    if wanted != len(optim):
        raise CheckpointError(f"{directory} has optimizer states of {len(optim)} ranks, and {wanted} saved", path=directory)
    ranks = [f"zero_pp_rank_{rank}_" for rank in range(len(optim))] if stage == 3 else [""]
    files = [directory / f"{rank}mp_rank_00_model_states.pt" for rank in ranks]
    models = [_load(path) for path in files]
    for key in ("module", "param_shapes", "buffer_names"):
        if (not models[0].get(key) and key == "param_shapes") or key not in models[0]:
            raise CheckpointError(f"{files[0]} has no {key!r}: it is not the model states of a ZeRO run", path=files[0])
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    if any(key not in state for state in states):
        raise CheckpointError(f"{directory}: a file has no {key!r}: its format is not that of stage {stage}", path=directory)
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]
    groups = [list(state[key]) for state in states]
    if any(len(one) != len(shapes) for one in groups):
        raise CheckpointError(f"{directory}: {len(groups[0])} flat groups, and names for {len(shapes)}", path=directory)
    flat = _Flat(stage, groups, shapes, states[0].get("param_alignment_paddings"))
    found = ZeroCheckpoint(directory, stage, len(optim), int(models[0].get("global_steps") or 0))
    _add_weights(found, flat, models)
    _add_moments(found, flat, [state.get("optimizer_state_dict") or state.get("base_optimizer_state") or {} for state in states])
    found.aliases = {
        a: b for a, b in (models[0].get("shared_params") or {}).items() if b in found.weights and a not in found.weights
    }
    return found


def _add_weights(found: ZeroCheckpoint, flat: _Flat, models: Sequence[Mapping[str, Any]]) -> None:
    for name, place in flat.places().items():
        found.weights[name] = (place[2], lambda place=place: flat.value(flat.groups, place))  # type: ignore[misc]
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        found.weights[name] = (tuple(shape), _frozen(name, tuple(shape), fragments))
    module = models[0]["module"]
    for name in models[0]["buffer_names"]:
        if name in module:
            found.weights[name] = (tuple(module[name].shape), _stored(module[name]))


def _frozen(name: str, shape: tuple[int, ...], fragments: Sequence[Mapping[str, torch.Tensor]]) -> Callable[[], torch.Tensor]:
    return lambda: torch.cat([part[name].reshape(-1) for part in fragments])[: math.prod(shape)].view(shape)


def _stored(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        return value

    make.dtype = value.dtype  # type: ignore[attr-defined]
    return make


def _add_moments(found: ZeroCheckpoint, flat: _Flat, inner: Sequence[Mapping[str, Any]]) -> None:
    """The inner optimizer's state, one entry a flat group, and its parameter groups, which may have several flat groups each."""
    if not all(isinstance(one, Mapping) and "state" in one for one in inner):
        return  # weights alone: the file was stripped, or written for elastic training
    for name, place in flat.places().items():
        number, _, shape = place
        entries = [one["state"].get(number, {}) for one in inner]
        for key, value in entries[0].items():
            if isinstance(value, torch.Tensor) and value.numel() == flat.groups[0][number].numel() and value.numel() > 1:
                flats = [[one["state"].get(n, {}).get(key, torch.empty(0)) for n in range(len(flat.shapes))] for one in inner]
                found.moments.setdefault(name, {})[key] = (shape, lambda f=flats, p=place: flat.value(f, p))  # type: ignore[misc]
            elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                found.moments.setdefault(name, {})[key] = ((), lambda v=value: torch.tensor(float(v)))  # type: ignore[misc]
    for group in inner[0].get("param_groups", ()):
        names = [name for number in group["params"] if number < len(flat.shapes) for name in flat.shapes[number]]
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in group.items() if k in _SETTINGS}
        found.groups.append({"params": names, "rest": pack(settings, "a parameter group")[0]})


def _resolve(directory: Path) -> Path:
    latest = directory / "latest"
    if latest.is_file() and not any(directory.glob("*_optim_states.pt")):
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"[\w.-]+", tag) or tag in (".", ".."):
            raise CheckpointError(f"{latest} names {tag!r}, which is not a directory beside it", path=latest)
        directory = directory / tag
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory", path=directory)
    return directory


def _by_rank(directory: Path) -> list[Path]:
    found = {}
    for path in directory.glob("*_optim_states.pt"):
        match = _RANK.fullmatch(path.name)
        if match is None or int(match[2]):
            raise CheckpointError(f"{path} is of a tensor- or expert-parallel run, which is not read", path=path)
        found[int(match[1])] = path
    if not found:
        raise CheckpointError(f"{directory} has no *_optim_states.pt: it is not a ZeRO checkpoint of DeepSpeed", path=directory)
    missing = [rank for rank in range(max(found) + 1) if rank not in found]
    if missing:
        raise CheckpointError(f"{directory} has no optimizer states of rank {missing[0]}", path=directory)
    return [found[rank] for rank in sorted(found)]


def _load(path: Path) -> dict[str, Any]:
    """One file, mapped, with inert records in the place of DeepSpeed's objects."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        inert: list[Any] = [(Inert, name) for name in names if name.startswith("deepspeed.")]
        with torch.serialization.safe_globals(inert):
            value = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", path=path) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain data, and reading it might run code ({refusal_of(error)})",
            path=path,
        ) from None
    except Exception as error:  # whatever a damaged zip file leads to
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {error}", path=path) from None
    of_optimizer = path.name.endswith("_optim_states.pt")
    if not isinstance(value, dict) or (of_optimizer and not isinstance(value.get("optimizer_state_dict"), dict)):
        raise CheckpointError(f"{path} is not a file of a ZeRO checkpoint", path=path)
    return value


def _number(value: Any) -> int:
    """An enum of DeepSpeed's was replaced by a record of what it was made of."""
    if isinstance(value, Inert):
        value = value.args[0] if value.args else None
    return value if isinstance(value, int) else -1
