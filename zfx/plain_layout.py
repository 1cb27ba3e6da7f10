"""Where a checkpoint keeps what: zfx's own layout, and the one that torch's users write with `dcp.save`.

    {"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}     any names for the two, at any depth
    model.<name>                                                                      tensors
    optim.state.<name>.<key>, optim.param_groups.<i>.<key>                            or, flattened, optim.param_groups.<name>.<key>

The prefixes are found by looking for the model's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .checkpoint_state import Run, model_entries
from .dcp_reader import Source, StoredTensor
from .errors import CheckpointError
from .optimizer_state import names_of
from .plain_state import pack


@dataclass(frozen=True, slots=True)
class Layout:
    """Prefixes of keys, dots included: of the model's tensors, and of the optimizers' (before `state.`); None: there are none."""

    source: Source
    model: str
    optim: str | None

    @classmethod
    def own(cls, source: Source) -> Layout:
        return cls(source, "model.", "optim.")

    def model_key(self, name: str) -> str:
        return self.model + name

    def optimizer_key(self, name: str, key: str) -> str:
        return f"{self.optim}state.{name}.{key}"

    def model_tensors(self) -> dict[str, StoredTensor]:
        """By name, of the model's state."""
        inside = None if self.optim is None or not self.optim.startswith(self.model) else self.optim
        found = {k[len(self.model) :]: t for k, t in self.source.tensors.items() if k.startswith(self.model)}
        if inside is not None:
            rest = inside[len(self.model) :]
            found = {name: t for name, t in found.items() if not name.startswith(rest)}
        return found

    def optimizer_tensors(self) -> dict[str, dict[str, StoredTensor]]:
        """By name of the parameter and key."""
        found: dict[str, dict[str, StoredTensor]] = {}
        start = f"{self.optim}state."
        for key, stored in self.source.tensors.items():
            if self.optim is not None and key.startswith(start):
                name, _, inner = key[len(start) :].rpartition(".")
                found.setdefault(name, {})[inner] = stored
        return found

    def records(self, run: Run) -> list[dict[str, Any]]:
        """What `optimizer_state` needs beside tensors, of a checkpoint that torch's users wrote.

        Raises:
            CheckpointError: it has no optimizer, or not these.
        """
        if self.optim is None:
            raise CheckpointError(f"{self.source.directory} holds no optimizer state of this model's parameters")
        names = names_of(run.model)
        values = self._values()
        groups = self._groups()
        out = []
        for optimizer in run.optimizers:
            mine = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
            if groups:
                chosen = [g for g in groups if set(g["params"]) & {n for group in mine for n in group}]
            else:
                chosen = [self._flat_group(group, optimizer.param_groups[i]) for i, group in enumerate(mine)]
            out.append({"class": None, "groups": chosen, "values": values, "sharded": {}})
        return out

    def _values(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        start = f"{self.optim}state."
        for key in self.source.objects:
            if key.startswith(start):
                name, _, inner = key[len(start) :].rpartition(".")
                found.setdefault(name, {})[inner] = _packed(self.source.object(key), key)
        return found

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of `param_groups.<i>.<key>`; none if the state is flattened."""
        found: dict[int, dict[str, Any]] = {}
        start = f"{self.optim}param_groups."
        for key in (key for key in self.source.paths if key.startswith(start)):
            *_, number, inner = ("", *self.source.paths[key])
            if type(number) is int and type(inner) is str:
                values = self.source.tensor if key in self.source.tensors else self.source.object
                found.setdefault(number, {})[inner] = values(key)
        out = []
        for position, group in sorted(found.items()):
            params = group.pop("params", None)
            if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
                raise CheckpointError(f"{self.source.directory}: parameter group {position} does not name its parameters")
            out.append({"params": params, "rest": {k: _packed(v, start + k) for k, v in group.items()}})
        return out

    def _flat_group(self, names: list[str], group: Mapping[str, Any]) -> dict[str, Any]:
        rest = {}
        for key in group:
            stored = f"{self.optim}param_groups.{names[0] if names else ''}.{key}"
            if stored in self.source.objects:
                rest[key] = _packed(self.source.object(stored), stored)
        return {"params": names, "rest": rest}


def plain_layout(source: Source, run: Run) -> Layout:
    """Find the prefixes.

    Raises:
        CheckpointError: the model's names are not there, or under several prefixes.
    """
    names = list(model_entries(run.model)[0])
    optim = _optimizer_prefix(source.tensors, set(names)) or _optimizer_prefix(source.objects, set(names), "param_groups.")
    best = _model_prefixes(source, names, optim)
    if len(best) != 1 and "model." not in best:
        what = f"under several names: {', '.join(repr(p) for p in sorted(best))}" if best else "not there"
        raise CheckpointError(
            f"{source.directory}: the model's tensors ({names[0]!r} and so on) are {what}; save them as "
            '{"model": model.state_dict()}',
            path=source.directory,
            name=names[0],
        )
    return Layout(source, "model." if "model." in best else best[0], optim)


def _model_prefixes(source: Source, names: list[str], optim: str | None) -> list[str]:
    """The prefixes under which most of the names are found."""
    counts: dict[str, int] = {}
    for name in names:
        for key in source.tensors:
            if key.endswith(name) and not (optim is not None and key.startswith(f"{optim}state.")):
                prefix = key[: len(key) - len(name)]
                if not prefix or prefix.endswith("."):
                    counts[prefix] = counts.get(prefix, 0) + 1
    most = max(counts.values(), default=0)
    return [prefix for prefix, count in counts.items() if count == most]


def _optimizer_prefix(keys: Iterable[str], names: set[str], part: str = "state.") -> str | None:
    for key in keys:
        at = key.find(part)
        while at >= 0:
            if at == 0 or key[at - 1] == ".":
                rest = key[at + len(part) :]
                if rest.rpartition(".")[0] in names or (part != "state." and rest.partition(".")[0].isdigit()):
                    return key[:at]
            at = key.find(part, at + 1)
    return None


def _packed(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"$lr": [float(value), str(value.dtype), list(value.shape)]}
    data, tensors = pack(value, where)
    if tensors:
        raise CheckpointError(f"{where} holds tensors inside of other data, which zfx does not read")
    return data
