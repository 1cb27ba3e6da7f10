"""From a directory back into a run: open, compare everything with the run, and only then change values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import manifest, optimizer_state, rng
from .checkpoint_state import VERSION, Run, model_entries
from .dcp_reader import METADATA, Source
from .dcp_writer import STATE
from .errors import CheckpointError
from .plain_layout import Layout, plain_layout
from .plain_state import unpack
from .progress import progress
from .together import RankGroup


@dataclass(frozen=True)
class Resumed:
    """What `Checkpointer.load` found beside what it loaded.

    Attributes:
        step: that was saved; 0 where the checkpoint is not zfx's.
        extras: the user's own.
        data: the data positions of all ranks that saved, by rank; empty if there are none.
        world_size: how many ranks saved; 0 where the checkpoint is not zfx's.
        path: the directory.
    """

    step: int
    extras: Any
    data: list[Any]
    world_size: int
    path: Path


class Opened:
    """A checkpoint whose manifest, metadata and state were read and found sound. Its values were not read yet.

    Attributes:
        facts: of the manifest; empty for a plain DCP directory.
        record: of `state.json`; None for a plain DCP directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.facts: dict[str, Any] = {}
        self.files: dict[str, manifest.FileFacts] = {}
        self.record: dict[str, Any] | None = None
        plain = (directory / METADATA).is_file() and not any((directory / name).exists() for name in (manifest.NAME, STATE))
        if not plain:
            self.facts, self.files = manifest.read(directory)
            manifest.check_lengths(directory, self.files)
            for name in (METADATA, STATE):
                if name not in self.files:
                    raise CheckpointError(f"{directory / manifest.NAME} does not list {name}", path=directory / manifest.NAME)
            manifest.check(directory, {name: self.files[name] for name in (METADATA, STATE)})
            self.record = _read_record(directory / STATE)
        self.source = Source(directory)

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Compare this rank's share of the files with their checksums."""
        mine = {name: self.files[name] for name in manifest.share(self.files, rank, world_size)}
        total = sum(facts.num_bytes for facts in mine.values())
        with progress(f"verifying {self.directory.name}", total, quiet=rank != 0) as advance:
            manifest.check(self.directory, mine, advance)

    def shared(self) -> dict[str, Any]:
        """State of the schedulers, the scaler, the model's extra state, its configuration, the extras."""
        assert self.record is not None
        tensors = [self.source.tensor(f"shared.{i}") for i in range(self.record["shared_tensors"])]
        return unpack(self.record["shared"], tensors, str(self.directory / STATE))

    def own(self, part: str, rank: int) -> Any:
        """What rank `rank` saved of its own: "rng" or "data"."""
        assert self.record is not None
        data, count = self.record["ranks"][rank][part]
        tensors = [self.source.tensor(f"rank.{rank}.{part}.{i}") for i in range(count)]
        return unpack(data, tensors, str(self.directory / STATE))

    @property
    def world_size(self) -> int:
        return len(self.record["ranks"]) if self.record is not None else 0


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", path=path) from None
    kinds = {
        "shared": dict,
        "shared_tensors": int,
        "optimizers": list,
        "aliases": dict,
        "tensors": dict,
        "parts": dict,
        "ranks": list,
    }
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {record.get('version') if isinstance(record, dict) else None!r}, not {VERSION}", path=path
        )
    for key, kind in kinds.items():
        if not isinstance(record.get(key), kind):
            raise CheckpointError(f"{path} is damaged: {key!r} is missing or of a wrong kind", path=path, name=key)
    return record


@dataclass(slots=True)
class _Plan:
    """All that is needed to change the run, compared and found to fit."""

    opened: Opened
    targets: dict[str, torch.Tensor]
    optim: dict[str, dict[str, torch.Tensor]]
    records: Sequence[Mapping[str, Any]]
    shared: dict[str, Any]
    position: Any
    positions: list[Any]
    streams: Any


def load_run(directory: Path, run: Run, ranks: RankGroup, *, with_rng: bool, verify: bool) -> Resumed:
    """See `Checkpointer.load`."""
    what, plans = f"loading {directory.name}", []

    def prepare() -> None:
        opened = Opened(directory)
        if verify:
            opened.verify(ranks.rank, ranks.world_size)
        plans.append(_plan(opened, run, ranks.rank, ranks.world_size, with_rng))

    ranks.every(what, prepare)
    plan = plans[0]
    ranks.guarded(what, lambda: plan.opened.source.read_into(plan.targets, ranks.group))
    ranks.every(what, lambda: _apply(plan, run, ranks.rank))
    step = plan.opened.facts.get("step", 0)
    return Resumed(step, plan.shared.get("extras"), plan.positions, plan.opened.facts.get("world_size", 0), directory)


