"""Presets: the costs of clusters that are not here, from data sheets, in two strings: a device and a network.

    costs_for("h100", "nvlink:8,ib", 64)        64 H100s, 8 a node over NVLink, InfiniBand between the nodes
    costs_for("a100", "nvlink:4,eth100*2", 16)  4 a node, 2 Ethernet ports of 100 Gbit/s a node
    costs_for("custom:flops=300e12,bandwidth=2e12,memory=48e9", "pcie4:8,ib@20/6", 32)

Equal strings give equal numbers on every rank: nothing here is measured or asks the machine. Estimates, good for comparing
schedules and sizes of clusters; where the machine is at hand, `zfx calibrate` measures its own.

**Devices** are rooflines. Products take `flops / (peak * share)` or `bytes / (bandwidth * memory_share)`, whichever is longer, and
all else the latter; the shares are what long kernels are taken to reach of the data sheet's peak.

**Networks** are tiers from the inside out, `NAME[:RANKS][*LINKS][@GB/s[/us]]`, joined by commas. RANKS is how many ranks the tier
reaches (not needed for the last); LINKS how many links into the tier a unit of the tier before has (a rank, for the first tier; by
default one for InfiniBand a rank, one for Ethernet a unit); then its speed and latency, where they aren't the table's.

    tier 0 nvlink:8     r0 = r1 = ... = r7     r8 = r9 = ... = r15         U0 = 16 units (ranks)
    tier 1 ib           [       node 0       ]=[       node 1       ]      U1 = 2 units (nodes), 8 links each; U2 = 1

One all-gather or reduce-scatter of S bytes on W ranks, where a_i is the latency of a hop in tier i and b_i the bandwidth of all the
links of one unit into it, is done by one of two algorithms. A ring visits every rank and enters each unit once, at the
pace of its slowest link; doubling joins 2, 4, 8, ... parts, one tier after the other:

    ring       base + sum of (U_i - U_i+1) a_i         + S (W-1)/W / min b_i
    doubling   base + sum of log2(U_i / U_i+1) a_i     + S sum of (1 - U_i+1 / U_i) / b_i

A `Link` is one line, so it is that of the algorithm that is faster for 128 MiB, about what large models gather at once.
On CPUs zfx sends from every rank to every other, which costs what a ring does.

With replicas a parameter is gathered and reduced over the W / R ranks of one replica, which lie next to each other and so in the
inner tiers. The all-reduce joins the R replicas as if each were one rank: its ranks all send at once, each its own shard of S
bytes, so that W / R times S goes over the replica's links together, and twice, as an all-reduce is a reduce-scatter and an
all-gather.

What is gathered from secondary shards, of G neighbouring ranks, costs what a gather of S bytes on G ranks costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .costs import CostModel, Link, Rate


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on.

    Attributes:
        memory_bytes: its memory.
        bandwidth: peak bytes per microsecond of that memory.
        flops: peak flops per microsecond of dense products by precision; others take those of "float32".
        share, attention_share, memory_share: of the peaks, what long products, attention and everything else are taken to reach.
        slower: kinds that are limited by more than memory, and how many times longer they take than memory would allow.
        overhead_us: of one kernel or operator, from launch to launch.
        launch_us, message_us: compute time that a collective takes, and the time of one more message in it.
        aliases: which generation the general names of tiers mean here.
        backend: "nccl" or "gloo".
        source: where the peaks are from.
    """

    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str
    share: float = 0.7
    attention_share: float = 0.4
    memory_share: float = 0.8
    slower: Mapping[str, float] = field(default_factory=dict)
    overhead_us: float = 4.0
    launch_us: float = 10.0
    message_us: float = 5.0
    aliases: Mapping[str, str] = field(default_factory=lambda: {"nvlink": "nvlink4", "ib": "ib400", "pcie": "pcie5"})
    backend: str = "nccl"


_HALF = ("bfloat16", "float16")
_HOPPER = {"float32": 66.9e6, "float64": 66.9e6, "float8_e4m3fn": 1978.9e6, **dict.fromkeys(_HALF, 989.4e6)}

