"""Nothing: the gradient of a parameter that a loss does not depend on. `.grad` stays None then, as it does in a single process.

What a rank has nothing of is known when a backward runs, and may differ by rank:

    an output that the loss does not read     autograd hands no gradient down for it, and AOTAutograd makes zeros of that
    a parameter that a leaf does not use      known when the leaf has run again: zeros that say so (`is_nothing`)

[Note: nothing] What a rank has nothing of it reduces all the same, as zeros, so that ranks issue the same collectives whatever
their losses read. A rank that may have nothing of something says so where it agrees with the others to begin. Then, and only
then, all of them vote at the end of that backward: what no rank had anything of, `.grad` gets nothing of; of what some rank had,
every rank gets its rows of the mean.

[Note: unread] A value of a captured backward is there if one of the tangents that it is computed from is: those are the gradients
of the outputs. A hook on the captured graph's autograd node sees which of them are missing, before AOTAutograd fills them in, and
leaves word on the node, which is the run's own: other calls of the model may be in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ._compat import captured_node, current_node

_UNREAD = "_zfx_unread"  # on an autograd node whose backward is about to run

Tangents = int  # a set of them: bit n is the n-th


def nothing(like: torch.Tensor) -> torch.Tensor:
    zeros = like.new_zeros(like.shape)
    zeros._zfx_nothing = True  # type: ignore[attr-defined]
    return zeros


def is_nothing(grad: torch.Tensor) -> bool:
    return hasattr(grad, "_zfx_nothing")


def watched(call: Callable[..., Any], tangents: Sequence[tuple[int, int | None]]) -> Callable[..., Any]:
    """A captured function that sees, in its backward, which of its outputs were not read: see [Note: unread].

    Args:
        tangents: as `_compat.traced_tangents` says.
    """
    output = next((number for _, number in tangents if number is not None), None)
    if output is None:
        return call

    def look(grads: Sequence[torch.Tensor | None]) -> None:
        setattr(current_node(), _UNREAD, sum(1 << n for n, (place, _) in enumerate(tangents) if grads[place] is None))

    @functools.wraps(call)
    def run(*args: Any) -> Any:
        outputs = call(*args)
        node = captured_node(outputs[output])
        if node is not None:
            node.register_prehook(look)
        return outputs

    return run


def unread() -> Tangents:
    """Those that are missing in the backward that this thread runs."""
    return getattr(current_node(), _UNREAD, 0)


def is_missing(tangents: Tangents, unread: Tangents) -> bool:
    """Whether a value that is computed from these is not there."""
    return bool(tangents) and not tangents & ~unread


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the outputs of a captured backward come from. Those are gradients of parameters, and of other inputs.

    Attributes:
        tangents: by place among the outputs, all that it is computed from.
        places: by parameter, the place of its gradient.
        by_leaves: whether a leaf may have nothing of a parameter.
    """

    tangents: tuple[Tangents, ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)
    by_leaves: bool = False


class Absences:
    """What this rank has nothing of, in the run of a lowered graph that goes on.

    Args:
        reduced: the parameters whose gradients the graph reduces, in an order that is the same on all ranks.
    """

    def __init__(self, sources: Sources, reduced: Sequence[str] = ()) -> None:
        self.sources, self.reduced = sources, tuple(reduced)
        self.names: set[str] = set()
        self.missing: set[int] = set()  # places
        self.votes = False

    def start(self) -> None:
        self.names, self.missing, self.votes = set(), set(), False
        if lacking := unread():
            self.missing = {i for i, tangents in enumerate(self.sources.tangents) if is_missing(tangents, lacking)}
            self.names = {name for name, place in self.sources.places.items() if place in self.missing}

    @property
    def doubt(self) -> bool:
        """What the rank tells the others when it begins: see [Note: nothing]."""
        return bool(self.names) or self.sources.by_leaves

    def of(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """What goes into a reduction, or waits for one, in the place of this gradient."""
        if is_nothing(grad):
            self.names.add(name)
            return grad
        return nothing(grad) if name in self.names else grad

    def joined(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """A gradient that was joined by what waited of it: earlier micro-batches may have had something."""
        if not is_nothing(grad):
            self.names.discard(name)
        return grad

    def taken_from(self, outputs: Sequence[Any], everywhere: Callable[[Sequence[bool]], list[bool]]) -> Sequence[Any]:
        """The outputs, but None for gradients that there are not: of parameters, on no rank; of other inputs, on this one.

        Args:
            everywhere: says which flags are true on every rank.
        """
        gone = self.missing.difference(self.sources.places.values())
        if self.votes and self.reduced:
            nobody = everywhere([name in self.names for name in self.reduced])
            gone |= {self.sources.places[name] for name, flag in zip(self.reduced, nobody) if flag}
        return [None if i in gone else output for i, output in enumerate(outputs)] if gone else outputs
