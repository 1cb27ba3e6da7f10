"""Small changes of a structure: what a search may try next.

    gathers      [a] [b c]      swap  [b c] [a]     join  [a b c]     cut  [a] [b] [c]      hand over  [a b] [c]
    intervals    a====a a===a   keep  a===========a          let go: the other way round
    the turn     |  [a]         gather in the forward what only the backward still reads
    reductions   as gathers; launch one later, or as soon as its gradients are complete

Those come first around which compute waits longest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zfx.ir import Limits, Parameter, Program

from .keep import allowed, gaps
from .timeline import Gather, Interval, Reduction, Timeline, reads_of, turn_of
from .timing import Times

FARTHEST = 3  # places that a gather is moved by at once


@dataclass(frozen=True, slots=True)
class Choices:
    """What is open to a search: what may be kept, and what is read when.

    What stays over the turn is open in the window "only" alone: all micro-batches must keep the same.
    """

    may_keep: frozenset[tuple[str, int, int]]
    reads: dict[str, list[int]]
    turn: int
    over_turn: bool

    @classmethod
    def of(cls, program: Program, limits: Limits) -> Choices:
        """All choices of a program under its limits."""
        over_turn, turn = program.window == "only", turn_of(program)
        open_gaps = (g for g in allowed(gaps(program), program, limits) if over_turn or (g.start <= turn) == (g.stop <= turn))
        return cls(frozenset((g.parameter.name, g.start, g.stop) for g in open_gaps), reads_of(program), turn, over_turn)


def moves(wished: Timeline, placed: Timeline, times: Times, choices: Choices) -> Iterator[Timeline]:
    """Every structure that is one small change away from `wished`, which was placed as in `placed`, and takes these times."""
    for index in sorted(range(len(wished.gathers)), key=lambda i: -times.gather_stalls_us[i]):
        yield from _around_gather(wished, index)
        yield from _intervals(wished, index, choices)
        yield from _over_turn(wished, index, choices)
        yield from _gathered_later(wished, placed, index)
    for index in sorted(range(len(wished.reductions)), key=lambda i: -times.reduce_stalls_us[i]):
        yield from _around_reduction(wished, index)
        yield from _reduced_later(wished, placed, index)


def _gathered_later(wished: Timeline, placed: Timeline, index: int) -> Iterator[Timeline]:
    """After the next point at which reductions do something, or as early as possible."""
    gather, launch = wished.gathers[index], placed.gathers[index].launch
    later = {r.launch for r in placed.reductions} | {r.wait for r in placed.reductions} | {gather.wait, launch + 1}
    for point in sorted(p for p in later if launch < p <= placed.gathers[index].wait)[:2]:
        yield _with(wished, index, index + 1, [replace(gather, launch=point)])
    if gather.launch:
        yield _with(wished, index, index + 1, [replace(gather, launch=0)])


def _reduced_later(wished: Timeline, placed: Timeline, index: int) -> Iterator[Timeline]:
    """At the next points at which something else happens, or after all steps, or as early as possible."""
    reduction, launch = wished.reductions[index], placed.reductions[index].launch
    later = {r.launch for r in placed.reductions} | {g.wait for g in placed.gathers} | {launch + 1}
    end = len(placed.program.steps)
    points = [*sorted(p for p in later if launch < p < end)[:2], *([end] if launch < end else [])]
    for point in [*points, *([0] if reduction.launch else [])]:
        row = (*wished.reductions[:index], replace(reduction, launch=point), *wished.reductions[index + 1 :])
        yield replace(wished, reductions=row)


def _with(timeline: Timeline, start: int, stop: int, gathers: Sequence[Gather]) -> Timeline:
    return replace(timeline, gathers=(*timeline.gathers[:start], *gathers, *timeline.gathers[stop:]))


def _around_gather(timeline: Timeline, index: int) -> Iterator[Timeline]:
    gathers, size = timeline.gathers, timeline.limits.prefetch_bucket_size
    gather = gathers[index]
    for first in (index - 1, index):
        if 0 <= first < len(gathers) - 1:
            a, b = gathers[first], gathers[first + 1]
            if _elements(a.members) + _elements(b.members) <= size and not _names(a) & _names(b):
                yield _with(timeline, first, first + 2, [replace(a, members=a.members + b.members, packed=())])
    for far in range(1, FARTHEST + 1):
        if index >= far:
            yield _with(timeline, index - far, index + 1, [gather, *gathers[index - far : index]])
        if index + far < len(gathers):
            yield _with(timeline, index, index + far + 1, [*gathers[index + 1 : index + far + 1], gather])
    members = gather.members
    for k in range(1, len(members)):
        head, tail = (replace(gather, members=part, packed=()) for part in (members[:k], members[k:]))
        yield _with(timeline, index, index + 1, [head, tail])
        yield _with(timeline, index, index + 1, [tail, head])
    if len(members) > 1:
        yield from _handed_over(timeline, index)


def _handed_over(timeline: Timeline, index: int) -> Iterator[Timeline]:
    """A member goes to the bucket before or after its own, or alone ahead of the bucket or behind it."""
    gathers, size = timeline.gathers, timeline.limits.prefetch_bucket_size
    members = gathers[index].members
    for k, member in enumerate(members):
        rest = replace(gathers[index], members=members[:k] + members[k + 1 :], packed=())
        if 0 < k < len(members) - 1:
            alone = replace(rest, members=(member,))
            yield _with(timeline, index, index + 1, [alone, rest])
            yield _with(timeline, index, index + 1, [rest, alone])
        for other in (index - 1, index + 1):
            if 0 <= other < len(gathers) and _elements(gathers[other].members) + member.parameter.num_elements <= size:
                more = replace(gathers[other], members=(*gathers[other].members, member), packed=())
                start = min(index, other)
                yield _with(timeline, start, start + 2, [more, rest] if other < index else [rest, more])


def _intervals(timeline: Timeline, index: int, choices: Choices) -> Iterator[Timeline]:
    """A member of this gather is not gathered but kept since its last interval; or let go between two reads, and gathered again."""
    for member in timeline.gathers[index].members:
        before = _before(timeline, index, member)
        if before is not None and (member.parameter.name, before.last, member.first) in choices.may_keep:
            longer = replace(before, last=member.last)
            yield _replaced(_without(timeline, index, member), before, longer)
        reads = choices.reads[member.parameter.name]
        inside = reads[bisect_left(reads, member.first) : bisect_right(reads, member.last)]
        if member.last < len(timeline.program.steps):
            for stop, start in pairwise(inside):
                if stop <= choices.turn < start and not choices.over_turn:
                    continue
                shorter, again = replace(member, last=stop), replace(member, first=start)
                yield _inserted(_replaced(timeline, member, shorter), again)


def _over_turn(timeline: Timeline, index: int, choices: Choices) -> Iterator[Timeline]:
    """Of the backward's gathers one comes before the turn: as the last of the forward. Or it goes back behind the turn."""
    turn, gather = choices.turn, timeline.gathers[index]
    if not choices.over_turn or any(choices.reads[i.parameter.name][0] > turn for i in gather.members):
        return
    last = sum(g.wait <= turn for g in timeline.gathers)
    if gather.wait > turn:
        rest = [*timeline.gathers[last:index], *timeline.gathers[index + 1 :]]
        yield replace(timeline, gathers=(*timeline.gathers[:last], replace(gather, wait=turn), *rest))
    elif all(i.first > turn for i in gather.members):
        rest = [*timeline.gathers[index + 1 : last], replace(gather, wait=turn + 1)]
        yield replace(timeline, gathers=(*timeline.gathers[:index], *rest, *timeline.gathers[last:]))


