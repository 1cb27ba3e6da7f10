"""From a checkpoint to a directory that transformers reads: in one process, tensor by tensor.

What is held at a time is one tensor (`SafetensorsWriter` wants it whole), twice while it is put together from the ranks' pieces
or cast; never the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint_load import Opened
from .dcp_reader import Source, StoredTensor
from .errors import CheckpointError
from .safetensors_writer import Entry, SafetensorsWriter


@dataclass(frozen=True)
class Contents:
    """What a checkpoint directory holds, without values.

    Attributes:
        step, world_size: None where it is not zfx's.
        model: tensors of the model by name, each once.
        aliases: other names of the same tensors.
        optimizer: by parameter name and key.
        config: of a transformers model, or None.
    """

    path: Path
    step: int | None
    world_size: int | None
    model: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    optimizer: Mapping[str, Mapping[str, StoredTensor]]
    config: Any
    source: Source


def contents_of(directory: Path, verify: bool = False) -> Contents:
    """Open a checkpoint of zfx, or any DCP directory with `model.` and `optim.` in its keys (or nothing before the names).

    Raises:
        CheckpointError: it is damaged or hostile; see `zfx.dcp_reader`.
    """
    opened = Opened(directory)
    if verify:
        opened.verify()
    tensors, aliases = opened.source.tensors, {}
    prefix = next((p for p in ("model.", "app.model.") if any(k.startswith(p) for k in tensors)), "")
    start = f"{prefix.removesuffix('model.')}optim.state."
    config = None
    if opened.record is not None:
        aliases = opened.record["aliases"]
        config = opened.shared()["config"]
    model = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix) and not k.startswith(start)}
    optimizer: dict[str, dict[str, StoredTensor]] = {}
    for key, stored in tensors.items():
        if key.startswith(start):
            name, _, inner = key[len(start) :].rpartition(".")
            optimizer.setdefault(name, {})[inner] = stored
    return Contents(
        directory,
        opened.facts.get("step"),
        opened.world_size or None,
        {name: t for name, t in model.items() if name not in aliases},
        aliases,
        optimizer,
        config,
        opened.source,
    )


def export(
    contents: Contents,
    out: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 50 * 10**9,
    progress: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Write `model.safetensors` (or several files and their index), and `config.json` where the checkpoint has a configuration.

    Args:
        dtype: cast floating-point tensors. Default: as they are.
        max_shard_bytes: most that one file takes.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: a tensor is damaged, or nothing can hold its dtype. Nothing is left behind.
    """
    if not contents.model:
        raise CheckpointError(f"{contents.path} holds no tensors of a model", path=contents.path)
    to = {name: _to(stored.dtype, dtype) for name, stored in contents.model.items()}
    entries = [Entry(name, to[name], stored.shape) for name, stored in contents.model.items()]
    with SafetensorsWriter(out, entries, metadata={"format": "pt"}, max_shard_bytes=max_shard_bytes) as writer:
        for name, stored in contents.model.items():
            progress(name)
            writer.add(name, contents.source.tensor(stored.key).to(to[name]))
        if contents.config is not None:
            config = dict(contents.config)
            if dtype is not None:
                config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
            (writer.folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return sorted(path.name for path in out.iterdir() if path.is_file())


def _to(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and stored.is_floating_point else stored


def rows(contents: Contents) -> Iterator[dict[str, Any]]:
    """One a tensor of the model, as plain data: name, shape, dtype, bytes, how many pieces, keys of its optimizer state."""
    for name, stored in contents.model.items():
        yield {
            "name": name,
            "shape": list(stored.shape),
            "dtype": str(stored.dtype).removeprefix("torch."),
            "num_bytes": stored.num_bytes,
            "num_pieces": len(stored.pieces),
            "optimizer": sorted(contents.optimizer.get(name, {})),
            "aliases": sorted(alias for alias, first in contents.aliases.items() if first == name),
        }
