"""The verifier: named rules that accept or reject a schedule. It shares no code with the passes.

    for each rule in RULES:   schedule -> violations, each with a message, a step (or point) and a parameter

Every rule is linear in the schedule (the reuse distance takes a logarithm more), and none of them trusts the schedule: names
that the program does not know, buckets that do not exist and points out of range are violations, never a crash.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate

from .errors import ScheduleError
from .ir import Instruction, Schedule, Step
from .replay import arriving, bucket_of, leaving, replay, walk

# What a rule yields: a message, the index of the step (or of the point before it), the parameter.
Finding = tuple[str, int | None, str | None]
Rule = Callable[[Schedule], Iterator[Finding]]

_LAUNCHES = {"all_gather": "wait", "reduce_scatter": "wait_reduce", "all_reduce": "wait_all_reduce"}
_BUCKET_KIND = {
    "all_gather": "all_gather", "wait": "all_gather",
    "reduce_scatter": "reduce_scatter", "wait_reduce": "reduce_scatter",
    "all_reduce": "reduce_scatter", "wait_all_reduce": "reduce_scatter",
}  # fmt: skip


# ----------------------------------------------------------------------------------------------- rules: the form of a schedule


def points(schedule: Schedule) -> Iterator[Finding]:
    """Points lie in 0..len(steps) and never go back."""
    latest = 0
    for instruction in schedule.instructions:
        if not 0 <= instruction.point <= len(schedule.program.steps):
            yield f"{instruction.kind} at point {instruction.point}, out of range", instruction.point, None
        elif instruction.point < latest:
            yield f"{instruction.kind} at point {instruction.point} stands after point {latest}", instruction.point, None
        latest = max(latest, instruction.point)


def names(schedule: Schedule) -> Iterator[Finding]:
    """Every name is a parameter of the program, and no instruction or bucket names one twice."""
    known = {p.name for p in schedule.program.parameters}
    rows = [(f"{i.kind} at point {i.point}", i.point, i.parameters) for i in schedule.instructions]
    rows += [(f"bucket {b.index}", None, b.parameters) for b in schedule.buckets]  # type: ignore[misc]
    rows += [(row, None, getattr(schedule, row)) for row in ("kept", "carried", "resharded")]  # type: ignore[misc]
    for what, point, members in rows:
        for name in members:
            if name not in known:
                yield f"{what} names {name!r}, which the program does not have", point, name
        if len(set(members)) != len(members):
            yield f"{what} names a parameter twice", point, None


def buckets(schedule: Schedule) -> Iterator[Finding]:
    """A bucket stands at its index and packs members only; its instructions have its kind and members. What launches nothing has
    none."""
    for place, bucket in enumerate(schedule.buckets):
        if bucket.index != place:
            yield f"bucket {bucket.index} stands at place {place}", None, None
        for name in set(bucket.packed) - set(bucket.parameters):
            yield f"bucket {bucket.index} packs {name!r}, which is not a member", None, name
    for instruction in schedule.instructions:
        found = bucket_of(schedule, instruction.bucket)
        what = f"{instruction.kind} at point {instruction.point}"
        if instruction.kind in ("release", "reshard"):
            if instruction.bucket is not None:
                yield f"{what} has a bucket", instruction.point, None
        elif found is None or found.kind != _BUCKET_KIND.get(instruction.kind):
            yield f"{what}: bucket {instruction.bucket} is missing or of another kind", instruction.point, None
        elif found.parameters != instruction.parameters:
            odd = next(iter(set(found.parameters) ^ set(instruction.parameters)), None)
            yield f"{what}: its parameters are not those of bucket {found.index}", instruction.point, odd


def launched_once(schedule: Schedule) -> Iterator[Finding]:
    """Every bucket is launched exactly once and waited for exactly once, after its launch."""
    counts: dict[tuple[str, int | None], int] = defaultdict(int)
    for point, event in walk(schedule):
        if isinstance(event, Step) or event.kind in ("release", "reshard"):
            continue
        counts[event.kind, event.bucket] += 1
        if counts[event.kind, event.bucket] > 1:
            yield f"bucket {event.bucket}: {event.kind} runs twice", point, None
        elif any(event.kind == wait and not counts[launch, event.bucket] for launch, wait in _LAUNCHES.items()):
            yield f"bucket {event.bucket}: {event.kind} before its launch", point, None
    for bucket in schedule.buckets:
        for kind in (bucket.kind, _LAUNCHES.get(bucket.kind, "")):
            if not counts[kind, bucket.index]:
                yield f"bucket {bucket.index}: {kind} never runs", None, next(iter(bucket.parameters), None)


def collective_order(schedule: Schedule) -> Iterator[Finding]:
    """The collectives of each kind are launched, and waited for, in the order of their buckets: the same on every rank."""
    latest: dict[str, int] = defaultdict(lambda: -1)
    for instruction in schedule.instructions:
        if instruction.bucket is None:
            continue
        if instruction.bucket < latest[instruction.kind]:
            yield (
                f"{instruction.kind} of bucket {instruction.bucket} stands after that of bucket {latest[instruction.kind]}",
                instruction.point,
                next(iter(instruction.parameters), None),
            )
        latest[instruction.kind] = max(latest[instruction.kind], instruction.bucket)


# --------------------------------------------------------------------------------------------------- rules: parameters


def _status_at_reads(schedule: Schedule) -> Iterator[tuple[int, str, str]]:
    """(step, parameter, "absent" | "in flight" | "gathered" | "released") for every read."""
    status = dict.fromkeys(arriving(schedule), "gathered")
    after = {"all_gather": "in flight", "wait": "gathered", "release": "released"}
    for point, event in walk(schedule):
        if isinstance(event, Step):
            for name in event.reads:
                yield point, name, status.get(name, "absent")
        elif event.kind in after:
            for name in event.parameters:
                if event.kind != "wait" or status.get(name) == "in flight":
                    status[name] = after[event.kind]


def gathered_before_use(schedule: Schedule) -> Iterator[Finding]:
    """A step reads only parameters that were gathered."""
    for step, name, status in _status_at_reads(schedule):
        if status == "absent":
            yield f"step {step} reads {name!r}, which was never gathered", step, name


def waited_before_use(schedule: Schedule) -> Iterator[Finding]:
    """A step reads only parameters whose gather was waited for."""
    for step, name, status in _status_at_reads(schedule):
        if status == "in flight":
            yield f"step {step} reads {name!r}, whose gather is still in flight", step, name


def no_use_after_release(schedule: Schedule) -> Iterator[Finding]:
    """A step reads no parameter that was released and not gathered again."""
    for step, name, status in _status_at_reads(schedule):
        if status == "released":
            yield f"step {step} reads {name!r}, which was released", step, name


def _transitions(schedule: Schedule) -> Iterator[tuple[int, Instruction, str, bool, bool]]:
    """(point, instruction, parameter, was it live before, was its gather in flight) for every gather and release."""
    live = set(arriving(schedule))
    in_flight: set[str] = set()
    for point, event in walk(schedule):
        if isinstance(event, Step):
            continue
        for name in event.parameters:
            if event.kind in ("all_gather", "release"):
                yield point, event, name, name in live, name in in_flight
            if event.kind == "all_gather":
                live.add(name)
                in_flight.add(name)
            elif event.kind in ("wait", "release"):
                in_flight.discard(name)
                if event.kind == "release":
                    live.discard(name)


def gathered_once(schedule: Schedule) -> Iterator[Finding]:
    """Nothing is gathered while it is live."""
    for point, event, name, live, _ in _transitions(schedule):
        if event.kind == "all_gather" and live:
            yield f"{name!r} is gathered at point {point} while it is live", point, name


def release_after_wait(schedule: Schedule) -> Iterator[Finding]:
    """Only what is live is released, and only after its gather was waited for."""
    for point, event, name, live, in_flight in _transitions(schedule):
        if event.kind == "release" and (not live or in_flight):
            yield f"{name!r} is released at point {point} but is {'in flight' if live else 'not live'}", point, name


def nothing_leaked(schedule: Schedule) -> Iterator[Finding]:
    """At the end everything is released, except what escapes, which never is, and what is carried to the next micro-batch."""
    escapes, leaves = set(schedule.program.escapes), set(leaving(schedule))
    live: dict[str, int] = dict.fromkeys(arriving(schedule), 0)
    for point, event, name, _, _ in _transitions(schedule):
        if event.kind == "all_gather":
            live[name] = point
        else:
            live.pop(name, None)
            if name in escapes:
                yield f"{name!r} escapes but is released at point {point}", point, name
    for name, point in live.items():
        if name not in escapes and name not in leaves:
            yield f"{name!r}, live since point {point}, is never released", point, name


def carried(schedule: Schedule) -> Iterator[Finding]:
    """What is carried to the next micro-batch is live and has arrived after the last step. Nothing is carried if there is
    no other micro-batch, nor what escapes, which belongs to the caller."""
    for name in schedule.carried:
        if schedule.program.window == "only":
            yield f"{name!r} is carried, but there is no other micro-batch", None, name
        if name in schedule.program.escapes:
            yield f"{name!r} is carried, but it escapes", None, name
    live, in_flight = set(arriving(schedule)), set[str]()
    for instruction in schedule.instructions:
        if instruction.kind == "all_gather":
            live.update(instruction.parameters)
            in_flight.update(instruction.parameters)
        elif instruction.kind == "wait":
            in_flight.difference_update(instruction.parameters)
        elif instruction.kind == "release":
            live.difference_update(instruction.parameters)
    for name in leaving(schedule):
        if name not in live or name in in_flight:
            yield f"{name!r} is carried, but {'in flight' if name in live else 'not live'} after the last step", None, name


def turn(schedule: Schedule) -> Iterator[Finding]:
    """No collective crosses the turn: it is waited for on the side where it is launched; what is live there is exactly `kept`,
    and the backward, which gets it in place of the shard, does not gather it again."""
    index = schedule.program.turn
    if index is None:
        for name in schedule.kept:
            yield f"{name!r} is kept across a turn that the program does not have", None, name
        return
    launched: dict[int | None, bool] = {}
    kept = set(schedule.kept)
    live = set(arriving(schedule))
    for point, event in walk(schedule):
        if isinstance(event, Step):
            if point == index:
                for name in sorted(live ^ set(schedule.kept)):
                    yield f"{name!r} is {'live' if name in live else 'not live'} at the turn, against `kept`", index, name
        elif event.kind in _LAUNCHES:
            side = launched.setdefault(event.bucket, point <= index)
            if side != (point <= index):
                member = next(iter(event.parameters), None)
                yield f"bucket {event.bucket} is launched before the turn and all-reduced at point {point}", point, member
            for name in event.parameters if event.kind == "all_gather" and point > index else ():
                if name in kept:
                    yield f"{name!r} is kept over the turn and gathered again at point {point}", point, name
        elif event.bucket is not None and launched.get(event.bucket, point <= index) != (point <= index):
            member = next(iter(event.parameters), None)
            yield f"bucket {event.bucket} is launched before the turn and waited for at point {point}", point, member
        if isinstance(event, Instruction) and event.kind in ("all_gather", "release"):
            (live.update if event.kind == "all_gather" else live.difference_update)(event.parameters)


def resharding(schedule: Schedule) -> Iterator[Finding]:
    """What is resharded, all of `resharded` and nothing else, is live then, has arrived, and is once only: in the forward, where
    there is a smaller group. The backward, which gets the secondary shard in place of the shard, gathers it from there and from
    nowhere else, at least once; nothing else is gathered from secondary shards."""
    program, turn = schedule.program, schedule.program.turn
    resharded, wanted = set[str](), set(schedule.resharded)
    used = {name for b in schedule.buckets if b.secondary for name in b.parameters}
    live, in_flight = set(arriving(schedule)), set[str]()
    for point, event in walk(schedule):
        if isinstance(event, Step):
            continue
        bucket = bucket_of(schedule, event.bucket)
        for name in event.parameters if event.kind in ("reshard", "all_gather") else ():
            secondary = bucket is not None and bucket.secondary
            if event.kind == "reshard":
                for what, wrong in {
                    "but the program has no smaller group of ranks": not program.reshard_to,
                    "but not in the forward": turn is None or point > turn,
                    "again": name in resharded,
                    "but is not live": name not in live,
                    "but is in flight": name in in_flight,
                    "against `resharded`": name not in wanted,
                    "but kept over the turn": name in schedule.kept,
                    "but never gathered from there": name not in used,
                }.items():
                    if wrong:
                        yield f"{name!r} is resharded at point {point}, {what}", point, name
                resharded.add(name)
            elif secondary and (name not in resharded or turn is None or point <= turn):
                yield f"{name!r} is gathered at point {point} from secondary shards that the backward does not have", point, name
            elif not secondary and name in wanted and turn is not None and point > turn:
                yield f"{name!r} is resharded, and gathered at point {point} from all ranks", point, name
        if event.kind in ("all_gather", "release"):
            (live.update if event.kind == "all_gather" else live.difference_update)(event.parameters)
        (in_flight.update if event.kind == "all_gather" else in_flight.difference_update)(event.parameters)
    for name in schedule.resharded:
        if name not in resharded:
            yield f"{name!r} is never resharded, against `resharded`", None, name
    for b in schedule.buckets:
        if b.secondary and b.kind != "all_gather":
            yield f"bucket {b.index}, which is no gather, takes from secondary shards", None, next(iter(b.parameters), None)


# ------------------------------------------------------------------------------------------------------- rules: gradients


def reduced_once(schedule: Schedule) -> Iterator[Finding]:
    """Every gradient that the program completes is reduced exactly once, and nothing else is."""
    counts: dict[str, int] = {name: 0 for step in schedule.program.steps for name in step.completes}
    for instruction in schedule.instructions:
        if instruction.kind == "reduce_scatter":
            for name in instruction.parameters:
                counts[name] = counts.get(name, -1) + 1
                if counts[name] != 1:
                    what = "twice" if counts[name] else "but never completed"
                    yield f"the gradient of {name!r} is reduced {what}", instruction.point, name
    for name, count in counts.items():
        if count == 0:
            yield f"the gradient of {name!r} is never reduced", None, name


def reduced_after_completion(schedule: Schedule) -> Iterator[Finding]:
    """A reduction is launched after the last step that completes one of its gradients."""
    complete = {name: t for t, step in enumerate(schedule.program.steps) for name in step.completes}
    for point, event in walk(schedule):
        if isinstance(event, Instruction) and event.kind == "reduce_scatter":
            for name in event.parameters:
                if complete.get(name, -1) >= point:
                    yield f"the gradient of {name!r} is reduced at point {point}, complete after step {complete[name]}", point, name


def averaged_over_replicas(schedule: Schedule) -> Iterator[Finding]:
    """With replicas every reduction has one all-reduce, launched once it has arrived, and waited for. Without, none has."""
    stages = ("reduce_scatter", "wait_reduce", "all_reduce", "wait_all_reduce")
    across = schedule.program.replicas > 1
    stage: dict[int | None, int] = defaultdict(int)  # how many of them each bucket has gone through
    for instruction in schedule.instructions:
        if instruction.kind not in stages[0 if across else 2 :]:
            continue
        what = f"{instruction.kind} of bucket {instruction.bucket}"
        name = next(iter(instruction.parameters), None)
        if not across:
            yield f"{what}, but there are no replicas", instruction.point, name
        elif stages.index(instruction.kind) != stage[instruction.bucket]:
            missing = stages[stage[instruction.bucket]] if stage[instruction.bucket] < 4 else "nothing"
            yield f"{what} where {missing} is due", instruction.point, name
        else:
            stage[instruction.bucket] += 1
    for bucket in schedule.buckets if across else ():
        if bucket.kind == "reduce_scatter" and stage[bucket.index] < len(stages):
            yield f"bucket {bucket.index}: {stages[stage[bucket.index]]} never runs", None, next(iter(bucket.parameters), None)


# ---------------------------------------------------------------------------------------------------------- rules: limits


def max_live_parameters(schedule: Schedule) -> Iterator[Finding]:
    """Gathered parameters and packing buffers never hold more elements than `max_live_parameters`."""
    limit = schedule.limits.max_live_parameters
    for state in replay(schedule):
        if state.num_elements > limit:
            when = f"during step {state.point}" if state.instruction is None else f"after {state.instruction.kind} at {state.point}"
            yield f"{state.num_elements:,} elements are live {when}, the limit is {limit:,}", state.point, None


def memory_budget(schedule: Schedule) -> Iterator[Finding]:
    """All that is held never takes more bytes than `memory_budget`, after any instruction and during any step."""
    limit = schedule.limits.memory_budget
    if limit is None:
        return
    for state in replay(schedule):
        if state.total_bytes > limit:
            when = f"during step {state.point}" if state.instruction is None else f"after {state.instruction.kind} at {state.point}"
            yield f"{state.total_bytes:,} bytes are held {when}, the limit is {limit:,}", state.point, None


def bucket_size(schedule: Schedule) -> Iterator[Finding]:
    """A bucket of more than one member has at most `prefetch_bucket_size` or `reduce_bucket_size` elements."""
    elements = {p.name: p.num_elements for p in schedule.program.parameters}
    limits = {"all_gather": schedule.limits.prefetch_bucket_size, "reduce_scatter": schedule.limits.reduce_bucket_size}
    for bucket in schedule.buckets:
        size, limit = sum(elements.get(name, 0) for name in bucket.parameters), limits.get(bucket.kind)
        if len(bucket.parameters) > 1 and limit is not None and size > limit:
            yield f"{bucket.kind} bucket {bucket.index} has {size:,} elements, the limit is {limit:,}", None, bucket.parameters[0]


def reuse_distance(schedule: Schedule) -> Iterator[Finding]:
    """What is kept between two reads is small, or escapes, or at most `max_reuse_distance` elements are read in between."""
    parameters = {p.name: p for p in schedule.program.parameters}
    limits, escapes = schedule.limits, set(schedule.program.escapes)
    if 2 * sum(p.num_elements for p in parameters.values()) <= limits.max_reuse_distance:
        return
    kept: list[tuple[int, int, str]] = []
    latest: dict[str, int] = {}
    for point, event in walk(schedule):
        if isinstance(event, Step):
            for name in set(event.reads):
                if latest.get(name, -1) >= 0 and name not in escapes:
                    kept.append((latest[name], point, name))
                latest[name] = point
        elif event.kind in ("all_gather", "release"):
            latest.update(dict.fromkeys(event.parameters, -1))
    kept = [gap for gap in kept if parameters[gap[2]].numel > limits.param_persistence_threshold]
    yield from _carried_too_far(schedule)
    for (start, stop, name), distance in zip(sorted(kept), reuse_distances(schedule, sorted(kept))):
        if distance > limits.max_reuse_distance:
            text = f"{name!r} is kept from step {start} to {stop} over {distance:,} elements"
            yield f"{text}, the limit is {limits.max_reuse_distance:,}", stop, name


def _carried_too_far(schedule: Schedule) -> Iterator[Finding]:
    """The same over the seam: counted are what is read after the last read, and, in the next micro-batch, before the first."""
    parameters, limits = {p.name: p for p in schedule.program.parameters}, schedule.limits
    first: dict[tuple[str, bool], int] = {}
    latest: dict[tuple[str, bool], int] = {}
    for t, step in enumerate(schedule.program.steps):
        for name in step.reads:
            first.setdefault((name, step.phase == "backward"), t)
            latest[name, step.phase == "backward"] = t

    def until(steps: dict[tuple[str, bool], int]) -> tuple[list[int], list[int]]:
        """Steps, ascending, and the elements of the parameters at those before each."""
        rows = sorted((t, parameters[name].num_elements) for (name, _), t in steps.items())
        return [t for t, _ in rows], list(accumulate((size for _, size in rows), initial=0))

    heads, tails = until(first), until(latest)
    for name in schedule.carried:
        reads = [(first[key], latest[key]) for key in ((name, False), (name, True)) if key in first]
        if not reads or parameters[name].numel <= limits.param_persistence_threshold:
            continue
        start, stop = max(last for _, last in reads), min(read for read, _ in reads)
        distance = tails[1][-1] - tails[1][bisect_right(tails[0], start)] + heads[1][bisect_left(heads[0], stop)]
        if distance > limits.max_reuse_distance:
            text = f"{name!r} is carried from step {start} to step {stop} of the next micro-batch over {distance:,} elements"
            yield f"{text}, the limit is {limits.max_reuse_distance:,}", stop, name


def reuse_distances(schedule: Schedule, spans: list[tuple[int, int, str]]) -> list[int]:
    """Elements read strictly inside each span, each parameter once a phase. `spans` is sorted.

    Swept from the right: at each start, a parameter counts at its first read to the right of it.
    """
    elements = {p.name: p.num_elements for p in schedule.program.parameters}
    steps = schedule.program.steps
    sums = [0] * (len(steps) + 1)
    first: dict[tuple[str, bool], int] = {}

    def add(t: int, amount: int) -> None:
        while t < len(sums):
            sums[t] += amount
            t |= t + 1

    distances, swept = [], len(steps)
    for start, stop, _ in reversed(spans):
        while swept > start + 1:
            swept -= 1
            for name in set(steps[swept].reads):
                key = (name, steps[swept].phase == "backward")
                add(first.get(key, len(sums)), -elements[name])
                first[key] = swept
                add(swept, elements[name])
        total, t = 0, stop - 1  # steps 0..stop-1; nothing before start+1 has been entered
        while t >= 0:
            total += sums[t]
            t = (t & (t + 1)) - 1
        distances.append(total)
    return distances[::-1]


# ------------------------------------------------------------------------------------------------- rules: happens-before


def happens_before(schedule: Schedule) -> Iterator[Finding]:
    """Two accesses to a buffer on different streams, one of which writes or frees it, are joined by a path.

        compute   --launch--> s0 -----------------wait--> reads, release        edges: program order on each stream,
                     |                             ^                            a launch to its collective,
        gather       +----> writes the buffer -----+                            a collective to its wait

    Each stream runs in order, so what an event has seen of a stream is one number: how far it had got (a vector clock). The
    gather stream writes parameters that compute reads and frees; the reduce stream reads gradients that compute writes, and
    that compute frees at `wait_reduce`. It writes shards of gradients, which the all-reduce stream adds up in their place. Gathers
    from secondary shards have a stream of their own, which reads those: compute writes them, and frees them at the last wait.
    """
    lanes = {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 3}
    clock = {lane: [0] * 5 for lane in range(5)}  # seen of compute (lane 0) and of each collective's stream
    ended: dict[tuple[str, int | None], list[int]] = {}
    written: dict[str, tuple[int, int]] = {}  # parameter -> its gather's stream and place there
    taken: dict[str, int] = {}  # gradient -> its reduction's place on the reduce stream
    completed: dict[str, int] = {}  # gradient -> the compute event that wrote it
    compute = clock[0]

    def seen(name: str) -> bool:
        """Whether compute has seen the end of the parameter's gather."""
        lane, place = written.get(name, (0, 0))
        return place <= compute[lane]

    for point, event in walk(schedule):
        compute[0] += 1
        if isinstance(event, Step):
            for name in event.reads:
                if not seen(name):
                    yield f"step {point} reads {name!r} while its gather may still write it", point, name
            for name in event.completes:
                completed[name] = compute[0]
                if taken.get(name, 0) > compute[2]:
                    yield f"step {point} writes the gradient of {name!r} while its reduction may still read it", point, name
        elif event.kind in _LAUNCHES:
            bucket = bucket_of(schedule, event.bucket)
            lane = 4 if bucket is not None and bucket.secondary else lanes[event.kind]
            stream = clock[lane]
            stream[:] = [max(pair) for pair in zip(stream, compute)]
            stream[lane] += 1
            ended.setdefault((_LAUNCHES[event.kind], event.bucket), list(stream))
            for name in event.parameters if lane == 3 else ():
                if taken.get(name, 0) > stream[2]:
                    yield f"all_reduce at point {point} adds up the shard of {name!r} while its reduction may write it", point, name
            if event.kind == "all_gather":
                written.update(dict.fromkeys(event.parameters, (lane, stream[lane])))
            elif event.kind == "reduce_scatter":
                taken.update(dict.fromkeys(event.parameters, stream[lane]))
        else:
            if event.kind not in ("release", "reshard"):
                compute[:] = [max(pair) for pair in zip(compute, ended.get((event.kind, event.bucket), compute))]
            for name in event.parameters if event.kind in ("release", "reshard", "wait_reduce") else ():
                if taken.get(name, 0) > compute[2] if event.kind == "wait_reduce" else not seen(name):
                    what = "reads" if event.kind == "reshard" else "frees"
                    yield f"{event.kind} at point {point} {what} {name!r} while a collective may use it", point, name


