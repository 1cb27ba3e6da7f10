"""Writing a directory of safetensors files, tensor by tensor, so that it appears whole or not at all.

    <directory>/.zfx-xxxxxxxx/model-00001-of-00003.safetensors     everything is written here first; any tensor, in any order
    <directory>/model-00001-of-00003.safetensors                   `finish` moves it, and what points to the rest comes last

What is to come is declared at the start, so each tensor's place in its file is known before it is there, and nothing is held. The
format is that of safetensors [1]: the length of a JSON header as 8 bytes, the header, then the tensors without gaps.

[1] https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
_PIECE_BYTES = 1 << 26  # what one write passes to the system


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes one directory; used in a `with`, whose end is `finish`, or `abort` where it was left by an error.

    Args:
        directory: made where it is not there. What it holds stays untouched until `finish`.
        entries: the tensors to come. Files are filled in this order; `add` may come in any.
        max_shard_bytes: most that the tensors of one file take; a larger one has its own file. Default: 50 GB, as transformers.
        metadata: strings for each file's header.
        index_metadata: more facts for the index, which is written where there are several files.
        stem: what names begin with: `<stem>.safetensors`, or `<stem>-00001-of-00002.safetensors` and so on, with
            `<stem>.safetensors.index.json`.

    Attributes:
        folder: the directory in which everything waits for `finish`; other files that are put there (a config) are published too.

    Raises:
        CheckpointError: two entries have the same name, a dtype has no name in the format, or the disk has too little room.
        OSError: the directory can't be written to, from here or from any method.

    Example:
        >>> import torch, tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with SafetensorsWriter(directory, [Entry("w", torch.float32, (2, 3))]) as writer:
        ...         writer.add("w", torch.ones(2, 3))
        ...     sorted(os.listdir(directory))
        ['model.safetensors']
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        entries: Iterable[Entry],
        *,
        max_shard_bytes: int = 50 * 10**9,
        metadata: Mapping[str, str] | None = None,
        index_metadata: Mapping[str, Any] | None = None,
        stem: str = "model",
    ) -> None:
        self.directory, self.stem = Path(directory), stem
        self._index_metadata = dict(index_metadata or {})
        entries = list(entries)
        _check(entries)
        shards = _shards(entries, max_shard_bytes)
        self._num_bytes = sum(entry.num_bytes for entry in entries)
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if self._num_bytes > free:
            raise CheckpointError(f"{directory} has room for {free:,} bytes, and {self._num_bytes:,} are needed", path=directory)
        self.folder = Path(tempfile.mkdtemp(prefix=".zfx-", dir=self.directory))
        self._places: dict[str, tuple[Entry, int, int]] = {}  # entry, file, and where in it
        self._missing = {entry.name for entry in entries}
        self._names: list[str] = []
        self._files: list[int] = []
        self._publishing = False
        try:
            for number, shard in enumerate(shards, 1):
                numbers = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
                self._begin(f"{stem}{numbers}.safetensors", shard, metadata)
        except BaseException:
            self.abort()
            raise

    def _begin(self, name: str, shard: list[Entry], metadata: Mapping[str, str] | None) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        at = 0
        for entry in sorted(shard, key=lambda e: (-e.dtype.itemsize, DTYPES[e.dtype], e.name)):  # keeps every tensor aligned
            header[entry.name] = {
                "dtype": DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [at, at + entry.num_bytes],
            }
            at += entry.num_bytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._names.append(name)
        self._files.append(file)
        _write(file, 0, len(text).to_bytes(8, "little") + text)
        os.ftruncate(file, 8 + len(text) + at)
        for entry in shard:
            self._places[entry.name] = (entry, file, 8 + len(text) + header[entry.name]["data_offsets"][0])

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a declared tensor, once; nothing of it is kept.

        Raises:
            CheckpointError: it was not declared, not so, or is there already.
        """
        if name not in self._missing:
            raise CheckpointError(f"{name!r} was {'written already' if name in self._places else 'not declared'}", name=name)
        entry, file, at = self._places[name]
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise CheckpointError(
                f"{name!r} was declared as {entry.shape} {entry.dtype} and is {tuple(tensor.shape)} {tensor.dtype}", name=name
            )
        tensor = tensor.detach().cpu().contiguous()
        if entry.num_bytes:
            _write(file, at, (ctypes.c_char * entry.num_bytes).from_address(tensor.data_ptr()))
        self._missing.discard(name)

    def finish(self) -> None:
        """Publish: files that others point to first, the index (or the only file of weights) last; then remove an earlier save's.

        A crash in between leaves the old checkpoint, the new one, or a directory that nobody takes for one (the rest is still in
        `folder`); never a mixture.
        """
        if self._missing:
            name = min(self._missing)
            raise CheckpointError(f"{len(self._missing)} tensors were declared and not written, {name!r} among them", name=name)
        self._close(sync=True)
        index, only = f"{self.stem}.safetensors.index.json", f"{self.stem}.safetensors"
        if len(self._names) > 1:
            self._write_index(self.folder / index)
        last = index if len(self._names) > 1 else only
        self._publishing = True
        for entrance in {index, only} - {last} | ({index} if last == index else set()):
            (self.directory / entrance).unlink(missing_ok=True)
        names = sorted(os.listdir(self.folder), key=lambda name: (name == last, name))
        for name in names:
            os.replace(self.folder / name, self.directory / name)
        _sync(self.directory)
        self.folder.rmdir()
        numbered = re.compile(re.escape(self.stem) + r"-\d{5}-of-\d{5}\.safetensors")
        for name in os.listdir(self.directory):
            if numbered.fullmatch(name) and name not in names:
                (self.directory / name).unlink()

    def _write_index(self, path: Path) -> None:
        names = dict(zip(self._file_order, self._names))
        index = {
            "metadata": {**self._index_metadata, "total_size": self._num_bytes},
            "weight_map": {name: names[file] for name, (_, file, _) in self._places.items()},
        }
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _sync(path)

    def _close(self, sync: bool) -> None:
        self._file_order = tuple(self._files)
        while self._files:
            file = self._files.pop()
            try:
                if sync:
                    os.fsync(file)
            finally:
                os.close(file)

    def abort(self) -> None:
        """Remove what was written, unless it's being published; the directory is as it was."""
        self._close(sync=False)
        if not self._publishing:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abort()


def _check(entries: list[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{entry.name!r} is {entry.dtype}, which safetensors files can't hold", name=entry.name)
        if entry.name in seen or entry.name == "__metadata__":
            raise CheckpointError(f"the name {entry.name!r} is taken", name=entry.name)
        seen.add(entry.name)


def _shards(entries: list[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    """At least one, and none empty but that one."""
    shards: list[list[Entry]] = [[]]
    held = 0
    for entry in entries:
        if shards[-1] and held + entry.num_bytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += entry.num_bytes
    return shards


def _write(file: int, at: int, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(file, view[:_PIECE_BYTES], at)
        view, at = view[written:], at + written


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, or text with a unit of thousands, such as "5GB".

    Raises:
        ValueError: it is neither, or not above 0.

    Example:
        >>> size_in_bytes("1.5MB")
        1500000
    """
    number: float
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B\s*", size, re.IGNORECASE)
        number = float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ") if found else 0
    else:
        number = 0 if isinstance(size, bool) or not isinstance(size, int) else size
    if number < 1:
        raise ValueError(f"max_shard_size must be a number of bytes above 0, or text such as '5GB', got {size!r}")
    return int(number)


__all__ = ["DTYPES", "Entry", "SafetensorsWriter", "size_in_bytes"]
