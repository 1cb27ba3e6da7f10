"""Which reads of a parameter share one gather: a parameter is kept over a gap between two reads, or released and gathered again.

    reads     a   b   c  |  b   a  ||  a   b         | the turn, || the seam to the next micro-batch, where the same begins again
              [a             a]                      the gap of a over the turn is 2 parameters wide (b and c)
                  [b      b]                         that of b is 1 wide (c)
                                [a     a]            over the seam, that of a is 0 wide

Over the turn there may be a third choice, to reshard: a secondary shard stays, a part of the parameter, and the backward gathers it
from the few ranks that have the other parts.

The width of a gap is its reuse distance: the elements of the other parameters that are read inside it, each once in the forward
and once in the backward. It must be at most `max_reuse_distance`; besides, memory decides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from zfx.ir import Limits, Parameter, Program, Schedule

from .demand import Demand, demand
from .memory import Profile
from .select import Hold, Room, select, sweep, without
from .timeline import Gather, Interval, Timeline, reads_of, turn_of, unique, write


@dataclass(frozen=True, slots=True)
class Gap:
    """Two consecutive reads of a parameter, and the elements of other parameters read strictly between them.

    A gap over the seam stops at a step before the one at which it starts: in the next micro-batch.
    """

    parameter: Parameter
    start: int
    stop: int
    distance: int

    @property
    def over_seam(self) -> bool:
        return self.stop <= self.start


def keep_parameters(schedule: Schedule) -> Schedule:
    """Keep parameters over the gaps that are worth most, as memory allows; gather again after the others.

    Only `program` and `limits` of the argument are read. A gap may be kept if its distance is at most `max_reuse_distance`, or
    if the parameter has at most `param_persistence_threshold` elements; those come before all others. Among gaps the gather time
    saved decides, see `select`. The gap over the seam is chosen last, in the room that is left: there are M turns for M - 1 seams.

    Guarantee: fits the limits if anything does. On a chain of n equal layers with room for k, one step takes 2n - k gathers, and
    M micro-batches take n + (2M - 1)(n - k), the fewest possible. Parameters kept over the turn end up in `Schedule.kept`, over the
    seam in `Schedule.carried`: the same ones in each of the windows "first", "middle" and "last". Every interval is a gather of
    its own, launched at its first read. Depends on durations never, on other bytes only under `memory_budget`.
    What is resharded (`Program.reshard_to`) is not exact: to keep, to reshard or to gather again are three choices for each
    parameter, a harder knapsack. Three orders are tried: to reshard all that fit first, to reshard the half with the widest gaps
    first, and to keep first. The one is taken whose gathers take the least time in all: never more than without resharding. A
    parameter is resharded only if its gather takes no longer that way; without `memory_budget`, all that are gathered again are.
    Cost: linear in steps, O(log) in reads.

    Raises:
        InfeasibleBudget: a step needs more than `max_live_parameters` or `memory_budget` allows.

    References: Belady's rule; Cao, Felten, Karlin, Li, *A study of integrated prefetching and caching strategies*, 1995.
    """
    program, limits = schedule.program, schedule.limits
    least = demand(program, limits)
    room = Room(_moments(least.elements), _moments(least.num_bytes))
    every = tuple(gaps(program, adjacent=limits.memory_budget is not None))
    wanted = allowed(every, program, limits)
    kept, parts = _kept_and_resharded(program, limits, every, [gap for gap in wanted if not gap.over_seam], room)
    over_seam = [gap for gap in wanted if gap.over_seam]
    carried: list[Gap] = []
    if over_seam:
        left = without(room, [*(_hold(program, gap) for gap in kept), *(part.hold for part in parts)])
        carried = _best(program, limits, over_seam, Room([*left.elements] * 2, [*left.num_bytes] * 2))
    return write(_timeline(program, limits, least, kept, carried, parts))


def keep_widest_last(program: Program, limits: Limits, wanted: Sequence[Gap]) -> Timeline:
    """Keep these gaps; where that does not fit, give up the widest first, persistent parameters last. None leads over the seam."""
    least = demand(program, limits)
    room = Room(_moments(least.elements), _moments(least.num_bytes))

    def choose(those: Sequence[Gap]) -> list[Gap]:
        persistent = [gap.parameter.numel <= limits.param_persistence_threshold for gap in those]
        kept = sweep([_hold(program, gap) for gap in those], room, lambda i: (persistent[i], -those[i].distance))
        return [those[index] for index in sorted(kept)]

    every = tuple(gaps(program, adjacent=limits.memory_budget is not None))
    return _timeline(program, limits, least, _consistent(program, every, wanted, choose), [])


def allowed(every: Iterable[Gap], program: Program, limits: Limits) -> list[Gap]:
    """The gaps that may be kept if there is room: narrow ones, and those of persistent parameters. What escapes has no choice."""
    escapes = set(program.escapes)
    return [
        gap
        for gap in every
        if gap.parameter.name not in escapes
        and (gap.distance <= limits.max_reuse_distance or gap.parameter.numel <= limits.param_persistence_threshold)
    ]


def gaps(program: Program, *, adjacent: bool = True) -> Iterator[Gap]:
    """Every gap with its reuse distance, in order of the later read; then, but in the window "only", those over the seam.

    Adjacent are two reads between which, on one side of the turn, nothing reads anything. Whatever else is kept there is kept
    beside the reads, too: by elements, such a gap takes nothing. Only a budget in bytes must know of them.

    Over the seam a gap leads from the backward to the forward. `tree` is a Fenwick tree over groups of steps that read the same,
    which holds the size of each (parameter, phase) at its latest read: a range sum over it counts each parameter once. The turn
    belongs to the forward. O(reads * log(groups)).
    """
    parameters = {p.name: p for p in program.parameters}
    rows = [(t, step.phase == "backward", unique(step.reads)) for t, step in enumerate(program.steps) if step.reads]
    changes = [before is None or before[1:] != row[1:] for before, row in zip((None, *rows), rows)]
    group_of = {row[0]: group for row, group in zip(rows, accumulate(changes))}  # from 1 on, as the tree counts
    tree = [0] * (sum(changes) + 1)
    latest: dict[tuple[str, bool], int] = {}
    previous: dict[str, int] = {}
    before_it = dict(_adjacent(program)) if not adjacent else {}
    ahead: dict[str, tuple[int, int]] = {}  # first read in the forward, and the size of all that is first read before it
    seen = 0

    def add(group: int, amount: int) -> None:
        while group < len(tree):
            tree[group] += amount
            group += group & -group

    def total(group: int) -> int:
        amount = 0
        while group > 0:
            amount += tree[group]
            group &= group - 1
        return amount

    for (t, backward, names), changed in zip(rows, changes):
        group = group_of[t]
        for name in names:
            if name in previous and previous[name] == before_it.get(t):
                pass
            elif name in previous:
                start = previous[name]
                distance = total(group - 1) - total(group_of[start]) if group - group_of[start] > 1 else 0
                yield Gap(parameters[name], start, t, distance)
            elif not backward:
                ahead[name] = (t, seen)
            previous[name] = t
        if changed:
            for name in names:
                size = parameters[name].num_elements
                seen += size if ahead.get(name, (None, 0))[0] == t else 0
                add(latest.get((name, backward), len(tree)), -size)
                latest[name, backward] = group
                add(group, size)
    if program.window != "only":
        for name, (first, before) in ahead.items():
            if (name, True) in latest:
                behind = total(len(tree) - 1) - total(group_of[previous[name]])
                yield Gap(parameters[name], previous[name], first, behind + before)


def _moments(room: Profile) -> list[float]:
    """before[0], during[0], before[1], ..., before[len(steps)]: the moments of a program in a row."""
    return [*chain.from_iterable(zip(room.before, room.during)), room.before[-1]]


def _hold(program: Program, gap: Gap, resharded: bool = False) -> Hold:
    """A gap from read a to read b holds its parameter in `before[a+1 .. b]` and `during[a+1 .. b-1]`.

    At a and b it is needed anyhow. Moments of the next micro-batch follow on those of this one. What is resharded over the turn
    would else be gathered from secondary shards.
    """
    parameter, costs = gap.parameter, program.costs
    stop = 2 * gap.stop + 1 + (2 * len(program.steps) + 1 if gap.over_seam else 0)
    secondary = resharded and gap.stop > turn_of(program)
    saved_us = costs.gather_us(parameter.num_bytes, secondary) + costs.busy_us(parameter.num_bytes)
    return Hold(2 * (gap.start + 1), stop, parameter.num_elements, parameter.num_bytes, saved_us)


def _best(
    program: Program, limits: Limits, wanted: Sequence[Gap], room: Room, candidates: Sequence[_Part] = ()
) -> list[Gap]:
    """The gaps that save most, persistent parameters before all others. All lead over the seam, or none does. Of the candidates, as
    many as fit are resharded after the persistent parameters; other gaps then get the room beside their secondary shards."""
    kept: list[Gap] = []
    parts: list[_Part] = []
    for persistent in (True, False):
        those = [gap for gap in wanted if (gap.parameter.numel <= limits.param_persistence_threshold) == persistent]
        if not persistent:
            parts = _resharded(program, candidates, kept, room)
        if not those:
            continue
        cheaper = {part.gap.parameter.name for part in parts}
        held = [*(_hold(program, gap) for gap in kept), *(part.hold for part in parts)]
        left = without(room, held) if held else room
        waist = 2 * len(program.steps) if those[0].over_seam else 2 * (turn_of(program) + 1)
        holds = [_hold(program, gap, gap.parameter.name in cheaper) for gap in those]
        kept += [those[index] for index in sorted(select(holds, left, waist))]
    return kept


@dataclass(frozen=True, slots=True)
class _Part:
    """A parameter that may be resharded over the turn, and what its secondary shard takes and saves, however often the backward
    gathers it: until its last read there, and one gather."""

    gap: Gap
    hold: Hold


def _kept_and_resharded(
    program: Program, limits: Limits, every: Sequence[Gap], wanted: Sequence[Gap], room: Room
) -> tuple[list[Gap], list[_Part]]:
    """The gaps to keep, none of them over the seam, and what to reshard in the room that they leave."""
    candidates = sorted(_parts(program, every), key=lambda part: part.gap.start)  # the widest gaps first, if they are nested

    def plan(first: Sequence[_Part]) -> tuple[list[Gap], list[_Part]]:
        kept = _consistent(program, every, wanted, lambda those: _best(program, limits, those, room, first))
        return kept, _resharded(program, candidates, kept, room)

    def gathers_us(choice: tuple[list[Gap], list[_Part]]) -> float:
        kept, parts = {(g.parameter.name, g.start) for g in choice[0]}, {part.gap.parameter.name for part in choice[1]}
        return sum(
            program.costs.gather_us(gap.parameter.num_bytes, gap.stop > turn and gap.parameter.name in parts)
            + program.costs.busy_us(gap.parameter.num_bytes)
            for gap in every
            if not gap.over_seam and (gap.parameter.name, gap.start) not in kept
        )

    turn = turn_of(program)
    if not candidates:
        return plan(())
    return min((plan(candidates), plan(candidates[: len(candidates) // 2]), plan(())), key=gathers_us)


def _parts(program: Program, every: Sequence[Gap]) -> Iterator[_Part]:
    """What may be resharded: read in the forward and in the backward, and gathered from secondary shards at least as fast."""
    if not program.reshard_to:
        return
    turn, escapes, reads = turn_of(program), set(program.escapes), reads_of(program)
    for gap in every:
        parameter = gap.parameter
        saved_us = program.costs.gather_us(parameter.num_bytes) - program.costs.gather_us(parameter.num_bytes, secondary=True)
        if gap.start <= turn < gap.stop and parameter.name not in escapes and saved_us >= 0:
            last = reads[parameter.name][-1]
            yield _Part(gap, Hold(2 * gap.start + 1, 2 * last + 2, 0, program.secondary_bytes(parameter), saved_us))


def _resharded(program: Program, candidates: Sequence[_Part], kept: Sequence[Gap], room: Room) -> list[_Part]:
    """Those that save most beside what is kept, which need not be resharded."""
    turn = turn_of(program)
    over_turn = {gap.parameter.name for gap in kept if gap.start <= turn < gap.stop}
    those = [part for part in candidates if part.gap.parameter.name not in over_turn]
    if not those:
        return []
    left = without(room, [_hold(program, gap) for gap in kept]) if kept else room
    return [those[index] for index in sorted(select([part.hold for part in those], left, 2 * (turn + 1)))]


def _consistent(
    program: Program, every: Sequence[Gap], wanted: Sequence[Gap], choose: Callable[[Sequence[Gap]], list[Gap]]
) -> list[Gap]:
    """The choice, without gaps over the turn of parameters that would be gathered again later in the backward.

    What is kept over the turn reaches the backward as a saved tensor, in the place of the shard: there is nothing left there to
    gather it from. Chosen twice, as what those gaps would have taken is there for others; giving them up only holds less.
    """
    turn = turn_of(program)

    def gathered_again(kept: Sequence[Gap]) -> set[tuple[str, int]]:
        held = {(gap.parameter.name, gap.start) for gap in kept}
        later = (gap for gap in every if gap.start > turn and not gap.over_seam)
        again = {gap.parameter.name for gap in later if (gap.parameter.name, gap.start) not in held}
        return {(gap.parameter.name, gap.start) for gap in kept if gap.start <= turn < gap.stop and gap.parameter.name in again}

    kept = choose(wanted)
    banned = gathered_again(kept)
    if banned:
        kept = choose([gap for gap in wanted if (gap.parameter.name, gap.start) not in banned])
        banned = gathered_again(kept)
    return [gap for gap in kept if (gap.parameter.name, gap.start) not in banned]


def _timeline(
    program: Program, limits: Limits, least: Demand, kept: Sequence[Gap], carried: Sequence[Gap], parts: Sequence[_Part] = ()
) -> Timeline:
    keys = {(gap.parameter.name, gap.start) for gap in kept}
    free = {start: stop for stop, start in _adjacent(program)} if limits.memory_budget is None else {}
    gathered, held = _intervals(program, keys, {gap.parameter.name for gap in carried}, free)
    turn, resharded = turn_of(program), {part.gap.parameter.name for part in parts}
    gathers = tuple(
        Gather((i,), i.first, i.first, secondary=i.first > turn and i.parameter.name in resharded) for i in gathered
    )
    return Timeline(program, limits, gathers, least.reductions, tuple(held))


def _adjacent(program: Program) -> Iterator[tuple[int, int]]:
    """(step, the step before it that reads anything), both on one side of the turn."""
    rows = [(t, step.phase == "backward") for t, step in enumerate(program.steps) if step.reads]
    return ((row[0], before[0]) for before, row in pairwise(rows) if before[1] == row[1])


def _intervals(
    program: Program, kept: set[tuple[str, int]], carried: set[str], free: dict[int, int]
) -> tuple[list[Interval], list[Interval]]:
    """The intervals that are gathered, in order of first read, and those that the window begins with.

    A read extends its interval if the gap before it starts in `kept`, or leads from a step to the next one in `free`.
    """
    num_steps, escapes = len(program.steps), set(program.escapes)
    leaves, arrives = program.window in ("first", "middle"), program.window in ("middle", "last")
    gathered: list[Interval] = []
    held: list[Interval] = []
    reads = reads_of(program)
    for parameter in program.parameters:
        name = parameter.name
        steps = reads.get(name, [])
        stops = [t for t, later in pairwise(steps) if free.get(t) != later and (name, t) not in kept]
        ends = steps[-1:] if name in escapes else [*stops, *steps[-1:]]
        begin = 0
        for end in ends:
            place = bisect_left(steps, end) + 1
            stays = name in escapes or (end == steps[-1] and name in carried and leaves)
            row = held if begin == 0 and name in carried and arrives else gathered
            row.append(Interval(parameter, steps[begin], num_steps if stays else end))
            begin = place
    gathered.sort(key=lambda i: (i.first, program.steps[i.first].reads.index(i.parameter.name)))
    return gathered, held
