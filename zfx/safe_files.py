"""Names of files that somebody else wrote: which may be opened.

A checkpoint directory is not trusted: its index may name any path, and its files may be links. Only plain file names are taken, and
a link may lead only to where the Hugging Face hub's cache keeps its files.

    models--org--name/snapshots/<revision>/model.safetensors  ->  ../../blobs/<hash>      allowed: it's how the cache is built
    anywhere/model.safetensors                                ->  /etc/passwd             refused
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import CheckpointError


def inside(directory: str | os.PathLike[str], name: object) -> Path:
    """The file `name` in `directory`, once it is known to lie there.

    Raises:
        CheckpointError: `name` is not a plain file name, there is no such regular file, or it leads out of the directory.

    Example:
        >>> inside("/tmp", "../x")
        Traceback (most recent call last):
        ...
        zfx.errors.CheckpointError: '../x' is not a plain file name: a checkpoint may only name files of its own directory, /tmp
    """
    folder = Path(directory)
    if not is_plain(name):
        raise CheckpointError(
            f"{name!r} is not a plain file name: a checkpoint may only name files of its own directory, {folder}",
            path=folder,
            name=str(name),
        )
    path = folder / str(name)
    real = Path(os.path.realpath(path))
    if real.parent not in _homes(folder):
        raise CheckpointError(f"{path} is a link to {real}, outside its directory; copy the file there", path=path, name=str(name))
    if not real.is_file():
        raise CheckpointError(f"{path} is missing or is not a regular file", path=path, name=str(name))
    return path


def is_plain(name: object) -> bool:
    """Whether this is the name of a file, and not a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0:")


def _homes(folder: Path) -> set[Path]:
    """Where files of this directory may really lie."""
    real = Path(os.path.realpath(folder))
    homes = {real}
    if real.parent.name == "snapshots":
        homes.add(real.parent.parent / "blobs")
    return homes
