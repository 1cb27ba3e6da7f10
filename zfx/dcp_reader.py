"""Reading a directory of `torch.distributed.checkpoint` (DCP) that may have come from anywhere.

[Note: nothing is executed] Torch reads two things of such a directory with a pickle that may run code: the file `.metadata`, and
entries that are no tensors. Here `.metadata` is read by an unpickler that knows DCP's own record classes and nothing else, before
torch sees any of it; everything in it is then checked: names of files stay inside the directory, pieces of tensors inside the
tensor, bytes inside the file. Tensors and objects are read with `weights_only=True`. What does not pass is refused with its name.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from ._compat import DCP_PRIVATE_RECORDS, StorageInfo, file_view
from .errors import CheckpointError
from .together import no_warnings

METADATA = ".metadata"


def _as_text(*parts: str) -> str:
    return "/".join(str(part) for part in parts)


_RECORDS = (
    Metadata,
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    MetadataIndex,
    StorageMeta,
    *DCP_PRIVATE_RECORDS,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(record.__module__, record.__qualname__): record for record in _RECORDS},
    # where the checkpoint was written: read as text
    **{(m, n): _as_text for m in ("pathlib", "pathlib._local") for n in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs") from None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    info: StorageInfo


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, without its values. Its pieces, in order, fill it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source:
    """A DCP directory whose metadata was read and found sound: `tensors` by key, keys of `objects` (all else), and the `paths` of
    both in the nested dicts and lists that were saved.

    Raises:
        CheckpointError: the directory or its metadata is missing, damaged, or asks for what it must not.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metadata = _read_metadata(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: list[str] = []
        self.paths: dict[str, tuple[str | int, ...]] = {}
        storage = _storage(self.metadata, directory)
        paths = self.metadata.planner_data if isinstance(self.metadata.planner_data, dict) else {}
        for key, entry in self.metadata.state_dict_metadata.items():
            path: Any = paths.get(key)
            self.paths[key] = path if _is_path(path) else (key,)
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[key] = _stored_tensor(key, entry, storage, directory)
            elif isinstance(entry, BytesStorageMetadata):
                self.objects.append(key)
            else:
                raise _refused(directory, f"{key!r} is neither a tensor nor an object")
        self._storage = storage

    def pieces(self, key: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Offsets and values of the pieces of one tensor, one after another, in order of their offsets."""
        stored = self.tensors[key]
        for piece in stored.pieces:
            yield piece.offsets, self._values(key, stored.dtype, piece.sizes, piece.info)

    def tensor(self, key: str) -> torch.Tensor:
        """One whole tensor, on the CPU."""
        stored = self.tensors[key]
        out = torch.empty(stored.shape, dtype=stored.dtype)
        for offsets, values in self.pieces(key):
            out[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape))] = values
        return out

    def object(self, key: str) -> Any:
        """One entry that is no tensor, if it is plain data.

        Raises:
            CheckpointError: reading it would run code, or it is damaged.
        """
        info = self._storage[MetadataIndex(key)]
        with open(self.directory / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return self._load(io.BytesIO(file.read(info.length)), info.relative_path, key)

    def read_into(self, targets: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Fill these tensors (DTensors: this rank's part) in place. A collective call where there is a group."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        with no_warnings():
            dcp.load(targets, storage_reader=_Reader(self), planner=planner, process_group=group, no_dist=group is None)

    def _values(self, key: str, dtype: torch.dtype, sizes: tuple[int, ...], info: StorageInfo) -> torch.Tensor:
        with open(self.directory / info.relative_path, "rb") as file:
            found = self._load(file_view(file, info.offset, info.length), info.relative_path, key)
        if not isinstance(found, torch.Tensor) or found.dtype != dtype or tuple(found.shape) != sizes or found.is_sparse:
            raise self._bad(info.relative_path, key, f"{dtype} of shape {sizes} should be there, and is not")
        return found

    def _load(self, file: Any, name: str, key: str) -> Any:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            why = f"it is not plain data, and reading it might run code ({refusal_of(error)})"
            raise self._bad(name, key, why) from None
        except Exception as error:  # whatever a damaged zip file leads to
            raise self._bad(name, key, f"{type(error).__name__}: {error}") from None

    def _bad(self, name: str, key: str, why: str) -> CheckpointError:
        path = self.directory / name
        return CheckpointError(f"{path} can't be read at {key!r}: {why}", path=path, name=key)


class _Reader(FileSystemReader):
    """Torch's reader, over metadata that has been checked; errors say file and tensor."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.directory)
        self.source = source

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.source.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            key = item.storage_index.fqn
            stored = self.source.tensors[key]
            if 0 in item.lengths and stored.shape:
                continue  # the part of a rank that owns no rows
            offset = item.storage_index.offset
            piece = next(p for p in stored.pieces if p.offsets == tuple(offset or (0,) * len(stored.shape)))
            values = self.source._values(key, stored.dtype, piece.sizes, piece.info)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                values = values.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def refusal_of(error: BaseException) -> str:
    """The line of torch's refusal that says what was refused; the rest is advice to trust the file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Unsupported" in line or "Trying to" in line), lines[-1] if lines else "")[:200]


def _read_metadata(directory: Path) -> Metadata:
    path = directory / METADATA
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError:
        what = "has no .metadata" if directory.is_dir() else "does not exist"
        raise CheckpointError(f"{directory} is not a checkpoint of torch.distributed.checkpoint: it {what}", path=path) from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}", path=path) from None
    except pickle.UnpicklingError as error:
        raise _refused(directory, str(error)) from None
    except Exception as error:  # a damaged pickle raises anything
        raise _refused(directory, f"it is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(found, Metadata) or not isinstance(getattr(found, "state_dict_metadata", None), dict):
        raise _refused(directory, "it does not describe a checkpoint")
    if not all(type(key) is str for key in found.state_dict_metadata):
        raise _refused(directory, "a key is not a string")
    found.storage_meta = StorageMeta()
    return found


def _storage(metadata: Metadata, directory: Path) -> Mapping[MetadataIndex, StorageInfo]:
    found = getattr(metadata, "storage_data", None)
    if not isinstance(found, dict):
        raise _refused(directory, "it does not say where the values are")
    sizes: dict[str, int] = {}
    for index, info in found.items():
        if type(index) is not MetadataIndex or not isinstance(info, StorageInfo):
            raise _refused(directory, "an entry is of a wrong kind")
        name = getattr(info, "relative_path", None)
        if type(name) is not str:
            raise _refused(directory, f"{index.fqn!r} names no file")
        if name not in sizes:
            sizes[name] = _size_of(directory, name)
        offset, length = getattr(info, "offset", -1), getattr(info, "length", -1)
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0 or offset + length > sizes[name]:
            raise CheckpointError(
                f"{directory / name} is truncated, or {METADATA} is damaged: {index.fqn!r} should be at bytes {offset} to "
                f"{offset + length if type(offset) is type(length) is int else '?'}, and the file has {sizes[name]:,}",
                path=directory / name,
                name=index.fqn,
            )
        if getattr(info, "transform_descriptors", None):
            raise _refused(directory, f"{index.fqn!r} was written with a stream extension, which zfx does not read")
    return found


def _size_of(directory: Path, name: str) -> int:
    path = directory / name
    inside = path.resolve().is_relative_to(directory.resolve())
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or not inside or "\0" in name:
        raise _refused(directory, f"it names the file {name!r}, which is outside the directory")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is not complete", path=path)
    return path.stat().st_size


def _stored_tensor(
    key: str, entry: TensorStorageMetadata, storage: Mapping[MetadataIndex, StorageInfo], directory: Path
) -> StoredTensor:
    shape: Any = getattr(entry, "size", None)
    dtype = getattr(getattr(entry, "properties", None), "dtype", None)
    if not isinstance(dtype, torch.dtype) or not _is_shape(shape):
        raise _refused(directory, f"{key!r} has no shape or no dtype")
    offsets: Any
    sizes: Any
    pieces, volume = [], 0
    for chunk in getattr(entry, "chunks", ()):
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if not _is_shape(offsets) or not _is_shape(sizes) or len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _refused(directory, f"a piece of {key!r} has no place")
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape)):
            raise _refused(
                directory, f"a piece of {key!r} at {tuple(offsets)} of sizes {tuple(sizes)} is outside of {tuple(shape)}"
            )
        info = storage.get(MetadataIndex(key, offsets))
        if info is None:
            raise _refused(directory, f"the piece of {key!r} at {tuple(offsets)} is in no file")
        if math.prod(sizes) or not shape:
            pieces.append(Piece(tuple(offsets), tuple(sizes), info))
        volume += math.prod(sizes)
    if volume != math.prod(shape) or len({piece.offsets for piece in pieces}) != len(pieces):
        raise _refused(directory, f"the pieces of {key!r} do not make up its shape {tuple(shape)}")
    return StoredTensor(key, tuple(shape), dtype, tuple(sorted(pieces, key=lambda piece: piece.offsets)))


def _is_shape(value: Any) -> bool:
    return isinstance(value, (torch.Size, tuple, list)) and all(type(n) is int and n >= 0 for n in value)


def _is_path(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(type(part) in (str, int) for part in value)


def _refused(directory: Path, why: str) -> CheckpointError:
    path = directory / METADATA
    return CheckpointError(f"{path} is refused: {why}", path=path)


__all__ = ["METADATA", "Piece", "Source", "StoredTensor", "refusal_of"]
