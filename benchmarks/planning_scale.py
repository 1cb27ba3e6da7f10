"""How planning and verifying grow with a program: CPU seconds for 1, 10 and 100 thousand steps, on one core.

    python benchmarks/planning_scale.py

Each program is a chain of equal layers with room for a tenth of them; the largest has 2,000 parameters and 100,000 steps.
"""

from __future__ import annotations

import time

from zfx.ir import Limits
from zfx.passes import stages
from zfx.testing import chain
from zfx.verify import verify


def main() -> None:
    print(f"{'steps':>8}{'parameters':>12}{'plan s':>9}{'verify s':>10}{'us a step':>11}")
    for num_layers in (20, 200, 2_000):
        program = chain(num_layers, repeat=25)
        limits = Limits(max_live_parameters=num_layers, param_persistence_threshold=0)  # layers have 10 elements
        begin = time.process_time()
        *_, (_, schedule) = stages(program, limits)
        planned = time.process_time()
        verify(schedule)
        verified = time.process_time()
        per_step_us = (verified - begin) / len(program.steps) * 1e6
        print(f"{len(program.steps):>8,}{num_layers:>12,}{planned - begin:>9.2f}{verified - planned:>10.2f}{per_step_us:>11.1f}")


if __name__ == "__main__":
    main()
