"""The certificate never claims more than the truth, and misses it by little: against exhaustive search, formulas and limits."""

from __future__ import annotations

import doctest
import gc
import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zfx.bounds
import zfx.certificate
from tests.optimum import least_time
from tests.passes import oracle
from tests.passes.test_pipeline import calls
from tests.strategies import chain, link_costs, problems, programs, smallest_budget, smallest_max_live
from zfx.bounds import bounds_of
from zfx.certificate import Certificate, certify
from zfx.costs import CostModel, Link
from zfx.ir import Limits, Parameter, Program, Schedule, Step
from zfx.passes import plan, stages
from zfx.simulate import simulate
from zfx.verify import verify

NO_REUSE_LIMIT = Limits(max_reuse_distance=2**62, param_persistence_threshold=0)


def claims_the_truth(certificate: Certificate) -> bool:
    return min(certificate.time_ratio, certificate.volume_ratio, certificate.peak_ratio) >= 1


# ---------------------------------------------------------------------------------------------------- against the optimum


def instance(seed: int) -> tuple[Program, Limits]:
    """A small problem: two to four parameters in a forward and a backward that reads what the forward read, mostly backwards."""
    rng = random.Random(seed)
    names = [f"p{i}" for i in range(rng.randint(2, 4))]
    sizes = [rng.randint(1, 6) for _ in names]
    parameters = tuple(Parameter(name, size, 4 * size, 4 * size) for name, size in zip(names, sizes))
    links = [Link(rng.choice([0.0, 1.0, 8.0]), rng.choice([1.0, 4.0, 8.0])) for _ in range(2)]
    costs = CostModel(
        *links,
        launch_us=rng.choice([0.0, 1.0]),
        pack_threshold_bytes=0,
        busy_bytes_per_us=rng.choice([math.inf, math.inf, 16.0]),
    )
    reads = [tuple(sorted({name, *rng.sample(names, rng.randint(0, 1))})) for name in names]
    row = [(tuple(r), float(rng.randint(0, 16)), rng.randint(0, 12)) for r in reads]
    steps = [Step(f"f{t}", "forward", "op", r, (), other, us) for t, (r, us, other) in enumerate(row)]
    steps.append(Step("turn", "turn"))
    order = list(reversed(range(len(names)))) if rng.random() < 0.7 else rng.sample(range(len(names)), len(names))
    for t in order:
        r, us, other = row[t]
        steps.append(Step(f"b{t}", "backward", "op", r, (names[t],), other, us))
    program = Program(parameters, tuple(steps), 2, costs=costs, uniform=True, static_bytes=rng.randint(0, 12))
    budget = smallest_budget(program) + rng.choice([0, 10, 40, 100])
    limits = replace(
        NO_REUSE_LIMIT,
        max_live_parameters=smallest_max_live(program) + rng.choice([0, 2, 4, 8, 100]),
        prefetch_bucket_size=rng.choice([4, 8, 100]),
        reduce_bucket_size=rng.choice([4, 100]),
        memory_budget=rng.choice([None, None, budget]),
    )
    return program, limits


def compare(seeds: range) -> None:
    """Planner, optimum and bound on so many instances: the bound is never above the optimum. Prints mean and worst ratios."""
    planned, proven = [], []
    for seed in seeds:
        schedule = plan(*instance(seed), check=verify)
        certificate = certify(schedule)
        best, optimum = least_time(*instance(seed), below=certificate.time_us)
        assert claims_the_truth(certificate), seed
        if optimum is not None:
            verify(optimum)
            assert simulate(optimum).finish_us == best < certificate.time_us
            assert claims_the_truth(certify(optimum)), seed
        assert certificate.time_bound_us <= best, seed
        planned.append(certificate.time_us / best)
        proven.append(best / certificate.time_bound_us)
    for what, ratios in (("planner / optimum", planned), ("optimum / bound", proven)):
        print(f"\n{what}: mean {sum(ratios) / len(ratios):.4f}, worst {max(ratios):.4f} of {len(ratios)}", end="")


def test_the_bound_is_below_the_optimum_on_small_instances() -> None:
    compare(range(30))


@pytest.mark.slow
def test_the_bound_is_below_the_optimum_on_300_instances() -> None:
    compare(range(300))


def test_the_search_finds_what_everything_early_cannot() -> None:
    """Two layers, room for both, no latency: gathering costs 2 x 10 us, of which the second hides behind the first step."""
    program = chain(2, size=10, duration_us=10.0, costs=link_costs(0.0, 4.0))
    best, optimum = least_time(program, NO_REUSE_LIMIT)
    assert best == 10 + 4 * 10 + 10  # one gather, four steps, the last reduction
    assert optimum is not None and simulate(optimum).finish_us == best


@given(problems(max_parameters=3, max_steps=3))
@settings(max_examples=25)
def test_no_plan_is_faster_than_the_search(problem) -> None:
    program, limits = problem
    schedule = plan(program, limits)
    best, optimum = least_time(program, limits, below=math.nextafter(simulate(schedule).finish_us, math.inf))
    assert best <= simulate(schedule).finish_us
    assert optimum is not None
    verify(optimum)
    assert claims_the_truth(certify(optimum))


