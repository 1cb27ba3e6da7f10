"""Where sharded parameters meet code that is not the model's own call: what torch's DTensor lacks there, and what it should say.

    model.encode(x), model[0](x)     a shard meets a plain tensor: an error that says what to do instead of "mixed torch.Tensor ..."
    set_detect_anomaly(True)         asks of each gradient whether it has a NaN: an operator that DTensor has no rule for
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ._compat import explain_mixed_tensors
from .errors import LoopError

_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def prepare(mesh: DeviceMesh) -> None:
    """Called when parameters are about to be sharded over this mesh."""
    _meshes.add(mesh)
    _once()


@functools.cache
def _once() -> None:
    explain_mixed_tensors(_explain)
    operator = getattr(torch.ops.aten, "_is_any_true", None)
    if operator is not None:
        register_sharding(operator.default)(_any_true)


def _any_true(x: Any) -> list[tuple[list[Any], list[Any]]]:
    """True anywhere: the largest of the ranks' answers."""
    return [([Replicate()], [Replicate()]), *(([Partial("max")], [Shard(dim)]) for dim in range(len(x.shape)))]


def _explain(mesh: Any, message: str) -> Exception | None:
    if mesh not in _meshes:
        return None
    return LoopError(
        f"a sharded parameter (a DTensor) meets a plain tensor outside the model's own call ({message.split(':')[0]}). Code that "
        "runs a part of the model (model.encode(x), model[0](x)) or reads its weights (model.lm_head.weight, a penalty on "
        "parameters) runs as `run = model.zfx.function(lambda model, x: model.encode(x))`; whole values without gradients are "
        "those of `with model.zfx.gathered(...)`"
    )
