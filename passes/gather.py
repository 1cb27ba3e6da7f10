"""Which gathers are launched together.

    first read at     0   1   2       5        9
    intervals         a   b   c       d        e
    buckets          [a   b   c]     [d]      [e]         d is large; e may not be live before d is gone

One launch costs a latency, so small gathers share one. The price is memory: a member is live from the first read of the
*first* member, not of its own.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from zfx.ir import CostModel, Schedule

from .memory import Profile, byte_room, element_room, gathered_bytes, gathered_elements, gradient_bytes
from .timeline import Gather, Interval, read, turn_of, write


def bucket_gathers(schedule: Schedule) -> Schedule:
    """Partition the gather order into buckets: consecutive intervals of one phase, as far as the limits allow.

    An interval joins the open bucket while that has less than `costs.bucket_bytes`, has at most `prefetch_bucket_size`
    elements with it, would not be launched before an earlier interval of the same parameter ends, and fits the hard bounds.
    Members below `costs.pack_threshold_bytes` travel packed if there are two or more, and if the bounds allow the packing buffer.

    Guarantee: fits the limits if the argument does with every gather launched at its first read, which is where this launches
    them. The result depends on parameters, the order of their reads and the limits, and on nothing else unless
    `memory_budget` is set: ranks with different data agree.
    Cost: linear.
    Reference: Shi et al., *MG-WFBP: efficient data communication for distributed synchronous SGD algorithms*, 2019.
    """
    timeline = read(schedule)
    costs, limits = timeline.program.costs, timeline.limits
    turn = turn_of(timeline.program)
    order = sorted((i for g in timeline.gathers for i in g.members), key=lambda i: i.first)
    alone = replace(timeline, gathers=tuple(Gather((i,), launch=i.first) for i in order))
    elements = element_room(alone) - gathered_elements(alone)
    num_bytes = byte_room(alone) - gathered_bytes(alone) - gradient_bytes(alone)
    room = _Room(elements, num_bytes)
    gathers: list[Gather] = []
    members: list[Interval] = []
    held_elements = held_bytes = 0
    ended: dict[str, int] = {}
    for interval in order:
        parameter = interval.parameter
        if members:
            joins = (
                held_bytes < costs.bucket_bytes
                and held_elements + parameter.num_elements <= limits.prefetch_bucket_size
                and (members[0].first <= turn) == (interval.first <= turn)
                and ended.get(parameter.name, -1) < members[0].first
                and room.stretch(members[-1].first, interval)
            )
            if not joins:
                gathers.append(_close(members, room, costs))
                members, held_elements, held_bytes = [], 0, 0
                room.open()
        members.append(interval)
        held_elements += parameter.num_elements
        held_bytes += parameter.num_bytes
        ended[parameter.name] = interval.last
    if members:
        gathers.append(_close(members, room, costs))
    return write(replace(timeline, gathers=tuple(gathers)))


def _close(members: list[Interval], room: _Room, costs: CostModel) -> Gather:
    small = [i for i in members if i.parameter.num_bytes < costs.pack_threshold_bytes]
    packed = tuple(small) if len(small) > 1 and room.pack(members, small) else ()
    return Gather(tuple(members), members[0].first, packed)


class _Room:
    """What the hard bounds leave from the first read of the open bucket's first member on.

    A member that is first read at step f is live from there anyway; joining a bucket that is launched at point b < f makes it
    live during [b, f) too. The open bucket's members are joined in order of first read, so the least room of the whole
    stretch is one running minimum, and each step is looked at once.
    """

    def __init__(self, elements: Profile, num_bytes: Profile) -> None:
        self._elements, self._bytes = elements, num_bytes
        self._during_elements, self._during_bytes = list(elements.during), list(num_bytes.during)
        self.open()

    def open(self) -> None:
        self._least_elements = self._least_bytes = inf

    def stretch(self, start: int, interval: Interval) -> bool:
        """Make `interval` live from the launch on, if there is room; `start` is the first read of the member before it."""
        stop = interval.first
        elements, num_bytes = self._least_elements, self._least_bytes
        if start < stop:
            elements = min(elements, *self._during_elements[start:stop], *self._elements.before[start + 1 : stop + 1])
            num_bytes = min(num_bytes, *self._during_bytes[start:stop], *self._bytes.before[start + 1 : stop + 1])
        elements -= interval.parameter.num_elements
        num_bytes -= interval.parameter.num_bytes
        if elements < 0 or num_bytes < 0:
            return False
        self._least_elements, self._least_bytes = elements, num_bytes
        return True

    def pack(self, members: list[Interval], small: list[Interval]) -> bool:
        """Hold a packing buffer for `small` where the bucket is waited for, if there is room."""
        first = members[0].first
        early = [i.parameter for i in members if i.first > first]
        elements = self._during_elements[first] - sum(p.num_elements for p in early) - sum(i.parameter.num_elements for i in small)
        num_bytes = self._during_bytes[first] - sum(p.num_bytes for p in early) - sum(i.parameter.num_bytes for i in small)
        if elements < 0 or num_bytes < 0:
            return False
        # Other buckets may be waited for at the same point: from now on they see this buffer.
        self._during_elements[first] -= sum(i.parameter.num_elements for i in small)
        self._during_bytes[first] -= sum(i.parameter.num_bytes for i in small)
        return True