# Peaks are dense (no sparsity), and float32 is without TF32, which torch leaves off. Shares: by their papers, FlashAttention-2
# reaches 50 to 73 % of an A100 and 35 % of an H100; AMD's "Max-Achievable FLOPs" and others give products 45 to 55 % of an MI300X;
# 0.7 and 0.8 elsewhere are round numbers.
DEVICES: dict[str, Device] = {
    "a100": Device(
        80_000_000_000,
        2.039e6,
        {"float32": 19.5e6, "float64": 19.5e6, **dict.fromkeys(_HALF, 312e6)},
        "NVIDIA A100 Tensor Core GPU data sheet, SXM 80 GB",
        attention_share=0.55,
        aliases={"nvlink": "nvlink3", "ib": "ib200", "pcie": "pcie4"},
    ),
    "h100": Device(80_000_000_000, 3.35e6, _HOPPER, "NVIDIA H100 Tensor Core GPU data sheet, SXM5", attention_share=0.35),
    "h200": Device(141_000_000_000, 4.8e6, _HOPPER, "NVIDIA H200 Tensor Core GPU data sheet, SXM", attention_share=0.35),
    "mi300x": Device(
        192_000_000_000,
        5.3e6,
        {"float32": 163.4e6, "float64": 163.4e6, "float8_e4m3fnuz": 2614.9e6, **dict.fromkeys(_HALF, 1307.4e6)},
        "AMD Instinct MI300X data sheet",
        share=0.5,
        attention_share=0.3,
        aliases={"ib": "ib400", "pcie": "pcie5"},
    ),
    "cpu": Device(
        8_000_000_000,
        10e3,
        {"float32": 96e3, "float64": 48e3, **dict.fromkeys(_HALF, 24e3)},
        "one core at 3 GHz with two 8-wide multiply-adds a cycle; memory bandwidth and memory are round numbers",
        attention_share=0.4,
        slower={"transcendental": 3.0, "random": 10.0},
        overhead_us=5.0,
        launch_us=50.0,
        message_us=30.0,
        aliases={"ib": "ib200"},
        backend="gloo",
    ),
}


@dataclass(frozen=True, slots=True)
class Tier:
    """What joins units of the tier before: ranks, for the first.

    Attributes:
        bytes_per_us: of one link, one way.
        ring_us, doubling_us: latency of one hop of either algorithm.
        shared: one link a unit, not one a rank.
        share: of `bytes_per_us`, what large messages reach.
    """

    bytes_per_us: float
    ring_us: float
    doubling_us: float
    source: str
    shared: bool = False
    share: float = 0.8


_NCCL = "hop latencies: those of rings and trees in NCCL's tuning model (src/graph/tuning.cc), LL128"
_TCP = "the wire's rate; TCP latency is a round number"

NETWORKS: dict[str, Tier] = {
    "nvlink3": Tier(300e3, 1.9, 1.2, f"NVLink 3: 600 GB/s both ways; {_NCCL}"),
    "nvlink4": Tier(450e3, 1.9, 1.2, f"NVLink 4: 900 GB/s both ways; {_NCCL}"),
    "nvlink5": Tier(900e3, 1.9, 1.2, f"NVLink 5: 1.8 TB/s both ways; {_NCCL}"),
    "xgmi": Tier(448e3, 1.9, 1.2, f"Infinity Fabric: 7 links of 128 GB/s both ways; latency as NVLink; {_NCCL}", share=0.7),
    "pcie4": Tier(32e3, 2.5, 1.9, f"PCI Express 4.0 x16; {_NCCL}"),
    "pcie5": Tier(64e3, 2.5, 1.9, f"PCI Express 5.0 x16; {_NCCL}"),
    "ib200": Tier(25e3, 4.0, 8.5, f"InfiniBand HDR, 200 Gbit/s; {_NCCL}"),
    "ib400": Tier(50e3, 4.0, 8.5, f"InfiniBand NDR, 400 Gbit/s; {_NCCL}"),
    "ib800": Tier(100e3, 4.0, 8.5, f"InfiniBand XDR, 800 Gbit/s; {_NCCL}"),
    "eth1": Tier(0.125e3, 100.0, 100.0, f"Ethernet, 1 Gbit/s: {_TCP}", shared=True),
    "eth10": Tier(1.25e3, 50.0, 50.0, f"Ethernet, 10 Gbit/s: {_TCP}", shared=True),
    "eth25": Tier(3.125e3, 50.0, 50.0, f"Ethernet, 25 Gbit/s: {_TCP}", shared=True),
    "eth100": Tier(12.5e3, 30.0, 30.0, f"Ethernet, 100 Gbit/s: {_TCP}", shared=True),
    "loopback": Tier(2e3, 100.0, 100.0, "TCP within one machine: round numbers, which include the copies", share=1.0),
}
_BASE_US = {"nccl": 10.0, "gloo": 0.0}  # of a collective whatever its ranks: NCCL's tuning model, LL128
_TYPICAL_BYTES = 2**27


