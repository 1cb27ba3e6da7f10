"""Names of weights in files and in models: what transformers renames and converts, and in which groups.

A group is the smallest set of tensors that is converted together, so that weights can travel group by group:

    most names         one tensor in the file                   one in the model
    Mixtral            8 x w1 and 8 x w3 in the file  ->  experts.gate_up_proj in the model

transformers' own rules and operations do the work [1]; everything of it that is not public is used in this file and nowhere else.
For other models each name is a group of its own, and nothing is renamed.

[1] `transformers/core_model_loading.py` and `conversion_mapping.py`, version 5.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

Read = Callable[[str], torch.Tensor]


def is_transformers(model: nn.Module | type[nn.Module]) -> bool:
    """Whether a model, or a class of models, is transformers' own kind."""
    library = sys.modules.get("transformers.modeling_utils")
    kind = model if isinstance(model, type) else type(model)
    return library is not None and issubclass(kind, library.PreTrainedModel)


@dataclass(slots=True)
class Group:
    """Tensors that are converted together.

    Attributes:
        sources: their names before, with the pattern of the rule that each matched.
        target: the name after (for a rule with several results, the first of them).
    """

    target: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    _rule: Any = None
    _renamings: tuple[Any, ...] = ()
    _model: Any = None

    @property
    def is_plain(self) -> bool:
        """One tensor, which only changes its name."""
        return self._rule is None

    def convert(self, read: Read, rows: slice | None = None) -> dict[str, torch.Tensor]:
        """The results by name.

        Args:
            rows: only these rows of the only result; for a group that `is_stacked`.
        """
        if self._rule is None:
            return {self.target: read(self.sources[0][0])}
        rule = copy.deepcopy(self._rule)
        for name, pattern in self._chosen(rows):
            rule.add_tensor(self.target, name, pattern, lambda name=name: read(name))
        found = rule.convert(self.target, model=self._model, config=self._model.config)
        found = {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
        return {_renamed(name, self._renamings): value for name, value in found.items()}

    @property
    def is_stacked(self) -> bool:
        """Whether row i of the result comes from the i-th tensors alone: they're stacked, and joined along other dimensions."""
        if self._rule is None or len(self._rule.target_patterns) > 1:
            return False
        names = [(type(op).__name__, getattr(op, "dim", None)) for op in self._rule.operations]
        return names[:1] == [("MergeModulelist", 0)] and all(name == "Concatenate" and dim for name, dim in names[1:])

    def _chosen(self, rows: slice | None) -> list[tuple[str, str]]:
        if rows is None:
            return self.sources
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for source in self.sources:
            by_pattern.setdefault(source[1], []).append(source)
        return [source for found in by_pattern.values() for source in found[rows]]


# ---- from files into a model ---------------------------------------------------------------------------------------------


def groups_to_load(model: nn.Module, names: Iterable[str], expected: Iterable[str]) -> tuple[list[Group], set[str], Any]:
    """How tensors of a checkpoint become those of a model.

    Args:
        names: in the checkpoint.
        expected: in the model: parameters under all their names, and persistent buffers.

    Returns:
        The groups; names (as the model would call them) that it does not know; and what `loaded` takes.
    """
    expected = set(expected)
    if not is_transformers(model):
        names = list(names)
        return [Group(n, [(n, n)]) for n in names if n in expected], {n for n in names if n not in expected}, None
    loading = _library()
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(cast(Any, model))
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(expected, True)
    groups: dict[str, Group] = {}
    unknown: set[str] = set()
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:  # a rule that should not have matched
            target, pattern = loading.rename_source_key(name, [], [], prefix, known)
        rule = None if pattern is None else by_pattern[pattern]
        if target not in known or (rule is None and target in groups):
            unknown.update([target] if rule is None else [target.replace(rule.target_patterns[0], t) for t in rule.target_patterns])
            continue
        groups.setdefault(target, Group(target, _rule=rule, _model=model)).sources.append((name, pattern or name))
    return list(groups.values()), unknown, rules


def loaded(model: nn.Module, rules: Any) -> None:
    """Tell a transformers model how its checkpoint was converted, so that it's saved in the same form."""
    if rules is not None:
        cast(Any, model)._weight_conversions = [rule for rule in rules if rule.was_used()]


def without_ignored(model: nn.Module, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """The same without names that a transformers model says do not matter."""
    if not is_transformers(model):
        return missing, unexpected
    info = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(info)  # type: ignore[operator]
    return info.missing_keys, info.unexpected_keys


# ---- from a model into files ---------------------------------------------------------------------------------------------


def groups_to_save(model: nn.Module, state: Mapping[str, torch.Tensor]) -> tuple[list[Group], dict[str, str]]:
    """How tensors of a model become those of a checkpoint, and the names left out, each with the one written for it (ties).

    Args:
        state: tensors on the meta device by name, those of tied parameters under each of their names.
    """
    if not is_transformers(model):
        first: dict[int, str] = {}
        dropped = {n: first[id(t)] for n, t in state.items() if first.setdefault(id(t), n) != n}
        return [Group(n, [(n, n)]) for n in state if n not in dropped], dropped
    loading = _library()
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = remove_tied_weights_from_state_dict({n: t for n, t in state.items() if n not in ignored}, model)  # type: ignore[arg-type]
    rules = [rule.reverse_transform() for rule in reversed(_saving_rules(model, loading))]
    renamings = tuple(rule for rule in rules if isinstance(rule, loading.WeightRenaming))
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: dict[str, Group] = {}
    for name in sorted(kept, key=loading.dot_natural_key):
        target, pattern = loading.apply_converters(name, converters)
        if pattern is None:
            target = _renamed(name, renamings)
        group = Group(target, _rule=None if pattern is None else by_pattern[pattern], _renamings=renamings, _model=model)
        groups.setdefault(target, group).sources.append((name, pattern or name))
    return list(groups.values()), {}


def _saving_rules(model: Any, loading: Any) -> list[Any]:
    """The rules by which the model was loaded; for one that never was, all but those that guess a prefix."""
    rules = getattr(model, "_weight_conversions", None)
    if rules is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        rules = [r for r in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(r, loading.PrefixChange)]
    return rules


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _library() -> Any:
    import transformers

    if int(re.match(r"\d+", transformers.__version__)[0]) < 5:  # type: ignore[index]
        raise ImportError(
            f"names are converted by transformers 5 or newer, this is {transformers.__version__}: pip install -U transformers"
        )
    from transformers import core_model_loading

    return core_model_loading


__all__ = ["Group", "groups_to_load", "groups_to_save", "is_transformers", "loaded", "without_ignored"]
