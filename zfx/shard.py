"""Sharding: who owns which rows of a parameter, and turning a model's parameters into DTensors in place.

Rows are cut as `torch.chunk` cuts them, so that a DTensor `Shard(0)` describes them: every rank owns `chunk` rows, the last
ones fewer or none. In the local storage every rank holds `chunk` rows all the same; what lies beyond its own is padding:

    5 rows on 3 ranks, chunk = 2        rank 0    rank 1    rank 2
    local storage                       r0 r1     r2 r3     r4 --
    gathered storage                    r0 r1     r2 r3     r4 --     the parameter is its first 5 rows: no copy out

With replicas the ranks form a mesh, replicate x shard: rows are cut over the ranks of one replica, and the others hold the same.

A 0-dim parameter has no rows: it is replicated (DTensor `Replicate`), and its gradient is averaged to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ._compat import dtensor_spec, make_dtensor
from .dtensors import quiet_hooks
from .ir import Parameter
from .precision import Precision
from .versions import version


@dataclass(frozen=True, slots=True)
class Layout:
    """How one parameter is cut over the `world_size` ranks of a replica.

    Attributes:
        name: its first name in the model.
        shape, dtype: of the whole parameter.
        gathered_dtype: what it is gathered and computed in; its shards, and its gradient's, are of `dtype`.
        reduce_dtype: what its gradient is averaged in; None: as the wire does it.
        order: dimensions from the outermost in memory to the innermost, where the parameter was not contiguous; else None.
            Shards are always contiguous; the gathered value gets this order back.
        replicas: how many replicas there are.
        joined: how many ranks' shards make one of these: more than one for secondary shards.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    world_size: int
    gathered_dtype: torch.dtype = None  # type: ignore[assignment]  # becomes `dtype`
    reduce_dtype: torch.dtype | None = None
    order: tuple[int, ...] | None = None
    replicas: int = 1
    joined: int = 1

    def __post_init__(self) -> None:
        if self.gathered_dtype is None:
            object.__setattr__(self, "gathered_dtype", self.dtype)

    @property
    def replicated(self) -> bool:
        return not self.shape

    @property
    def chunk(self) -> int:
        """Rows that every rank holds in its storage, padding included."""
        return 1 if self.replicated else -(-self.shape[0] // (self.world_size * self.joined)) * self.joined

    @property
    def row_numel(self) -> int:
        return _product(self.shape[1:])

    @property
    def numel(self) -> int:
        return _product(self.shape)

    @property
    def chunk_numel(self) -> int:
        """Elements of one rank's storage, padding included."""
        return self.chunk * self.row_numel

    @property
    def padded_numel(self) -> int:
        """Elements of the gathered storage."""
        return 1 if self.replicated else self.world_size * self.chunk_numel

    def rows(self, rank: int) -> tuple[int, int]:
        """First row of `rank`, and the one after its last."""
        return min(rank * self.chunk, self.shape[0]), min((rank + 1) * self.chunk, self.shape[0])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.replicated:
            return ()
        start, stop = self.rows(rank)
        return (stop - start, *self.shape[1:])

    @property
    def num_ranks(self) -> int:
        """All ranks, whose gradients are averaged."""
        return self.world_size * self.replicas

    @property
    def between_dtype(self) -> torch.dtype | None:
        """What a gradient is reduced to over the ranks of a replica; with replicas it stays wide between the two stages."""
        if self.replicas > 1 and self.reduce_dtype is None and self.gathered_dtype in (torch.bfloat16, torch.float16):
            return torch.float32
        return self.reduce_dtype

    def over(self, world_size: int, replicas: int = 1) -> Layout:
        """The same on so many ranks."""
        return replace(self, world_size=world_size // replicas, replicas=replicas)

    def resharded_to(self, num_ranks: int) -> Layout:
        """The same between so many neighbouring ranks: each has the rows of several, and the gathered storage stays what it is."""
        return replace(self, world_size=num_ranks, joined=self.world_size // num_ranks)

    def in_full_precision(self) -> Layout:
        """The same, gathered as it is stored."""
        return replace(self, gathered_dtype=self.dtype)

    @property
    def held_dtype(self) -> torch.dtype:
        """What whole gradients of several micro-batches are added up in, where they wait for one reduction."""
        return torch.promote_types(self.gathered_dtype, self.reduce_dtype or self.gathered_dtype)

    def of_held(self) -> Layout:
        """The same for gradients that come in `held_dtype`."""
        return replace(self, gathered_dtype=self.held_dtype)

    def shard_bytes(self, trainable: bool) -> int:
        """What a rank holds of it all the time: its shard and its gradient's."""
        return self.chunk_numel * self.dtype.itemsize * (2 if trainable else 1)

    def parameter(self, trainable: bool) -> Parameter:
        """The planner's view of it. A replicated one is always there: gathering it holds nothing more."""
        size = self.gathered_dtype.itemsize
        held = 0 if self.replicated else self.padded_numel
        across = self.chunk_numel * (self.between_dtype or self.gathered_dtype).itemsize if trainable and self.replicas > 1 else 0
        return Parameter(self.name, held, held * size, self.numel * size if trainable else 0, self.numel, across)


def _product(sizes: tuple[int, ...]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def layout_of(name: str, param: torch.Tensor, world_size: int, precision: Precision, replicas: int = 1) -> Layout:
    """The layout of a parameter over `world_size` ranks that form so many replicas."""
    order = None
    if not param.is_contiguous() and param.numel():
        order = tuple(sorted(range(param.dim()), key=param.stride, reverse=True))
    gathered_dtype = precision.gathered_in(param.dtype)
    reduce_dtype, num_shards = precision.reduce_in(gathered_dtype), world_size // replicas
    return Layout(name, tuple(param.shape), param.dtype, num_shards, gathered_dtype, reduce_dtype, order, replicas)


def padded(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """The `chunk_numel` elements behind a local shard, flat: a view where the storage has the room, else a copy."""
    if local.numel() == layout.chunk_numel and local.is_contiguous():
        return local.reshape(-1)
    room = local.untyped_storage().nbytes() // layout.dtype.itemsize - local.storage_offset()
    if local.is_contiguous() and room >= layout.chunk_numel:
        return local.as_strided((layout.chunk_numel,), (1,))
    out = local.new_zeros(layout.chunk_numel)
    out[: local.numel()] = local.reshape(-1)
    return out


def shard_of(layout: Layout, full: torch.Tensor, rank: int, device: torch.device) -> torch.Tensor:
    """This rank's rows of `full`, in a new storage of `chunk_numel` elements."""
    shape = layout.local_shape(rank)
    storage = torch.zeros(layout.chunk_numel, dtype=layout.dtype, device=device)
    local = storage[: _product(shape)].view(shape)
    local.copy_(full if layout.replicated else full[slice(*layout.rows(rank))])
    return local


@dataclass(frozen=True, slots=True)
class Owner:
    """One place where a parameter hangs: `model.get_submodule(path)._parameters[attribute]`. Each module has one path here."""

    path: str
    module: nn.Module
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


def unique_parameters(model: nn.Module) -> list[tuple[nn.Parameter, list[Owner]]]:
    """Each parameter once, with every place that holds it; its name is its first owner's."""
    found: dict[int, tuple[nn.Parameter, list[Owner]]] = {}
    for path, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), (param, []))[1].append(Owner(path, module, attribute))
    return list(found.values())


def shard_rank(mesh: DeviceMesh) -> int:
    """Which of a parameter's parts this rank owns."""
    return mesh.get_local_rank(mesh.ndim - 1)


def sharded(layout: Layout, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The DTensor of which this rank holds `local`: the rows that `shard_rank` says, or the whole where it's replicated."""
    placements = (*[Replicate()] * (mesh.ndim - 1), Replicate() if layout.replicated else Shard(0))
    return make_dtensor(local, dtensor_spec(mesh, placements, layout.shape, layout.dtype))


def shard_parameters(
    model: nn.Module, layouts: list[Layout], mesh: DeviceMesh, device: torch.device, shards: dict[int, torch.Tensor] | None = None
) -> None:
    """Replace every parameter by `nn.Parameter(DTensor)`, one at a time, under all its names; each whole one is given up at once.

    Args:
        shards: parts that are there already, by the parameter's number: those of parameters on the meta device.
    """
    rank, shards = shard_rank(mesh), shards or {}
    entries = unique_parameters(model)
    for index, layout in enumerate(layouts):
        param, owners = entries[index]
        entries[index] = None  # type: ignore[call-overload]  # or the list would keep every whole parameter to the end
        local = shards.pop(index, None)
        if local is None:
            local = shard_of(layout, param.detach(), rank, device)
        new = nn.Parameter(sharded(layout, local, mesh), requires_grad=param.requires_grad)
        new.__dict__.update({k: v for k, v in param.__dict__.items() if k not in new.__dict__})
        for owner in owners:
            module = owner.module
            module._parameters[owner.attribute] = new
            if isinstance(module, nn.RNNBase):  # it holds its weights in a second list, which would keep the whole ones alive
                module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]


class ToLocal(torch.autograd.Function):
    """From the DTensor parameters that the user sees to the plain shards that the graphs work on, and gradients back."""

    @staticmethod
    def forward(
        ctx: Any, changed: Callable[[list[int]], None], finish: Callable[[list[int]], dict[int, torch.Tensor]], *params: DTensor
    ) -> tuple[torch.Tensor, ...]:
        # autograd itself would not notice a shard that was changed between forward and backward: [Note: versions of shards]
        ctx.changed, ctx.params, ctx.versions = changed, params, [version(p) for p in params]
        ctx.specs, ctx.finish = [p._spec for p in params], finish
        ctx.set_materialize_grads(False)
        return tuple(p._local_tensor.detach() for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "double backward through sharded parameters is not supported: create_graph=True would need gradients of gradient "
                "shards (for example in torch.func.functional_call with weights adapted by gradients)"
            )
        changed = [i for i, (p, before) in enumerate(zip(ctx.params, ctx.versions)) if version(p) != before]
        if changed:
            ctx.changed(changed)
        more = ctx.finish(list(range(len(grads))))
        summed = [more.get(i) if g is None else g + more[i] if i in more else g for i, g in enumerate(grads)]
        for param, grad in zip(ctx.params, summed):
            if grad is None:
                quiet_hooks(param)
        return (None, None, *(None if g is None else make_dtensor(g, spec) for g, spec in zip(summed, ctx.specs)))
