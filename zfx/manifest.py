"""The manifest of a checkpoint: what files it has, how long they are, and their SHA-256. It is the last file to be written.

    {"format": "zfx.checkpoint", "version": 1, "step": 10, "world_size": 4,
     "files": {"__0_0_0.distcp": [1024, "9f86..."], ...}, "sha256": "..."}

`sha256` is of everything above it, so that a manifest notices its own damage too. Checksums tell accidents, not malice: whoever can
change a file can change its checksum. What keeps hostile files from doing harm is in `dcp_reader`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

NAME = "manifest.json"
FORMAT, VERSION = "zfx.checkpoint", 1
_BLOCK = 1 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\.metadata")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Length in bytes and SHA-256 (hex) of one file."""

    num_bytes: int
    sha256: str


def facts_of(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> FileFacts:
    """Read a file once. `progress` is told of bytes as they are read."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
            progress(len(block))
    return FileFacts(size, digest.hexdigest())


def write(directory: Path, facts: Mapping[str, Any], files: Mapping[str, FileFacts]) -> None:
    """Write the manifest and flush it and the directory to the disk.

    Raises:
        CheckpointError: a file is not there, or not as long as the rank that wrote it says.
    """
    for name, wanted in files.items():
        size = (directory / name).stat().st_size if (directory / name).is_file() else None
        if size != wanted.num_bytes:
            raise CheckpointError(
                f"{directory / name}, which a rank wrote, {'is not there' if size is None else f'has {size:,} bytes'} for rank 0: "
                "the directory must be on a file system that all ranks share",
                path=directory / name,
            )
    body = {"format": FORMAT, "version": VERSION, **facts, "files": {n: [f.num_bytes, f.sha256] for n, f in sorted(files.items())}}
    text = json.dumps({**body, "sha256": _digest(body)}, indent=1, allow_nan=False)
    write_file(directory / NAME, text.encode())
    sync_directory(directory)


def write_file(path: Path, content: bytes) -> None:
    """Write and flush to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries, where the system can (POSIX)."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(directory: Path) -> tuple[dict[str, Any], dict[str, FileFacts]]:
    """The manifest's facts and files; whether the files agree is for `check`.

    Raises:
        CheckpointError: there is none, or it is damaged, of another version, or names a file outside the directory.
    """
    path = directory / NAME
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is no complete checkpoint: it has no {NAME}", path=path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", path=path) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a zfx checkpoint", path=path)
    if body.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {body.get('version')!r}; this zfx reads version {VERSION}", path=path)
    if body.pop("sha256", None) != _digest(body):
        raise CheckpointError(f"{path} is damaged: it does not match its own checksum", path=path)
    files = {}
    for name, entry in body.pop("files", {}).items():
        if not _PLAIN_NAME.fullmatch(name) or (directory / name).is_symlink():
            raise CheckpointError(f"{path} names {name!r}, which is not a plain file of this directory", path=path, name=name)
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int) and isinstance(entry[1], str)):
            raise CheckpointError(f"{path} is damaged at {name!r}", path=path, name=name)
        files[name] = FileFacts(*entry)
    return body, files


def check(directory: Path, files: Mapping[str, FileFacts], progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Compare every one of these files with the manifest; lengths first, since they cost nothing.

    Raises:
        CheckpointError: one is missing, of another length, or its bytes changed. The message names it.
    """
    check_lengths(directory, files)
    for name, wanted in files.items():
        if facts_of(directory / name, progress) != wanted:
            raise _bad(directory / name, "its bytes are not those that were written: the SHA-256 differs")


def check_lengths(directory: Path, files: Mapping[str, FileFacts]) -> None:
    """As `check`, without reading."""
    for name, wanted in files.items():
        path = directory / name
        if not path.is_file():
            raise _bad(path, "it is missing")
        if (size := path.stat().st_size) != wanted.num_bytes:
            raise _bad(path, f"it has {size:,} bytes, and was written with {wanted.num_bytes:,}")


def share(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Which of the files this rank checks, so that together the ranks read each once."""
    return sorted(names)[rank::world_size]


def _bad(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}. Load an earlier checkpoint (step=...), or restore the file", path=path)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
