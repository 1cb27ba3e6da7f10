"""The weights of a directory, read by rows: safetensors, or torch's own files without running what is in them.

    model.safetensors | model.safetensors.index.json -> files     only the rows that are asked for are read
    pytorch_model.bin | pytorch_model.bin.index.json -> files     mapped into memory, so that only what is asked for is read

Nothing in the directory is trusted: see `zfx.safe_files` for names; headers are checked by the safetensors library, which refuses
sizes and offsets that do not fit the file; torch's files are unpickled with `weights_only=True`, which runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError
from .safe_files import inside
from .safetensors_writer import DTYPES

ENTRANCES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_INDEX_BYTES = 1 << 28  # no honest index is larger


class WeightFiles:
    """All tensors of a directory; used in a `with`, which closes the files.

    Attributes:
        names: of all tensors, in the order of the files.
        description: a line for each file, equal where files hold tensors of the same names and shapes at the same places. Contents
            are not compared: that would mean reading everything.

    Raises:
        CheckpointError: there are no weights, or a file is missing, hostile, damaged or of another kind than its name says.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._stack = contextlib.ExitStack()
        self._tensors: dict[str, _Stored] = {}
        self.description: list[str] = []
        try:
            for name, wanted in self._files().items():
                self._open(name, wanted)
        except BaseException:
            self.close()
            raise
        self.names = tuple(self._tensors)

    def _files(self) -> dict[str, list[str]]:
        """Names of files, and which tensors the index says they hold."""
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is not a directory", path=self.directory)
        entrance = next((name for name in ENTRANCES if os.path.lexists(self.directory / name)), None)
        if entrance is None:
            raise CheckpointError(f"{self.directory} holds none of {', '.join(ENTRANCES)}", path=self.directory)
        if not entrance.endswith(".json"):
            return {entrance: []}
        path = inside(self.directory, entrance)
        kind = ".safetensors" if ".safetensors" in entrance else ".bin"
        files: dict[str, list[str]] = {}
        for tensor, file in _weight_map(path).items():
            if not file.endswith(kind):
                raise CheckpointError(f"{path} names {file!r}, which is not a {kind} file", path=path, name=file)
            files.setdefault(file, []).append(tensor)
        return files

    def _open(self, name: str, wanted: list[str]) -> None:
        path = inside(self.directory, name)
        found = _open_safetensors(path, self._stack) if name.endswith(".safetensors") else _open_torch(path)
        missing = [tensor for tensor in wanted if tensor not in found]
        if missing:
            raise CheckpointError(f"{path} does not hold {missing[0]!r}, which the index says is there", path=path, name=missing[0])
        for tensor, stored in found.items():
            if tensor not in self._tensors or tensor in wanted:
                self._tensors[tensor] = stored
        facts = "\n".join(f"{tensor} {s.shape} {s.dtype}" for tensor, s in found.items())
        digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
        self.description.append(f"{name} of {path.stat().st_size:,} bytes with {len(found)} tensors ({digest})")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        """The tensor, or some of its rows, on the CPU."""
        stored = self._tensors[name]
        if not stored.shape:
            return stored.get(slice(None))
        start, stop, _ = rows.indices(stored.shape[0])
        if start >= stop or 0 in stored.shape:
            return torch.empty((max(0, stop - start), *stored.shape[1:]), dtype=stored.dtype)
        return stored.get(slice(start, stop))

    def close(self) -> None:
        self._tensors = {}
        self._stack.close()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class _Stored:
    """One tensor in a file."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, source: Any) -> None:
        self.shape, self.dtype, self.source = shape, dtype, source

    def get(self, rows: slice) -> torch.Tensor:
        if isinstance(self.source, torch.Tensor):
            return self.source[rows] if self.shape else self.source
        file, name = self.source
        return file.get_slice(name)[rows] if self.shape else file.get_tensor(name)


def _weight_map(path: Path) -> dict[str, str]:
    """Raises CheckpointError unless the index maps names to names."""
    if path.stat().st_size > _INDEX_BYTES:
        raise CheckpointError(f"{path} is too large for an index", path=path)
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        good = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of weights: {type(error).__name__}: {error}", path=path) from None
    if not good:
        raise CheckpointError(f"{path} is not an index of weights: its weight_map must map names to names of files", path=path)
    return weight_map


def _open_safetensors(path: Path, stack: contextlib.ExitStack) -> dict[str, _Stored]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("reading safetensors files needs the package safetensors: pip install 'zfx[hf]'") from None
    try:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it's no dict
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}", path=path) from None
    found = {}
    for name, part in slices.items():
        if part.get_dtype() not in _DTYPES:
            raise CheckpointError(f"{path}: {name!r} is of dtype {part.get_dtype()}, which is not supported", path=path, name=name)
        found[name] = _Stored(tuple(part.get_shape()), _DTYPES[part.get_dtype()], (file, name))
    return found


def _open_torch(path: Path) -> dict[str, _Stored]:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is not in the format that torch.save has written since torch 1.6, the only one that is read: load it in a "
            "safe place and save it as safetensors",
            path=path,
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read without running code, or is damaged: {error}", path=path) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__} instead of tensors by name", path=path)
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__} and not a tensor", path=path, name=str(name))
    return {name: _Stored(tuple(t.shape), t.dtype, t.detach()) for name, t in _sorted(state)}


def _sorted(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from sorted(state.items())


__all__ = ["ENTRANCES", "WeightFiles"]
