"""The window between two optimizer steps: parameters do not change in it, so they may be carried from one micro-batch to the next.

    micro-batch   1                2                ...   M
    forward       cold             warm                   warm        cold: gathers everything; warm: finds what was carried
    backward      leaves           leaves                 drops       leaves: carried parameters stay gathered; drops: they go
    schedule      first            middle                 last

A forward is warm if the values that it needs are there and the shards are what they were; a backward leaves its values behind if
it is not the M-th. Neither needs to know of the other: at the turn, the same parameters are kept in all of them. So calls may come
in any order, without a backward, or several in flight at once: the worst that happens is that something is gathered again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .held import Held, Mode
from .versions import Version, version

Boxed = Callable[[list[Any]], Any]


class Window:
    """What is carried, and how many backwards have run since the shards last changed.

    Args:
        num_micro_batches: backwards between two optimizer steps. A window that ends early, by a change of the shards, is no error.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._versions: list[Version] = []
        self._num_backwards = 0
        self._names: tuple[str, ...] = ()
        self._values: list[torch.Tensor] = []

    def enter(self, params: Sequence[Any], waiting: bool) -> None:
        """A call begins with these DTensor parameters. A new window starts if one was changed since the last call, or if gradients
        of an earlier micro-batch were there and are gone: whoever clears them is done with that window.

        Args:
            waiting: gradients of an earlier micro-batch are there, but not in `.grad` yet.
        """
        versions = [version(p) for p in params]
        cleared = self._num_backwards > 0 and not waiting and all(p.grad is None for p in params)
        if cleared or versions != self._versions:
            self._restart()
            self._versions = versions

    def is_warm(self, names: tuple[str, ...]) -> bool:
        """Whether exactly these were carried; if others were, they are dropped."""
        if names != self._names:
            self._names, self._values = (), []
        return bool(self._values)

    def is_last(self) -> bool:
        """Whether the backward that begins is the window's last."""
        return self._num_backwards + 1 >= self.num_micro_batches

    def take(self) -> list[torch.Tensor]:
        values, self._names, self._values = self._values, (), []
        return values

    def carry(self, names: tuple[str, ...], values: Sequence[torch.Tensor]) -> None:
        self._names, self._values = names, list(values)

    def count_backward(self) -> None:
        self._num_backwards += 1
        if self._num_backwards >= self.num_micro_batches:
            self._restart()

    def _restart(self) -> None:
        self._num_backwards, self._names, self._values = 0, (), []


def forward_runner(window: weakref.ref[Window], names: tuple[str, ...], cold: Boxed, warm: Boxed) -> Boxed:
    def run(args: list[Any]) -> Any:
        open_window = window()
        return (warm if open_window is not None and open_window.is_warm(names) else cold)(args)

    return _boxed(run)


def backward_runner(
    window: weakref.ref[Window] | None, held: weakref.ref[Held], backwards: Callable[[Mode, bool], Boxed]
) -> Boxed:
    """Runs the backward that is due.

    Args:
        backwards: by what is done with gradients, and whether it is the window's last.
    """

    def run(args: list[Any]) -> Any:
        waiting, open_window = held(), window() if window is not None else None
        mode = "reduce" if waiting is None else waiting.mode()  # None: the model is gone, its outputs are not
        grads = backwards(mode, open_window is None or open_window.is_last())(args)
        if open_window is not None:
            open_window.count_backward()
        return grads

    return _boxed(run)


def _boxed(run: Boxed) -> Boxed:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
