"""From which tangents the gradients of a captured backward come: [Note: unread] in nothing.py.

    tangents          1          2
    h_grad            mm(1)      mm(2)      sum: {1, 2}
    main.weight       mm(1)                      {1}
    aux.weight                   mm(2)           {2}: nothing where the loss did not read the second output
    body.weight       mm(h_grad)                 {1, 2}
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from . import leaf
from ._compat import is_tangent
from .nothing import Sources, Tangents
from .passes.nodes import is_reduction


def sources_of(backward: fx.GraphModule, names: Sequence[str]) -> Sources:
    """
    Args:
        names: of the parameters, by the index that the naive operators carry.
    """
    reached: dict[fx.Node, Tangents] = {}
    number = 0
    for node in backward.graph.nodes:
        if is_tangent(node):
            reached[node], number = 1 << number, number + 1
        else:
            reached[node] = functools.reduce(operator.or_, (reached[a] for a in node.all_input_nodes), 0)
        if node.target is torch.ops.zfx.leaf_backward.default:
            leaf.tell_sources(node.args[-1], [reached[grad] for grad in node.args[0]])
    (output,) = backward.graph.find_nodes(op="output")
    outputs: Any = output.args[0]
    reductions = {place: node for place, node in enumerate(outputs) if isinstance(node, fx.Node) and is_reduction(node)}
    return Sources(
        tuple(reached.get(node, 0) for node in outputs),
        {names[node.args[2]]: place for place, node in reductions.items()},  # type: ignore[index]
        any(_may_be_skipped(node.args[0]) for node in reductions.values()),
    )


def _may_be_skipped(grad: Any) -> bool:
    """Whether the gradient is what a leaf's backward returns, and may be nothing."""
    made_by = grad.args[0] if grad.target is operator.getitem else None
    return made_by is not None and made_by.target is torch.ops.zfx.leaf_backward.default and leaf.may_skip(made_by.args[-1])