# ------------------------------------------------------------------------------------------------- for every schedule


@given(problems())
@settings(max_examples=60)
def test_every_stage_of_the_pipeline_is_at_or_above_its_bounds(problem) -> None:
    for _, schedule in stages(*problem):
        assert claims_the_truth(certify(schedule))


@given(problems(with_budget=True, busy=True, costs=link_costs(30.0, 1.0, pack_threshold_bytes=1000)))
@settings(max_examples=200)
def test_where_bytes_are_short_and_transfers_slow(problem) -> None:
    assert claims_the_truth(certify(plan(*problem)))


@given(problems(), st.data())
def test_wherever_gathers_are_launched(problem, data) -> None:
    schedule = plan(*problem)
    points, least = [], 0
    for wait in oracle.waits(schedule):
        points.append(least := data.draw(st.integers(least, wait)))
    moved = oracle.at_launches(schedule, points)
    try:
        verify(moved)
    except zfx.ScheduleError:
        return
    assert claims_the_truth(certify(moved))


@given(programs())
def test_more_memory_never_raises_a_bound(program) -> None:
    rows = []
    for extra in (0, 3, 10, 1000):
        limits = replace(
            NO_REUSE_LIMIT,
            max_live_parameters=smallest_max_live(program) + extra,
            memory_budget=smallest_budget(program) + 4 * extra,
        )
        bounds = bounds_of(Schedule(program, limits))
        rows.append((bounds.volume_bytes, *bounds.times_us.values()))
    for above, below in itertools.pairwise(rows):
        assert all(a >= b or math.isclose(a, b, rel_tol=1e-9) for a, b in zip(above, below))


@given(programs())
def test_the_peaks_bound_is_what_limits_are_refused_by(program) -> None:
    assert max(bounds_of(Schedule(program, Limits())).peaks_bytes.values()) <= max(smallest_budget(program), program.static_bytes)


# -------------------------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("k", range(1, 13))
def test_a_chain_with_room_for_k_layers(k: int) -> None:
    """2n - k gathers are needed, and the planner's schedule has them: the bound is exact."""
    n = 12
    schedule = plan(chain(n, costs=CostModel()), replace(NO_REUSE_LIMIT, max_live_parameters=10 * k), check=verify)
    certificate = certify(schedule)
    assert certificate.volume_bound_bytes == certificate.volume_bytes == 40 * (2 * n - k)
    assert certificate.volume_binds == ("first reads" if k == n else "max_live_parameters")


@pytest.mark.parametrize("k", (1, 5, 12))
def test_a_chain_in_four_windows(k: int) -> None:
    """n + (2M - 1)(n - k) gathers over M micro-batches, since k layers may be carried from each to the next."""
    n = 12
    limits = replace(NO_REUSE_LIMIT, max_live_parameters=10 * k)
    windows = [replace(chain(n), window=window) for window in ("first", "middle", "middle", "last")]
    volumes = [bounds_of(Schedule(program, limits)).volume_bytes for program in windows]
    assert sum(volumes) == 40 * (n + 7 * (n - k))


def test_a_budget_in_bytes_forces_what_elements_do_not() -> None:
    program = chain(4)
    small = replace(NO_REUSE_LIMIT, memory_budget=40 + 8 + 40 + 40)  # two layers and a gradient beside a step's 8 bytes
    certificate = certify(plan(program, small, check=verify))
    assert certificate.volume_binds == "memory_budget"
    assert certificate.volume_bytes >= certificate.volume_bound_bytes > 4 * 40


def test_a_reuse_distance_forces_gathers_and_is_named() -> None:
    certificate = certify(plan(chain(5), Limits(max_reuse_distance=0, param_persistence_threshold=0), check=verify))
    assert (certificate.volume_bound_bytes, certificate.volume_binds) == (40 * 9, "max_reuse_distance")


@pytest.mark.parametrize(
    ("costs", "duration_us", "limits", "binds"),
    [
        (link_costs(0.0, math.inf), 50.0, NO_REUSE_LIMIT, "compute"),
        (CostModel(Link(0.0, 1.0), Link(0.0, math.inf), launch_us=0.0), 0.0, NO_REUSE_LIMIT, "gather channel"),
        (CostModel(Link(0.0, math.inf), Link(0.0, 1.0), launch_us=0.0), 0.0, NO_REUSE_LIMIT, "reduce channel"),
        (link_costs(0.0, 40.0), 50.0, NO_REUSE_LIMIT, "first gather + compute + last reduction"),
        (CostModel(Link(0.0, 1.0), Link(0.0, 40.0), launch_us=0.0), 10.0, NO_REUSE_LIMIT, "critical path"),
        (link_costs(0.0, 4.0), 10.0, replace(NO_REUSE_LIMIT, max_live_parameters=10), "critical path under the limits"),
    ],
)
def test_what_binds_is_named_and_reached(costs: CostModel, duration_us: float, limits: Limits, binds: str) -> None:
    """A chain of equal layers, each gathered alone: the planner reaches every one of these bounds."""
    program = chain(5, duration_us=duration_us, costs=costs)
    certificate = certify(plan(program, limits, check=verify))
    assert (certificate.time_binds, certificate.time_ratio) == (binds, 1.0)


