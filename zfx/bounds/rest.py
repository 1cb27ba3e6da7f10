"""What is still to be reduced after each event."""

from __future__ import annotations

from collections import defaultdict

from ..costs import Link
from ..ir import Schedule
from .held import Event, completions_of, sizes_of
from .volume import at_least, shares_of


def transfer_us(link: Link, num_buckets: int, num_bytes: float) -> float:
    return num_buckets * link.latency_us + num_bytes / link.bytes_per_us if num_buckets else 0.0


class Rest:
    """By event, what is still to be reduced once it is over: the gradients that complete there or later."""

    def __init__(self, schedule: Schedule, events: list[Event]) -> None:
        program = schedule.program
        self._link = program.costs.reduce
        at = {event.step: m for m, event in enumerate(events)}
        size, shares = sizes_of(program, "grad_bytes"), shares_of(program, schedule.limits.reduce_bucket_size)
        completed: dict[int, list[str]] = defaultdict(list)
        for name, (_, last) in completions_of(program).items():
            completed[at[last]].append(name)
        self.num_bytes, self.num_buckets = [0], [0]
        filled = 0.0
        for m in reversed(range(len(events))):
            filled += sum(shares[name] for name in completed[m])
            self.num_bytes.append(self.num_bytes[-1] + sum(size[name] for name in completed[m]))
            self.num_buckets.append(max(at_least(filled), int(self.num_buckets[-1] > 0 or bool(completed[m]))))
        self.num_bytes.reverse()
        self.num_buckets.reverse()

    def us(self, event: int) -> float:
        return transfer_us(self._link, self.num_buckets[event], self.num_bytes[event])
