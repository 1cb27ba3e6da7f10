"""Questions that take many plans of one capture: step time against memory, and the fewest ranks that a model fits on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


def draw(answer: Mapping[str, Any], path: Path) -> None:
    """What `zfx plan --sweep` prints, as a picture. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = sorted((row["memory"]["total_bytes"] / 1e9, row["time"]["step_us"] / 1e6, row["fits"]) for row in answer["points"])
    axes.step([x for x, _, _ in points], [y for _, y, _ in points], where="post", color="tab:blue", alpha=0.6)
    for wanted, color, label in ((True, "tab:blue", "fits"), (False, "tab:red", "does not fit")):
        chosen = [(x, y) for x, y, fits in points if fits == wanted]
        if chosen:
            axes.plot(*zip(*chosen), "o", color=color, label=label)
    room = answer["device_bytes"] * (1 - answer["margin"]) / 1e9
    axes.axvline(room, color="grey", linestyle="--", label=f"{answer['device']}, less {answer['margin']:.0%}")
    compute_us = answer["points"][0]["time"]["compute_us"]
    axes.axhline(compute_us / 1e6, color="grey", linestyle=":", label="compute alone")
    axes.set_xlabel("peak memory of a rank with optimizer state (GB)")
    axes.set_ylabel("predicted time of an optimizer step (s)")
    axes.set_title(f"{answer['target']}\n{answer['world_size']:,} x {answer['device']}, {answer['network']}")
    axes.legend()
    figure.savefig(path)
