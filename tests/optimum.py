"""The best schedule of a small program, by exhaustive search: what planner and certificate are measured against.

The search space is all schedules that the verifier accepts, less what can't matter in the time model of `zfx/ir.py`:

    gathers      any order, any buckets (`prefetch_bucket_size`), launched at any point, packed never (it costs memory and no time);
                 also before the turn for the backward's reads, in which case the parameter is kept (`over_turn=False`: not so)
    keeping      after each read a parameter is released or kept for its next one, where `max_reuse_distance` allows it
    waits        for gathers as late as the reads, the turn and the order of buckets allow: earlier gains nothing
    reductions   any order, any buckets (`reduce_bucket_size`) of complete gradients, launched at any point, waited for at any point
    a point      releases first, but for waits for reductions, and waits for gathers last; the rest in any order

under `max_live_parameters` and `memory_budget` after every instruction and during every step. Labels that are not worse in any
time and equal in all else displace each other; so do those whose own bound can't beat the best known time. Every optimum comes with
its schedule, which the verifier and the simulator can be asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from zfx.ir import Bucket, Instruction, Limits, Program, Schedule

Flight = tuple[int, float]  # a bucket's members as bits, and when it is over
Trail = tuple["Trail", Instruction] | None


@dataclass(frozen=True)
class Label:
    """Where a schedule may stand: what is live, to be released, in flight, not reduced yet, kept over the turn; and the clock."""

    now: float = 0.0
    live: int = 0
    dying: int = 0
    gathers: tuple[Flight, ...] = ()
    pending: int = 0
    reductions: tuple[Flight, ...] = ()
    kept: int = 0
    num_buckets: int = 0
    trail: Trail = None

    @property
    def key(self) -> tuple[object, ...]:
        gathers, reductions = (tuple(members for members, _ in flights) for flights in (self.gathers, self.reductions))
        return self.live, self.dying, gathers, self.pending, reductions, self.kept

    @property
    def times(self) -> tuple[float, ...]:
        return (self.now, *(max(self.now, end) for _, end in (*self.gathers, *self.reductions)))


class Search:
    def __init__(self, program: Program, limits: Limits, *, over_turn: bool = True, below: float = inf) -> None:
        self.program, self.limits, self.over_turn, self.best = program, limits, over_turn, below
        self.winner: Label | None = None
        self.names = [p.name for p in program.parameters]
        bit = {name: 1 << i for i, name in enumerate(self.names)}
        self.num_steps = len(program.steps)
        self.turn = self.num_steps if program.turn is None else program.turn
        self.reads = [sum({bit[n] for n in s.reads}) for s in program.steps]
        self.completes = [sum({bit[n] for n in s.completes}) for s in program.steps]
        self.escapes = sum({bit[n] for n in program.escapes})
        assert len([n for s in program.steps for n in s.completes]) == bin(sum(self.completes)).count("1"), "complete each once"
        self.sizes = {
            unit: [getattr(p, unit) for p in program.parameters] for unit in ("num_elements", "num_bytes", "grad_bytes")
        }
        self.sums: dict[tuple[str, int], int] = {}

    def size(self, members: int, unit: str) -> int:
        if (unit, members) not in self.sums:
            self.sums[unit, members] = sum(n for i, n in enumerate(self.sizes[unit]) if members >> i & 1)
        return self.sums[unit, members]

    def next_read(self, member: int, point: int) -> int | None:
        return next((t for t in range(point, self.num_steps) if self.reads[t] & member), None)

    def run(self) -> tuple[float, Schedule | None]:
        """The least finish below the one that was known, and its schedule; or that one, and None."""
        labels = [Label()]
        for point in range(self.num_steps + 1):
            reached = self.at(point, labels)
            if point == self.num_steps:
                for label in reached:
                    self.finish(label)
                break
            labels = self.pareto(after for label in reached for after in self.step(point, label))
        return self.best, self.schedule(self.winner) if self.winner else None

    # ------------------------------------------------------------------------------------------------- at one point

    def at(self, point: int, labels: list[Label]) -> list[Label]:
        """All labels that instructions at this point lead to, the given ones included."""
        fronts: dict[object, list[Label]] = {}
        todo = [label for label in labels if self.add(fronts, label, point)]
        while todo:
            for label in self.moves(point, todo.pop()):
                if self.fits(label, point) and self.add(fronts, label, point):
                    todo.append(label)
        return [label for front in fronts.values() for label in front]

    def moves(self, point: int, label: Label) -> Iterator[Label]:
        costs = self.program.costs
        if label.reductions:
            yield self.land(label, point)
        if label.dying:
            trail = (label.trail, Instruction("release", point, self.named(label.dying)))
            yield replace(label, live=label.live & ~label.dying, dying=0, trail=trail)
            return
        flying = sum(m for m, _ in label.gathers)
        free = sum({b for t in range(point, self.num_steps) for b in bits(self.reads[t])}) & ~label.live & ~flying
        if point > self.turn:
            free &= ~label.kept
        elif not self.over_turn:
            free &= sum({b for t in range(point, min(self.turn + 1, self.num_steps)) for b in bits(self.reads[t])})
        for members in subsets(free):
            if self.fills(members, self.limits.prefetch_bucket_size):
                begin = max(label.now, label.gathers[-1][1] if label.gathers else 0.0)
                flight = (members, begin + costs.gather_us(self.size(members, "num_bytes")))
                yield self.launch(label, "all_gather", point, members, gathers=(*label.gathers, flight))
        for members in subsets(label.pending):
            if self.fills(members, self.limits.reduce_bucket_size):
                now = label.now + costs.busy_us(self.size(members, "grad_bytes"))
                begin = max(now, label.reductions[-1][1] if label.reductions else 0.0)
                flight = (members, begin + costs.reduce_us(self.size(members, "grad_bytes")))
                changes = {"now": now, "pending": label.pending & ~members, "reductions": (*label.reductions, flight)}
                yield self.launch(label, "reduce_scatter", point, members, **changes)

    def fills(self, members: int, bucket_size: int) -> bool:
        return members & (members - 1) == 0 or self.size(members, "num_elements") <= bucket_size

    def launch(self, label: Label, kind: str, point: int, members: int, **changes: object) -> Label:
        instruction = Instruction(kind, point, self.named(members), label.num_buckets)  # type: ignore[arg-type]
        return replace(label, num_buckets=label.num_buckets + 1, trail=(label.trail, instruction), **changes)  # type: ignore[arg-type]

    def land(self, label: Label, point: int) -> Label:
        (members, end), *rest = label.reductions
        return replace(
            label, now=max(label.now, end), reductions=tuple(rest),
            trail=(label.trail, Instruction("wait_reduce", point, self.named(members), None)),
        )  # fmt: skip

    def named(self, members: int) -> tuple[str, ...]:
        return tuple(name for i, name in enumerate(self.names) if members >> i & 1)

    def arrive(self, label: Label, point: int) -> Label:
        """Wait for the oldest gather."""
        (members, end), *rest = label.gathers
        trail = (label.trail, Instruction("wait", point, self.named(members), None))
        now = max(label.now, end) + self.program.costs.busy_us(self.size(members, "num_bytes"))
        return replace(label, now=now, live=label.live | members, gathers=tuple(rest), trail=trail)

    # --------------------------------------------------------------------------------------------------- over one step

    def step(self, point: int, label: Label) -> Iterator[Label]:
        """The step runs; then every choice of what it read is let go."""
        step, reads = self.program.steps[point], self.reads[point]
        while label.gathers and (point == self.turn or any(m & reads for m, _ in label.gathers)):
            label = self.arrive(label, point)
        while point == self.turn and label.reductions:
            label = self.land(label, point)
        if label.dying or reads & ~label.live or not self.fits(label, point, running=True):
            return
        kept = label.live if point == self.turn else label.kept
        label = replace(label, now=label.now + step.duration_us, pending=label.pending | self.completes[point], kept=kept)
        must, may = 0, 0
        for member in bits(reads & ~self.escapes):
            after = self.next_read(member, point + 1)
            if after is None or not self.may_keep(member, point, after):
                must |= member
            else:
                may |= member
        for released in (0, *subsets(may)):
            yield replace(label, dying=released | must)

    def may_keep(self, member: int, start: int, stop: int) -> bool:
        parameter = self.program.parameters[member.bit_length() - 1]
        between = {(b, t > self.turn) for t in range(start + 1, stop) for b in bits(self.reads[t]) if b != member}
        distance = sum(self.size(b, "num_elements") for b, _ in between)
        return distance <= self.limits.max_reuse_distance or parameter.numel <= self.limits.param_persistence_threshold

    def fits(self, label: Label, point: int, *, running: bool = False) -> bool:
        """While a step runs its own gradients are held, too."""
        gathered = label.live | sum(m for m, _ in label.gathers)
        if self.size(gathered, "num_elements") > self.limits.max_live_parameters:
            return False
        if self.limits.memory_budget is None:
            return True
        other = self.program.steps[point].other_bytes if point < self.num_steps else 0
        gradients = self.size(label.pending, "grad_bytes") + 2 * sum(self.size(m, "grad_bytes") for m, _ in label.reductions)
        if running:
            gradients += self.size(self.completes[point], "grad_bytes")
        total = self.program.static_bytes + other + self.size(gathered, "num_bytes") + gradients
        return total <= self.limits.memory_budget

    # --------------------------------------------------------------------------------------------------------- pruning

    def add(self, fronts: dict[object, list[Label]], label: Label, point: int | None) -> bool:
        if point is not None and self.at_least(label, point) >= self.best:
            return False
        front, times = fronts.setdefault(label.key, []), label.times
        if any(all(a <= b for a, b in zip(other.times, times)) for other in front):
            return False
        front[:] = [other for other in front if not all(a <= b for a, b in zip(times, other.times))]
        front.append(label)
        return True

    def pareto(self, labels: Iterator[Label]) -> list[Label]:
        fronts: dict[object, list[Label]] = {}
        for label in labels:
            self.add(fronts, label, None)
        return [label for front in fronts.values() for label in front]

    def at_least(self, label: Label, point: int) -> float:
        """With endless memory from here on, and everything missing in one bucket each time it is first read."""
        costs, now = self.program.costs, label.now
        free = label.gathers[-1][1] if label.gathers else 0.0
        ends = {b: end for m, end in label.gathers for b in bits(m)}
        there = label.live & ~label.dying | sum(ends)
        volume, begin = 0, max(label.now, free)
        for t in range(point, self.num_steps):
            for member in bits(self.reads[t]):
                now = max(now, ends.get(member, 0.0))
                if not there & member:
                    there |= member
                    volume += self.size(member, "num_bytes")
                    now = max(now, begin + costs.gather_us(volume))
            now += self.program.steps[t].duration_us
        left = label.pending | sum(self.completes[point:])
        if left:
            free = label.reductions[-1][1] if label.reductions else 0.0
            now = max(now, max(label.now, free) + costs.reduce_us(self.size(left, "grad_bytes")))
        return now

    # --------------------------------------------------------------------------------------------------------- the end

    def finish(self, label: Label) -> None:
        if label.gathers or label.pending or label.dying:
            return
        while label.reductions:
            label = self.land(label, self.num_steps)
        if label.live & ~self.escapes == 0 and label.now < self.best:
            self.best, self.winner = label.now, label

    def schedule(self, label: Label) -> Schedule:
        rows: list[Instruction] = []
        trail = label.trail
        while trail:
            rows.append(trail[1])
            trail = trail[0]
        launches = {"wait": "all_gather", "wait_reduce": "reduce_scatter"}
        buckets: list[Bucket] = []
        queues: dict[str, list[int]] = {"all_gather": [], "reduce_scatter": []}
        instructions = []
        for row in reversed(rows):
            if row.kind in queues:
                queues[row.kind].append(len(buckets))
                buckets.append(Bucket(len(buckets), row.kind, row.parameters))  # type: ignore[arg-type]
            index = None if row.kind == "release" else row.bucket if row.kind in queues else queues[launches[row.kind]].pop(0)
            instructions.append(replace(row, bucket=index))
        kept = self.named(label.kept)
        return Schedule(self.program, self.limits, tuple(buckets), tuple(instructions), kept)


def bits(members: int) -> Iterator[int]:
    while members:
        yield members & -members
        members &= members - 1


def subsets(members: int) -> Iterator[int]:
    """Every subset but the empty one."""
    subset = members
    while subset:
        yield subset
        subset = (subset - 1) & members


def least_time(program: Program, limits: Limits, *, below: float = inf, over_turn: bool = True) -> tuple[float, Schedule | None]:
    """The least finish of all schedules in the search space and the schedule; `below` and None if none is faster than that."""
    return Search(program, limits, over_turn=over_turn, below=below).run()
