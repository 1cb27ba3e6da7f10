"""Which gathers are launched together.

    first read at     0   1   2       5        9
    intervals         a   b   c       d        e
    buckets          [a] [b   c]     [d]      [e]         a is waited for at once, so it goes alone; e may not be live before d ends

One launch costs a latency, and compute a little too, so gathers share one. The price is time: all members of a bucket arrive when
the last one does, and it cannot be launched before there is room for all. And it is memory: a member is live for the
sake of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from zfx.ir import CostModel, Schedule

from .memory import bytes_left, element_room, gathered_bytes, gathered_elements, gradient_bytes
from .partition import Candidate, State, enough_bytes, partition
from .place import earliest_launches
from .timeline import Gather, Timeline, read, write
from .view import structural_us


def bucket_gathers(schedule: Schedule) -> Schedule:
    """Partition the gather order into buckets: the least time; among equals, the least bytes times steps, then the fewest.

    A bucket has at most `prefetch_bucket_size` elements and stays on its side of the turn; all of it comes from secondary shards,
    or nothing does. Time is that of gathers and compute, each bucket launched as early as memory allows. Which point that is
    depends on the last member alone: the whole prefix of the order up to it must fit from there on, whatever the buckets are. So
    buckets are found by dynamic programming, see `partition`. Members below `costs.pack_threshold_bytes` travel packed if there are
    two or more, and if the bounds allow the packing buffer; the dynamic program does not foresee its bytes.

    Guarantee: fits the limits if the argument does with every gather alone, launched at its wait, which is where this launches
    them. Optimal where `partition` is, among buckets that are closed once larger ones would save next to nothing
    (`enough_bytes`). Depends on what ranks share, see `structural_us`. Cost: linear.
    Reference: Shi et al., *MG-WFBP: efficient data communication for distributed synchronous SGD algorithms*, 2019.
    """
    timeline = one_by_one(read(schedule))
    runs = _cheapest_runs(timeline, structural_us(timeline.program))
    return write(packed(merged(timeline, runs)))


def one_by_one(timeline: Timeline) -> Timeline:
    """Every interval a gather of its own, in the same order, launched where it is waited for."""
    rows = [(interval, gather.secondary) for gather in timeline.gathers for interval in gather.members]
    waits = list(accumulate((i.first for i, _ in reversed(rows)), min))[::-1]
    alone = (Gather((i,), wait, wait, secondary=secondary) for (i, secondary), wait in zip(rows, waits))
    return replace(timeline, gathers=tuple(alone))


def merged(timeline: Timeline, runs: Sequence[tuple[int, int]]) -> Timeline:
    """Each run of gathers as one, launched where the first of them is waited for."""
    rows = [timeline.gathers[start:stop] for start, stop in runs]
    members = [tuple(i for gather in row for i in gather.members) for row in rows]
    together = (Gather(m, row[0].wait, row[0].wait, secondary=row[0].secondary) for m, row in zip(members, rows))
    return replace(timeline, gathers=tuple(together))


def packed(timeline: Timeline) -> Timeline:
    """Small members share one packing buffer, where there are two of them in a bucket, and room for it where it is waited for."""
    threshold = timeline.program.costs.pack_threshold_bytes
    rows = [tuple(i for i in gather.members if i.parameter.num_bytes < threshold) for gather in timeline.gathers]
    if all(len(small) < 2 for small in rows):
        return timeline
    elements = list((element_room(timeline) - gathered_elements(timeline)).during)
    num_bytes = list(bytes_left(timeline, gathered_bytes, gradient_bytes).during)
    gathers = []
    for gather, small in zip(timeline.gathers, rows):
        pack_elements = sum(i.parameter.num_elements for i in small)
        pack_bytes = sum(i.parameter.num_bytes for i in small)
        if len(small) > 1 and pack_elements <= elements[gather.wait] and pack_bytes <= num_bytes[gather.wait]:
            gather = replace(gather, packed=small)
            elements[gather.wait] -= pack_elements  # other buckets may be waited for at the same point
            num_bytes[gather.wait] -= pack_bytes
        gathers.append(gather)
    return replace(timeline, gathers=tuple(gathers))


def farthest(timeline: Timeline, launches: Sequence[int], enough: Callable[[Gather], float]) -> list[int]:
    """By gather, the end of the longest bucket that may begin with it, and that holds less than `enough` bytes before its last.

    All members must be ready to be launched where the first is waited for, and come from the same kind of shards. The elements are
    bounded by `prefetch_bucket_size`.
    """
    limit, gathers = timeline.limits.prefetch_bucket_size, timeline.gathers
    parameters = [gather.members[0].parameter for gather in gathers]
    elements = list(accumulate((p.num_elements for p in parameters), initial=0))
    num_bytes = list(accumulate((p.num_bytes for p in parameters), initial=0))
    reach, stop = [], 0
    for start, gather in enumerate(gathers):
        stop, most = max(stop, start + 1), enough(gather)
        while (
            stop < len(gathers)
            and launches[stop] <= gather.wait
            and gathers[stop].secondary == gather.secondary
            and elements[stop + 1] - elements[start] <= limit
            and num_bytes[stop] - num_bytes[start] < most
        ):
            stop += 1
        reach.append(stop)
    return reach


def _cheapest_runs(timeline: Timeline, durations_us: Sequence[float]) -> list[tuple[int, int]]:
    costs, gathers = timeline.program.costs, timeline.gathers
    launches = earliest_launches(timeline)
    reach = farthest(timeline, launches, lambda gather: enough_bytes(costs.gather_link(gather.secondary), costs.launch_us))
    reached_us = list(accumulate(durations_us, initial=0.0))  # compute at each point, if it never stalled
    extend = _Extend(costs, gathers, launches, reached_us)
    return partition(len(gathers), reach, extend, lambda state: state.delay_us)


class _Extend:
    """One more bucket: from the state before its first member to the state after its last."""

    def __init__(
        self,
        costs: CostModel,
        gathers: Sequence[Gather],
        launches: Sequence[int],
        reached_us: Sequence[float],
    ) -> None:
        self._costs, self._links = costs, [costs.gather_link(gather.secondary) for gather in gathers]
        self._waits, self._launches, self._reached_us = [gather.wait for gather in gathers], launches, reached_us
        intervals = [gather.members[0] for gather in gathers]
        sizes = [interval.parameter.num_bytes for interval in intervals]
        self._bytes = list(accumulate(sizes, initial=0))
        self._byte_steps = list(accumulate((size * i.first for size, i in zip(sizes, intervals)), initial=0))

    def __call__(self, state: State, start: int, stops: Sequence[int]) -> Iterator[tuple[int, Candidate]]:
        latency_us, bytes_per_us = self._links[start].latency_us, self._links[start].bytes_per_us
        launches, reached_us = self._launches, self._reached_us
        wait, delay_us, launched = self._waits[start], state.delay_us, -1
        now = reached_us[wait]
        begin = 0.0
        for stop in stops:
            launch = launches[stop - 1]
            if launch != launched:
                begin, launched = max(reached_us[launch] + state.delay_at(launch), state.channel_us), launch
            num_bytes = self._bytes[stop] - self._bytes[start]
            stretch = self._byte_steps[stop] - self._byte_steps[start] - num_bytes * wait
            end = begin + latency_us + num_bytes / bytes_per_us
            delay = max(delay_us, end - now) + self._costs.busy_us(num_bytes)
            yield stop, (end, (delay, state.stretch + stretch, state.count + 1), state.channel_us, wait, start)
