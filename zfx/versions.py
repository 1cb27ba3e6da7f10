"""Versions of shards: whether a parameter's values are still those that were gathered.

[Note: versions of shards] autograd counts in-place changes of a plain tensor, and so notices a weight that was changed between
forward and backward. A DTensor has two counters, its own and its local tensor's, and some changes move only one of them: an
in-place operation on the DTensor bumps its own; `to_local()` changed in place, the local one's. Foreach and fused optimizers
bump neither, so steps of `torch.optim` are counted here, by a hook that torch calls after every one. What is left unseen is
what torch itself calls unsafe: changes in place through `p.data`.

[Note: assigning to p.data] On a DTensor `p.data = x` exchanges the outside alone: `p` goes on with the old shard, silently.
It is seen by the outside's storage, which is another one then while the shard is the same object.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ._compat import outer_storage

_STEPS = "_zfx_steps"  # on every DTensor that an optimizer has stepped: how often

Version = tuple[int, int, int]


def version(param: DTensor) -> Version:
    """Differs from an earlier one if the parameter may have changed in between."""
    return param._version, param._local_tensor._version, getattr(param, _STEPS, 0)


class Outsides:
    """The parameters of a model, watched for assignments to `p.data`: see [Note: assigning to p.data]."""

    def __init__(self, params: Sequence[DTensor]) -> None:
        self._seen = [(weakref.ref(p._local_tensor), outer_storage(p)) for p in params]
        self._told: dict[int, Version] = {}

    def assigned(self, params: Sequence[DTensor]) -> int | None:
        """The number of the first that was assigned to and has not been changed in a way that works since."""
        for number, param in enumerate(params):
            shard, outside = self._seen[number]
            now = outer_storage(param)
            if (
                shard() is param._local_tensor
                and outside != now
                and self._told.setdefault(number, version(param)) == version(param)
            ):
                return number
            if shard() is not param._local_tensor or outside != now:
                self._seen[number] = (weakref.ref(param._local_tensor), now)
                self._told.pop(number, None)
        return None


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, DTensor):
                setattr(param, _STEPS, getattr(param, _STEPS, 0) + 1)


register_optimizer_step_post_hook(_count_step)
