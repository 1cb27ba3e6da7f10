"""Versions of shards: whether a parameter's values are still those that were gathered.

[Note: versions of shards] autograd counts in-place changes of a plain tensor, and so notices a weight that was changed between
forward and backward. A DTensor has two counters, its own and its local tensor's, and some changes move only one of them: an
in-place operation on the DTensor bumps its own; `to_local()` changed in place, the local one's. Foreach and fused optimizers
bump neither, so steps of `torch.optim` are counted here, by a hook that torch calls after every one. What is left unseen is
what torch itself calls unsafe: changes through `p.data`.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_STEPS = "_zfx_steps"  # on every DTensor that an optimizer has stepped: how often

Version = tuple[int, int, int]


def version(param: DTensor) -> Version:
    """Differs from an earlier one if the parameter may have changed in between."""
    return param._version, param._local_tensor._version, getattr(param, _STEPS, 0)


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, DTensor):
                setattr(param, _STEPS, getattr(param, _STEPS, 0) + 1)


register_optimizer_step_post_hook(_count_step)
