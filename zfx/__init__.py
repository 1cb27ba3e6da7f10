"""zfx: a schedule compiler for ZeRO-3 training on torch.fx graphs.

    model = zfx.compile(model, world_size)      # in place; then an ordinary torch loop
    model.zfx.dump("schedule.json")

See `zfx.compile`, `zfx.Limits`, and the errors in `zfx.errors`.
"""

from .api import compile
from .errors import CaptureError, InfeasibleBudget, RankMismatch, ScheduleError, ZfxError
from .ir import CostModel, Program, Schedule
from .limits import Limits

__all__ = [
    "CaptureError",
    "CostModel",
    "InfeasibleBudget",
    "Limits",
    "Program",
    "RankMismatch",
    "Schedule",
    "ScheduleError",
    "ZfxError",
    "compile",
]
