"""For tests of planning passes: random programs, limits and costs, and what must hold of every schedule. Needs hypothesis.

    from hypothesis import given
    from zfx.passes import plan
    from zfx.testing import assert_valid, problems

    @given(problems())
    def test_my_pass(problem):
        assert_valid(my_pass(plan(*problem)))

Programs are small and so are their numbers, so that limits, ties and full buckets are met often; times and bytes are whole
numbers, so that equal means equal. docs/passes.md shows how a pass is tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

try:
    from hypothesis import strategies as st
except ImportError:
    raise ImportError("zfx.testing needs hypothesis, which zfx itself does not: pip install hypothesis") from None

from .costs import CostModel, Link
from .dump import from_json, to_json
from .ir import Limits, Parameter, Phase, Program, Schedule, Step, Window
from .replay import replay
from .simulate import simulate
from .verify import verify

_SMALL = st.integers(0, 12)
_LINKS = st.builds(Link, st.sampled_from([0.0, 1.0, 8.0]), st.sampled_from([1.0, 4.0, float("inf")]))
_COSTS = st.builds(
    CostModel,
    _LINKS,
    _LINKS,
    launch_us=st.sampled_from([0.0, 1.0]),
    pack_threshold_bytes=st.sampled_from([0, 20, 1000]),
    all_reduce=_LINKS,
)


# ------------------------------------------------------------------------------------------------------------ strategies


def costs() -> st.SearchStrategy[CostModel]:
    """Costs in whole numbers, free and infinitely fast links among them."""
    return _COSTS


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    max_parameters: int = 5,
    max_steps: int = 6,
    with_escapes: bool = True,
    busy: bool = False,
    costs: CostModel | None = None,
    windows: Sequence[Window] = ("only",),
    uniform: bool | None = False,
    replicas: Sequence[int] = (1,),
    reshard_to: Sequence[int] = (0,),
) -> Program:
    """A forward, and mostly a turn and a backward; any step reads anything, and gradients complete anywhere in the backward.

    Args:
        max_parameters, max_steps: most parameters, and most steps in each of forward and backward.
        with_escapes: some parameters may leave as outputs.
        busy: leave nothing out: two parameters or more, each of some size and with a gradient, a backward, and reads at every step.
        costs: these costs. Default: any of `costs()`.
        windows: which places among micro-batches to draw from, for programs with a backward; others are "only".
        uniform: what `Program.uniform` is; None: either.
        replicas: how many replicas there may be, of two ranks each.
        reshard_to: what `Program.reshard_to` may be: 0, or any number; replicas then have twice as many ranks.
    """
    num_replicas, reshard = draw(st.sampled_from(replicas)), draw(st.sampled_from(reshard_to))
    least = 2 if busy else 0
    size_of = st.integers(1, 12) if busy else _SMALL
    trained_or_not = st.just(True) if busy else st.booleans()
    shape = st.tuples(size_of, st.sampled_from([2, 4]), trained_or_not, st.integers(0, 2))
    shapes = draw(st.lists(shape, min_size=least, max_size=max_parameters))
    across = [draw(st.integers(0, 3 * size)) if trained and num_replicas > 1 else 0 for size, _, trained, _ in shapes]
    parameters = tuple(
        Parameter(f"p{i}", size, size * width, size * width if trained else 0, max(0, size - padding), across[i])
        for i, (size, width, trained, padding) in enumerate(shapes)
    )
    indices = st.integers(0, max(len(shapes) - 1, 0))
    reads = st.lists(indices, min_size=int(busy), max_size=3, unique=True) if shapes else st.just([])
    rows = st.lists(st.tuples(reads, _SMALL, _SMALL, _SMALL), min_size=least, max_size=max_steps)
    forward, has_backward = draw(rows), busy or draw(st.booleans())
    backward = draw(rows) if has_backward else []
    priced = costs or draw(_COSTS)
    if reshard and costs is None:
        priced = replace(priced, secondary=draw(st.one_of(st.none(), _LINKS)))
    completed_at = {i: draw(st.integers(0, len(backward) - 1)) for i, s in enumerate(shapes) if backward and s[2]}
    escapes = draw(st.lists(indices, max_size=2, unique=True)) if shapes and with_escapes and draw(st.booleans()) else []
    steps = [_step(f"f{t}", "forward", row, ()) for t, row in enumerate(forward)]
    if has_backward:
        turn_reads = [i for i in escapes if draw(st.booleans())]
        steps.append(_step("turn", "turn", (turn_reads, draw(_SMALL), draw(_SMALL), 0), ()))
    for t, row in enumerate(backward):
        steps.append(_step(f"b{t}", "backward", row, tuple(f"p{i}" for i in completed_at if completed_at[i] == t)))
    return Program(
        parameters,
        tuple(steps),
        world_size=max(2, 2 * reshard) * num_replicas,
        escapes=tuple(f"p{i}" for i in escapes),
        static_bytes=draw(_SMALL),
        costs=priced,
        uniform=draw(st.booleans()) if uniform is None else uniform,
        window=draw(st.sampled_from(windows)) if has_backward else "only",
        replicas=num_replicas,
        reshard_to=reshard,
    )


def _step(name: str, phase: Phase, row: tuple[list[int], int, int, int], completes: tuple[str, ...]) -> Step:
    reads, other_bytes, duration, nominal = row
    return Step(name, phase, "op", tuple(f"p{i}" for i in reads), completes, other_bytes, float(duration), float(nominal))


@st.composite
def limits(draw: st.DrawFn, program: Program, *, with_budget: bool | None = None) -> Limits:
    """Limits under which the program has a schedule: often exactly enough, sometimes ample.

    Args:
        with_budget: whether there is a `memory_budget`; None: either.
    """
    slack = st.one_of(st.just(0), st.integers(0, 40), st.just(10_000))
    budget = draw(st.booleans()) if with_budget is None else with_budget
    sizes = st.sampled_from([0, 10, 20, 10_000])
    return Limits(
        max_live_parameters=smallest_max_live(program) + draw(slack),
        max_reuse_distance=draw(sizes),
        prefetch_bucket_size=draw(sizes),
        reduce_bucket_size=draw(sizes),
        param_persistence_threshold=draw(st.sampled_from([0, 5, 10_000])),
        memory_budget=smallest_budget(program) + draw(st.one_of(slack, st.integers(0, 200))) if budget else None,
    )


@st.composite
def problems(draw: st.DrawFn, *, with_budget: bool | None = None, **options: object) -> tuple[Program, Limits]:
    """A program and limits that it fits: the arguments of `zfx.passes.plan`.

    Args:
        with_budget: as in `limits`.
        options: as in `programs`.
    """
    program = draw(programs(**options))  # type: ignore[arg-type]
    return program, draw(limits(program, with_budget=with_budget))


# -------------------------------------------------------------------------------------------------- programs for exact numbers


def chain(
    n: int,
    *,
    size: int = 10,
    duration_us: float = 50.0,
    costs: CostModel | None = None,
    repeat: int = 1,
    replicas: int = 1,
    reshard_to: int = 0,
) -> Program:
    """n equal layers: layer i reads parameter i in the forward and, in reverse order, in the backward.

    forward  p0 p1 ... pn-1  | turn |  backward  pn-1 ... p1 p0

    Args:
        size: elements of each parameter, of 4 bytes each.
        repeat: steps that each layer takes, in the forward and in the backward.
        replicas: of two ranks each.
        reshard_to: replicas then have twice as many ranks.
    """
    num_shards = max(2, 2 * reshard_to)
    across = 2 * size if replicas > 1 else 0
    parameters = tuple(Parameter(f"p{i}", size, 4 * size, 4 * size, across_bytes=across) for i in range(n))
    steps = [
        Step(f"f{i}.{k}", "forward", "op", (f"p{i}",), (), 8, duration_us, duration_us)
        for i in range(n)
        for k in range(repeat)
    ]
    steps.append(Step("turn", "turn"))
    for i in reversed(range(n)):
        for k in range(repeat):
            done = (f"p{i}",) if k == repeat - 1 else ()
            steps.append(Step(f"b{i}.{k}", "backward", "op", (f"p{i}",), done, 8, duration_us, duration_us))
    return Program(
        parameters, tuple(steps), num_shards * replicas, costs=costs or CostModel(), replicas=replicas, reshard_to=reshard_to
    )


# ----------------------------------------------------------------------------------------------------- what must hold


def assert_valid(schedule: Schedule) -> None:
    """Raise unless the verifier accepts the schedule, the simulator's account of it adds up, and its JSON reads back the same.

    Raises:
        ScheduleError: a rule of the verifier is broken.
        AssertionError: time is lost or spent twice, a channel carries two collectives at once, the simulator and the replay
            disagree about what is held, or the JSON reads back as another schedule.

    Example:
        >>> from zfx.passes import plan
        >>> assert_valid(plan(chain(3), Limits()))
    """
    verify(schedule)
    for what, holds in _accounts(schedule):
        if not holds:
            raise AssertionError(f"{what}, in\n{schedule}")
    if from_json(to_json(schedule)) != schedule:
        raise AssertionError(f"the JSON reads back as another schedule than\n{schedule}")


def _accounts(schedule: Schedule) -> Iterator[tuple[str, bool]]:
    """What must hold of every simulation, in words, and whether it does."""
    result, steps = simulate(schedule), schedule.program.steps
    spent = result.compute_us + result.overhead_us + result.exposed_us
    yield "the finish is not the sum of compute, overhead and exposed time", _same(result.finish_us, spent)
    starts = [0.0, *(time.end_us for time in result.steps)]
    yield "a step starts before the one before it ends", all(t.start_us >= end for t, end in zip(result.steps, starts))
    lasting = all(_same(time.end_us - time.start_us, step.duration_us) for time, step in zip(result.steps, steps))
    yield "a step does not last as long as the program says", lasting
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        spans = [span for span in result.spans if span.kind == kind]
        free = [0.0, *(span.end_us for span in spans)]
        in_turn = all(span.start_us >= max(span.launch_us, end) for span, end in zip(spans, free))
        yield f"an {kind} starts before its launch, or while its channel is taken", in_turn
        yield f"an {kind} does not stall compute until it is over", all(
            _same(span.exposed_us, max(0.0, span.end_us - span.wait_us)) for span in spans
        )
    held = [(moment.parameters + moment.packing, moment.secondary, moment.total) for moment in result.moments]
    replayed = [(s.gathered_bytes + s.packing_bytes, s.secondary_bytes, s.total_bytes) for s in replay(schedule)]
    yield "the simulator and the replay disagree about what is held", held == replayed


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6)


def smallest_max_live(program: Program) -> int:
    """The most elements that one step needs: what it reads and what has escaped. The definition, in quadratic time."""
    return max((_needed(program, t, "num_elements") for t in range(len(program.steps))), default=0)


def smallest_budget(program: Program) -> int:
    """The most bytes that one step or point needs, every gradient reduced alone where it completes. By definition."""
    return max(bytes_needed(program), default=0)


def bytes_needed(program: Program) -> list[int]:
    """By step, with what is reduced just before it (and, for the last, just after it)."""
    sizes, needed = {p.name: p for p in program.parameters}, []
    for t, step in enumerate(program.steps):
        grads = sum(sizes[name].grad_bytes for name in step.completes)
        needed.append(program.static_bytes + step.other_bytes + _needed(program, t, "num_bytes") + grads)
    for t, step in enumerate(program.steps):
        last = t + 1 == len(program.steps)
        other = 0 if last else program.steps[t + 1].other_bytes
        escaped = sum(sizes[name].num_bytes for name in program.escapes if any(name in s.reads for s in program.steps[: t + 1]))
        completed = [sizes[name].grad_bytes for name in step.completes]
        across = [sizes[name].across_bytes for name in step.completes]
        exchange = max((sum(completed[i:]) + completed[i] for i in range(len(completed))), default=0)
        exchange = max((exchange, *(sum(completed[i + 1 :]) + across[i] for i in range(len(across)))))
        at = min(t + 1, len(program.steps) - 1)
        needed[at] = max(needed[at], program.static_bytes + other + escaped + exchange)
    return needed


def _needed(program: Program, t: int, unit: str) -> int:
    sizes = {p.name: getattr(p, unit) for p in program.parameters}
    escaped = {name for name in program.escapes if any(name in s.reads for s in program.steps[: t + 1])}
    return sum(sizes[name] for name in escaped | set(program.steps[t].reads))


__all__ = [
    "assert_valid",
    "bytes_needed",
    "chain",
    "costs",
    "limits",
    "problems",
    "programs",
    "smallest_budget",
    "smallest_max_live",
]
