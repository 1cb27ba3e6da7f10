"""From captured graphs to graphs that run: extract, plan, verify, lower. The compiler's main corridor."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import fx

from . import runtime
from .agreement import digest_of
from .bucket import Transfers
from .costs import CostModel
from .held import Mode, Waiting
from .ir import Bucket, Program, Schedule
from .nothing import Absences, Sources
from .passes import plan
from .passes.extract import extract
from .passes.lower import Part, lower
from .passes.unreduced import holding, joining, with_room
from .passes.window import plan_windows
from .shard import Layout
from .sources import sources_of
from .text import ranks_of
from .verify import verify
from .window import backward_runner, forward_runner

if TYPE_CHECKING:
    from .blueprint import Blueprint

log = logging.getLogger("zfx")


@dataclass(frozen=True)
class Capture:
    """The graphs of one call of a model. They do not depend on the world size, the costs or the limits: capture once, plan often.

    Attributes:
        backward: None for a call without gradients.
        num_outputs: as `extract` takes it.
    """

    layouts: tuple[Layout, ...]
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int | None

    def program(self, world_size: int, costs: CostModel, replicas: int = 1) -> Program:
        """What `world_size` ranks, each with the captured shapes, would run at these costs: one replica of the parameters, or more.

        Raises:
            ValueError: the ranks can't be divided among the replicas.
        """
        if replicas < 1 or world_size % replicas:
            raise ValueError(f"{world_size} ranks can't be divided among {replicas} replicas")
        layouts = [layout.over(world_size, replicas) for layout in self.layouts]
        return extract(self.forward, self.backward, layouts, world_size, costs, self.num_outputs, replicas)


class Planned(Exception):
    """Ends a planning-only call: the plan is made, nothing runs."""


class Captured(Exception):
    """Ends a capture-only call, before anything is planned."""

    def __init__(self, found: Capture) -> None:
        self.found = found
        super().__init__("captured")


_only: Literal["capture", "plan"] | None = None


@contextlib.contextmanager
def only(what: Literal["capture", "plan"]) -> Iterator[None]:
    """Inside, a call ends once its graphs are captured, or planned and lowered, by raising `Captured` or `Planned`."""
    global _only
    _only = what
    try:
        yield
    finally:
        _only = None


def plan_graphs(
    blueprint: Blueprint, forward: fx.GraphModule, backward: fx.GraphModule | None = None, num_outputs: int | None = None
) -> tuple[Schedule, ...]:
    """Verified schedules over a forward and, in training, its backward: one for each kind of micro-batch."""
    captured = Capture(blueprint.layouts, forward, backward, num_outputs)
    if _only == "capture":
        raise Captured(captured)
    start = time.perf_counter()
    settings = blueprint.settings
    program = captured.program(blueprint.world_size, settings.costs, blueprint.replicas)
    program = replace(program, uniform=settings.uniform, reshard_to=settings.reshard_to)
    held_bytes = blueprint.held_bytes() if blueprint.holds else None

    def plan_one(p: Program) -> Schedule:
        most = p if held_bytes is None else with_room(p, held_bytes)
        return replace(plan(most, settings.limits, check=verify, passes=settings.passes), program=p)

    schedules = plan_windows(plan_one, program, settings.accumulate)
    for schedule in schedules[1:-1]:  # put together from the others
        verify(schedule)
    log.info(
        "%s: planned %d steps, %d buckets, kept %d parameters, in %.2f s",
        blueprint.model_name,
        len(program.steps),
        len(schedules[0].buckets),
        len(schedules[0].kept),
        time.perf_counter() - start,
    )
    return schedules


def attach(blueprint: Blueprint, schedules: Sequence[Schedule], forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Leave word for `compile_part`, which AOTAutograd calls with these graphs (or copies of them) later on."""
    numbers = blueprint.add(schedules)
    forward.meta["zfx"], backward.meta["zfx"] = (numbers, "forward"), (numbers, "backward")
    if _only == "plan":  # the backward would only be asked for by a backward
        compile_part(blueprint, backward)


