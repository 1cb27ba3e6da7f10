"""What the nodes of a lowered graph call. No recording, no state of a run: every gathered value is a value of the graph.

plan = begin(plan)                       ranks agree, or RankMismatch
g = all_gather(plan, 3, [shard, ...])    launch bucket 3
weight, bias = wait(plan, g)             arrived
(part,) = reshard(plan, [weight])        a copy of this rank's secondary shard, for the backward to gather from
release([weight, bias])                  storage given back at once
r = reduce_scatter(plan, 5, [grad])      launch
(shard_grad,) = wait_reduce(plan, r)     this rank's rows of the mean
reduced = wait_reduce(plan, r)           with replicas: its rows of this replica's part of the mean, and then:
a = all_reduce(plan, 5, reduced)         launch
(shard_grad,) = wait_all_reduce(plan, a) this rank's rows of the mean
(weight,) = take(plan)                   what the micro-batch before left behind
carry(plan, [weight])                    left behind for the next one
hold(plan, "w", grad)                    a whole gradient waits for a later backward
grad = join(plan, "w", grad)             the sum of what waited and this one
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from . import leaf
from ._compat import StorageWeakRef, profiling
from .agreement import digest_of
from .bucket import Averaging, Gathering, Reduced, Reducing, Transfers, secondary_shard
from .channels import Channels
from .held import Waiting
from .nothing import Absences, Sources
from .window import Window

T = TypeVar("T")


class GatheredMeter:
    """Counts the bytes of gathered storages, packs and secondary shards that are alive. For tests and tools; None in production."""

    active: GatheredMeter | None = None

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.on_node: Callable[[torch.fx.Node, int], None] = lambda node, num_bytes: None

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def forget(self, tensor: torch.Tensor) -> None:
        self._storages.pop(tensor.untyped_storage()._cdata, None)

    def num_bytes(self) -> int:
        self._storages = {key: (ref, n) for key, (ref, n) in self._storages.items() if not ref.expired()}
        return sum(n for _, n in self._storages.values())

    def __enter__(self) -> GatheredMeter:
        GatheredMeter.active = self
        return self

    def __exit__(self, *_: object) -> None:
        GatheredMeter.active = None


class Plan:
    """What one lowered graph needs beside its tensors. Constant once built, but for what is in flight while the graph runs.

    Args:
        transfers: by bucket index; buckets that the other graph launches are None.
        description: one line a collective, in launch order, the same on every rank; the first line names the graph.
        carried: parameters that go from one micro-batch to the next.
        window: where they lie meanwhile; dead once the model is.
        waiting: where gradients are held that wait for a reduction, if the graph holds or joins any.
        absences: in a backward, gradients that turn out to be nothing.
        reshard_to: how many ranks share a parameter that was resharded, if any is.
    """

    def __init__(
        self,
        transfers: Sequence[Transfers | None],
        channels: Channels | None,
        description: Sequence[str],
        carried: tuple[str, ...] = (),
        window: weakref.ref[Window] | None = None,
        waiting: Waiting | None = None,
        absences: Absences | None = None,
        reshard_to: int = 0,
    ) -> None:
        self.carried, self.window, self.waiting = carried, window, waiting
        self.absences = absences or Absences(Sources())
        self.in_flight: set[Gathering | Reducing | Averaging] = set()
        self.transfers, self.description, self.digest = tuple(transfers), tuple(description), digest_of(description)
        if channels is not None:  # else the graph can be read, but not run
            self.gathers, self.reductions, self.agreement = channels.gathers, channels.reductions, channels.agreement
            self.across, self.secondary = channels.across, channels.secondary.get(reshard_to)

    def drain(self) -> None:
        """An operator has raised: let what was launched arrive, or the next collective would take its bytes for its own."""
        for transfer in self.in_flight:
            with contextlib.suppress(RuntimeError):  # a peer is gone: the error that is on its way says more
                transfer.wait()
        self.in_flight.clear()

    def open_window(self) -> Window:
        window = self.window() if self.window is not None else None
        assert window is not None, "the runner asks for a graph with carried parameters only while the window lives"
        return window


def begin(plan: Plan) -> Plan:
    plan.absences.votes = plan.agreement.begin(plan.digest, plan.description, plan.absences.doubt)
    return plan


def _shown(what: str, transfers: Transfers) -> contextlib.AbstractContextManager[Any]:
    """Under a profiler, a span with a name such as `zfx::all_gather layers.0.weight +2`."""
    if not profiling():
        return _NOT_SHOWN
    more = f" +{len(transfers.layouts) - 1}" if len(transfers.layouts) > 1 else ""
    return torch.profiler.record_function(f"zfx::{what} {transfers.layouts[0].name}{more}")


_NOT_SHOWN = contextlib.nullcontext()


def _doing(plan: Plan, what: str, transfers: Transfers, act: Callable[[], T]) -> T:
    """`act()`, named in profiles; an error of the wire says which rank is gone."""
    try:
        with _shown(what, transfers):
            return act()
    except RuntimeError as error:
        raise _explain(plan, error) from error


def all_gather(plan: Plan, bucket: int, shards: Sequence[torch.Tensor]) -> Gathering:
    transfers = plan.transfers[bucket]
    assert transfers is not None
    wire = plan.secondary if transfers.secondary else plan.gathers
    assert wire is not None
    gathering = _doing(plan, "all_gather", transfers, lambda: transfers.all_gather(wire, shards))
    plan.in_flight.add(gathering)
    if GatheredMeter.active is not None:
        for tensor in (*(s for s, layout in zip(gathering.stores, transfers.layouts) if not layout.replicated), *gathering.buffers):
            GatheredMeter.active.add(tensor)
    return gathering


def wait(plan: Plan, gathering: Gathering) -> list[torch.Tensor]:
    plan.in_flight.discard(gathering)
    return _doing(plan, "wait all_gather", gathering.transfers, gathering.wait)


def reshard(plan: Plan, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    wire = plan.secondary
    assert wire is not None
    shards = [secondary_shard(whole, wire.rank, wire.world_size) for whole in wholes]
    if GatheredMeter.active is not None:
        for shard in shards:
            GatheredMeter.active.add(shard)
    return shards


def release(tensors: Sequence[torch.Tensor]) -> None:
    """Give the storage back at once, whoever still holds a reference: the verifier has shown that nobody reads it."""
    for tensor in tensors:
        if GatheredMeter.active is not None:
            GatheredMeter.active.forget(tensor)
        tensor.untyped_storage().resize_(0)


def take(plan: Plan) -> list[torch.Tensor]:
    return plan.open_window().take()


def carry(plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
    plan.open_window().carry(plan.carried, tensors)


def let_go(tensors: Sequence[torch.Tensor]) -> None:
    """Release what autograd may still need for another backward: drop the references only."""


def hold(plan: Plan, name: str, grad: torch.Tensor) -> None:
    assert plan.waiting is not None
    plan.waiting.add(name, plan.absences.of(name, grad))


def join(plan: Plan, name: str, grad: torch.Tensor) -> torch.Tensor:
    assert plan.waiting is not None
    return plan.absences.joined(name, plan.waiting.join(name, plan.absences.of(name, grad)))


def reduce_scatter(plan: Plan, bucket: int, grads: Sequence[torch.Tensor]) -> Reducing:
    transfers = plan.transfers[bucket]
    assert transfers is not None
    grads = [plan.absences.of(layout.name, grad) for layout, grad in zip(transfers.layouts, grads)]
    reducing = _doing(plan, "reduce_scatter", transfers, lambda: transfers.reduce_scatter(plan.reductions, grads))
    plan.in_flight.add(reducing)
    return reducing


def wait_reduce(plan: Plan, reducing: Reducing) -> list[torch.Tensor] | Reduced:
    plan.in_flight.discard(reducing)
    reduced = _doing(plan, "wait reduce_scatter", reducing.transfers, reducing.wait)
    return reduced.split() if plan.across is None else reduced


def all_reduce(plan: Plan, bucket: int, reduced: Reduced) -> Averaging:
    transfers, across = plan.transfers[bucket], plan.across
    assert transfers is not None and across is not None
    averaging = _doing(plan, "all_reduce", transfers, lambda: transfers.all_reduce(across, reduced))
    plan.in_flight.add(averaging)
    return averaging


def wait_all_reduce(plan: Plan, averaging: Averaging) -> list[torch.Tensor]:
    plan.in_flight.discard(averaging)
    return _doing(plan, "wait all_reduce", averaging.transfers, averaging.wait).split()


def _explain(plan: Plan, error: RuntimeError) -> Exception:
    """Out of memory and programming errors are what they say; what is left is a peer that went away."""
    by_peer = any(sign in str(error) for sign in ("onnect", "imed out", "gloo", "NCCL"))
    if isinstance(error, torch.OutOfMemoryError) or plan.agreement.world_size == 1 or not by_peer:
        return error
    return plan.agreement.lost(error, plan.description)


plain_calls = leaf.PLAIN_CALLS


def runner(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The boxed callable that AOTAutograd wants. Under an active meter the graph is interpreted, node by node."""
    plan: Plan = gm.plan  # type: ignore[assignment]

    def run(args: list[Any]) -> Any:
        meter = GatheredMeter.active
        try:
            plan.absences.start()
            outputs = gm.forward(args) if meter is None else _Metered(gm, meter, args).run()
            return plan.absences.taken_from(outputs, lambda flags: plan.agreement.everywhere(flags, plan.description))
        except BaseException:
            plan.drain()
            raise

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Metered(torch.fx.Interpreter):
    def __init__(self, gm: torch.fx.GraphModule, meter: GatheredMeter, args: list[Any]) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.meter, self.boxed = meter, args

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.boxed.pop(0)  # boxed: nothing else may keep an argument alive

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        self.meter.on_node(n, self.meter.num_bytes())
        return result
