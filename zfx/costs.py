"""What compute and communication cost: plain data, the same on every rank, never measured while training.

Costs steer when collectives are launched and how they are bucketed. They change no result and no limit.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from functools import cached_property

from .records import LATER, Form, write_whole


def _check(record: object, above: tuple[str, ...] = (), least: tuple[str, ...] = ()) -> None:
    for name in above:
        if not getattr(record, name) > 0:
            raise ValueError(f"{type(record).__name__}.{name} must be above 0, got {getattr(record, name)!r}")
    for name in least:
        if not getattr(record, name) >= 0:
            raise ValueError(f"{type(record).__name__}.{name} must not be negative, got {getattr(record, name)!r}")


@dataclass(frozen=True, slots=True)
class Link:
    """The time of one collective by the alpha-beta model: `latency_us + num_bytes / bytes_per_us`.

    `num_bytes` is the whole gathered (or unreduced) size, at the world size that the link was made for: what that costs on
    rings, trees and tiers is in the two numbers already.
    """

    latency_us: float = 100.0
    bytes_per_us: float = 2_000.0

    def __post_init__(self) -> None:
        _check(self, above=("bytes_per_us",), least=("latency_us",))

    def us(self, num_bytes: int) -> float:
        return self.latency_us + num_bytes / self.bytes_per_us


@dataclass(frozen=True, slots=True)
class Rate:
    """The time of one kind of compute: `overhead_us` plus the larger of its flops and its bytes over their rates.

    Attributes:
        kind: e.g. "matmul", "attention", "elementwise", see `zfx.passes.duration.kind_of`; with dots, as in "matmul.bfloat16", for
            one precision, operator or shape only.
    """

    kind: str
    overhead_us: float = 5.0
    flops_per_us: float = 50_000.0
    bytes_per_us: float = 10_000.0

    def __post_init__(self) -> None:
        _check(self, above=("flops_per_us", "bytes_per_us"), least=("overhead_us",))

    def us(self, num_flops: int, num_bytes: int) -> float:
        return self.overhead_us + max(num_flops / self.flops_per_us, num_bytes / self.bytes_per_us)


@dataclass(frozen=True)
class CostModel:
    """Costs of one kind of machine at one world size. The defaults are round numbers for one CPU core and loopback TCP.

    Attributes:
        gather, reduce: an all-gather of so many gathered bytes, a reduce-scatter of so many unreduced ones.
        all_reduce: an all-reduce over replicas of so many bytes of each rank's shards, while all ranks do that with theirs.
        secondary: an all-gather of so many gathered bytes from secondary shards (`reshard_after_forward`), over the few ranks that
            have them. None: nothing is known of it, and it is taken to be like any other gather.
        rates: compute by kind. A kind takes the rate of its longest beginning that is listed ("matmul.bfloat16" may take that of
            "matmul"), else the first one.
        launch_us, busy_bytes_per_us: compute time that a collective takes from its rank, whether it overlaps or not: so much each
            (launching, packing, unpacking), and its bytes at that rate (on CPUs: copies, the network stack). It is booked where a
            gather is waited for and where a reduction or an all-reduce is launched; the links hold what is left of the
            collective's time.
        pack_threshold_bytes: parameters whose gathered size is below this travel packed in one buffer: copying them costs less
            than a message of their own.
        nominal_tokens: how many rows a matrix product is taken to have where ranks may differ in their data, see
            `Step.nominal_us`.
        source: where the numbers come from, for people.
    """

    gather: Link = field(default_factory=Link)
    reduce: Link = field(default_factory=Link)
    rates: tuple[Rate, ...] = (Rate("elementwise"),)
    launch_us: float = 50.0
    pack_threshold_bytes: int = 65_536
    nominal_tokens: int = 2_048
    source: str = "round numbers for one CPU core and loopback TCP"
    busy_bytes_per_us: float = math.inf
    all_reduce: Link = field(default_factory=Link)
    secondary: Link | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        _check(self, above=("busy_bytes_per_us",), least=("launch_us", "pack_threshold_bytes", "nominal_tokens"))
        if not self.rates or len({rate.kind for rate in self.rates}) != len(self.rates):
            raise ValueError("CostModel.rates must name at least one kind of compute, and none twice")

    def gather_link(self, secondary: bool) -> Link:
        """What an all-gather goes over, from secondary shards or from those of all ranks."""
        return self.secondary or self.gather if secondary else self.gather

    def gather_us(self, num_bytes: int, secondary: bool = False) -> float:
        return self.gather_link(secondary).us(num_bytes)

    def reduce_us(self, num_bytes: int) -> float:
        return self.reduce.us(num_bytes)

    def on_slower_links(self, factor: float) -> CostModel:
        """The same with collectives that take `factor` times as long."""

        def slower(link: Link) -> Link:
            return Link(link.latency_us * factor, link.bytes_per_us / factor)

        secondary = None if self.secondary is None else slower(self.secondary)
        return replace(
            self, gather=slower(self.gather), reduce=slower(self.reduce), all_reduce=slower(self.all_reduce), secondary=secondary
        )

    def all_reduce_us(self, num_bytes: int) -> float:
        return self.all_reduce.us(num_bytes)

    def busy_us(self, num_bytes: int) -> float:
        return self.launch_us + num_bytes / self.busy_bytes_per_us

    def compute_us(self, kind: str, num_flops: int, num_bytes: int) -> float:
        return self.rate_of(kind).us(num_flops, num_bytes)

    def rate_of(self, kind: str) -> Rate:
        """The rate that a kind takes, see `rates`."""
        found = self._by_kind.get(kind)
        while found is None and kind:
            kind = kind.rpartition(".")[0]
            found = self._by_kind.get(kind)
        return found or self.rates[0]

    @cached_property
    def _by_kind(self) -> dict[str, Rate]:
        return {rate.kind: rate for rate in self.rates}


_FORM = Form(CostModel, "costs", version=2, again="run zfx calibrate again")


def save_costs(costs: CostModel, path: str | os.PathLike[str]) -> None:
    """Write a cost model as JSON, for `load_costs` and `zfx.compile(costs=path)`. The file appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, _FORM.to_json(costs).encode())


def load_costs(path: str | os.PathLike[str]) -> CostModel:
    """The cost model that `save_costs` wrote. Every rank must read the same: plans follow from it.

    Raises:
        ValueError: the file is no cost model, is of another version, or has fields that are missing, unknown or wrong.
        OSError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return _FORM.from_json(file.read())
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None
