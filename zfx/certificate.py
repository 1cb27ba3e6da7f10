"""The certificate: a schedule beside what no schedule of the same program under the same limits can beat, and what binds.

    time      812.0 us, 1.03 of the bound; binds: gather channel
    volume    1.5 GiB, 1.00 of the bound; binds: max_live_parameters          bounds.py says what each bound is, and why it holds
    peak      3.1 GiB, 1.20 of the bound; binds: step backward.mm_7
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

from .bounds import bounds_of
from .ir import Schedule
from .simulate import simulate

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a schedule takes, the least that any could take, and what it is that binds.

    Attributes:
        time_us: the simulated time of the step.
        volume_bytes: bytes gathered on each rank, from secondary shards or from all ranks. Reductions are not counted: every
            schedule reduces the same.
        peak_bytes: most that is held at any moment: parameters, packing, gradients, activations and shards.
        time_binds: "compute", "gather channel", "reduce channel", "all-reduce channel", "first gather + compute + last reduction",
            "critical path" or "critical path under the limits".
        volume_binds: "first reads", or the limits that force parameters to be gathered again.
        peak_binds: "shards", the step that needs so much, or the gradient whose reduction does.
    """

    time_us: float
    time_bound_us: float
    time_binds: str
    volume_bytes: int
    volume_bound_bytes: int
    volume_binds: str
    peak_bytes: int
    peak_bound_bytes: int
    peak_binds: str

    @property
    def time_ratio(self) -> float:
        """Achieved over bound: at least 1 for every schedule that the verifier accepts."""
        return _ratio(self.time_us, self.time_bound_us)

    @property
    def volume_ratio(self) -> float:
        return _ratio(self.volume_bytes, self.volume_bound_bytes)

    @property
    def peak_ratio(self) -> float:
        return _ratio(self.peak_bytes, self.peak_bound_bytes)


def certify(schedule: Schedule) -> Certificate:
    """The certificate of a schedule. A time that differs from its bound by less than one part in 1e9 is taken to be equal to it.

    Cost: O(n log n) in steps, instructions and reads, once for each schedule: it is remembered as long as the schedule lives.

    Example:
        >>> from zfx.ir import Bucket, Instruction, Limits, Parameter, Program, Step
        >>> program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",), duration_us=5.0),))
        >>> run = tuple(Instruction(kind, 0, ("w",), 0) for kind in ("all_gather", "wait")) + (Instruction("release", 1, ("w",)),)
        >>> certificate = certify(Schedule(program, Limits(), (Bucket(0, "all_gather", ("w",)),), run))
        >>> certificate.time_ratio, certificate.time_binds, certificate.volume_bound_bytes
        (1.0, 'first gather + compute + last reduction', 40)
    """
    key = id(schedule)
    if key not in _known:
        _known[key] = _certified(schedule)
        weakref.finalize(schedule, _known.pop, key, None).atexit = False
    return _known[key]


_known: dict[int, Certificate] = {}  # by the identity of a schedule that lives: comparing two takes as long as certifying one


def _certified(schedule: Schedule) -> Certificate:
    simulation, bounds = simulate(schedule), bounds_of(schedule)
    time_us, time_bound_us = simulation.finish_us, max(bounds.times_us.values())
    peak_binds = max(bounds.peaks_bytes, key=bounds.peaks_bytes.__getitem__)
    return Certificate(
        time_us,
        time_us if _equal(time_us, time_bound_us) else time_bound_us,
        next((name for name, us in bounds.times_us.items() if _equal(us, time_bound_us)), "compute"),
        sum(span.num_bytes for span in simulation.spans if span.kind == "all_gather"),
        bounds.volume_bytes,
        bounds.volume_binds,
        simulation.peak.total,
        bounds.peaks_bytes[peak_binds],
        peak_binds,
    )


def _equal(one_us: float, other_us: float) -> bool:
    return math.isclose(one_us, other_us, rel_tol=_ROUNDING)


def _ratio(achieved: float, bound: float) -> float:
    return 1.0 if achieved == bound else achieved / bound if bound else math.inf


__all__ = ["Certificate", "certify"]