def _before(timeline: Timeline, index: int, member: Interval) -> Interval | None:
    """The interval of the same parameter before that of gather `index`."""
    for gather in reversed(timeline.gathers[:index]):
        for other in gather.members:
            if other.parameter is member.parameter:
                return other
    return next((other for other in timeline.carried if other.parameter is member.parameter), None)


def _without(timeline: Timeline, index: int, member: Interval) -> Timeline:
    rest = tuple(i for i in timeline.gathers[index].members if i is not member)
    left = [replace(timeline.gathers[index], members=rest, packed=())] if rest else []
    return _with(timeline, index, index + 1, left)


def _replaced(timeline: Timeline, old: Interval, new: Interval) -> Timeline:
    def swap(row: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return tuple(new if i is old else i for i in row)

    gathers = (replace(g, members=swap(g.members), packed=()) if any(i is old for i in g.members) else g for g in timeline.gathers)
    return replace(timeline, gathers=tuple(gathers), carried=swap(timeline.carried))


def _inserted(timeline: Timeline, interval: Interval) -> Timeline:
    """Gathered alone, in order of first reads."""
    place = sum(min(i.first for i in g.members) < interval.first for g in timeline.gathers)
    turn = turn_of(timeline.program)
    if interval.first > turn:
        place = max(place, sum(g.wait <= turn for g in timeline.gathers))
    return _with(timeline, place, place, [Gather((interval,), 0, interval.first)])


def _around_reduction(timeline: Timeline, index: int) -> Iterator[Timeline]:
    reductions, size = timeline.reductions, timeline.limits.reduce_bucket_size

    def changed(start: int, stop: int, row: Sequence[Reduction]) -> Timeline:
        return replace(timeline, reductions=(*reductions[:start], *row, *reductions[stop:]))

    this = reductions[index]
    members = this.members
    for first in (index - 1, index):
        if 0 <= first < len(reductions) - 1:
            a, b = reductions[first], reductions[first + 1]
            if _size(a.members) + _size(b.members) <= size:
                yield changed(first, first + 2, [Reduction(a.members + b.members, 0, 0, 0)])
    if index + 1 < len(reductions):
        yield changed(index, index + 2, [replace(reductions[index + 1], launch=0), replace(this, launch=0)])
    for k in range(1, len(members)):
        yield changed(index, index + 1, [Reduction(members[:k], 0, 0, 0), Reduction(members[k:], 0, 0, 0)])
        yield changed(index, index + 1, [Reduction(members[k:], 0, 0, 0), Reduction(members[:k], 0, 0, 0)])
    for k, member in enumerate(members if len(members) > 1 else ()):
        rest = replace(this, members=members[:k] + members[k + 1 :], packed=())
        for other in (index - 1, index + 1):
            if 0 <= other < len(reductions) and _size(reductions[other].members) + member.num_elements <= size:
                more = replace(reductions[other], members=(*reductions[other].members, member), packed=())
                yield changed(min(index, other), max(index, other) + 1, [more, rest] if other < index else [rest, more])
    if index + 2 < len(reductions) and _size(reductions[index + 2].members) + _size(members) <= size:
        more = replace(reductions[index + 2], members=reductions[index + 2].members + members, packed=())
        yield changed(index, index + 3, [reductions[index + 1], more])


def _size(members: Sequence[Parameter]) -> int:
    return sum(p.num_elements for p in members)


def _elements(members: Sequence[Interval]) -> int:
    return sum(i.parameter.num_elements for i in members)


def _names(gather: Gather) -> set[str]:
    return {i.parameter.name for i in gather.members}
