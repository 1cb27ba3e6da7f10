"""Limits: what a schedule must respect. The names, units and defaults of the first five are DeepSpeed's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a schedule. Elements for the first five, as in DeepSpeed's `stage3_*` options; bytes for the last.

    Attributes:
        max_live_parameters: most elements of gathered parameters that may be held at any moment, padding and packing
            buffers included. A hard bound: a model that cannot run under it is refused with `InfeasibleBudget`.
            Default 1e9 (DeepSpeed's).
        max_reuse_distance: a gathered parameter is kept for its next use if at most this many elements of parameters
            are read in between (each parameter counted once in the forward and once in the backward); else it is
            released and gathered again. 0 releases everything after use; a number above twice the model keeps everything,
            which is ZeRO-2. Default 1e9 (DeepSpeed's).
        prefetch_bucket_size: most elements that one all-gather bucket may hold, unless a single parameter is larger.
            Default 5e7 (DeepSpeed's).
        reduce_bucket_size: the same for reduce-scatter buckets. Default 5e8 (DeepSpeed's).
        param_persistence_threshold: parameters of at most this many elements are kept from their first use to their
            last, whatever their reuse distance, while the hard bounds allow. Default 1e5 (DeepSpeed's).
        memory_budget: most bytes that the step may hold on the device: shards and their gradients, gathered parameters,
            unreduced gradients, activations. Optimizer state is not known to a schedule and is not counted. None: no bound.
            "auto": what is free when `zfx.compile` has sharded the model, on the rank that has least, and the shards
            themselves, less 5 % and less room for two more numbers an element of the trained shards, as Adam keeps. On the CPU the
            machine's free memory is divided by its ranks (LOCAL_WORLD_SIZE; else all). A schedule's limits are always
            numbers: planning without a process group needs one.

    Raises:
        ValueError: a bound is negative or not a whole number.

    Example:
        >>> Limits(max_live_parameters=2_000_000).max_reuse_distance
        1000000000
    """

    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    reduce_bucket_size: int = 500_000_000
    param_persistence_threshold: int = 100_000
    memory_budget: int | None = None

    if TYPE_CHECKING:  # "auto" may be asked for, but who reads the limits of a schedule never meets it

        def __init__(
            self,
            max_live_parameters: int = ...,
            max_reuse_distance: int = ...,
            prefetch_bucket_size: int = ...,
            reduce_bucket_size: int = ...,
            param_persistence_threshold: int = ...,
            memory_budget: int | Literal["auto"] | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "memory_budget" and value in (None, "auto"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value != int(value):
                raise ValueError(f"Limits.{name} must be a whole number, got {value!r}")
            if value < 0:
                raise ValueError(f"Limits.{name} must not be negative, got {value!r}")
            object.__setattr__(self, name, int(value))

    @property
    def follows_free_memory(self) -> bool:
        """Whether `memory_budget` is still "auto"."""
        return isinstance(self.memory_budget, str)

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any]) -> Limits:
        """Read the `zero_optimization` section of a DeepSpeed config (a dict, or the whole config).

        Both spellings are read (`stage3_max_live_parameters` and `max_live_parameters`). `"auto"` means the default.
        Keys that are not limits are ignored (`zero_hpz_partition_size` is `zfx.compile`'s `reshard_after_forward`); `stage` 2 keeps
        everything that was gathered.

        Raises:
            ValueError: `stage` is neither 2 nor 3, or a value is not a whole number.

        Example:
            >>> Limits.from_deepspeed({"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0}}).max_reuse_distance
            0
        """
        section = config.get("zero_optimization", config)
        stage = section.get("stage", 3)
        if stage not in (2, 3):
            raise ValueError(f"zero_optimization.stage must be 2 or 3 for zfx, got {stage!r}")
        found: dict[str, int] = {}
        for name in (
            "max_live_parameters",
            "max_reuse_distance",
            "prefetch_bucket_size",
            "reduce_bucket_size",
            "param_persistence_threshold",
        ):
            for key in (name, f"stage3_{name}"):
                value = section.get(key, "auto")
                if value != "auto":
                    found[name] = value
        if stage == 2:
            found["max_reuse_distance"] = found["max_live_parameters"] = 2**62
        return cls(**found)