def test_the_step_with_the_peak_is_named() -> None:
    program = Program(
        (Parameter("w", 10, 40, 40),),
        (
            Step("f0", "forward", reads=("w",), other_bytes=5),
            Step("turn", "turn", other_bytes=7),
            Step("b0", "backward", reads=("w",), completes=("w",), other_bytes=6),
        ),
        static_bytes=100,
    )
    peaks = bounds_of(Schedule(program, Limits())).peaks_bytes
    assert peaks == {"shards": 100, "step f0": 145, "step turn": 107, "step b0": 186, "reduction of w": 180}
    certificate = certify(plan(program, Limits()))
    assert (certificate.peak_binds, certificate.peak_bytes, certificate.peak_bound_bytes) == ("step b0", 186, 186)


def test_a_reduction_that_memory_forces_is_waited_for_between_two_steps() -> None:
    """w's gradient does not fit beside the next step, and w itself not beside the exchange: so w is gathered again."""
    program = Program(
        (Parameter("w", 3, 12, 8),),
        (
            Step("f0", "forward"),
            Step("turn", "turn"),
            Step("b0", "backward", reads=("w",), completes=("w",), duration_us=5.0),
            Step("b1", "backward", reads=("w",), other_bytes=5, duration_us=5.0),
        ),
        costs=link_costs(0.0, 1.0),
    )
    best, optimum = least_time(program, replace(NO_REUSE_LIMIT, memory_budget=24))
    assert optimum is not None
    certificate = certify(optimum)
    assert (certificate.volume_bound_bytes, certificate.volume_binds) == (24, "memory_budget")
    assert best == certificate.time_bound_us == 12 + 5 + 8 + 12 + 5


# --------------------------------------------------------------------------------------------------------------- extremes


def test_nothing_at_all() -> None:
    certificate = certify(Schedule(Program((), ()), Limits(memory_budget=0)))
    assert certificate == Certificate(0.0, 0.0, "compute", 0, 0, "first reads", 0, 0, "shards")
    assert (certificate.time_ratio, certificate.volume_ratio, certificate.peak_ratio) == (1.0, 1.0, 1.0)


def test_infinite_times_are_bounds_too() -> None:
    certificate = certify(plan(chain(3, costs=link_costs(math.inf)), Limits()))
    assert certificate.time_us == certificate.time_bound_us == math.inf and certificate.time_ratio == 1.0
    assert Certificate(1.0, 0.0, "", 0, 0, "", 0, 0, "").time_ratio == math.inf


def test_a_schedule_that_does_nothing_is_certified_to_be_too_good_to_be_true() -> None:
    """Bounds hold for what the verifier accepts; anything else may be below them, and is not hidden."""
    certificate = certify(Schedule(chain(3), Limits()))
    assert certificate.volume_ratio == 0.0 and certificate.time_ratio < 1


def test_odd_sizes_are_counted_in_multiples_of_what_they_share() -> None:
    """Two hundred different sizes have too many sums to count: the greatest common divisor is used, and the bound still holds."""
    sizes = random.Random(0).sample(range(10**6, 10**7), 200)
    parameters = tuple(Parameter(f"p{i}", size, 4 * size) for i, size in enumerate(sizes))
    forward = [Step(f"f{i}", "forward", reads=(p.name,), duration_us=5e3) for i, p in enumerate(parameters)]
    backward = [Step(f"b{i}", "backward", reads=(p.name,), duration_us=5e3) for i, p in enumerate(reversed(parameters))]
    program = Program(parameters, (*forward, Step("turn", "turn"), *backward))
    certificate = certify(plan(program, replace(NO_REUSE_LIMIT, max_live_parameters=5 * 10**7), check=verify))
    assert claims_the_truth(certificate) and certificate.volume_ratio < 1.1


def test_a_schedule_is_certified_once_and_forgotten_with_it() -> None:
    schedule = plan(chain(3), Limits())
    gc.collect()
    known = len(zfx.certificate._known)
    certificate = certify(schedule)
    assert certify(schedule) is certificate and len(zfx.certificate._known) == known + 1
    assert certify(replace(schedule)) is not certificate and certify(replace(schedule)) == certificate
    del schedule
    gc.collect()
    assert len(zfx.certificate._known) == known


def test_certifying_is_linear() -> None:
    schedules = [plan(chain(n, repeat=3), Limits(max_live_parameters=100, memory_budget=10_000)) for n in (100, 400)]
    one, four = (calls(lambda s=schedule: certify(s)) for schedule in schedules)
    assert four < 4 * one * 1.25


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(zfx.certificate).failed == 0
    assert doctest.testmod(zfx.bounds).failed == 0
