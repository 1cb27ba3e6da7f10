"""How one model was asked to be compiled: what `zfx.compile` was given beside the model and the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .costs import CostModel
from .limits import Limits
from .passes import PIPELINE, Pass
from .precision import Precision


@dataclass(frozen=True, slots=True)
class Settings:
    """The same on every rank. See `zfx.compile` for each."""

    limits: Limits = field(default_factory=Limits)
    costs: CostModel = field(default_factory=CostModel)
    passes: Sequence[Pass] = PIPELINE
    uniform: bool = False
    accumulate: int = 1
    precision: Precision = field(default_factory=Precision)
    reshard_to: int = 0
