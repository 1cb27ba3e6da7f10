"""Whole models from directories and back, while no rank ever holds one: `load_pretrained` and `save_pretrained`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .agreement import digest_of
from .blueprint import Blueprint
from .conversion import Group, groups_to_load, groups_to_save, is_transformers, loaded, without_ignored
from .engine import Engine, engine_of
from .errors import CheckpointError
from .safetensors_writer import Entry, SafetensorsWriter, size_in_bytes
from .shard import unique_parameters
from .together import together
from .weight_files import WeightFiles


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What did not fit, under transformers' names for it.

    Attributes:
        missing_keys: tensors of the model that the checkpoint does not give; they keep their values.
        unexpected_keys: tensors of the checkpoint that the model does not have.
        mismatched_keys: name, what the checkpoint has, what the model has; they keep their values.
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched_keys: tuple[tuple[str, str, str], ...]

    def __bool__(self) -> bool:
        """Whether anything did not fit."""
        return bool(self.missing_keys or self.unexpected_keys or self.mismatched_keys)

    def __str__(self) -> str:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            for what, names in (
                ("missing", self.missing_keys),
                ("unexpected", self.unexpected_keys),
                (
                    "of another shape or kind",
                    tuple(f"{n} ({theirs} there, {ours} here)" for n, theirs, ours in self.mismatched_keys),
                ),
            )
            if names
        ]
        return "; ".join(parts) or "everything fits"


def load_pretrained(model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
    """Fill a compiled model from a directory of weights; each rank reads only its rows. A collective call.

    Reads `model.safetensors`, `pytorch_model.bin` or either's index, under transformers' names (tied weights, a missing or extra
    base model prefix, experts that are stored one by one) or, for other models, those of `state_dict()`. Values are converted to
    each parameter's dtype. Only weights and persistent buffers are loaded, no config and no generation config.

    Args:
        model: compiled by `zfx.compile`; best built on the meta device and compiled with `init_fn=zfx.skip_init`.
        directory: on each rank where it has them, the same files. Downloading is the caller's (with
            `huggingface_hub.snapshot_download`).
        strict: anything that does not fit is an error, and nothing is loaded. Otherwise it is left as it was, and reported.

    Returns:
        What did not fit.

    Raises:
        CheckpointError: on every rank: files are missing, damaged or hostile on one of them; something does not fit; a tied
            parameter has two values.
        RankMismatch: ranks see different files.
        ValueError: the model is not compiled, or only for planning.

    Memory: beside the shards, this rank's rows of one parameter, twice for one that is stacked of many tensors; for one
    that is converted in another way, all of it and the tensors that it is made of.

    Example::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        model = zfx.compile(model, init_fn=zfx.skip_init)
        zfx.load_pretrained(model, path)
    """
    engine = _running(model)
    channels = engine.blueprint.channels
    assert channels is not None
    opened: list[_Loading] = []
    try:
        with together(channels.agreement, f"load_pretrained of {engine.blueprint.model_name}: opening the files"):
            opened.append(_Loading(model, engine, WeightFiles(directory)))
        loading = opened[0]
        lines = [f"load_pretrained of {engine.blueprint.model_name}, strict={strict}", *loading.files.description]
        lines.append(str(loading.report))
        channels.agreement.begin(digest_of(lines), lines)
        if strict and loading.report:
            raise CheckpointError(
                f"{directory} does not fit {engine.blueprint.model_name}: {loading.report}. strict=False leaves what "
                "does not fit as it is",
                path=directory,
            )
        with together(channels.agreement, f"load_pretrained of {engine.blueprint.model_name}: reading"), torch.no_grad():
            loading.run()
        loaded(model, loading.rules)
        return loading.report
    finally:
        for loading in opened:
            loading.files.close()


class _Loading:
    """What goes where, known before anything is read."""

    def __init__(self, model: nn.Module, engine: Engine, files: WeightFiles) -> None:
        self.files, self.blueprint = files, engine.blueprint
        self.parameters = _numbers(model, engine.blueprint)
        self.values = _state(model)
        try:
            groups, unexpected, self.rules = groups_to_load(model, files.names, self.values)
            self.groups = [(group, self._shapes(group)) for group in groups]
        except BaseException:
            files.close()
            raise
        found = {name for _, shapes in self.groups for name in shapes}
        unexpected |= found - self.values.keys()
        given = {self.parameters[name] for name in found if name in self.parameters}
        missing = {n for n in self.values if n not in found and self.parameters.get(n) not in given}
        missing, unexpected = without_ignored(model, missing, unexpected)
        mismatched = [(n, _facts(t), _facts(self.values[n])) for _, s in self.groups for n, t in s.items() if not self._fits(n, t)]
        self.unfit = {name for name, _, _ in mismatched}
        mismatched = [entry for entry in mismatched if entry[0] in self.values]
        self.report = LoadReport(tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(sorted(mismatched)))

    def _shapes(self, group: Group) -> dict[str, torch.Tensor]:
        """What the group will give, on meta."""
        try:
            return group.convert(lambda name: torch.empty(self.files.shape(name), dtype=self.files.dtype(name), device="meta"))
        except Exception as error:
            sources = ", ".join(name for name, _ in group.sources[:4])
            raise CheckpointError(f"{group.target!r} can't be made of {sources}: {error}", name=group.target) from error

    def _fits(self, name: str, given: torch.Tensor) -> bool:
        own = self.values.get(name)
        return own is not None and given.shape == own.shape and (given.dtype == own.dtype or _floats(given, own))

    def run(self) -> None:
        filled: set[int] = set()
        for group, shapes in self.groups:
            names = [name for name in shapes if name not in self.unfit]
            if names:
                for name, value in self._part(group, names, shapes).items():
                    self._fill(name, value, filled)
                    del value  # or it would be there beside the next group's

    def _part(self, group: Group, names: list[str], shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank holds of the results of a group."""
        rows = self._rows(names[0])
        if group.is_plain:
            return {names[0]: self.files.read(group.sources[0][0], rows)}
        if group.is_stacked and names[0] in self.parameters:
            empty = {name: torch.empty((0, *shape.shape[1:]), dtype=shape.dtype) for name, shape in shapes.items()}
            return group.convert(self.files.read, rows) if rows.start < rows.stop else empty
        whole = group.convert(self.files.read)
        return {name: whole[name][self._rows(name)] if whole[name].dim() else whole[name] for name in names}

    def _rows(self, name: str) -> slice:
        return self.blueprint.own_rows(self.parameters[name]) if name in self.parameters else slice(None)

    def _fill(self, name: str, value: torch.Tensor, filled: set[int]) -> None:
        number, own = self.parameters.get(name), self.values[name]
        own = getattr(own, "_local_tensor", own)
        if number in filled and not torch.equal(own, value.to(own)):
            raise CheckpointError(
                f"parameter {name!r} is tied to {self.blueprint.names[number]!r} in the model, and has other values in the "
                "checkpoint; untie them before zfx.compile (transformers: config.tie_word_embeddings=False)",
                name=name,
            )
        own.copy_(value)
        if number is not None:
            filled.add(number)


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str], *, max_shard_size: int | str = "50GB") -> None:
    """Write a compiled model as a directory that `from_pretrained` reads, parameter by parameter. A collective call.

    A transformers model is written in transformers' layout and names, with its config and generation config. Of any other model
    the tensors of `state_dict()` are written, a tied one under its first name, with the others in the files' metadata. Buffers are
    rank 0's. Rank 0 writes; files appear once all are whole, the index last, and an earlier save is replaced.

    Args:
        directory: made if it's not there. Only rank 0's counts.
        max_shard_size: most bytes of one file, or text such as "5GB"; a larger parameter has a file of its own.

    Raises:
        CheckpointError: on every rank: rank 0 could not write (there the OSError itself), or the model holds what can't be written.
        ValueError: the model is not compiled, only for planning, quantized or with transformers' adapters; `max_shard_size` is no
            size.

    Memory: one whole parameter (rank 0: twice, where transformers stores it in another form) beside what is there already.

    Example::

        zfx.save_pretrained(model, "out", max_shard_size="5GB")
        AutoModelForCausalLM.from_pretrained("out")
    """
    engine = _running(model)
    if getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("a transformers model with adapters or quantized weights is not saved: its files are of another form")
    max_shard_bytes = size_in_bytes(max_shard_size)
    saving = _Saving(model, engine)
    channels = engine.blueprint.agree(f"save_pretrained(max_shard_size={max_shard_bytes})")
    writer: SafetensorsWriter | None = None
    what = f"save_pretrained of {engine.blueprint.model_name}: writing"
    try:
        with together(channels.agreement, what):
            if channels.agreement.rank == 0:
                writer = SafetensorsWriter(
                    directory,
                    saving.entries(),
                    max_shard_bytes=max_shard_bytes,
                    metadata=saving.metadata,
                    index_metadata=saving.facts,
                )
        for group in saving.groups:
            wholes = {name: saving.whole(name) for name, _ in group.sources}
            with together(channels.agreement, what):
                if writer is not None:
                    _write(writer, group.convert(wholes.pop))
            del wholes
        with together(channels.agreement, what):
            if writer is not None:
                _write_configs(model, writer.folder)
                writer.finish()
    finally:
        if writer is not None:
            writer.abort()


