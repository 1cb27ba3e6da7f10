"""`zfx.Checkpointer`: checkpoints of a whole run that are whole or not there, and that load on any number of ranks."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.optimizer import Optimizer

from . import checkpoint_folder as folder
from . import checkpoint_state as state
from .checkpoint_load import Resumed, load_run
from .dcp_writer import FILE_BYTES, STATE, CpuCopy, Writer
from .progress import progress
from .together import TORCH_FAILS, RankGroup, explained, no_warnings

log = logging.getLogger("zfx")


class Checkpointer:
    """Saves and loads a run: model, optimizers, schedulers, scaler, random streams, data position, and what the user adds.

    Every method but `latest` is a collective call. Each checkpoint is a directory of `torch.distributed.checkpoint` with a
    manifest of SHA-256 checksums; it gets its name by one rename, when every rank's files are on the disk. So a crash, at any
    moment, leaves the ones before it as they were, and what fails on one rank is raised on all and commits nothing.

    The same number of ranks goes on bit for bit as if it had never stopped. On another number, each rank reads its rows of every
    tensor; random streams follow the rule in `zfx.rng`; buffers that differed between ranks are those of the rank of the same
    number, or of rank 0; for the data position see `load`.

    Nothing that is read runs code: what is not a tensor is JSON, tensors are read with `weights_only=True`, and DCP's own metadata
    by an unpickler that knows only its records. So what is saved must be plain: numbers, strings, containers and tensors.

    Args:
        directory: where the checkpoints of one run go, on a file system that all ranks share. Made by the first save.
        keep: how many checkpoints stay; older ones are deleted after a save has succeeded, never before. None: all.
        process_group: whose ranks save together. Default: all.
        timeout: seconds that ranks wait for one that does not call the same method, before all raise `RankMismatch`.
        write_timeout: seconds that ranks wait for one that is still reading or writing.
        file_bytes: most bytes in one file of tensors. Torch holds a CPU copy of a file's tensors while it writes, so this is also
            what a save costs in memory (or the largest shard, if that is larger). A background save costs a CPU copy of all this
            rank's shards.

    Example, resuming where there is something to resume::

        checkpoints = zfx.Checkpointer("runs/7", keep=3)
        first = 0
        if checkpoints.latest() is not None:
            first = checkpoints.load(model=model, optimizer=optimizer, scheduler=scheduler, data=loader).step
        for step in range(first, num_steps):
            ...
            if (step + 1) % 100 == 0:
                checkpoints.save(step + 1, model=model, optimizer=optimizer, scheduler=scheduler, data=loader, background=True)
        checkpoints.wait()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        write_timeout: float = 1800.0,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be a whole number of at least 1, or None to keep all, got {keep!r}")
        for name, value in (("timeout", timeout), ("write_timeout", write_timeout), ("file_bytes", file_bytes)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} must be above 0, got {value!r}")
        self.directory, self.keep, self.file_bytes = Path(directory), keep, int(file_bytes)
        self._process_group, self._timeout_s, self._work_s = process_group, timeout, write_timeout
        self._ranks: RankGroup | None = None
        self._pending: tuple[Future[Any], str, Path] | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.wait()

    def latest(self) -> Path | None:
        """The checkpoint of the highest step, or None. One that is still being written is not there yet."""
        found = folder.saved_in(self.directory)
        return found[-1].path if found else None

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, in order."""
        return sorted({one.step for one in folder.saved_in(self.directory)})

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        extras: Any = None,
        background: bool = False,
    ) -> Path:
        """Write a checkpoint of this step; where it is, or will be.

        Args:
            step: a whole number of at least 0; how many steps were taken, say.
            model: compiled by zfx, sharded by FSDP2, or plain.
            optimizer: one or several. Only read: saving before the first step changes nothing.
            scheduler: one or several, with `state_dict` and `load_state_dict`.
            scaler: a `torch.amp.GradScaler`, or None.
            data: any object with `state_dict` and `load_state_dict`: each rank's own position in its data.
            extras: plain values and tensors of your own; rank 0's are stored.
            background: copy all tensors to the CPU, return, and write while training goes on. An error of the writing is raised
                by the next call of `save`, `load` or `wait`.

        Raises:
            CheckpointError: on every rank, if any rank failed; nothing was committed, and earlier checkpoints are as they were.
            RankMismatch: ranks save different steps, or one did not come.
            ValueError, TypeError: wrong arguments.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a whole number of at least 0, got {step!r}")
        run = _run(model, optimizer, scheduler, scaler, data, extras)
        self.wait()
        ranks, what = self._group(), f"saving step {step}"
        ranks.begin([f"Checkpointer.save(step={step}, background={background}) of {type(model).__name__}"])
        mine: list[state.Collected] = []

        def collect() -> dict[str, Any]:
            mine.append(state.collect(run, ranks.rank))
            return mine[0].summary

        def complete() -> Any:
            state.complete(mine[0], summaries, ranks.rank)
            return folder.places_for(self.directory, step, secrets.token_hex(4)) if ranks.rank == 0 else None

        summaries = ranks.every(what, collect)
        temporary, final = ranks.every(what, complete)[0]
        writer = self._writer(mine[0], step, ranks, temporary, final)
        self._write(what, mine[0].tree, writer, ranks, background)
        return final

    def load(
        self,
        step: int | None = None,
        *,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        rng: bool = True,
        path: str | os.PathLike[str] | None = None,
        verify: bool = True,
    ) -> Resumed:
        """Load a checkpoint into a run that is built alike, in place, on any number of ranks.

        Names, shapes, dtypes, checksums and everything else that can be checked is checked on all ranks before the first value
        changes.

        Args:
            step: which. Default: the latest. One that is damaged is refused, not passed over.
            optimizer, scheduler, scaler: as they were saved, those that are to be loaded. What is left out is not loaded.
            data: gets this rank's position. On another number of ranks there is no rule for it, unless all positions are the
                same: leave it out then, and set your loader from the `data` of what is returned, which has the positions of all
                ranks that saved.
            rng: restore the random streams, by the rule in `zfx.rng`.
            path: a directory to load instead: another run's checkpoint, or any of `torch.distributed.checkpoint`, such as one
                that FSDP2 wrote, in torch's usual layout (`{"model": ..., "optim": ...}` from `get_state_dict`).
            verify: compare every byte with the checksums; the ranks share the work. False: lengths only.

        Raises:
            CheckpointError: on every rank: there is no such checkpoint, it is damaged (which file), or it holds something else
                than what is to be loaded (which name).
            RankMismatch: ranks load different steps, or one did not come.
        """
        run = _run(model, optimizer, scheduler, scaler, data, None)
        if step is not None and path is not None:
            raise ValueError("say step= or path=, not both")
        self.wait()
        ranks = self._group()
        ranks.begin([f"Checkpointer.load(step={step}, path={path}) of {type(model).__name__}"])

        def choose() -> Path:
            return Path(path) if path is not None else folder.choose(self.directory, step)

        chosen = ranks.every("loading", lambda: choose() if ranks.rank == 0 else Path())[0]  # ranks may see a new one late
        return load_run(chosen, run, ranks, with_rng=rng, verify=verify)

    def wait(self) -> None:
        """Return once the save in the background, if there is one, is committed.

        Raises:
            CheckpointError: it failed; nothing was committed.
        """
        if self._pending is None:
            return
        (future, what, temporary), self._pending = self._pending, None
        try:
            future.result()
        except TORCH_FAILS as error:
            self._clear(temporary)
            raise explained(f"{what} in the background", error) from error

    # ---- writing -------------------------------------------------------------------------------------------------------

    def _group(self) -> RankGroup:
        if self._ranks is None or not self._ranks.is_current():
            self._ranks = RankGroup(self._process_group, self._timeout_s, self._work_s)
        return self._ranks

    def _writer(self, mine: state.Collected, step: int, ranks: RankGroup, temporary: Path, final: Path) -> Writer:
        facts = {"step": step, "world_size": ranks.world_size}
        documents = {STATE: json.dumps(mine.record, allow_nan=False).encode()} if ranks.rank == 0 else {}
        aliases = {f"model.{name}": f"model.{first}" for name, first in mine.aliases.items()}
        return Writer(temporary, final, facts, documents, aliases, file_bytes=self.file_bytes, committed=self._committed)

    def _write(self, what: str, tree: dict[str, Any], writer: Writer, ranks: RankGroup, background: bool) -> None:
        if background:
            with no_warnings():
                future = ranks.guarded(
                    what,
                    lambda: dcp.async_save(
                        tree, storage_writer=writer, process_group=ranks.group, async_stager=CpuCopy(), no_dist=ranks.group is None
                    ),
                )
            assert isinstance(future, Future)
            self._pending = (future, what, writer.temporary)
            return
        try:
            with progress(what, _local_bytes(tree), quiet=ranks.rank != 0) as writer.progress, no_warnings():
                ranks.guarded(
                    what, lambda: dcp.save(tree, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
                )
        except BaseException:
            self._clear(writer.temporary)
            raise

    def _committed(self, final: Path) -> None:
        """On rank 0, once the new one is safe. What can't be deleted is said, and is no failure of the save."""
        log.info("saved %s", final)
        if self.latest() != final:
            log.warning(
                "%s holds a later step than %s: the latest is the highest step, not the last one saved", self.directory, final
            )
        try:
            folder.remove_left(self.directory)
            for gone in folder.retain(self.directory, self.keep, final):
                log.info("deleted %s: keep=%s", gone, self.keep)
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self.directory, error)

    def _clear(self, temporary: Path) -> None:
        if self._ranks is not None and self._ranks.rank == 0 and temporary.exists():
            folder.remove(temporary)


def _run(model: Any, optimizer: Any, scheduler: Any, scaler: Any, data: Any, extras: Any) -> state.Run:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    optimizers = _several(optimizer)
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or several, got {type(one).__name__}")
    schedulers = _several(scheduler)
    for what, one in (*(("scheduler", s) for s in schedulers), ("scaler", scaler), ("data", data)):
        if one is not None and not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            raise TypeError(f"{what} must have state_dict() and load_state_dict(), and {type(one).__name__} has not")
    return state.Run(model, optimizers, schedulers, scaler, data, extras)


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _local_bytes(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(_local_bytes(value) for value in tree.values())
    local = getattr(tree, "_local_tensor", tree)
    return local.numel() * local.itemsize if hasattr(local, "itemsize") else 0
