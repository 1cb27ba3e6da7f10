"""The directory that a run keeps its checkpoints in: names, the latest, what to delete, what a crash left behind.

step-00000010            a checkpoint: it was renamed to this name when all of it was on the disk
step-00000010.2          the same step saved again: the higher number counts
step-00000020.tmp-5f3c   being written, or left by a crash; the next save removes it
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .manifest import sync_directory

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LEFT = re.compile(r"step-\d{8,}(?:\.\d+)?\.tmp-[0-9a-f]+")


@dataclass(frozen=True, order=True, slots=True)
class Saved:
    """One checkpoint. The order is that of steps, then of saves of the same step."""

    step: int
    again: int
    path: Path


def saved_in(directory: Path) -> list[Saved]:
    """Every checkpoint, oldest step first; nothing where there is no directory."""
    found = []
    if directory.is_dir():
        for entry in os.scandir(directory):
            match = _NAME.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append(Saved(int(match[1]), int(match[2] or 1), directory / entry.name))
    return sorted(found)


def choose(directory: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the latest.

    Raises:
        CheckpointError: there is none; the message says which there are.
    """
    found = [one for one in saved_in(directory) if step is None or one.step == step]
    if found:
        return found[-1].path
    steps = ", ".join(str(n) for n in sorted({one.step for one in saved_in(directory)})) or "none"
    raise CheckpointError(
        f"there is no checkpoint{'' if step is None else f' of step {step}'} in {directory}; steps there: {steps}", path=directory
    )


def places_for(directory: Path, step: int, token: str) -> tuple[Path, Path]:
    """Where a save of this step writes, and what that is renamed to. Makes the directory, and tries that it can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        again = max((one.again for one in saved_in(directory) if one.step == step), default=0) + 1
        name = f"step-{step:08d}" + (f".{again}" if again > 1 else "")
        temporary = directory / f"{name}.tmp-{token}"
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoints to {directory}: {error.strerror}", path=directory) from None
    return temporary, directory / name


def remove(path: Path) -> None:
    """Delete a checkpoint, or what a crash left of one. Renamed first, so that what is half deleted is never taken for whole."""
    if not _LEFT.fullmatch(path.name):
        gone = path.with_name(f"{path.name}.tmp-0")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        sync_directory(path.parent)
        path = gone
    shutil.rmtree(path, ignore_errors=True)


def remove_left(directory: Path) -> None:
    """Delete what crashed saves left. Only for whom nobody is writing there: after a save, before the next."""
    for entry in os.scandir(directory):
        if _LEFT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


def retain(directory: Path, keep: int | None, newest: Path) -> list[Path]:
    """Delete all but `newest` and the `keep - 1` others of the highest steps, and earlier saves of the same step; what was deleted.
    `newest` was just committed, so it is whole, and it stays whatever the steps of others are."""
    others = [one for one in saved_in(directory) if one.path != newest]
    step = next((one.step for one in saved_in(directory) if one.path == newest), None)
    gone = [one for one in others if one.step == step]
    others = [one for one in others if one.step != step]
    if keep is not None:
        gone += others[: max(0, len(others) - (keep - 1))]
    for one in gone:
        remove(one.path)
    return [one.path for one in gone]
