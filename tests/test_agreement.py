"""Ranks agree before an execution, or every one of them says who differs: no hang, no abort, no wrong number."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx
from tests.harness import rank_outcomes, run_ranks

TIMEOUT_S = 8.0


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        return self.second(self.first(x)) if deep else self.first(x)


def ready() -> nn.Module:
    torch.manual_seed(0)
    model = zfx.compile(Branching(), timeout=TIMEOUT_S)
    model(torch.ones(3, 4), True).sum().backward()  # one step together
    return model


def other_branch() -> None:
    ready()(torch.ones(3, 4), dist.get_rank() == 0)


def other_phase() -> None:
    model = ready()
    out = model(torch.ones(3, 4), True)
    if dist.get_rank() == 0:
        model(torch.ones(3, 4), True)
    else:
        out.sum().backward()


def other_parameters() -> None:
    model = ready()
    with model.zfx.gathered("first.weight" if dist.get_rank() == 0 else "second.weight"):
        pass


def raises() -> None:
    out = ready()(torch.ones(3, 4), True)
    if dist.get_rank() == 1:
        raise ValueError("poisoned batch")
    out.sum().backward()


def exits() -> None:
    out = ready()(torch.ones(3, 4), True)
    if dist.get_rank() == 1:
        os._exit(3)
    out.sum().backward()


def lingers() -> float:
    out = ready()(torch.ones(3, 4), True)
    if dist.get_rank() == 1:
        time.sleep(2 * TIMEOUT_S)
        return 0.0
    start = time.monotonic()
    with pytest.raises(zfx.RankMismatch, match="rank 1 did not come") as caught:
        out.sum().backward()
    assert caught.value.ranks == (1,)
    return time.monotonic() - start


@pytest.mark.parametrize(("job", "difference"), [
    (other_branch, "second.weight"), (other_phase, "backward"), (other_parameters, "second.weight"),
])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_difference_is_named_on_every_rank(job, difference: str, world_size: int) -> None:  # type: ignore[no-untyped-def]
    outcomes = rank_outcomes(world_size, job, timeout=60)
    assert [o.error and o.error.type_name for o in outcomes] == ["RankMismatch"] * world_size
    for rank, outcome in enumerate(outcomes):
        assert outcome.error.attributes["ranks"] and rank not in outcome.error.attributes["ranks"]
        assert difference in outcome.error.message and "rank 0" in outcome.error.message


@pytest.mark.parametrize("job", [raises, exits])
def test_a_rank_that_goes_is_named(job) -> None:  # type: ignore[no-untyped-def]
    first, second = rank_outcomes(2, job, timeout=60)
    assert first.error and first.error.type_name == "RankMismatch" and first.error.attributes["ranks"] == (1,), str(first)
    if job is raises:
        assert second.error and second.error.first_line == "ValueError: poisoned batch"
    else:
        assert second.status == "crash"


def test_a_rank_that_stays_away_is_named_within_the_timeout() -> None:
    assert 0 < run_ranks(2, lingers, timeout=60)[0] <= TIMEOUT_S + 1


def after_a_mismatch() -> tuple[str, str]:
    model = ready()
    messages = []
    for _ in range(2):
        with pytest.raises(zfx.RankMismatch) as caught:
            model(torch.ones(3, 4), dist.get_rank() == 0)
        messages.append(str(caught.value))
    return messages[0], messages[1]


def test_nothing_runs_after_a_mismatch() -> None:
    for first, second in run_ranks(2, after_a_mismatch, timeout=60):
        assert first in second and "earlier execution" in second


class Counting(nn.Module):
    """Calls that take long to capture on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.lin(x))
        return x


def slow_capture() -> float:
    torch.manual_seed(0)
    model = zfx.compile(Counting(), timeout=8.0)
    model(torch.ones(2, 4)).sum().backward()
    build_extract = zfx.build.extract
    if dist.get_rank() == 1:  # this rank captures anew, and takes longer than the timeout
        def slow(*args):  # type: ignore[no-untyped-def]
            time.sleep(10)
            return build_extract(*args)

        zfx.build.extract = slow
    try:
        out = model(torch.ones(3 + dist.get_rank(), 4) if dist.get_rank() else torch.ones(2, 4))
    finally:
        zfx.build.extract = build_extract
    out.sum().backward()
    return float(model.lin.weight.grad.full_tensor().sum())


def test_a_rank_that_compiles_for_long_is_waited_for() -> None:
    values = run_ranks(2, slow_capture, timeout=90)
    assert values[0] == values[1]
