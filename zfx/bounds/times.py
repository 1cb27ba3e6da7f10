"""Bounds on the time: totals of compute and of each channel, and the longest paths through both."""

from __future__ import annotations

from ..costs import CostModel, Link
from ..ir import Schedule
from .detours import Detour, detours_of
from .held import Event
from .rest import Rest
from .room import Measure
from .volume import Volume, cheapest_link


def times_of(schedule: Schedule, events: list[Event], measures: list[Measure], volume: Volume) -> dict[str, float]:
    """Every bound on the time, by name; the plainest first, since that is what is named where several bind."""
    costs, rest = schedule.program.costs, Rest(schedule, events)
    num_buckets, num_bytes = max(volume.num_buckets, default=0), max(volume.num_bytes, default=0.0)
    compute_us = costs.launch_us * (num_buckets + rest.num_buckets[0]) + (num_bytes + rest.num_bytes[0]) / costs.busy_bytes_per_us
    compute_us += rest.across_busy_us
    for event in events:
        compute_us += event.duration_us if event.step is not None else 0.0
    row = row_of(events, costs, cheapest_link(schedule.program), volume, rest)
    bare = [(0.0, event.duration_us, 0.0) for event in events]
    return {
        "compute": compute_us,
        "gather channel": max(volume.us, default=0.0),
        "reduce channel": rest.reduce_us(0),
        **({"all-reduce channel": rest.across_us(0)} if schedule.program.replicas > 1 else {}),
        "first gather + compute + last reduction": in_a_row(row, volume, rest, costs),
        "critical path": longest_path(row, [], volume, rest, costs),
        "critical path under the limits": longest_path(bare, detours_of(schedule, events, measures, rest), volume, rest, costs),
    }


Row = list[tuple[float, float, float]]  # by event: the compute time of gathers before it, its own, that of reductions after it


def row_of(events: list[Event], costs: CostModel, gather: Link, volume: Volume, rest: Rest) -> Row:
    """The steps, and what collectives take from compute, as far as that is certain on any path to the row and away from it.

    A gather may be waited for before the path comes to the row, and a reduction launched after it has left. It takes nothing from
    the row then, but it takes its time on the channel that the path comes by, or leaves by. The lesser of the two is certain.
    """

    def least(link: Link) -> tuple[float, float]:
        return min(costs.launch_us, link.latency_us), 1 / max(costs.busy_bytes_per_us, link.bytes_per_us)

    (gather_us, gather_us_of_byte), (reduce_us, reduce_us_of_byte) = least(gather), least(costs.reduce)
    gathered = [gather_us * k + gather_us_of_byte * n for k, n in zip([0, *volume.num_buckets], [0.0, *volume.num_bytes])]
    left = [reduce_us * k + reduce_us_of_byte * n for k, n in zip(rest.num_buckets, rest.num_bytes)]
    return [
        (gathered[m + 1] - gathered[m], 0.0 if event.step is None else event.duration_us, left[m] - left[m + 1])
        for m, event in enumerate(events)
    ]


def in_a_row(row: Row, volume: Volume, rest: Rest, costs: CostModel) -> float:
    """What the first read needs is gathered, the steps from there to the last completion run, what is left is reduced."""
    now = finish = 0.0
    for m, (before_us, duration_us, after_us) in enumerate(row):
        now += before_us
        if volume.num_buckets[m] and not (m and volume.num_buckets[m - 1]):
            now = max(now, volume.us[m] + costs.launch_us)
        now += duration_us
        if rest.num_buckets[m] and not rest.num_buckets[m + 1]:
            finish = now + costs.launch_us + rest.us(m)
        now += after_us
    return max(now, finish)


def longest_path(row: Row, detours: list[Detour], volume: Volume, rest: Rest, costs: CostModel) -> float:
    """The longest path to the finish.

    It leads from the start along the row, or through all that must be gathered before an event; on along the row and detours;
    and to the finish along the row, or through all that is still to be reduced after an event.
    """
    now = finish = 0.0
    for m, (before_us, duration_us, after_us) in enumerate(row):
        now += before_us
        if volume.num_buckets[m]:
            now = max(now, volume.us[m] + costs.launch_us)
        now = max([now, *(detour.ready_us(m) for detour in detours)]) + duration_us
        for detour in detours:
            detour.leave(m, now)
        if rest.num_buckets[m]:
            finish = max(finish, now + costs.launch_us + rest.us(m))
        now += after_us
    return max(now, finish)
