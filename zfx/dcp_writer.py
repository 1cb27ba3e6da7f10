"""Writing a checkpoint so that it exists whole or not at all.

    step-00000010.tmp-5f3c/   ranks write __<rank>_<i>_0.distcp, each flushed to the disk and hashed by its writer
                              rank 0 writes .metadata, state.json, and at last manifest.json
    step-00000010/            one rename makes it a checkpoint

All of it happens inside `dcp.save`: its own exchange of plans and results carries the checksums to rank 0, and what fails on one
rank is raised on all of them before the rename. The same holds for `dcp.async_save`, which runs the same code in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from . import manifest
from ._compat import StoragePrefix, make_dtensor
from .dcp_reader import METADATA
from .manifest import FileFacts

STATE = "state.json"
FILE_BYTES = 256 << 20  # torch holds a CPU copy of all that goes into one file, so a file is what a save costs in memory


@dataclass(frozen=True)
class _Digest(WriteResult):
    """Beside the results for tensors: a file that a rank has finished."""

    name: str = ""
    facts: FileFacts = FileFacts(0, "")  # noqa: RUF009  # immutable


class Writer(FileSystemWriter):
    """Writes into `temporary`, and on rank 0 makes it `final`.

    Args:
        facts: what the manifest says beside the files.
        documents: small files that rank 0 adds, by name.
        aliases: keys that are other names of a stored tensor, e.g. of a tied parameter: name to the stored key.
        committed: called on rank 0 after the rename.
        progress: told of bytes as they are on the disk and hashed.
        file_bytes: most that one file holds, unless a tensor alone is larger.
    """

    def __init__(
        self,
        temporary: Path,
        final: Path,
        facts: Mapping[str, Any],
        documents: Mapping[str, bytes],
        aliases: Mapping[str, str],
        committed: Callable[[Path], None] = lambda final: None,
        progress: Callable[[int], None] = lambda num_bytes: None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        super().__init__(temporary, sync_files=True, overwrite=False)
        self.temporary, self.final, self.facts, self.documents, self.aliases = temporary, final, facts, documents, aliases
        self.committed, self.progress, self.file_bytes = committed, progress, file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix, results = plan.storage_data.prefix, []
        for number, items in enumerate(in_files(plan.items, self.file_bytes)):
            part = replace(plan, items=items, storage_data=StoragePrefix(f"{prefix}{number}_"))
            written = super().write_data(part, planner).value()
            results += written
            for name in sorted({result.storage_data.relative_path for result in written}):
                facts = manifest.facts_of(self.temporary / name, self.progress)
                results.append(_Digest(MetadataIndex(name), facts.num_bytes, None, name, facts))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {r.name: r.facts for rank in results for r in rank if isinstance(r, _Digest)}
        stored = [[r for r in rank if not isinstance(r, _Digest)] for rank in results]
        stored[0] += _add_aliases(metadata, stored, self.aliases)
        super().finish(metadata, stored)
        for name, content in self.documents.items():
            manifest.write_file(self.temporary / name, content)
        for name in (METADATA, *self.documents):
            files[name] = manifest.facts_of(self.temporary / name)
        manifest.write(self.temporary, self.facts, files)
        os.rename(self.temporary, self.final)
        manifest.sync_directory(self.final.parent)
        self.committed(self.final)


def in_files(items: Sequence[WriteItem], file_bytes: int) -> list[list[WriteItem]]:
    """The items of a plan, in groups of at most so many bytes each (or of one item)."""
    groups: list[list[WriteItem]] = []
    filled = 0
    for item in items:
        size = 0
        if item.tensor_data is not None:
            size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if not groups or filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups


def _add_aliases(metadata: Metadata, results: list[list[WriteResult]], aliases: Mapping[str, str]) -> list[WriteResult]:
    """Other names of stored tensors: the same bytes under a second key, so that every reader of DCP finds both."""
    if not aliases:
        return []
    of: dict[str, list[str]] = {}
    for name, key in aliases.items():
        of.setdefault(key, []).append(name)
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[key]
        if metadata.planner_data is not None and key in metadata.planner_data:
            metadata.planner_data[name] = (metadata.planner_data[key][0], name.partition(".")[2])
    stored = [result for rank in results for result in rank if result.index.fqn in of]
    return [replace(r, index=replace_key(r.index, name)) for r in stored for name in of[r.index.fqn]]


def replace_key(index: MetadataIndex, key: str) -> MetadataIndex:
    return MetadataIndex(key, index.offset, index.index)


class CpuCopy(AsyncStager):
    """What a background save writes from: a copy of every tensor on the CPU, made before `async_save` returns."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {key: copied(value) for key, value in state_dict.items()}

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def copied(value: Any) -> Any:
    """A nested copy in which tensors are on the CPU, and DTensors keep their placement."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [copied(inner) for inner in value]
    if isinstance(value, DTensor):
        return make_dtensor(_on_cpu(value.to_local()), value._spec)
    return _on_cpu(value) if isinstance(value, torch.Tensor) else value


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


__all__ = ["FILE_BYTES", "STATE", "CpuCopy", "Writer", "copied", "in_files"]
