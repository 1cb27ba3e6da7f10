"""What else holds a model's weights when it is compiled: after that it would go its own way in silence, so it is refused.

    another module, outside the model     a.weight is b.weight, and only a is compiled: b would keep the old whole tensor
    a model that was compiled before      the same, seen from the other side
    a view under another name             b.weight = nn.Parameter(a.weight.detach()), a buffer that is a view of a weight
    a hook that sets a weight             old-style weight_norm, spectral_norm and prune on the outermost module itself

Weights that are tied within the model, one Parameter under several names, stay tied.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .shard import unique_parameters

# whole parameters that gave way to shards, while someone still holds them
_replaced: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


def remember_replaced(model: nn.Module) -> None:
    """Called before a model's parameters are replaced."""
    for key in [k for k, (ref, _) in _replaced.items() if ref() is None]:
        del _replaced[key]
    for param, owners in unique_parameters(model):
        _replaced[id(param)] = (weakref.ref(param), f"{type(model).__name__}.{owners[0].name}")


def check_aliases(model: nn.Module) -> None:
    """
    Raises:
        ValueError: a weight has a tie that compiling would cut.
    """
    for param, owners in unique_parameters(model):
        ref, name = _replaced.get(id(param), (None, ""))
        if ref is not None and ref() is param:
            raise ValueError(
                f"parameter {owners[0].name!r} is tied to {name!r} of a model that was compiled before, which holds a shard of it "
                "now; compile one module that holds both, or give this one a weight of its own (clone it)"
            )
    _check_views(model)
    _check_outside(model)
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod)):
            raise ValueError(
                f"the outermost module has an old-style {type(hook).__name__} hook, which would compute with shards: use "
                "torch.nn.utils.parametrizations (for pruning: prune.remove), or put the module inside another one"
            )


def _check_views(model: nn.Module) -> None:
    params: list[tuple[str, torch.Tensor]] = [(owners[0].name, param) for param, owners in unique_parameters(model)]
    spans: dict[int, list[tuple[int, int, str]]] = {}  # storage -> (first byte, the one after the last, parameter)
    for i, (name, tensor) in enumerate([*params, *model.named_buffers()]):
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
        start = int(tensor.storage_offset()) * tensor.element_size()
        stop = start + int(reach) * tensor.element_size()
        row = spans.setdefault(tensor.untyped_storage()._cdata, [])
        for other in (other for a, b, other in row if a < stop and start < b):
            raise ValueError(
                f"{name!r} shares memory with parameter {other!r} but is not the same Parameter: once sharded, a change of one "
                "would no longer change the other. Tie them (one Parameter under both names), or clone one"
            )
        if i < len(params):
            row.append((start, stop, name))


def _check_outside(model: nn.Module) -> None:
    found = next(_outside(model), None)
    if found is None:
        return
    gc.collect()  # was it on its way out?
    found = next(_outside(model), None)
    if found is not None:
        raise ValueError(
            f"parameter {found[0]!r} is also held by a {found[1]} outside the model, which would keep the whole tensor as it is "
            "now; compile one module that holds both, or clone the weight"
        )


def _outside(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(parameter, class of a module that holds it and is not one of the model's)."""
    inside = {id(module) for module in model.modules()}
    dicts = {id(module._parameters) for module in model.modules()}  # shallow copies of a module share it, and see the shards
    names = {id(param): owners[0].name for param, owners in unique_parameters(model)}
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module) or id(thing) in inside:
            continue
        params = thing.__dict__.get("_parameters") or {}
        for param in params.values() if id(params) not in dicts else ():
            if param is not None and id(param) in names:
                yield names[id(param)], type(thing).__name__
