"""Gradients that wait: `model.zfx.no_sync()` keeps each rank's own whole gradients, and a later backward reduces them with its own.

    backward            first          second         third
    in no_sync()        yes            yes            no
    graph               holds          holds          joins
    held                g1             g1 + g2        -              g1 + g2 + g3 goes to the reduction; .grad is set by it alone

What is held is none of `.grad`: that stays the mean over ranks, sharded. It is added up in the dtype that gradients are averaged
in, in the order of the backwards, as a single process adds them up in `.grad`.

[Note: who adds] `torch.autograd.grad` does not add to `.grad`; it must neither hold nor take what is held. It runs the graph that
reduces, in `no_sync()` too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._compat import backward_accumulates
from .errors import LoopError
from .nothing import is_nothing, nothing

Mode = Literal["reduce", "hold", "join"]

_alive: weakref.WeakSet[Held] = weakref.WeakSet()


class Held:
    """What waits for one model.

    Args:
        names: of the parameters, by index.
        parameters: the model's parameters as they are now, by index.
    """

    def __init__(self, names: Sequence[str], parameters: Callable[[], list[Any]]) -> None:
        self.names, self.parameters = names, parameters
        self.depth = 0
        self.values: dict[int, torch.Tensor] = {}
        _alive.add(self)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def mode(self) -> Mode:
        """What the backward that runs now does with its gradients. See [Note: who adds]."""
        if not (self.depth or self.values) or not backward_accumulates():
            return "reduce"
        return "hold" if self.depth else "join"

    def add(self, index: int, grad: torch.Tensor, dtype: torch.dtype) -> None:
        """Hold a whole gradient. The tensor itself may be anybody's, so the first one is copied."""
        if is_nothing(grad):
            self.values.setdefault(index, nothing(grad.to(dtype)))
        elif index in self.values and not is_nothing(self.values[index]):
            self.values[index].add_(grad)
        else:
            self.values[index] = grad.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)

    def join(self, index: int, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A whole gradient and what was held of it, which is held no longer."""
        self.add(index, grad, dtype)
        return self.values.pop(index)

    def take(self, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """What is still held of these, because the backward that has just ended did not come by them; ascending."""
        return {i: self.values.pop(i) for i in sorted(indices) if i in self.values}

    def refuse_step(self, stepped: set[int]) -> None:
        """
        Raises:
            LoopError: an optimizer is about to step a parameter (by identity) whose gradient waits.
        """
        if not self.values:
            return
        params = self.parameters()
        waiting = [self.names[i] for i in self.values if id(params[i]) in stepped]
        if waiting:
            raise LoopError(
                f"optimizer.step() while gradients wait for their reduction: {waiting[0]!r}"
                + (f" and {len(waiting) - 1} more" if len(waiting) > 1 else "")
                + ". Run the backward of the last micro-batch outside model.zfx.no_sync(): it reduces them all. To drop them "
                "instead, call model.zero_grad() (optimizer.zero_grad() does not know of them)."
            )


class Waiting:
    """What a lowered graph knows of `Held`, which dies with the model: where a parameter's gradient goes, and in which dtype."""

    def __init__(self, held: weakref.ref[Held] | None, index: Mapping[str, int], layouts: Sequence[Any]) -> None:
        assert held is not None
        self.held, self.index, self.layouts = held, index, layouts

    def add(self, name: str, grad: torch.Tensor) -> None:
        held, i = self.held(), self.index[name]
        if held is not None:
            held.add(i, grad, self.layouts[i].held_dtype)

    def join(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        held, i = self.held(), self.index[name]
        return grad if held is None else held.join(i, grad, self.layouts[i].held_dtype)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if any(held.values for held in _alive):
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for held in list(_alive):
            held.refuse_step(stepped)


register_optimizer_step_pre_hook(_before_step)
