"""A bucket at run time: which transfers one launch makes, and how small tensors are packed and unpacked.

direct   the parameter's own gathered storage is what the wire fills: nothing is copied
packed   (one pack a dtype)   shards -> one flat buffer -> wire -> (world, total) buffer -> each parameter's storage
0-dim    replicated: its value is the local tensor itself, nothing travels; its gradient is averaged to every rank

Where there are replicas, what a reduction brings is not yet the gradient's shard: it is added up over the replicas as it came,
packs as packs, and then taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .shard import Layout, padded
from .wire import Wire


@dataclass(frozen=True, slots=True)
class Pack:
    """Members (by position in the bucket) of one dtype, and where each begins in every rank's part of the buffer."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int
    dtype: torch.dtype


class Transfers:
    """What a bucket of `layouts` sends. Built once when a graph is lowered; holds no state of a run.

    `secondary`: the layouts are those of secondary shards.
    """

    def __init__(self, layouts: Sequence[Layout], packed: Sequence[bool], secondary: bool = False) -> None:
        self.layouts, self.secondary = tuple(layouts), secondary
        self.replicated = tuple(i for i, layout in enumerate(layouts) if layout.replicated)
        sharded = [i for i, layout in enumerate(layouts) if not layout.replicated]
        self.direct = tuple(i for i in sharded if not packed[i])
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in sharded:
            if packed[i]:
                by_dtype.setdefault(layouts[i].gathered_dtype, []).append(i)
        self.packs = tuple(_pack(members, layouts, dtype) for dtype, members in by_dtype.items())

    def all_gather(self, wire: Wire, shards: Sequence[torch.Tensor]) -> Gathering:
        """Allocate every member's whole storage and the packs, and launch."""
        layouts = self.layouts
        shards = [shard.to(layout.gathered_dtype) for layout, shard in zip(layouts, shards)]
        stores = [shard if layout.replicated else shard.new_empty(layout.padded_numel) for layout, shard in zip(layouts, shards)]
        outs = [
            stores[i].view(wire.world_size, -1) if stores[i].numel() else stores[i].view(wire.world_size, 0) for i in self.direct
        ]
        ins = [padded(layouts[i], shards[i]) for i in self.direct]
        buffers = []
        for pack in self.packs:
            buffer = torch.empty((wire.world_size, pack.total), dtype=pack.dtype, device=shards[pack.members[0]].device)
            own = buffer[wire.rank]
            torch._foreach_copy_(
                [own[at : at + shards[i].numel()] for i, at in zip(pack.members, pack.offsets)],
                [shards[i].reshape(-1) for i in pack.members],
            )
            buffers.append(buffer)
            outs.append(buffer)
            ins.append(own)
        return Gathering(self, stores, buffers, shards if self.secondary else ins, wire.all_gather(outs, ins))

    def unpack(self, stores: list[torch.Tensor], buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        for pack, buffer in zip(self.packs, buffers):
            world_size = buffer.shape[0]
            into, out_of = [], []
            for i, at in zip(pack.members, pack.offsets):
                n = self.layouts[i].chunk_numel
                into.append(stores[i].view(world_size, n))
                out_of.append(buffer[:, at : at + n])
            torch._foreach_copy_(into, out_of)
        return [
            store if layout.replicated else store[: layout.numel].view(layout.shape) for layout, store in zip(self.layouts, stores)
        ]

    def reduce_scatter(self, wire: Wire, grads: Sequence[torch.Tensor]) -> Reducing:
        """Launch the mean over ranks of whole gradients. Direct ones are read where they lie, if they are contiguous."""
        flat = [grad.reshape(-1) for grad in grads]  # a view of a contiguous gradient, else a copy
        ins = [flat[i] for i in self.direct]
        sizes = [self.layouts[i].chunk_numel for i in self.direct]
        for pack in self.packs:
            ins.append(self._fill(pack, flat, wire.world_size))
            sizes.append(pack.total)
        sums = [self.layouts[i].between_dtype for i in (*self.direct, *(pack.members[0] for pack in self.packs))]
        sums_of_whole = [self.layouts[i].between_dtype for i in self.replicated]
        divisor = self.layouts[0].num_ranks
        parts = wire.reduce_scatter(ins, sizes, sums, divisor)
        whole = wire.all_reduce([flat[i] for i in self.replicated], sums_of_whole, divisor)
        return Reducing(self, wire.rank, parts, whole)

    def all_reduce(self, wire: Wire, reduced: Reduced) -> Averaging:
        """Launch the sum over replicas of what a reduction has brought."""
        return Averaging(reduced, wire.all_reduce(reduced.parts, [None] * len(reduced.parts), divisor=1))

    def _fill(self, pack: Pack, flat: list[torch.Tensor], world_size: int) -> torch.Tensor:
        buffer = torch.empty((world_size, pack.total), dtype=pack.dtype, device=flat[pack.members[0]].device)
        into, out_of = [], []
        for i, at in zip(pack.members, pack.offsets):
            n, grad = self.layouts[i].chunk_numel, flat[i]
            if grad.numel() == n * world_size:
                into.append(buffer[:, at : at + n])
                out_of.append(grad.view(world_size, n))
                continue
            for rank in range(world_size):
                part = grad[rank * n : (rank + 1) * n]
                into.append(buffer[rank, at : at + part.numel()])
                out_of.append(part)
                buffer[rank, at + part.numel() : at + n].zero_()
        torch._foreach_copy_(into, out_of)
        return buffer.view(-1)

    def split(self, rank: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """One shard a member, in the bucket's order, out of what the wire returned: for direct members, packs, 0-dim ones."""
        shards: list[torch.Tensor | None] = [None] * len(self.layouts)
        for i, part in zip(self.direct, parts):
            shards[i] = part
        num_cut = len(self.direct) + len(self.packs)
        for pack, part in zip(self.packs, parts[len(self.direct) : num_cut]):
            for i, at in zip(pack.members, pack.offsets):
                shards[i] = part[at : at + self.layouts[i].chunk_numel].clone()  # small, and must not keep the whole pack alive
        for i, part in zip(self.replicated, parts[num_cut:]):
            shards[i] = part
        out = []
        for layout, shard in zip(self.layouts, shards):
            assert shard is not None
            shard, shape = shard.to(layout.dtype), layout.local_shape(rank)
            out.append(shard[: shape[0] * layout.row_numel].view(shape) if shape else shard.view(()))
        return out


def secondary_shard(whole: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """A copy of this rank's part of a gathered storage, padding included, if `num_ranks` ranks share it."""
    numel = whole.untyped_storage().nbytes() // whole.element_size() // num_ranks
    return whole.as_strided((numel,), (1,), rank * numel).clone()


class Gathering:
    """A gather under way. Holds what the wire still reads: casts of shards; and secondary shards, packed ones too, so that what is
    held does not depend on that."""

    __slots__ = ("_arrive", "_held", "buffers", "stores", "transfers")

    def __init__(
        self,
        transfers: Transfers,
        stores: list[torch.Tensor],
        buffers: list[torch.Tensor],
        held: list[torch.Tensor],
        arrive: Callable[[], None],
    ) -> None:
        self.transfers, self.stores, self.buffers, self._held, self._arrive = transfers, stores, buffers, held, arrive

    def wait(self) -> list[torch.Tensor]:
        self._arrive()
        self._held.clear()
        return self.transfers.unpack(self.stores, self.buffers)


class Reduced:
    """What a reduction has brought, before it is taken apart."""

    __slots__ = ("_rank", "parts", "transfers")

    def __init__(self, transfers: Transfers, rank: int, parts: list[torch.Tensor]) -> None:
        self.transfers, self._rank, self.parts = transfers, rank, parts

    def split(self) -> list[torch.Tensor]:
        return self.transfers.split(self._rank, self.parts)


class Reducing:
    """A reduction under way. Holds what the wire still reads."""

    __slots__ = ("_parts", "_rank", "_whole", "transfers")

    def __init__(
        self, transfers: Transfers, rank: int, parts: Callable[[], list[torch.Tensor]], whole: Callable[[], list[torch.Tensor]]
    ) -> None:
        self.transfers, self._rank, self._parts, self._whole = transfers, rank, parts, whole

    def wait(self) -> Reduced:
        return Reduced(self.transfers, self._rank, [*self._parts(), *self._whole()])


class Averaging:
    """An all-reduce over replicas under way. Holds what the wire still reads."""

    __slots__ = ("_reduced", "_summed", "transfers")

    def __init__(self, reduced: Reduced, summed: Callable[[], list[torch.Tensor]]) -> None:
        self._reduced, self._summed, self.transfers = reduced, summed, reduced.transfers

    def wait(self) -> Reduced:
        self._reduced.parts = self._summed()
        return self._reduced


def gather_whole(layout: Layout, shard: torch.Tensor, wire: Wire) -> torch.Tensor:
    """A whole parameter as it is stored, in memory of its own."""
    layout = layout.in_full_precision()
    value = Transfers([layout], [False]).all_gather(wire, [shard]).wait()[0]
    return value.clone() if layout.replicated else value


def _pack(members: list[int], layouts: Sequence[Layout], dtype: torch.dtype) -> Pack:
    offsets, total = [], 0
    for i in members:
        offsets.append(total)
        total += layouts[i].chunk_numel
    return Pack(tuple(members), tuple(offsets), total, dtype)