def _plan(opened: Opened, run: Run, rank: int, world_size: int, with_rng: bool) -> _Plan:
    layout = Layout.own(opened.source) if opened.record is not None else plain_layout(opened.source, run)
    targets = _model_targets(opened, layout, run, rank)
    records: Sequence[Mapping[str, Any]] = []
    optim: dict[str, dict[str, torch.Tensor]] = {}
    if run.optimizers:
        records = opened.record["optimizers"] if opened.record is not None else layout.records(run)
        if opened.record is not None and not records:
            raise CheckpointError(f"{opened.directory} holds no optimizer")
        stored = {n: {k: (t.shape, t.dtype) for k, t in entries.items()} for n, entries in layout.optimizer_tensors().items()}
        optim = optimizer_state.targets(run.model, run.optimizers, stored, records)
        targets.update({layout.optimizer_key(n, k): t for n, entries in optim.items() for k, t in entries.items()})
    shared = _shared_for(opened, run)
    positions: list[Any] = []
    position = streams = None
    if opened.record is not None:
        if opened.record["parts"].get("data"):
            positions = [opened.own("data", r) for r in range(opened.world_size)]
        if run.data is not None:
            position = _position(opened, rank, world_size, positions)
        if with_rng and opened.world_size:
            streams = opened.own("rng", rank % opened.world_size)
    elif run.data is not None:
        raise CheckpointError(f"{opened.directory} is a checkpoint of torch alone, and holds no data position")
    return _Plan(opened, targets, optim, records, shared, position, positions, streams)


def _model_targets(opened: Opened, layout: Layout, run: Run, rank: int) -> dict[str, torch.Tensor]:
    tensors, aliases, _ = model_entries(run.model)
    there, record = layout.model_tensors(), opened.record
    known = {*tensors, *aliases}
    missing = [name for name in tensors if name not in there]
    extra = [name for name in there if name not in known]
    if missing or extra:
        parts = [f"has no {_names(missing)}"] if missing else []
        parts += [f"has {_names(extra)}, which the model has not"] if extra else []
        raise CheckpointError(
            f"{opened.directory} was written of another model: it {' and '.join(parts)}",
            path=opened.directory,
            name=(missing + extra)[0],
        )
    for name, tensor in tensors.items():
        stored = there[name]
        for fact, mine, theirs in (("shape", tuple(tensor.shape), stored.shape), ("dtype", tensor.dtype, stored.dtype)):
            if mine != theirs:
                raise CheckpointError(
                    f"{name!r} has {fact} {theirs} in the checkpoint and {mine} in the model", path=opened.directory, name=name
                )
    if record is not None:
        for name, first in aliases.items():
            if name in record["tensors"]:
                raise CheckpointError(
                    f"the model ties {name!r} to {first!r}, and the checkpoint has two different tensors",
                    path=opened.directory,
                    name=name,
                )
    local = set(record.get("local_buffers", ())) if record is not None and rank < opened.world_size else set()
    return {f"rank.{rank}.buffers.{n}" if n in local else layout.model_key(n): t for n, t in tensors.items()}


def _shared_for(opened: Opened, run: Run) -> dict[str, Any]:
    """The shared state, if it has what the run asks for."""
    _, _, rest = model_entries(run.model)
    if opened.record is None:
        for what, wanted in (("scheduler", run.schedulers), ("scaler", run.scaler)):
            if wanted:
                raise CheckpointError(f"{opened.directory} is a checkpoint of torch alone, and holds no {what}")
        return {"model": {}}
    shared, saved = opened.shared(), opened.record["parts"].get("schedulers", [])
    mine = [type(one).__name__ for one in run.schedulers]
    if mine and mine != saved:
        raise CheckpointError(f"the checkpoint holds {_those(saved, 'scheduler')}, and {_those(mine, 'scheduler')} is to be loaded")
    if run.scaler is not None and shared["scaler"] is None:
        raise CheckpointError(f"{opened.directory} holds no scaler")
    if missing := [name for name in rest if name not in shared["model"]]:
        raise CheckpointError(f"{opened.directory} has no {missing[0]!r} of the model's extra state", name=missing[0])
    return shared


def _position(opened: Opened, rank: int, world_size: int, positions: list[Any]) -> Any:
    if not positions:
        raise CheckpointError(f"{opened.directory} holds no data position")
    assert opened.record is not None
    if opened.world_size == world_size:
        return positions[rank]
    packed = [own["data"] for own in opened.record["ranks"]]
    if all(one == packed[0] and one[1] == 0 for one in packed):
        return positions[0]
    raise CheckpointError(
        f"{opened.world_size} ranks saved their data positions, which differ, and {world_size} load: there is no rule for that. "
        "Load without data=, and set your loader from the `data` of what load returns"
    )


def _apply(plan: _Plan, run: Run, rank: int) -> None:
    if plan.shared["model"]:
        run.model.load_state_dict(plan.shared["model"], strict=False)
    if run.optimizers:
        optimizer_state.apply(run.model, run.optimizers, plan.optim, plan.records)
    for scheduler, saved in zip(run.schedulers, plan.shared.get("schedulers", [])):
        scheduler.load_state_dict(saved)
    if run.scaler is not None:
        run.scaler.load_state_dict(plan.shared["scaler"])
    if run.data is not None:
        run.data.load_state_dict(plan.position)
    if plan.streams is not None:
        if rank < plan.opened.world_size:
            rng.restore(plan.streams)
        else:
            rng.reseed(plan.streams, rank)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _those(names: Sequence[str], what: str) -> str:
    return f"{what} {' and '.join(names)}" if names else f"no {what}"
