"""The runner and the pool of ranks tell the ends of a job apart; what they call a match is one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import RanksFailed, rank_outcomes, run_ranks

from .reference import run
from .runner import REGISTRY, Report, Setting, differences, end_of, problems, run_case


def total(x: float) -> tuple[float, int]:
    t = torch.tensor([x + dist.get_rank()])
    dist.all_reduce(t)
    return float(t), dist.get_world_size()


def rank_1_raises() -> float:
    if dist.get_rank() == 1:
        error = ValueError("no luck")
        error.rank, error.unpicklable = 1, lambda: None  # type: ignore[attr-defined]
        raise error
    return total(0.0)[0]


def rank_1_dies() -> float:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return total(0.0)[0]


def rank_0_sleeps() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def test_values_come_back_in_rank_order_from_any_world_size() -> None:
    for world in (1, 3, 2):
        assert run_ranks(world, total, 1.0) == [(world + world * (world - 1) / 2, world)] * world


def test_an_error_keeps_its_facts_and_frees_its_peers() -> None:
    first, second = rank_outcomes(2, rank_1_raises, timeout=30)
    assert second.error is not None and (second.error.type_name, second.error.message) == ("ValueError", "no luck")
    assert second.error.attributes == {"rank": 1} and "rank_1_raises" in second.error.traceback
    assert first.status == "error" and first.seconds < 10
    with pytest.raises(RanksFailed, match="no luck"):
        run_ranks(2, rank_1_raises, timeout=30)


@pytest.mark.parametrize(("job", "rank", "status", "end"), [(rank_1_dies, 1, "crash", "CRASH"), (rank_0_sleeps, 0, "hang", "HANG")])
def test_crash_and_hang_are_told_apart_and_the_pool_recovers(job: Any, rank: int, status: str, end: str) -> None:
    outcomes = rank_outcomes(2, job, timeout=4)
    assert outcomes[rank].status == status and end_of(outcomes)[0] == end
    if status == "crash":
        assert outcomes[rank].exit_code == -signal.SIGKILL
    else:
        assert job.__name__ in outcomes[rank].log, "the stacks of a hung rank are kept"
    assert run_ranks(2, total, 1.0) == [(3.0, 2)] * 2


def test_the_runner_matches_under_fsdp2_and_notices_a_wrong_result() -> None:
    report = run_case("grad_accum_4", 2, Setting("fsdp2"))
    assert report.end == "match" and problems(report) == []
    case = REGISTRY["grad_accum_4"]
    assert differences(run(case, 3), report.outcomes[0].value, case.build()[4]), "two ranks are not three"


def test_a_silent_difference_is_a_problem() -> None:
    """FSDP2 loses a hook that was put on a parameter before: a case that must not pass."""
    report = run_case("param_grad_hook_row_mask", 2, Setting("fsdp2"))
    assert report.end == "DIFFERENT" and problems(report)


def test_an_error_must_be_clear_the_same_and_mention_its_cause() -> None:
    outcomes = rank_outcomes(2, rank_1_raises, timeout=30)
    end, detail = end_of(outcomes)
    assert end == "error" and "rank 1 ValueError: no luck" in detail
    wrong = problems(Report("complex_param", 2, end, detail, 1.0, tuple(outcomes)))
    assert any("different errors" in line for line in wrong) and any("mentions none" in line for line in wrong)