# -------------------------------------------------------------------------------------------------------------- the table

RULES: dict[str, Rule] = {
    "points": points,
    "names": names,
    "buckets": buckets,
    "launched_once": launched_once,
    "collective_order": collective_order,
    "gathered_before_use": gathered_before_use,
    "waited_before_use": waited_before_use,
    "no_use_after_release": no_use_after_release,
    "gathered_once": gathered_once,
    "release_after_wait": release_after_wait,
    "nothing_leaked": nothing_leaked,
    "carried": carried,
    "turn": turn,
    "resharding": resharding,
    "reduced_once": reduced_once,
    "reduced_after_completion": reduced_after_completion,
    "averaged_over_replicas": averaged_over_replicas,
    "max_live_parameters": max_live_parameters,
    "memory_budget": memory_budget,
    "bucket_size": bucket_size,
    "reuse_distance": reuse_distance,
    "happens_before": happens_before,
}


def violations(schedule: Schedule) -> Iterator[ScheduleError]:
    """Every violation of every rule, in the table's order, as errors that were not raised."""
    for rule, find in RULES.items():
        for message, step, parameter in find(schedule):
            yield ScheduleError(message, rule=rule, step=step, parameter=parameter)


def verify(schedule: Schedule) -> None:
    """Accept the schedule, or raise.

    Raises:
        ScheduleError: the first violation, with its rule, step and parameter.

    Example:
        >>> from zfx.ir import Limits, Parameter, Program
        >>> program = Program((Parameter("w", 10, 40),), (Step("mul", "forward", reads=("w",)),))
        >>> verify(Schedule(program, Limits()))
        Traceback (most recent call last):
        zfx.errors.ScheduleError: [gathered_before_use] step 0 reads 'w', which was never gathered
    """
    for violation in violations(schedule):
        raise violation


__all__ = ["RULES", "reuse_distances", "verify", "violations"]