def _write(writer: SafetensorsWriter, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        writer.add(name, tensor)


class _Saving:
    """What is written, known before anything is gathered."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.blueprint, self.values = engine.blueprint, _state(model)
        self.parameters = _numbers(model, engine.blueprint)
        on_meta: dict[int, torch.Tensor] = {}
        for value in self.values.values():
            on_meta.setdefault(id(value), torch.empty(value.shape, dtype=value.dtype, device="meta"))
        self.meta = {name: on_meta[id(value)] for name, value in self.values.items()}
        self.groups, dropped = groups_to_save(model, self.meta)
        self.metadata = {**dropped, "format": "pt"}
        self.facts = {"total_parameters": sum(layout.numel for layout in self.blueprint.layouts)}

    def entries(self) -> list[Entry]:
        found = [item for group in self.groups for item in group.convert(self.meta.__getitem__).items()]
        return [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found]

    def whole(self, name: str) -> torch.Tensor:
        """A collective call for a parameter."""
        value = self.values[name].detach()
        if name not in self.parameters:
            return value
        self.blueprint.agree(f"save_pretrained: gather {name}")
        return self.blueprint.gather_whole(self.parameters[name], value._local_tensor)  # type: ignore[attr-defined]


def _write_configs(model: Any, folder: os.PathLike[str]) -> None:
    """As transformers does beside its weights."""
    if not is_transformers(model):
        return
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _running(model: nn.Module) -> Engine:
    engine = engine_of(model)
    if engine.blueprint.channels is None:
        raise ValueError("this model was compiled without a process group: it holds no weights that could be loaded or saved")
    return engine


def _numbers(model: nn.Module, blueprint: Blueprint) -> dict[str, int]:
    """The number of a parameter by each of its names."""
    return {owner.name: blueprint.index[owners[0].name] for _, owners in unique_parameters(model) for owner in owners}


def _state(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Parameters and persistent buffers by name, the tensors themselves."""
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__}: extra state can't be kept in a file of tensors", name=name
            )
    return state


def _facts(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _floats(*tensors: torch.Tensor) -> bool:
    return all(t.dtype.is_floating_point for t in tensors)
