"""Partition: the joint graph into a forward and a backward, with nothing that parameters alone decide saved in between.

AOTAutograd would save every gathered parameter for the backward: ZeRO-2 in disguise. So the whole closure of the gathers, every
value that is computed from parameters alone (casts, transposes, views, weight norm), is tagged for recomputation, down to the
gathers themselves; the backward then starts from the shards again. A parameter that the plan keeps across the turn is tagged
for saving instead: it becomes a saved tensor like any activation.

    joint:     shard -> gather -> t -> mm ... -> mm(t) ...
    forward:   shard -> gather -> t -> mm            backward, released:  shard -> gather -> t -> mm
                                                     backward, kept:      (saved gather) -> t -> mm
                                                     backward, resharded: secondary shard -> gather -> t -> mm

What is resharded changes neither what is computed nor what is saved: its secondary shard goes where the shard went.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from . import build
from ._compat import CheckpointPolicy, default_partition
from .errors import CaptureError
from .ops import ALL_GATHER, REDUCE_SCATTER, RESHARD
from .passes.nodes import KEPT

if TYPE_CHECKING:
    from .blueprint import Blueprint

# above every id that activation checkpointing hands out: a region of the user's never pins one of our values
_CLOSURE_REGION = 2**60


def partition(blueprint: Blueprint, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split, plan, and split again if the plan keeps anything. Then let the backward start from what is resharded."""
    _refuse_sparse(blueprint, joint)
    gathers = _tag_closure(joint)
    forward, backward = default_partition(joint, inputs, **options)
    schedules = build.plan_graphs(blueprint, forward, backward, options["num_fwd_outputs"])
    kept = schedules[0].kept  # the same for every micro-batch
    if kept:
        for node in gathers:
            if blueprint.layouts[node.args[2]].name in kept:  # type: ignore[index]
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        forward, backward = default_partition(joint, inputs, **options)
        _mark_kept(blueprint, gathers, backward)
        again = build.plan_graphs(blueprint, forward, backward, options["num_fwd_outputs"])
        assert all(s.kept == kept for s in again), "keeping a parameter must not change what the graphs read"
        schedules = again
    for name in schedules[0].resharded:  # the same for every micro-batch
        _reshard(blueprint, name, forward, backward, options["num_fwd_outputs"])
    build.attach(blueprint, schedules, forward, backward)
    return forward, backward


def _refuse_sparse(blueprint: Blueprint, joint: fx.GraphModule) -> None:
    for node in joint.graph.nodes:
        value = node.args[0].meta.get("val") if node.target is REDUCE_SCATTER else None
        if value is not None and value.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {blueprint.layouts[node.args[2]].name!r} is sparse, which can't be reduced to shards",
                advice="use sparse=False in the embedding that reads it",
            )


def _mark_kept(blueprint: Blueprint, gathers: list[fx.Node], backward: fx.GraphModule) -> None:
    """Tell the lowering which saved tensors of the backward are gathered parameters."""
    names = {node.name: blueprint.layouts[node.args[2]].name for node in gathers}  # type: ignore[index]
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in names:
            node.meta[KEPT] = names[node.name]


def _reshard(blueprint: Blueprint, name: str, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Save a secondary shard in the place of the shard of one parameter. Of a 0-dim or empty one every rank has all."""
    index = blueprint.index[name]
    if not blueprint.layouts[index].parameter(trainable=False).num_elements:
        return
    (whole,) = (n for n in forward.graph.nodes if n.target is ALL_GATHER and n.args[2] == index)
    shard: Any = whole.args[0]
    (saved,) = (n for n in backward.graph.find_nodes(op="placeholder") if n.name == shard.name)
    assert all(user.target is ALL_GATHER for user in saved.users), f"the backward needs the shard of {name!r} itself"
    (output,) = forward.graph.find_nodes(op="output")
    numel = blueprint.layouts[index].resharded_to(blueprint.settings.reshard_to).chunk_numel
    with forward.graph.inserting_before(output):
        part = forward.graph.call_function(RESHARD, (whole, numel, index))
    part.meta["val"] = saved.meta["val"] = whole.meta["val"].new_empty((numel,))
    outputs: Any = output.args[0]
    output.args = (tuple(part if i >= num_outputs and value is shard else value for i, value in enumerate(outputs)),)
    forward.recompile()


def _tag_closure(joint: fx.GraphModule) -> list[fx.Node]:
    closure: set[fx.Node] = set()
    gathers = []
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is ALL_GATHER:
            gathers.append(node)
        elif not _derived(node, closure):
            continue
        closure.add(node)
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _CLOSURE_REGION
    return gathers


def _derived(node: fx.Node, closure: set[fx.Node]) -> bool:
    """Computed from values of the closure alone, and the same every time it is computed."""
    tensors = [a for a in node.all_input_nodes if not isinstance(a.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))]
    if not tensors or any(a not in closure for a in tensors) or node.is_impure():
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags and not isinstance(node.target, torch._ops.HigherOrderOperator)