def compile_part(blueprint: Blueprint, gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """What runs in the place of a captured graph: its lowered form or, where micro-batches differ, the one that is due."""
    numbers, phase = gm.meta["zfx"]
    first = _lowered(blueprint, gm, numbers[0], phase)
    last = first if len(numbers) == 1 else _lowered(blueprint, gm, numbers[-1], phase)
    for middle in numbers[1:-1]:
        blueprint.graphs[middle][phase] = last if phase == "forward" else first
    if phase == "forward":
        if len(numbers) == 1 or _only == "plan":
            return _runs(first)
        assert blueprint.window is not None
        return forward_runner(blueprint.window, blueprint.schedules[numbers[0]].carried, cold=_runs(first), warm=_runs(last))
    assert blueprint.held is not None
    backwards = _Backwards(blueprint, gm, numbers)
    held = blueprint.held()
    if _only == "plan" and held is not None and held.depth:
        backwards("hold", last=False)
    return _stop if _only == "plan" else backward_runner(blueprint.window, blueprint.held, backwards)


class _Backwards:
    """The backwards of one captured graph: for what is done with gradients, and whether carried parameters stay. Those that some
    loops never run are planned, verified and lowered when one does."""

    def __init__(self, blueprint: Blueprint, gm: fx.GraphModule, numbers: Sequence[int]) -> None:
        self.blueprint, self.gm, self.numbers = blueprint, gm, numbers
        self.made: dict[tuple[Mode, int], Callable[[list[Any]], Any]] = {}

    def __call__(self, mode: Mode, last: bool) -> Callable[[list[Any]], Any]:
        number = self.numbers[-1 if last else 0]
        if (mode, number) not in self.made:
            self.made[mode, number] = self._make(mode, number)
        return self.made[mode, number]

    def _make(self, mode: Mode, number: int) -> Callable[[list[Any]], Any]:
        blueprint = self.blueprint
        if mode == "reduce":
            return _runs(blueprint.graphs[number]["backward"])
        derive = holding if mode == "hold" else joining
        schedule = derive(blueprint.schedules[number], blueprint.held_bytes())
        verify(schedule)
        (new,) = blueprint.add([schedule])
        blueprint.graphs[new].update((k, g) for k, g in blueprint.graphs[number].items() if k == "forward")
        return _runs(_lowered(blueprint, self.gm, new, "backward", mode))


def compile_inference(blueprint: Blueprint, gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    (number,) = blueprint.add(plan_graphs(blueprint, gm))
    return _runs(_lowered(blueprint, gm, number, "forward"))


def _lowered(
    blueprint: Blueprint, gm: fx.GraphModule, number: int, phase: Literal["forward", "backward"], mode: Mode = "reduce"
) -> fx.GraphModule:
    part = Part(blueprint.schedules[number], phase, mode)
    sources = sources_of(gm, blueprint.names) if phase == "backward" else Sources()
    lowered = lower(gm, part, blueprint.names, _run_plan(blueprint, part, sources), runtime)
    blueprint.graphs[number][phase] = lowered
    return lowered


def _runs(lowered: fx.GraphModule) -> Callable[[list[Any]], Any]:
    return _stop if _only == "plan" else runtime.runner(lowered)


def _stop(args: list[Any]) -> Any:
    raise Planned


_stop._boxed_call = True  # type: ignore[attr-defined]


def _run_plan(blueprint: Blueprint, part: Part, sources: Sources) -> runtime.Plan:
    """What the runtime needs for one of the two graphs, and what ranks compare before they run it."""
    launched = {i.bucket for i in part.instructions() if i.kind in ("all_gather", "reduce_scatter")}
    buckets = [b if b.index in launched else None for b in part.schedule.buckets]
    transfers = [_transfers(blueprint, b, part.gradients == "join") if b else None for b in buckets]
    lines = [
        f"the {part.phase} of {blueprint.model_name}{_micro_batch(part)}{_GRADIENTS[part.gradients]} on "
        f"{ranks_of(part.schedule.program)}",
        *([_promise(part.schedule.program)] if blueprint.settings.uniform else []),
        *(_line(blueprint, b) for b in buckets if b),
    ]
    waiting = None if part.gradients == "reduce" else Waiting(blueprint.held, blueprint.index, blueprint.layouts)
    absences = Absences(sources, [p for b in buckets if b and b.kind == "reduce_scatter" for p in b.parameters])
    carried, reshard_to = part.schedule.carried, blueprint.settings.reshard_to
    return runtime.Plan(transfers, blueprint.channels, lines, carried, blueprint.window, waiting, absences, reshard_to)


_GRADIENTS = {"reduce": "", "hold": " in no_sync(), whose gradients wait", "join": " with the gradients that waited"}


def _micro_batch(part: Part) -> str:
    return {
        ("forward", "first"): " (a micro-batch that finds nothing)",
        ("forward", "last"): " (a micro-batch that finds what the one before it left)",
        ("backward", "first"): " (a micro-batch that others follow)",
        ("backward", "last"): " (the last micro-batch)",
    }.get((part.phase, part.schedule.program.window), "")


def _promise(program: Program) -> str:
    """What follows from the shapes, for ranks that say they are the same. Told even where the plans happen to be equal: a broken
    promise fails at once, not at the first batch that is odd enough."""
    digest = digest_of([f"{step.duration_us!r} {step.other_bytes}" for step in program.steps])
    return (
        f"{len(program.steps)} steps of {sum(step.duration_us for step in program.steps):,.1f} us (digest {digest:x}), which "
        "uniform=True says are the same on every rank: drop uniform=True where ranks may run different shapes"
    )


def _transfers(blueprint: Blueprint, bucket: Bucket, of_held: bool) -> Transfers:
    layouts = [blueprint.layouts[blueprint.index[p]] for p in bucket.parameters]
    if of_held and bucket.kind == "reduce_scatter":
        layouts = [layout.of_held() for layout in layouts]
    if bucket.secondary:
        layouts = [layout.resharded_to(blueprint.settings.reshard_to) for layout in layouts]
    return Transfers(layouts, [p in bucket.packed for p in bucket.parameters], bucket.secondary)


def _line(blueprint: Blueprint, bucket: Bucket) -> str:
    members = []
    for name in bucket.parameters:
        layout = blueprint.layouts[blueprint.index[name]]
        dtype, packed = str(layout.gathered_dtype).removeprefix("torch."), " packed" if name in bucket.packed else ""
        members.append(f"{name}{list(layout.shape)} {dtype}{packed}")
    return f"{bucket.kind} of {', '.join(members)}{' from secondary shards' if bucket.secondary else ''}"