def costs_for(device: str, network: str, world_size: int, replicas: int = 1, reshard_to: int = 0) -> CostModel:
    """The costs of `world_size` such devices on such a network. See the module for both strings and for the formula.

    Args:
        device: a name of `DEVICES`, or `custom:flops=F,bandwidth=B,memory=M` with what products reach in flops per second,
            memory in bytes per second, and its size in bytes; `overhead_us=` and `launch_us=` may follow.
        network: tiers from the inside out. May be empty for one rank.
        replicas: each has `world_size / replicas` ranks in a row.
        reshard_to: how many ranks in a row have a parameter between them once it is resharded; 0: none is.

    Raises:
        ValueError: the ranks can't be divided among the replicas, or those of a replica into groups of `reshard_to`, an unknown
            name (the message lists the known ones), a tier that doesn't fit the one before, or more ranks than the network reaches.

    Example:
        >>> costs = costs_for("h100", "nvlink:8,ib", 64)
        >>> round(costs.gather_us(2**30) / 1000, 1)       # 1 GiB in milliseconds
        3.4
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}")
    if replicas < 1 or world_size % replicas:
        raise ValueError(f"{world_size} ranks can't be divided among {replicas} replicas")
    found, num_shards = device_for(device), world_size // replicas
    if reshard_to < 0 or (reshard_to and num_shards % reshard_to):
        raise ValueError(f"the {num_shards} ranks of a replica can't be divided into groups of {reshard_to}")
    tiers = _tiers(network, found)
    _check_reach(tiers, network, world_size)
    link = _link(found, tiers, num_shards)
    copied_per_us = found.bandwidth * found.memory_share / 4  # packing and unpacking each read and write
    return CostModel(
        gather=link,
        reduce=link,
        rates=_rates(found),
        launch_us=found.launch_us if world_size > 1 else 0.0,
        pack_threshold_bytes=2 ** int(math.log2(max(found.message_us * copied_per_us, 1))),
        all_reduce=_link_of_replicas(found, tiers, num_shards, replicas),
        secondary=_link(found, tiers, reshard_to) if reshard_to else None,
        source=f"preset {device} ({found.source}) over {network or 'no network'} on {world_size} ranks"
        + (f", {replicas} replicas" if replicas > 1 else "")
        + (f", resharded to {reshard_to}" if reshard_to else ""),
    )


def device_for(device: str) -> Device:
    """The `Device` that a string names.

    Raises:
        ValueError: as `costs_for`.
    """
    if device in DEVICES:
        return DEVICES[device]
    name, _, rest = device.partition(":")
    if name != "custom":
        raise ValueError(
            f"unknown device {device!r}; known are {', '.join(DEVICES)}, and custom:flops=...,bandwidth=...,memory=... "
            "(per second, bytes per second, bytes)"
        )
    values = _numbers(device, rest)
    return Device(
        memory_bytes=int(values["memory"]),
        bandwidth=values["bandwidth"] / 1e6,
        flops={"float32": values["flops"] / 1e6},
        source="the user's numbers",
        share=1.0,
        attention_share=1.0,
        memory_share=1.0,
        overhead_us=values.get("overhead_us", 4.0),
        launch_us=values.get("launch_us", 10.0),
    )


def _numbers(device: str, text: str) -> dict[str, float]:
    needed, known = ("flops", "bandwidth", "memory"), ("flops", "bandwidth", "memory", "overhead_us", "launch_us")
    values: dict[str, float] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        try:
            values[key] = float(value)
        except ValueError:
            raise ValueError(f"device {device!r}: {item!r} is not KEY=NUMBER; keys are {', '.join(known)}") from None
        if key not in known or not math.isfinite(values[key]) or values[key] < 0 or (key in needed and values[key] == 0):
            raise ValueError(f"device {device!r}: {item!r} must be one of {', '.join(known)}, and a number above 0")
    missing = [key for key in needed if key not in values]
    if missing:
        raise ValueError(f"device {device!r} lacks {', '.join(missing)}")
    return values


def _rates(device: Device) -> tuple[Rate, ...]:
    """Elementwise first: it stands for every kind that isn't listed."""
    memory, overhead = device.bandwidth * device.memory_share, device.overhead_us
    rates = [Rate("elementwise", overhead, device.flops["float32"], memory)]
    rates += [Rate(kind, overhead, device.flops["float32"], memory / factor) for kind, factor in device.slower.items()]
    for kind, share in (("matmul", device.share), ("convolution", device.share), ("attention", device.attention_share)):
        rates.append(Rate(kind, overhead, device.flops["float32"] * share, memory))
        rates += [
            Rate(f"{kind}.{dtype}", overhead, peak * share, memory) for dtype, peak in device.flops.items() if dtype != "float32"
        ]
    return tuple(rates)


# ---- networks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reach:
    """One part of a network's string: a tier, how many ranks it reaches, and how many links a unit has into it (0: the default)."""

    tier: Tier
    ranks: float
    links: int

    def bandwidth(self, unit_ranks: int) -> float:
        links = self.links or (1 if self.tier.shared else unit_ranks)
        return links * self.tier.bytes_per_us * self.tier.share


_PART = re.compile(r"(?P<name>[a-z0-9]+)(:(?P<ranks>\d+))?(\*(?P<links>\d+))?(@(?P<speed>[\d.e+-]+)(/(?P<us>[\d.e+-]+))?)?")


