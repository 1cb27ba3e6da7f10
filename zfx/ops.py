"""The naive operators that every capture starts from: gather a whole parameter, reduce its whole gradient.

Run as they stand (`with model.zfx.reference():`) they are the slow reference that every compiled schedule is compared with.
In a captured graph they mark where a parameter is needed and where its gradient is complete; the lowering replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch


class Naive(Protocol):
    """What the operators ask of a blueprint."""

    def gather_now(self, index: int, shard: torch.Tensor) -> torch.Tensor: ...

    def reduce_now(self, index: int, grad: torch.Tensor) -> torch.Tensor: ...


BLUEPRINTS: WeakValueDictionary[int, Naive] = WeakValueDictionary()


@torch.library.custom_op("zfx::all_gather", mutates_args=())
def all_gather(shard: torch.Tensor, shape: Sequence[int], index: int, blueprint: int, dtype: torch.dtype) -> torch.Tensor:
    """The whole parameter number `index` of `blueprint`, in a new tensor of `shape` and `dtype`."""
    return BLUEPRINTS[blueprint].gather_now(index, shard)


@all_gather.register_fake
def _(shard: torch.Tensor, shape: Sequence[int], index: int, blueprint: int, dtype: torch.dtype) -> torch.Tensor:
    return shard.new_empty(shape, dtype=dtype)


@torch.library.custom_op("zfx::reduce_scatter", mutates_args=())
def reduce_scatter(grad: torch.Tensor, shape: Sequence[int], index: int, blueprint: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's rows (of `shape` and `dtype`) of the mean over ranks of the whole gradient."""
    return BLUEPRINTS[blueprint].reduce_now(index, grad)


@reduce_scatter.register_fake
def _(grad: torch.Tensor, shape: Sequence[int], index: int, blueprint: int, dtype: torch.dtype) -> torch.Tensor:
    return grad.new_empty(shape, dtype=dtype, layout=torch.strided)


@torch.library.custom_op("zfx::reshard", mutates_args=())
def reshard(whole: torch.Tensor, numel: int, index: int) -> torch.Tensor:
    """Marks what the forward leaves for the backward in the place of a shard: this rank's secondary shard of `numel` elements."""
    raise NotImplementedError("only schedules reshard")


@reshard.register_fake
def _(whole: torch.Tensor, numel: int, index: int) -> torch.Tensor:
    return whole.new_empty((numel,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    shard, _, ctx.index, ctx.blueprint, _ = inputs
    ctx.shape, ctx.dtype = shard.shape, shard.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    return reduce_scatter(grad, ctx.shape, ctx.index, ctx.blueprint, ctx.dtype), None, None, None, None


all_gather.register_autograd(_backward, setup_context=_setup_context)

ALL_GATHER = torch.ops.zfx.all_gather.default
REDUCE_SCATTER = torch.ops.zfx.reduce_scatter.default
RESHARD = torch.ops.zfx.reshard.default
