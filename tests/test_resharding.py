"""Resharding to a smaller group after the forward: every room knows secondary shards, and 4 ranks compute what they did without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from zfx.certificate import certify
from zfx.costs import CostModel, Link
from zfx.ir import Limits, Program, Schedule
from zfx.passes import PIPELINE, plan, stages
from zfx.passes.timeline import read, write
from zfx.passes.window import plan_windows
from zfx.simulate import simulate
from zfx.testing import assert_valid, chain, limits, problems, programs
from zfx.verify import violations

SLOW_WORLD = CostModel(gather=Link(100.0, 1.0), secondary=Link(10.0, 10.0))
NOTHING_KEPT = Limits(max_reuse_distance=0, param_persistence_threshold=0)


# ---- planning -------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(problems(reshard_to=(2, 3), replicas=(1, 2), uniform=None))
def test_random_programs(problem: tuple[Program, Limits]) -> None:
    program, bounds = problem
    for _, schedule in stages(program, bounds):
        assert_valid(schedule)
        assert write(read(schedule)) == schedule
        certificate = certify(schedule)
        assert certificate.time_ratio >= 1 and certificate.volume_ratio >= 1 and certificate.peak_ratio >= 1
    assert set(schedule.resharded).isdisjoint(schedule.kept)
    if program.uniform:
        without = plan(replace(program, reshard_to=0), bounds)
        assert simulate(schedule).finish_us <= simulate(without).finish_us * (1 + 1e-6)
