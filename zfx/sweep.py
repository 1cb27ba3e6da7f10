"""Questions that take many plans of one capture: step time against memory, and the fewest ranks that a model fits on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .errors import InfeasibleBudget
from .estimate import Estimate, estimate, fits, least
from .ir import Program
from .limits import Limits

MOST_RANKS = 65_536


def frontier(program: Program, limits: Limits, optimizer_bytes: int, num_points: int, accumulate: int = 1) -> Iterator[Estimate]:
    """Plans from the least memory that works to as much as the planner can use, in equal steps of `memory_budget`.

    Args:
        limits: all bounds but `memory_budget`.

    Yields:
        `num_points` estimates, from the largest budget to the smallest. The first has no budget at all.

    Raises:
        InfeasibleBudget: a bound of `limits` can't be met with any memory.
    """
    widest = estimate(program, replace(limits, memory_budget=None), optimizer_bytes, accumulate)
    yield widest
    smallest = least(program, optimizer_bytes).peak_bytes
    for i in range(1, num_points):
        budget = widest.peak_bytes - (widest.peak_bytes - smallest) * i // (num_points - 1)
        yield estimate(program, replace(limits, memory_budget=budget), optimizer_bytes, accumulate)


@dataclass(frozen=True, slots=True)
class Fewest:
    """The answer to how few ranks a model fits on.

    Attributes:
        world_size: None where no number of ranks is enough.
        refused: the largest world size that was found too small, and why; None where one rank is enough. Where no number is
            enough, the one that came closest.
    """

    world_size: int | None
    refused: tuple[int, InfeasibleBudget] | None


def find_world_size(
    program_at: Callable[[int], Program],
    limits_at: Callable[[Program], Limits],
    node_size: int = 8,
    most: int = MOST_RANKS,
    tried: Callable[[int, bool], object] = lambda world_size, fits: None,
) -> Fewest:
    """The fewest ranks on which some schedule respects the limits: 1, 2, 4, ... up to a node, then whole nodes.

    The number of nodes is doubled until the model fits, then bisected: the answer fits, one node fewer does not.

    Args:
        program_at: the program by world size.
        limits_at: the limits of a program.
        tried: called with every world size that was looked at, and whether it fits.
    """
    refused: dict[int, InfeasibleBudget] = {}

    def works(world_size: int) -> bool:
        program = program_at(world_size)
        refusal = fits(program, limits_at(program))
        if refusal is not None:
            refused[world_size] = refusal
        tried(world_size, refusal is None)
        return refusal is None

    def largest() -> tuple[int, InfeasibleBudget] | None:
        return max(refused.items(), key=lambda row: row[0], default=None)

    within = [1]
    while within[-1] * 2 < node_size:
        within.append(within[-1] * 2)
    for world_size in within:
        if world_size <= most and works(world_size):
            return Fewest(world_size, largest())
    low, high, last = 0, min(1, most // node_size), most // node_size  # in nodes: `low` are too few
    while not (high and works(high * node_size)):
        if high == last:
            return Fewest(None, min(refused.items(), key=lambda row: row[1].smallest_limit - row[1].limit))
        low, high = high, min(2 * high, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle * node_size) else (middle, high)
    return Fewest(high * node_size, largest())
