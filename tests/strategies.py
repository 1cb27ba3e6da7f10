"""What only this project's tests need beside `zfx.testing`, under the names that they use."""

from __future__ import annotations

from typing import Any

from zfx.costs import CostModel, Link
from zfx.testing import _needed, bytes_needed, chain, problems, programs, smallest_budget, smallest_max_live
from zfx.testing import costs as cost_models
from zfx.testing import limits as limits_for

__all__ = [
    "_needed",
    "bytes_needed",
    "chain",
    "cost_models",
    "limits_for",
    "link_costs",
    "problems",
    "programs",
    "smallest_budget",
    "smallest_max_live",
]


def link_costs(latency_us: float = 100.0, bytes_per_us: float = 2_000.0, **others: Any) -> CostModel:
    """Gathers and reductions alike."""
    return CostModel(Link(latency_us, bytes_per_us), Link(latency_us, bytes_per_us), **{"launch_us": 0.0, **others})
