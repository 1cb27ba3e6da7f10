"""What the passes that know torch ask of one node of a captured graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

# marks a placeholder of the backward that is a parameter kept across the turn; holds its name
KEPT = "zfx_kept"


def is_gather(node: fx.Node) -> bool:
    return node.target is torch.ops.zfx.all_gather.default


def is_reduction(node: fx.Node) -> bool:
    return node.target is torch.ops.zfx.reduce_scatter.default


def is_reshard(node: fx.Node) -> bool:
    return node.target is torch.ops.zfx.reshard.default


def is_planned(node: fx.Node) -> bool:
    """What is no step, but what the schedule places."""
    return is_gather(node) or is_reduction(node) or is_reshard(node)


def storages(node: fx.Node) -> list[tuple[int, int]]:
    """(identity, bytes) of every storage that the node's value uses, by the fake tensors of the trace."""
    found = []
    for value in tensors(node.meta.get("val")):
        if value.layout is torch.strided:
            storage = value.untyped_storage()
            found.append((storage._cdata, number(storage.nbytes())))
    return found


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def number(size: int | torch.SymInt) -> int:
    """A size for counting: a symbolic one by the value that it had at capture."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 0
    return int(size)


def aliased_inputs(node: fx.Node) -> Iterable[fx.Node]:
    """Inputs that the output may be a view of, by the operator's schema (and for the one view that hides it)."""
    if node.op != "call_function":
        return ()
    if node.target in (torch.ops.aten._unsafe_view.default, operator.getitem):
        return node.all_input_nodes
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    schema = node.target._schema
    views = any(r.alias_info is not None for r in schema.returns)
    return [a for a, arg in zip(node.args, schema.arguments) if views and arg.alias_info is not None and isinstance(a, fx.Node)]
