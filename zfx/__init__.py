"""zfx: a schedule compiler for ZeRO-3 training on torch.fx graphs.

    model = zfx.compile(model, world_size)      # in place; then an ordinary torch loop
    model.zfx.dump("schedule.json")

See `zfx.compile`, `zfx.Limits`, and the errors in `zfx.errors`.
"""

from .api import compile
from .born import skip_init
from .checkpoint import Checkpointer
from .checkpoint_load import Resumed
from .costs import CostModel, Link, Rate, load_costs
from .errors import CaptureError, CheckpointError, InfeasibleBudget, LoopError, PassError, RankMismatch, ScheduleError, ZfxError
from .ir import Program, Schedule
from .limits import Limits
from .precision import Precision
from .pretrained import LoadReport, load_pretrained, save_pretrained

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Checkpointer",
    "CostModel",
    "InfeasibleBudget",
    "Limits",
    "Link",
    "LoadReport",
    "LoopError",
    "PassError",
    "Precision",
    "Program",
    "RankMismatch",
    "Rate",
    "Resumed",
    "Schedule",
    "ScheduleError",
    "ZfxError",
    "compile",
    "load_costs",
    "load_pretrained",
    "save_pretrained",
    "skip_init",
]
