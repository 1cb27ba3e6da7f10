"""Replay: a schedule run without tensors, to see what is held after every instruction and during every step.

It follows the definitions at the top of `ir.py` and nothing else; it shares no code with the passes, and like the verifier it
does not trust the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .ir import Bucket, Instruction, Parameter, Schedule, Step


@dataclass(frozen=True, slots=True)
class State:
    """What is held right after an instruction, or while a step runs.

    Attributes:
        point: the point of the instruction, or the index of the step.
        instruction: the instruction that has just run, or None if a step is running.
        step: the step that is running, or None after an instruction.
        num_live: number of gathered parameters (launched and not released).
        gathered_elements, gathered_bytes: their sizes.
        packing_elements, packing_bytes: buffers of packed buckets that were not waited for yet.
        secondary_bytes: secondary shards.
        gradient_bytes: unreduced gradients, twice while their reduction is in flight, and what arrives from other replicas.
        total_bytes: all of these, the program's `static_bytes` and the step's `other_bytes` (after an instruction: those of the
            step at that point; after the last step: none).
    """

    point: int
    instruction: Instruction | None
    step: Step | None
    num_live: int
    gathered_elements: int
    gathered_bytes: int
    packing_elements: int
    packing_bytes: int
    secondary_bytes: int
    gradient_bytes: int
    total_bytes: int
    _log: list[tuple[bool, str]] = field(repr=False, compare=False)  # grows behind the states' backs; [:_length] never changes
    _length: int = field(repr=False, compare=False)

    @property
    def live(self) -> frozenset[str]:
        """Names of the gathered parameters. Linear in what has happened so far: not for loops over all states."""
        names: set[str] = set()
        for gathered, name in self._log[: self._length]:
            if gathered:
                names.add(name)
            else:
                names.discard(name)
        return frozenset(names)

    @property
    def num_elements(self) -> int:
        """What `max_live_parameters` bounds."""
        return self.gathered_elements + self.packing_elements


def replay(schedule: Schedule) -> Iterator[State]:
    """Every state of the schedule: one after each instruction, one for each step while it runs. Linear in all.

    Tolerates wrong schedules: what is unknown has no size, and releasing twice releases once.
    """
    held = _Held(schedule)
    for point, event in walk(schedule):
        if isinstance(event, Step):
            held.run(event)
            yield held.state(point, None, event)
        else:
            held.execute(event)
            yield held.state(point, event, None)


def walk(schedule: Schedule) -> Iterator[tuple[int, Instruction | Step]]:
    """Instructions and steps in execution order, each with its point or index. Points that go back count as the current one."""
    steps = schedule.program.steps
    t = 0
    for instruction in schedule.instructions:
        while t < len(steps) and t < instruction.point:
            yield t, steps[t]
            t += 1
        yield t, instruction
    for i in range(t, len(steps)):
        yield i, steps[i]


def arriving(schedule: Schedule) -> tuple[str, ...]:
    """What is live at point 0, carried from the micro-batch before."""
    return schedule.carried if schedule.program.window in ("middle", "last") else ()


def leaving(schedule: Schedule) -> tuple[str, ...]:
    """What stays live after the last step, carried to the next micro-batch."""
    return schedule.carried if schedule.program.window in ("first", "middle") else ()


def bucket_of(schedule: Schedule, index: int | None) -> Bucket | None:
    return schedule.buckets[index] if index is not None and 0 <= index < len(schedule.buckets) else None


class _Held:
    """The running sums behind `replay`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._parameters = {p.name: p for p in schedule.program.parameters}
        self._live: set[str] = set()
        self._log: list[tuple[bool, str]] = []
        self._packs: dict[int | None, tuple[int, int]] = {}
        self._gradients: dict[str, int] = {}
        self._arriving: dict[int | None, int] = {}
        self._across: dict[int | None, int] = {}
        self._secondary: dict[str, int] = {}  # by parameter: how many gathers from its secondary shard are still to be waited for
        self._uses: dict[str, int] = {}
        for b in schedule.buckets:
            self._uses.update({name: self._uses.get(name, 0) + 1 for name in b.parameters if b.secondary})
        self._sums = [0] * 6  # gathered elements and bytes, packing elements and bytes, gradient bytes, secondary bytes
        self._hold(arriving(schedule), 1)

    def _size(self, name: str) -> Parameter:
        return self._parameters.get(name) or Parameter(name, 0, 0)

    def _hold(self, names: Iterable[str], sign: int) -> None:
        """Hold (1) or free (-1) the parameters; what is held already, or not at all, changes nothing."""
        for name in names:
            if (name in self._live) == (sign > 0):
                continue
            (self._live.add if sign > 0 else self._live.discard)(name)
            self._log.append((sign > 0, name))
            self._sums[0] += sign * self._size(name).num_elements
            self._sums[1] += sign * self._size(name).num_bytes

    def run(self, step: Step) -> None:
        for name in step.completes:
            if name not in self._gradients:
                self._gradients[name] = self._size(name).grad_bytes
                self._sums[4] += self._gradients[name]

    def execute(self, instruction: Instruction) -> None:
        names, index, sums = instruction.parameters, instruction.bucket, self._sums
        if instruction.kind in ("all_gather", "release"):
            self._hold(names, 1 if instruction.kind == "all_gather" else -1)
        if instruction.kind == "all_gather" and index not in self._packs:
            bucket = bucket_of(self._schedule, index)
            packed = [self._size(name) for name in bucket.packed] if bucket else []
            self._packs[index] = (sum(p.num_elements for p in packed), sum(p.num_bytes for p in packed))
            sums[2] += self._packs[index][0]
            sums[3] += self._packs[index][1]
        elif instruction.kind == "wait":
            elements, num_bytes = self._packs.pop(index, (0, 0))
            sums[2] -= elements
            sums[3] -= num_bytes
            found = bucket_of(self._schedule, index)
            if found is not None and found.secondary:
                self._use_secondary(names)
        elif instruction.kind == "reshard":
            for name in names:
                if name not in self._secondary:
                    self._secondary[name] = self._uses.get(name, 0)
                    sums[5] += self._schedule.program.secondary_bytes(self._size(name))
        elif instruction.kind == "reduce_scatter" and index not in self._arriving:
            self._arriving[index] = sum(self._size(name).grad_bytes for name in names)
            sums[4] += self._arriving[index]
        elif instruction.kind == "wait_reduce":
            sums[4] -= self._arriving.pop(index, 0) + sum(self._gradients.pop(name, 0) for name in names)
        elif instruction.kind == "all_reduce" and index not in self._across:
            self._across[index] = sum(self._size(name).across_bytes for name in names)
            sums[4] += self._across[index]
        elif instruction.kind == "wait_all_reduce":
            sums[4] -= self._across.pop(index, 0)

    def _use_secondary(self, names: Iterable[str]) -> None:
        """Gathers from the secondary shards of these are over; what no other gather takes is gone."""
        for name in names:
            if name in self._secondary:
                self._secondary[name] -= 1
                if self._secondary[name] == 0:
                    del self._secondary[name]
                    self._sums[5] -= self._schedule.program.secondary_bytes(self._size(name))

    def state(self, point: int, instruction: Instruction | None, step: Step | None) -> State:
        program, sums = self._schedule.program, self._sums
        other = program.steps[point].other_bytes if point < len(program.steps) else 0
        total = sums[1] + sums[3] + sums[4] + sums[5] + program.static_bytes + other
        elements, num_bytes, packing_elements, packing_bytes, gradients, secondary = sums
        return State(
            point, instruction, step, len(self._live), elements, num_bytes, packing_elements, packing_bytes, secondary, gradients,
            total, self._log, len(self._log),
        )  # fmt: skip
