"""The wire: how one bucket's bytes travel, on gloo and on NCCL. Everything here is even: every rank sends and receives the same.

A wire moves flat tensors. `all_gather` fills `outs[i]`, shaped (world_size, n_i), from `ins[i]`, shaped (n_i,).
`reduce_scatter` takes flat gradients and returns, for each, the sum over ranks of this rank's part, divided: elements
`[rank * n_i, (rank + 1) * n_i)`, fewer where the gradient ends before. The divisor is the number of ranks, or of all ranks of all
replicas: the all-reduce that follows then only adds. So a mean is divided once, and no sum of large 16-bit gradients overflows.

[Note: gloo by send and receive] gloo's reduce_scatter is an all-reduce inside and moves twice the bytes, and its other
collectives abort the process where ranks disagree. Both directions are therefore sends and receives between every pair of
ranks: each byte is sent once, and partial sums are added in rank order, so that no bucketing changes a bit of the result. In an
all-reduce of two ranks each sends the other everything; of more, each adds up one part for all: as few bytes as there can be.

[Note: memory on a GPU] Every buffer is allocated on the compute stream at the launch. NCCL's own stream waits for an event
recorded there at the launch, and `Pending.wait` makes the compute stream wait for the collective. A block freed later on the
compute stream is therefore never still in use on another one, and no `record_stream` is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._compat import _coalescing_manager, all_gather_single, reduce_scatter_single

# sums of 16-bit gradients are kept in float32 until all ranks are added
_SUM_DTYPE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Wire(ABC):
    """One channel: a process group whose collectives run in launch order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world_size = group, group.rank(), group.size()

    @abstractmethod
    def all_gather(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Launch; the callable returned waits."""

    @abstractmethod
    def reduce_scatter(
        self, grads: Sequence[torch.Tensor], sizes: Sequence[int], sums: Sequence[torch.dtype | None], divisor: int
    ) -> Callable[[], list[torch.Tensor]]:
        """Launch; the callable returned waits and gives the parts. `grads` must stay alive and unchanged until then.

        `sums`: what each is added up, divided and returned in. None: returned in the gradient's own dtype.
        """

    @abstractmethod
    def all_reduce(
        self, grads: Sequence[torch.Tensor], sums: Sequence[torch.dtype | None], divisor: int
    ) -> Callable[[], list[torch.Tensor]]:
        """The sum over ranks of flat tensors, divided, on every rank: of 0-dim parameters, and of shards over replicas."""


class SendReceiveWire(Wire):
    """gloo: see [Note: gloo by send and receive]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.peers = [(self.rank + k) % self.world_size for k in range(1, self.world_size)]

    def _exchange(self, send: Callable[[int], torch.Tensor], receive: Callable[[int], torch.Tensor], works: list[Any]) -> None:
        for peer in self.peers:
            out, into = send(peer), receive(peer)
            if into.numel():
                works.append(self.group.recv([_bytes(into)], peer, 0))
            if out.numel():
                works.append(self.group.send([_bytes(out)], peer, 0))

    def all_gather(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> Callable[[], None]:
        works: list[Any] = []
        for out, shard in zip(outs, ins):
            self._exchange(lambda peer, shard=shard: shard, lambda peer, out=out: out[peer], works)  # type: ignore[misc]
            out[self.rank].copy_(shard)
        return lambda: _wait(works)

    def reduce_scatter(
        self, grads: Sequence[torch.Tensor], sizes: Sequence[int], sums: Sequence[torch.dtype | None], divisor: int
    ) -> Callable[[], list[torch.Tensor]]:
        works: list[Any] = []
        parts = []
        for grad, n in zip(grads, sizes):
            own = grad[self.rank * n : (self.rank + 1) * n]
            received = {peer: torch.empty_like(own) for peer in self.peers}
            self._exchange(lambda peer, grad=grad, n=n: grad[peer * n : (peer + 1) * n], received.__getitem__, works)  # type: ignore[misc]
            parts.append({**received, self.rank: own})
        return lambda: self._added(works, parts, sums, divisor)

    def all_reduce(
        self, grads: Sequence[torch.Tensor], sums: Sequence[torch.dtype | None], divisor: int
    ) -> Callable[[], list[torch.Tensor]]:
        if self.world_size > 2:
            return self._all_reduce_by_parts(grads, sums, divisor)
        works: list[Any] = []
        parts = []
        for grad in grads:
            received = {peer: torch.empty_like(grad) for peer in self.peers}
            self._exchange(lambda peer, grad=grad: grad, received.__getitem__, works)  # type: ignore[misc]
            parts.append({**received, self.rank: grad})
        return lambda: self._added(works, parts, sums, divisor)

    def _all_reduce_by_parts(
        self, grads: Sequence[torch.Tensor], sums: Sequence[torch.dtype | None], divisor: int
    ) -> Callable[[], list[torch.Tensor]]:
        sizes = [-(-grad.numel() // self.world_size) for grad in grads]
        reduced = self.reduce_scatter(grads, sizes, sums, divisor)

        def finish() -> list[torch.Tensor]:
            works: list[Any] = []
            parts = reduced()
            wholes = [part.new_empty(grad.numel()) for part, grad in zip(parts, grads)]
            for part, whole, n in zip(parts, wholes, sizes):
                pieces = [whole[rank * n : (rank + 1) * n] for rank in range(self.world_size)]
                self._exchange(lambda peer, part=part: part, pieces.__getitem__, works)  # type: ignore[misc]
                pieces[self.rank].copy_(part)
            _wait(works)
            return wholes

        return finish

    def _added(
        self, works: list[Any], parts: list[dict[int, torch.Tensor]], sums: Sequence[torch.dtype | None], divisor: int
    ) -> list[torch.Tensor]:
        _wait(works)
        return [self._add_in_rank_order(part, dtype, divisor) for part, dtype in zip(parts, sums)]

    def _add_in_rank_order(self, part: dict[int, torch.Tensor], dtype: torch.dtype | None, divisor: int) -> torch.Tensor:
        own = part[self.rank]
        dtype = dtype or own.dtype
        if self.world_size == 1:
            return own.to(dtype) if divisor == 1 else own.to(_SUM_DTYPE.get(dtype, dtype)).div(divisor).to(dtype)
        wide = _SUM_DTYPE.get(dtype, dtype if dtype != own.dtype else None)
        if wide is not None:
            total = part[0].to(wide)
        elif self.rank == 0:  # a + b = b + a: the sum goes into a buffer that was received, not into the gradient
            total = part[1].add_(part[0])
        else:
            total = part[0]
        for rank in range(2 if wide is None and self.rank == 0 else 1, self.world_size):
            total.add_(part[rank])
        return total.div_(divisor).to(dtype)


class CollectiveWire(Wire):
    """NCCL (and any backend with real all-gather and reduce-scatter): one coalesced launch a bucket."""

    def all_gather(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> Callable[[], None]:
        if not outs:
            return _nothing
        with _coalescing_manager(self.group, outs[0].device, async_ops=True) as works:
            for out, shard in zip(outs, ins):
                all_gather_single(_real(out).view(-1), _real(shard).view(-1), group=self.group)
        return works.wait

    def reduce_scatter(
        self, grads: Sequence[torch.Tensor], sizes: Sequence[int], sums: Sequence[torch.dtype | None], divisor: int
    ) -> Callable[[], list[torch.Tensor]]:
        if not grads:
            return list
        ins = [_lengthened(grad, n * self.world_size, dtype) for grad, n, dtype in zip(grads, sizes, sums)]
        outs = [grad.new_empty(n) for grad, n in zip(ins, sizes)]
        with _coalescing_manager(self.group, outs[0].device, async_ops=True) as works:
            for out, grad in zip(outs, ins):
                reduce_scatter_single(_real(out).view(-1), _real(grad).view(-1), op=dist.ReduceOp.AVG, group=self.group)

        def finish() -> list[torch.Tensor]:
            works.wait()
            ins.clear()
            if divisor != self.world_size:  # the mean over these ranks is a part of the mean over all
                _scale(outs, self.world_size / divisor)
            return [out[: max(0, min(n, grad.numel() - self.rank * n))] for out, grad, n in zip(outs, grads, sizes)]

        return finish

    def all_reduce(
        self, grads: Sequence[torch.Tensor], sums: Sequence[torch.dtype | None], divisor: int
    ) -> Callable[[], list[torch.Tensor]]:
        outs = [grad.to(dtype or grad.dtype, copy=True) for grad, dtype in zip(grads, sums)]
        op = dist.ReduceOp.SUM if divisor == 1 else dist.ReduceOp.AVG
        works = [dist.all_reduce(_real(out), op=op, group=self.group, async_op=True) for out in outs]

        def finish() -> list[torch.Tensor]:
            _wait(works)
            if divisor not in (1, self.world_size):
                _scale(outs, self.world_size / divisor)
            return outs

        return finish


def wire_for(group: dist.ProcessGroup) -> Wire:
    return SendReceiveWire(group) if dist.get_backend(group) == "gloo" else CollectiveWire(group)


def _nothing() -> None:
    pass


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()


def _scale(tensors: list[torch.Tensor], factor: float) -> None:
    if tensors:  # torch refuses to do nothing
        torch._foreach_mul_(tensors, factor)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Backends know no complex numbers; sums of real and imaginary parts are sums all the same."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """For sends and receives only the bytes count: any dtype travels."""
    return tensor.view(-1).view(torch.uint8)


def _lengthened(grad: torch.Tensor, numel: int, dtype: torch.dtype | None) -> torch.Tensor:
    if grad.numel() == numel:
        return grad.to(dtype or grad.dtype)
    out = grad.new_zeros(numel, dtype=dtype)
    out[: grad.numel()] = grad
    return out
