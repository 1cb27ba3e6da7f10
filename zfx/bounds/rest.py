"""What is still to be reduced after each event."""

from __future__ import annotations

import math
from collections import defaultdict

from ..ir import Schedule
from .held import Event, completions_of, sizes_of
from .volume import at_least, shares_of, transfer_us


class Rest:
    """By event, what is still to be reduced once it is over: the gradients that complete there or later.

    With replicas each collective has two stages. The last to be reduced must still be all-reduced, and before the first all-reduce
    something must be reduced: the one channel's total takes at least the other's shortest collective more.
    """

    def __init__(self, schedule: Schedule, events: list[Event]) -> None:
        program = schedule.program
        self._costs, self._across = program.costs, program.replicas > 1
        at = {event.step: m for m, event in enumerate(events)}
        size, shares = sizes_of(program, "grad_bytes"), shares_of(program, schedule.limits.reduce_bucket_size)
        completed: dict[int, list[str]] = defaultdict(list)
        for name, (_, last) in completions_of(program).items():
            completed[at[last]].append(name)
        across = sizes_of(program, "across_bytes")
        self.num_bytes, self.num_buckets, self._across_bytes = [0], [0], [0]
        self._least: list[tuple[float, float]] = [(math.inf, math.inf)]  # of either kind of bytes, in one gradient
        filled = 0.0
        for m in reversed(range(len(events))):
            filled += sum(shares[name] for name in completed[m])
            self.num_bytes.append(self.num_bytes[-1] + sum(size[name] for name in completed[m]))
            self.num_buckets.append(max(at_least(filled), int(self.num_buckets[-1] > 0 or bool(completed[m]))))
            self._across_bytes.append(self._across_bytes[-1] + sum(across[name] for name in completed[m]))
            least = [self._least[-1], *((float(size[name]), float(across[name])) for name in completed[m])]
            self._least.append((min(row[0] for row in least), min(row[1] for row in least)))
        for row in (self.num_bytes, self.num_buckets, self._across_bytes, self._least):
            row.reverse()

    def us(self, event: int) -> float:
        return max(self.reduce_us(event), self.across_us(event)) if self._across else self.reduce_us(event)

    def reduce_us(self, event: int) -> float:
        """All reductions, and the shortest all-reduce."""
        reduced_us = transfer_us(self._costs.reduce, self.num_buckets[event], self.num_bytes[event])
        if not self._across or not self.num_buckets[event]:
            return reduced_us
        link, least_bytes = self._costs.all_reduce, self._least[event][1]
        return reduced_us + self._costs.launch_us + link.latency_us + least_bytes / link.bytes_per_us

    def across_us(self, event: int) -> float:
        """The shortest reduction, and all all-reduces."""
        if not self.num_buckets[event]:
            return 0.0
        link, least_bytes = self._costs.reduce, self._least[event][0]
        first_us = link.latency_us + least_bytes / link.bytes_per_us + self._costs.launch_us
        return first_us + transfer_us(self._costs.all_reduce, self.num_buckets[event], self._across_bytes[event])

    @property
    def across_busy_us(self) -> float:
        """Compute time that all-reduces take."""
        if not self._across:
            return 0.0
        return self._costs.launch_us * self.num_buckets[0] + self._across_bytes[0] / self._costs.busy_bytes_per_us
