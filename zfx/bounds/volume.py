"""The fewest bytes that are gathered, and in how many collectives: what does not fit over a gap is gathered again."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from ..costs import Link
from ..ir import Program, Schedule
from ..limits import Limits
from ..verify import reuse_distances
from .held import Event, sizes_of
from .room import Measure

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Volume:
    """By event: the bytes that must have been gathered before it, in how many collectives at the least, and how long the channel
    takes for that."""

    num_bytes: list[float]
    num_buckets: list[int]
    us: list[float]
    total_bytes: int
    binds: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A parameter is read at step `stop`, and not between `start` and there; at -1 it may have been carried in."""

    start: int
    stop: int
    name: str


def volume_of(schedule: Schedule, events: list[Event], measures: list[Measure]) -> Volume:
    program, limits = schedule.program, schedule.limits
    num_bytes, shares = sizes_of(program, "num_bytes"), gather_shares_of(program, limits)
    share_of_byte = least_share_of_byte(program, shares)
    at = {event.step: m for m, event in enumerate(events)}
    firsts, wide, gaps = gathers_of(schedule)
    sure_bytes, sure_shares, sure_gathers = [0] * len(events), [0.0] * len(events), [0] * len(events)
    first_bytes, first_shares = [0] * len(events), [0.0] * len(events)
    for gap in firsts:
        first_bytes[at[gap.stop]] += num_bytes[gap.name]
        first_shares[at[gap.stop]] += shares[gap.name]
    for gap in (*firsts, *wide):
        sure_bytes[at[gap.stop]] += num_bytes[gap.name]
        sure_shares[at[gap.stop]] += shares[gap.name]
        sure_gathers[at[gap.stop]] += 1
    places = [(at.get(gap.start, -1), at[gap.stop], gap.name) for gap in gaps]
    again = [(given_up(places, measure), measure) for measure in measures]
    ones = [float(measure.bytes_of_one) for measure in measures]
    forced = [max(row) for row in zip(*([size * one for size in sizes] for (sizes, _), one in zip(again, ones)))]
    sums = zip(accumulate(sure_bytes), accumulate(sure_shares), accumulate(sure_gathers), forced)
    rows = [(b + f, max(at_least(s + f * share_of_byte), int(n > 0 or f > 0))) for b, s, n, f in sums]
    most, binds = max((math.ceil(sizes[-1] * m.bytes_of_one) if sizes else 0, m.name) for sizes, m in again)
    reasons = [*(["max_reuse_distance"] if wide else []), *([binds] if most else [])]
    from_all = [(b, max(at_least(s), int(b > 0))) for b, s in zip(accumulate(first_bytes), accumulate(first_shares))]
    return Volume(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [least_us(program, *all_of_it, *from_all_ranks) for all_of_it, from_all_ranks in zip(rows, from_all)],
        sum(sure_bytes) + most,
        " and ".join(reasons) or "first reads",
    )


def cheapest_link(program: Program) -> Link:
    """What no gather of the program is faster than: from all ranks or, where it may reshard, from secondary shards."""
    gather = program.costs.gather
    if not program.reshard_to:
        return gather
    other = program.costs.gather_link(secondary=True)
    return Link(min(gather.latency_us, other.latency_us), max(gather.bytes_per_us, other.bytes_per_us))


def transfer_us(link: Link, num_buckets: int, num_bytes: float) -> float:
    return num_buckets * link.latency_us + num_bytes / link.bytes_per_us if num_buckets else 0.0


def least_us(program: Program, num_bytes: float, num_buckets: int, first_bytes: int, first_buckets: int) -> float:
    """What so many bytes take in so many collectives, of which those for first reads come from all ranks."""
    gather, cheapest = program.costs.gather, cheapest_link(program)
    if cheapest == gather:
        return transfer_us(gather, num_buckets, num_bytes)
    again_us = transfer_us(cheapest, num_buckets - first_buckets, 0.0) + (num_bytes - first_bytes) / cheapest.bytes_per_us
    return transfer_us(gather, first_buckets, first_bytes) + again_us


def gathers_of(schedule: Schedule) -> tuple[list[Gap], list[Gap], list[Gap]]:
    """First reads; gaps over which `max_reuse_distance` lets nothing stay; the other gaps. What escapes has none."""
    program, limits = schedule.program, schedule.limits
    carried_in, escapes = program.window in ("middle", "last"), set(program.escapes)
    firsts: list[Gap] = []
    gaps: list[Gap] = []
    latest: dict[str, int] = {}
    for t, step in enumerate(program.steps):
        for name in dict.fromkeys(step.reads):
            gap = Gap(latest.get(name, -1), t, name)
            if name not in latest:
                (gaps if carried_in else firsts).append(gap)
            elif name not in escapes:
                gaps.append(gap)
            latest[name] = t
    wide: set[Gap] = set()
    if limits.max_reuse_distance < 2 * sum(p.num_elements for p in program.parameters):
        small = {p.name for p in program.parameters if p.numel <= limits.param_persistence_threshold}
        spans = sorted((gap.start, gap.stop, gap.name) for gap in gaps if gap.start >= 0 and gap.name not in small)
        wide = {Gap(*span) for span, far in zip(spans, reuse_distances(schedule, spans)) if far > limits.max_reuse_distance}
    return firsts, [gap for gap in gaps if gap in wide], [gap for gap in gaps if gap not in wide]


def given_up(gaps: list[tuple[int, int, str]], measure: Measure) -> list[int]:
    """By event, the least size that is lost over gaps which end by then, if what is needed last is given up first."""
    opening: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, stop, name in gaps:
        if start + 1 < stop:
            opening[start + 1].append((stop, measure.size[name]))
    kept: dict[int, int] = defaultdict(int)  # by the event where the gaps end
    needed_last: list[int] = []
    lost, held = [0] * len(measure.room), 0
    for m, room in enumerate(measure.room):
        held -= kept.pop(m, 0)
        for stop, size in opening[m]:
            if stop not in kept:
                heappush(needed_last, -stop)
            kept[stop] += size
            held += size
        while held > room and kept:
            stop = -needed_last[0]
            amount = min(kept[stop], held - room)
            kept[stop] -= amount
            lost[stop] += amount
            held -= amount
            if not kept[stop]:
                del kept[stop]
                heappop(needed_last)
    return list(accumulate(lost))


def gather_shares_of(program: Program, limits: Limits) -> dict[str, float]:
    return shares_of(program, min(limits.prefetch_bucket_size, limits.max_live_parameters))


def shares_of(program: Program, bucket_size: int) -> dict[str, float]:
    """How much of a bucket each parameter fills. The members of one bucket fill at most 1, whatever they are."""
    return {p.name: 1.0 if p.num_elements > bucket_size else p.num_elements / max(bucket_size, 1) for p in program.parameters}


def least_share_of_byte(program: Program, shares: dict[str, float]) -> float:
    return min((shares[p.name] / p.num_bytes for p in program.parameters if p.num_bytes), default=0.0)


def at_least(num_buckets: float) -> int:
    return math.ceil(num_buckets - ROUNDING)
