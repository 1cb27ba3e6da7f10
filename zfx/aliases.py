"""What else holds a model's weights when it is compiled: after that it would go its own way in silence, so it is refused.

    another module, outside the model     a.weight is b.weight, and only a is compiled: b would keep the old whole tensor
    a model that was compiled before      the same, seen from the other side
    a view under another name             b.weight = nn.Parameter(a.weight.detach()), a buffer that is a view of a weight
    an optimizer that was built before    it would go on stepping the old, whole parameters
    a hook that sets a weight             old-style weight_norm, spectral_norm and prune on the outermost module itself

Weights that are tied within the model, one Parameter under several names, stay tied.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

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
    _check_holders(model)
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


def _check_holders(model: nn.Module) -> None:
    if next(_holders(model), None) is None:
        return
    gc.collect()  # was it on its way out?
    holder, name = next(_holders(model), (None, ""))
    if isinstance(holder, torch.optim.Optimizer):
        raise ValueError(
            f"the optimizer {type(holder).__name__} was built before zfx.compile and holds the whole parameter {name!r}, which "
            "it would go on stepping while the model never moves; build it after zfx.compile, from model.parameters()"
        )
    if holder is not None:
        raise ValueError(
            f"parameter {name!r} is also held by a {type(holder).__name__} outside the model, which would keep the whole tensor "
            "as it is now; compile one module that holds both, or clone the weight"
        )


def _holders(model: nn.Module) -> Iterator[tuple[nn.Module | torch.optim.Optimizer, str]]:
    """Each optimizer, and each module outside the model, that holds one of its parameters; and the parameter's name."""
    inside = {id(module) for module in model.modules()}
    dicts = {id(module._parameters) for module in model.modules()}  # shallow copies of a module share it, and see the shards
    names = {id(param): owners[0].name for param, owners in unique_parameters(model)}
    for thing in _living(nn.Module, torch.optim.Optimizer):
        if isinstance(thing, torch.optim.Optimizer):
            held = [p for group in getattr(thing, "param_groups", ()) for p in group["params"]]
        else:
            params = thing.__dict__.get("_parameters") or {}
            held = [] if id(thing) in inside or id(params) in dicts else list(params.values())
        for param in held:
            if id(param) in names:
                yield thing, names[id(param)]


def _living(*classes: type) -> list[Any]:
    """All objects of these classes and of those derived from them, in one walk over what Python knows: there may be millions."""
    kinds: set[type] = set()
    new = list(classes)
    while new:
        kind = new.pop()
        if kind not in kinds:
            kinds.add(kind)
            new += type.__subclasses__(kind)
    # not isinstance: asking a lazy object for its class may load it
    return [thing for thing in gc.get_objects() if type(thing) in kinds]