def _tiers(network: str, device: Device) -> list[_Reach]:
    reaches: list[_Reach] = []
    parts = [part.strip() for part in network.split(",")] if network else []
    for i, part in enumerate(parts):
        reach = _reach(part, device)
        before = int(reaches[-1].ranks) if reaches else 1
        if math.isinf(reach.ranks) and i < len(parts) - 1:
            raise ValueError(f"network {network!r}: {part!r} must say how many ranks it reaches, as in {part}:8")
        if math.isfinite(reach.ranks) and (reach.ranks <= before or reach.ranks % before):
            raise ValueError(f"network {network!r}: {part!r} must reach a multiple of the {before} ranks of the tier before it")
        reaches.append(reach)
    return reaches


def _reach(part: str, device: Device) -> _Reach:
    match = _PART.fullmatch(part)
    name = match["name"] if match else part
    tier = NETWORKS.get(device.aliases.get(name, name))
    if match is None or tier is None:
        known = ", ".join((*NETWORKS, *(f"{alias} (here {name})" for alias, name in device.aliases.items())))
        raise ValueError(f"unknown network {part!r}: a tier is NAME[:RANKS][*LINKS][@GB/s[/us]], and NAME one of {known}")
    try:
        if match["speed"]:
            tier = replace(tier, bytes_per_us=float(match["speed"]) * 1e3, share=1.0)
        if match["us"]:
            tier = replace(tier, ring_us=float(match["us"]), doubling_us=float(match["us"]))
        if not (0 < tier.bytes_per_us < math.inf and 0 <= tier.ring_us < math.inf) or match["links"] == "0":
            raise ValueError
    except ValueError:
        raise ValueError(f"network {part!r}: speed and links must be numbers above 0, and latency one of at least 0") from None
    return _Reach(tier, int(match["ranks"]) if match["ranks"] else math.inf, int(match["links"] or 0))


def _check_reach(reaches: list[_Reach], network: str, world_size: int) -> None:
    if world_size > 1 and (not reaches or reaches[-1].ranks < world_size):
        raise ValueError(
            f"network {network!r} reaches {reaches[-1].ranks if reaches else 1} ranks, not {world_size}: add a tier, as in "
            f"{network + ',' if network else ''}ib"
        )


def _link(device: Device, reaches: list[_Reach], world_size: int) -> Link:
    """An all-gather or a reduce-scatter over neighbouring ranks: see the module."""
    if world_size == 1:  # nothing travels; a gather is a copy within the device
        return Link(0.0, device.bandwidth * device.memory_share / 2)
    return _faster(device, _crossed(reaches, world_size, 1), world_size)


def _link_of_replicas(device: Device, reaches: list[_Reach], num_shards: int, replicas: int) -> Link:
    """An all-reduce over replicas, of each rank's own shard, all at once: see the module."""
    if replicas == 1:
        return Link()
    half = _faster(device, _crossed(reaches, num_shards * replicas, num_shards), replicas)
    return Link(2 * half.latency_us - _BASE_US[device.backend], half.bytes_per_us / num_shards / 2)


class _Crossing(NamedTuple):
    """A tier that joins `here` units into `above`, and what each of those units can send into it."""

    tier: Tier
    here: int
    above: int
    bytes_per_us: float


def _crossed(reaches: list[_Reach], world_size: int, part_ranks: int) -> list[_Crossing]:
    """The tiers that join parts of so many neighbouring ranks."""
    found, here = [], world_size // part_ranks
    for before, reach in zip([None, *reaches], reaches):
        unit_ranks = int(before.ranks) if before else 1
        above = 1 if math.isinf(reach.ranks) else -(-world_size // max(part_ranks, int(reach.ranks)))
        if here > above:
            units = -(-max(part_ranks, unit_ranks) // unit_ranks)  # a part may be many units of the tier
            found.append(_Crossing(reach.tier, here, above, units * reach.bandwidth(unit_ranks)))
        here = above
    return found


def _faster(device: Device, crossed: list[_Crossing], num_parts: int) -> Link:
    """The line of the faster algorithm."""
    base = _BASE_US[device.backend]
    hops = sum((c.here - c.above) * c.tier.ring_us for c in crossed)
    lines = [Link(base + hops, min(c.bytes_per_us for c in crossed) * num_parts / (num_parts - 1))]
    if device.backend == "nccl":
        hops = sum(math.ceil(math.log2(c.here / c.above)) * c.tier.doubling_us for c in crossed)
        lines.append(Link(base + hops, 1 / sum((1 - c.above / c.here) / c.bytes_per_us for c in crossed)))
    return min(lines, key=lambda link: link.us(_TYPICAL_BYTES))
