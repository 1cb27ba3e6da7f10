"""Passes that users bring: errors name them, ranks must bring the same ones, and `zfx.testing` gives what it says.

The example's pass is tested here as docs/passes.md tells users to test theirs.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from torch import nn

import zfx
from examples.custom_pass import most_steps_ahead, prefetch_at_most
from tests.harness import rank_outcomes, run_ranks
from zfx.ir import Schedule
from zfx.passes import PIPELINE, plan, stages
from zfx.replay import replay
from zfx.testing import assert_valid, chain, problems, programs
from zfx.verify import verify

ROOT = Path(__file__).resolve().parent.parent
RELEASE_ALL = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)
FIRST = PIPELINE[0]  # makes a whole schedule from the program alone


# ------------------------------------------------------------------------------------------- passes that break the contract


def forgets_waits(schedule: Schedule) -> Schedule:
    return replace(schedule, instructions=tuple(i for i in schedule.instructions if i.kind != "wait"))


def forgets_to_return(schedule: Schedule) -> None:
    prefetch_at_most(schedule, num_steps=1)


def raises(schedule: Schedule) -> Schedule:
    return {}[schedule.kept]  # type: ignore[index]


def mutates(schedule: Schedule) -> Schedule:
    schedule.kept = ()  # type: ignore[misc]
    return schedule


def changes_the_program(schedule: Schedule) -> Schedule:
    return replace(schedule, program=replace(schedule.program, static_bytes=1))


def changes_the_limits(schedule: Schedule) -> Schedule:
    return replace(schedule, limits=zfx.Limits())


def takes_another_argument(schedule: Schedule, *, num_steps: int) -> Schedule:
    return schedule


class Forgetful:
    def __call__(self, schedule: Schedule) -> Schedule:
        return forgets_waits(schedule)


@pytest.mark.parametrize(("broken", "name", "says"), [
    (forgets_to_return, "forgets_to_return", "returned NoneType, not a Schedule"),
    (raises, "raises", "raised KeyError"),
    (mutates, "mutates", "raised FrozenInstanceError: cannot assign to field 'kept'"),
    (changes_the_program, "changes_the_program", "returned a schedule of another program"),
    (changes_the_limits, "changes_the_limits", "returned a schedule of another limits"),
    (takes_another_argument, "takes_another_argument", "raised TypeError: .*num_steps"),
    (partial(changes_the_limits), "changes_the_limits", "returned a schedule of another limits"),
    (lambda schedule: 7, "<lambda>", "returned int"),
])
@pytest.mark.parametrize("place", [0, 3, len(PIPELINE)])
def test_a_pass_that_breaks_the_contract_is_named(broken, name: str, says: str, place: int) -> None:  # type: ignore[no-untyped-def]
    passes = [*PIPELINE[:place], broken, *PIPELINE[place:]]
    with pytest.raises(zfx.PassError, match=f"^pass '{name}' {says}") as caught:
        plan(chain(3), RELEASE_ALL, passes=passes)
    assert caught.value.pass_name == name


def test_the_cause_of_what_a_pass_raised_is_kept() -> None:
    with pytest.raises(zfx.PassError) as caught:
        plan(chain(3), RELEASE_ALL, passes=[raises])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(("broken", "name"), [(forgets_waits, "forgets_waits"), (Forgetful(), "Forgetful")])
@pytest.mark.parametrize("place", [1, 5, len(PIPELINE)])
def test_the_pass_that_broke_the_schedule_is_named_even_if_a_later_one_mends_it(broken, name, place) -> None:  # type: ignore[no-untyped-def]
    passes = [*PIPELINE[:place], broken, FIRST]
    with pytest.raises(zfx.ScheduleError, match=rf"^\[launched_once\] after pass '{name}': ") as caught:
        plan(chain(3), RELEASE_ALL, check=verify, passes=passes)
    assert (caught.value.rule, caught.value.pass_name) == ("launched_once", name)


def test_a_list_that_never_makes_a_schedule_is_refused() -> None:
    with pytest.raises(zfx.ScheduleError, match="gathered_before_use") as caught:
        plan(chain(3), RELEASE_ALL, check=verify, passes=[lambda schedule: schedule])
    assert caught.value.pass_name == "<lambda>"
    with pytest.raises(ValueError, match="at least one pass"):
        plan(chain(3), RELEASE_ALL, check=verify, passes=[])


def test_errors_of_zfx_pass_through_a_users_pass() -> None:
    def tighter(schedule: Schedule) -> Schedule:
        plan(schedule.program, zfx.Limits(max_live_parameters=1))
        return schedule

    with pytest.raises(zfx.InfeasibleBudget):
        plan(chain(3), RELEASE_ALL, passes=[*PIPELINE, tighter])


def test_the_built_in_list_is_verified_once_and_a_users_after_every_pass() -> None:
    def seen(passes) -> list[Schedule]:  # type: ignore[no-untyped-def]
        schedules: list[Schedule] = []
        result = plan(chain(3), RELEASE_ALL, check=schedules.append, passes=passes)
        assert schedules[-1] is result
        return schedules

    assert len(seen(PIPELINE)) == len(seen(list(PIPELINE))) == 1
    mine = [*PIPELINE, partial(prefetch_at_most, num_steps=1)]
    assert seen(mine) == [schedule for _, schedule in stages(chain(3), RELEASE_ALL, mine)]


# -------------------------------------------------------------------------------------------------------- zfx.compile


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize(("arguments", "error", "says"), [
    (dict(passes=forgets_waits), TypeError, "a list of functions.*PIPELINE, my_pass"),
    (dict(passes="launch_late"), TypeError, "a list of functions"),
    (dict(passes=iter(PIPELINE)), TypeError, "a list of functions"),
    (dict(passes=[*PIPELINE, "launch_late"]), TypeError, "functions from Schedule to Schedule, got 'launch_late'"),
    (dict(passes=[]), ValueError, "at least one pass"),
    (dict(uniform=1), TypeError, "uniform must be True or False"),
])
def test_wrong_arguments_are_refused_when_compiling(arguments: dict, error: type[Exception], says: str) -> None:  # type: ignore[type-arg]
    model = mlp()
    with pytest.raises(error, match=says):
        zfx.compile(model, 2, **arguments)
    assert type(model) is nn.Sequential and not hasattr(model[0].weight, "_local_tensor")


@pytest.mark.parametrize(("broken", "error"), [(forgets_to_return, zfx.PassError), (forgets_waits, zfx.ScheduleError)])
def test_the_error_is_the_users_not_one_of_capturing(broken, error) -> None:  # type: ignore[no-untyped-def]
    model = zfx.compile(mlp(), 2, passes=[*PIPELINE, broken])
    with pytest.raises(error) as caught:
        model.zfx.plan(torch.ones(3, 4))
    assert caught.value.pass_name == broken.__name__


def test_a_copy_of_the_model_keeps_the_passes_and_the_promise() -> None:
    model = zfx.compile(mlp(), 2, limits=RELEASE_ALL, passes=[FIRST], uniform=True)
    copied, usual = copy.deepcopy(model), zfx.compile(mlp(), 2, limits=RELEASE_ALL)
    schedules = [m.zfx.plan(torch.ones(3, 4)) for m in (model, copied, usual)]
    assert schedules[0] == schedules[1] == FIRST(Schedule(schedules[0].program, RELEASE_ALL))
    assert [s.program.uniform for s in schedules] == [True, True, False]
    assert schedules[0].buckets != schedules[2].buckets


# ----------------------------------------------------------------------------------------------------------- on two ranks


def gradients(passes: tuple, uniform: bool, rows: tuple[int, int]) -> list[torch.Tensor]:  # type: ignore[type-arg]
    model = zfx.compile(mlp(), limits=RELEASE_ALL, passes=passes, uniform=uniform, timeout=20)
    x = torch.linspace(-1.0, 1.0, 4 * rows[dist.get_rank()]).reshape(-1, 4)
    model(x).square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def other_passes_on_rank_1() -> None:
    gradients(PIPELINE if dist.get_rank() == 0 else (FIRST,), False, (3, 3))


def gradients_by_several_lists() -> list[list[torch.Tensor]]:
    lists = (PIPELINE, (FIRST, partial(prefetch_at_most, num_steps=1)))
    return [gradients(passes, False, (3, 5)) for passes in lists]


def test_passes_change_no_bit_of_the_result() -> None:
    for usual, others in run_ranks(2, gradients_by_several_lists, timeout=180):
        assert all(torch.equal(a, b) for a, b in zip(usual, others, strict=True))


def test_ranks_with_other_passes_are_told() -> None:
    for outcome in rank_outcomes(2, other_passes_on_rank_1, timeout=60):
        assert outcome.error and outcome.error.type_name == "RankMismatch", str(outcome)
        assert "all_gather of 0.weight" in outcome.error.attributes["first_difference"]


def test_ranks_that_break_the_promise_of_equal_shapes_are_told_to_drop_it() -> None:
    same = run_ranks(2, gradients, PIPELINE, True, (3, 3), timeout=180)
    assert all(torch.equal(a, b) for a, b in zip(*same, strict=True))
    for outcome in rank_outcomes(2, gradients, PIPELINE, True, (3, 5), timeout=60):
        assert outcome.error and outcome.error.type_name == "RankMismatch", str(outcome)
        assert "drop uniform=True" in outcome.error.message


# ----------------------------------------------------------------------------------------------------------- zfx.testing


def test_without_hypothesis_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "zfx.testing")
    with pytest.raises(ImportError, match=r"^zfx.testing needs hypothesis.*pip install hypothesis$") as caught:
        importlib.import_module("zfx.testing")
    assert caught.value.__suppress_context__


@given(problems(), st.data())
def test_a_schedule_that_lost_an_instruction_is_not_valid(problem, data) -> None:  # type: ignore[no-untyped-def]
    schedule = plan(*problem)
    assert_valid(schedule)
    if schedule.instructions:
        lost = data.draw(st.integers(0, len(schedule.instructions) - 1))
        with pytest.raises(zfx.ScheduleError):
            assert_valid(replace(schedule, instructions=schedule.instructions[:lost] + schedule.instructions[lost + 1 :]))


@given(programs(windows=("first", "middle", "last"), uniform=None))
def test_only_programs_with_a_backward_have_a_place_among_micro_batches(program) -> None:  # type: ignore[no-untyped-def]
    assert (program.window == "only") == (program.turn is None)


@pytest.mark.parametrize("wanted", [
    lambda p: p.uniform, lambda p: not p.uniform, lambda p: p.window == "first", lambda p: p.window == "last",
    lambda p: p.escapes and p.turn, lambda p: any(s.nominal_us != s.duration_us for s in p.steps),
])  # fmt: skip
def test_the_strategies_reach_what_they_say(wanted) -> None:  # type: ignore[no-untyped-def]
    unshrunk = settings(max_examples=2000, phases=[Phase.generate], database=None)
    assert wanted(find(programs(windows=("first", "last"), uniform=None), wanted, settings=unshrunk))


@given(programs())
def test_by_default_programs_are_neither_uniform_nor_one_of_several_micro_batches(program) -> None:  # type: ignore[no-untyped-def]
    assert (program.uniform, program.window) == (False, "only")


# ----------------------------------------------------------------------------------------------------------- the example


@given(problems(), st.integers(0, 12))
def test_the_example_caps_every_launch_and_keeps_the_rest(problem, num_steps) -> None:  # type: ignore[no-untyped-def]
    before = plan(*problem)
    after = prefetch_at_most(before, num_steps=num_steps)
    assert_valid(after)
    assert most_steps_ahead(after) <= num_steps
    assert prefetch_at_most(after, num_steps=num_steps) == after
    if most_steps_ahead(before) <= num_steps:
        assert after == before
    assert (after.buckets, after.kept) == (before.buckets, before.kept)
    launches = {s: {i.bucket: i.point for i in s.instructions if i.kind == "all_gather"} for s in (before, after)}
    waits = {i.bucket: i.point for i in before.instructions if i.kind == "wait"}
    assert launches[after] == {b: max(p, waits[b] - num_steps) for b, p in launches[before].items()}


@given(problems(), st.integers(0, 12))
def test_the_example_never_holds_more(problem, num_steps) -> None:  # type: ignore[no-untyped-def]
    def held(schedule: Schedule) -> list[int]:
        """While each step runs."""
        return [state.total_bytes for state in replay(schedule) if state.step is not None]

    def most(schedule: Schedule) -> int:
        return max((state.total_bytes for state in replay(schedule)), default=0)

    before = plan(*problem)
    after = prefetch_at_most(before, num_steps=num_steps)
    assert all(a <= b for a, b in zip(held(after), held(before), strict=True)) and most(after) <= most(before)


def test_the_example_holds_one_layer_on_a_chain_without_prefetching() -> None:
    slow = zfx.Link(latency_us=0.0, bytes_per_us=0.1)
    program, limits = chain(6, costs=zfx.CostModel(gather=slow, reduce=slow)), replace(RELEASE_ALL, prefetch_bucket_size=0)
    usual = plan(program, limits)
    capped = plan(program, limits, check=verify, passes=[*PIPELINE, partial(prefetch_at_most, num_steps=0)])
    assert most_steps_ahead(usual) > 0
    assert max(state.num_live for state in replay(capped)) == 1


@pytest.mark.slow
def test_the_example_runs_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "custom_pass.py"), "--steps-ahead", "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pattern = "{} +gathers launched up to ([0-9]+) steps ahead, ([0-9,]+) bytes"
    usual, capped = (re.search(pattern.format(name), done.stdout) for name in ("usual", "capped"))
    assert usual and capped and int(usual[1]) > int(capped[1]) == 3
    assert int(usual[2].replace(",", "")) > int(capped[2].replace(",", ""))
