"""A schedule for people: `render`, one line a step, is what `print(schedule)` shows; `report` is a page of totals.

    step       name       op            live  before the step
       0 fwd   forward.mm aten.mm   12.0 KiB  gather 0: up.weight +1 packed; wait 0

Everything here also draws schedules that the verifier would refuse, since those are the ones that one has to look at: an unknown
parameter counts 0 bytes, a point outside the program is drawn at its nearest end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from .certificate import Certificate, certify
from .ir import Instruction, Parameter, Program, Schedule
from .limits import Limits
from .replay import bucket_of, replay
from .simulate import CHANNELS, Channel, Moment, channels_of, link_of, simulate

WIDTH = 120
_NO_LIMIT = 2**31
_NAME_WIDTHS = (40, 30, 24, 18, 14)
_PLURALS = {"gather": "gathers", "reduce": "reductions", "all_reduce": "all-reduces"}
_MARK = {"forward": "fwd", "turn": "turn", "backward": "bwd"}


@dataclass(frozen=True, slots=True)
class _Traffic:
    """The collectives of one kind: how many parameters, how many of those not for the first time, in how many buckets; and what of
    the bytes comes from secondary shards."""

    num_parameters: int
    num_again: int
    num_buckets: int
    num_bytes: int
    duration_us: float
    secondary_bytes: int


def by_point(schedule: Schedule) -> list[list[Instruction]]:
    """The instructions at each point, in execution order; one list more than there are steps."""
    last = len(schedule.program.steps)
    points: list[list[Instruction]] = [[] for _ in range(last + 1)]
    for instruction in sorted(schedule.instructions, key=lambda i: i.point):
        points[min(max(instruction.point, 0), last)].append(instruction)
    return points


def packed_members(schedule: Schedule, instruction: Instruction) -> tuple[str, ...]:
    """Those of the instruction's parameters that travel in its bucket's packing buffer."""
    bucket = instruction.bucket
    if bucket is None or not 0 <= bucket < len(schedule.buckets):
        return ()
    packed = set(schedule.buckets[bucket].packed)
    return tuple(name for name in instruction.parameters if name in packed)


def render(schedule: Schedule, *, full: bool = False) -> str:
    """Draw the schedule: a header, then one line a step with what zfx does before the step runs.

    Args:
        schedule: any schedule, also one that the verifier refuses.
        full: write every step and every name in full. Otherwise rows of steps without an instruction are folded into
            one line, long names are abbreviated, and lines end at 120 columns.

    Example:
        >>> from zfx.ir import Bucket, Instruction, Parameter, Program, Schedule, Step
        >>> program = Program((Parameter("w", 256, 1024),), (Step("forward.mm", "forward", "aten.mm.default", reads=("w",)),))
        >>> bucket = Bucket(0, "all_gather", ("w",))
        >>> run = tuple(Instruction(k, 0, ("w",), 0) for k in ("all_gather", "wait")) + (Instruction("release", 1, ("w",)),)
        >>> print("\\n".join(render(Schedule(program, Limits(), (bucket,), run)).splitlines()[-3:]))
        step       name       op            live  before the step
           0 fwd   forward.mm aten.mm    1.0 KiB  gather 0: w; wait 0
         end                                 0 B  release w
    """
    lines = [_clip(line, full) for line in (*_header(schedule), *_table(schedule, full))]
    return "\n".join(lines)


def report(schedule: Schedule) -> str:
    """Totals of a schedule, a line each: what it holds, what it moves, and what that is estimated to cost.

    Example:
        >>> from zfx.ir import Program
        >>> print(report(Schedule(Program((), (), world_size=4), Limits())).splitlines()[0])
        ranks                4
    """
    program, simulation, certificate = schedule.program, simulate(schedule), certify(schedule)
    gathers, reductions, across = (_traffic(schedule, channel) for channel in CHANNELS)
    phases = [s.phase for s in program.steps]
    limit = schedule.limits.max_live_parameters
    peak = max((state.num_elements for state in replay(schedule)), default=0)
    rows = {
        "ranks": f"{program.world_size:,}{_replicas(program)}",
        "steps": f"{phases.count('forward'):,} forward, {phases.count('backward'):,} backward",
        "parameters": _parameters(schedule),
        "gathered peak": _peak(schedule),
        "max_live_parameters": f"{limit:,} elements" + (f", {peak / limit:.1%} used at the peak" if limit else ""),
        "memory peak": f"{_split(simulation.peak)}, {_where(schedule, simulation.peak.point)}",
        "end of forward": _split(simulation.forward_end),
        "end of backward": _split(simulation.backward_end),
        "kept": _kept(schedule),
        **({"resharded": _resharded(schedule)} if program.reshard_to else {}),
        "gathers": _moved(gathers),
        "reductions": _moved(reductions),
        **({"all-reduces": _moved(across)} if program.replicas > 1 else {}),
        "mean bucket": f"{_mean(gathers)} gathered, {_mean(reductions)} reduced",
        "communication": f"{human_time(gathers.duration_us + reductions.duration_us + across.duration_us)} estimated: "
        f"gathers {human_time(gathers.duration_us)}, reductions {human_time(reductions.duration_us)}"
        + (f", all-reduces {human_time(across.duration_us)}" if program.replicas > 1 else ""),
        "step time": f"{human_time(simulation.finish_us)} estimated: compute {human_time(simulation.compute_us)}, "
        f"launches {human_time(simulation.overhead_us)}, exposed communication {human_time(simulation.exposed_us)}",
        "certificate": f"time {_of_bound(certificate.time_ratio, certificate.time_binds)}",
        "": f"volume {_of_bound(certificate.volume_ratio, certificate.volume_binds)}",
        " ": f"memory {_of_bound(certificate.peak_ratio, certificate.peak_binds)}",
    }
    return "\n".join(_clip(f"{key:<20} {value}", False) for key, value in rows.items())


def human_bytes(num_bytes: int) -> str:
    """A number of bytes, not negative, with a binary unit.

    Example:
        >>> human_bytes(1023), human_bytes(1536), human_bytes(2**20 - 1)
        ('1023 B', '1.5 KiB', '1.0 MiB')
    """
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = 1
    while power < 5 and num_bytes * 20 >= 20479 * 1024**power:  # it would round to 1024.0
        power += 1
    tenths = (num_bytes * 10 + 1024**power // 2) // 1024**power
    return f"{tenths // 10}.{tenths % 10} {('KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power - 1]}"


def human_time(duration_us: float) -> str:
    """Microseconds with a unit that keeps the number short.

    Example:
        >>> human_time(12.34), human_time(4_560), human_time(7_890_000)
        ('12.3 us', '4.6 ms', '7.9 s')
    """
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(duration_us) >= scale:
            return f"{duration_us / scale:,.1f} {unit}"
    return f"{duration_us:.1f} us"


def printable(text: str) -> str:
    """The text on one line: line breaks, control characters and lone surrogates become backslash escapes.

    Example:
        >>> printable("a\\nb")
        'a\\\\nb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(name: str, width: int) -> str:
    """A dotted name in at most `width` characters: parts shrink to their initials from the left (numbers stay), then the head goes.

    Example:
        >>> shorten("model.layers.17.self_attn.q_proj.weight", 30)
        'm.l.17.self_attn.q_proj.weight'
    """
    parts = printable(name).split(".")
    for i, part in enumerate(parts if len(parts) > 2 else parts[:-1]):
        if len(".".join(parts)) <= width:
            break
        parts[i] = part if part.isdigit() else part[:1]
    short = ".".join(parts)
    return short if len(short) <= width else ".." + short[len(short) - max(width - 2, 0) :]


def _clip(line: str, full: bool) -> str:
    line = line.rstrip()
    return line if full or len(line) <= WIDTH else line[: WIDTH - 3] + " .."


def _traffic(schedule: Schedule, channel: Channel) -> _Traffic:
    sizes = {p.name: getattr(p, channel.size) for p in schedule.program.parameters}
    launches = [i for i in schedule.instructions if i.kind == channel.launch]
    names = [name for i in launches for name in i.parameters]
    volumes = [sum(sizes.get(name, 0) for name in i.parameters) for i in launches]
    duration_us = sum(link_of(schedule, channel, i).us(volume) for i, volume in zip(launches, volumes))
    secondary = sum(volume for i, volume in zip(launches, volumes) if _from_secondary(schedule, i))
    return _Traffic(len(names), len(names) - len(set(names)), len(launches), sum(volumes), duration_us, secondary)


def _from_secondary(schedule: Schedule, instruction: Instruction) -> bool:
    bucket = bucket_of(schedule, instruction.bucket)
    return bucket is not None and bucket.secondary


def ranks_of(program: Program) -> str:
    """How many ranks, and how they share the parameters.

    Example:
        >>> ranks_of(Program((), (), world_size=8)), ranks_of(Program((), (), world_size=8, replicas=2))
        ('8 ranks', '8 ranks (2 replicas of 4)')
    """
    return _plural(program.world_size, "rank") + _replicas(program)


def _replicas(program: Program) -> str:
    facts = [f"{program.replicas:,} replicas of {program.num_shards:,}"] if program.replicas > 1 else []
    facts += [f"resharded to {program.reshard_to:,}"] if program.reshard_to else []
    return f" ({', '.join(facts)})" if facts else ""


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _moved(traffic: _Traffic) -> str:
    again = f", {traffic.num_again:,} of them again" if traffic.num_again else ""
    again += f", {human_bytes(traffic.secondary_bytes)} from secondary shards" if traffic.secondary_bytes else ""
    buckets = _plural(traffic.num_buckets, "bucket")
    return f"{traffic.num_parameters:,} in {buckets}, {human_bytes(traffic.num_bytes)} on each rank{again}"


def _mean(traffic: _Traffic) -> str:
    return human_bytes(traffic.num_bytes // traffic.num_buckets) if traffic.num_buckets else "nothing"


def _parameters(schedule: Schedule) -> str:
    parameters: Sequence[Parameter] = schedule.program.parameters
    num_elements, num_bytes = sum(p.num_elements for p in parameters), sum(p.num_bytes for p in parameters)
    return f"{len(parameters):,} with {num_elements:,} elements, {human_bytes(num_bytes)}"


def _kept(schedule: Schedule) -> str:
    if not schedule.kept:
        return "nothing across the turn"
    sizes = {p.name: p.num_bytes for p in schedule.program.parameters}
    num_bytes = sum(sizes.get(name, 0) for name in schedule.kept)
    return f"{len(schedule.kept):,} across the turn, {human_bytes(num_bytes)}: " + ", ".join(map(printable, schedule.kept))


def _resharded(schedule: Schedule) -> str:
    if not schedule.resharded:
        return "nothing over the turn"
    program, wanted = schedule.program, set(schedule.resharded)
    num_bytes = sum(program.secondary_bytes(p) for p in program.parameters if p.name in wanted)
    names = ", ".join(map(printable, schedule.resharded))
    return f"{len(schedule.resharded):,} over the turn, {human_bytes(num_bytes)} in secondary shards: {names}"


def _peak(schedule: Schedule) -> str:
    """The most that is gathered or packed, in elements and in bytes; with mixed dtypes the two need not peak at the same step."""
    rows = [(state.point, state.num_elements, state.gathered_bytes + state.packing_bytes) for state in replay(schedule)]
    rows = rows or [(len(schedule.program.steps), 0, 0)]
    by_elements = max(rows, key=lambda row: row[1])
    by_bytes = max(rows, key=lambda row: row[2])
    if by_elements[2] == by_bytes[2]:
        by_bytes = by_elements
    first = f" {_where(schedule, by_elements[0])}" if by_elements[0] != by_bytes[0] else ""
    return f"{by_elements[1]:,} elements{first}, {human_bytes(by_bytes[2])} {_where(schedule, by_bytes[0])}"


def _where(schedule: Schedule, point: int) -> str:
    steps = schedule.program.steps
    return f"at step {point} ({printable(steps[point].name)})" if point < len(steps) else "after the last step"


def _split(moment: Moment) -> str:
    """What is held, by kind; nothing is said of what there is nothing of."""
    kinds = ("parameters", "packing", "secondary", "gradients", "activations", "shards")
    parts = [f"{kind} {human_bytes(getattr(moment, kind))}" for kind in kinds if getattr(moment, kind)]
    return human_bytes(moment.total) + (": " + ", ".join(parts) if parts else "")


def _of_bound(ratio: float, binds: str) -> str:
    return f"{ratio:.2f} of the bound; binds: {printable(binds)}"


def _certified(certificate: Certificate) -> str:
    ratios = (certificate.time_ratio, certificate.volume_ratio, certificate.peak_ratio)
    time, volume, memory = (f"{ratio:.2f}" for ratio in ratios)
    return f"time {time} of the bound (binds: {printable(certificate.time_binds)}), volume {volume}, memory {memory}"


def _header(schedule: Schedule) -> list[str]:
    limits = schedule.limits
    changed = [f"{f.name}={getattr(limits, f.name):,}" for f in fields(Limits) if getattr(limits, f.name) != f.default]
    return [
        f"zfx schedule: {ranks_of(schedule.program)}, {_plural(len(schedule.program.steps), 'step')}",
        f"parameters   {_parameters(schedule)}",
        f"limits       {', '.join(changed) or 'defaults'}",
        *(f"{_PLURALS[c.name]:<12} {_moved(_traffic(schedule, c))}" for c in channels_of(schedule)),
        f"peak         {_peak(schedule)}",
        f"kept         {_kept(schedule)}",
        *([f"resharded    {_resharded(schedule)}"] if schedule.program.reshard_to else []),
        f"certificate  {_certified(certify(schedule))}",
    ]


def _table(schedule: Schedule, full: bool) -> list[str]:
    """The lines of the widest layout that need not be cut: operators give way first."""
    lines: list[str] = []
    for name_width, op_width in ((_NO_LIMIT, _NO_LIMIT),) if full else ((26, 24), (20, 0)):
        lines = _rows(schedule, full, name_width, op_width)
        if max(map(len, lines)) <= WIDTH:
            break
    return lines


def _rows(schedule: Schedule, full: bool, name_width: int, op_width: int) -> list[str]:
    steps, points, live = schedule.program.steps, by_point(schedule), _live(schedule)
    names = ["name", *(shorten(s.name, name_width) for s in steps)]
    ops = ["op", *(shorten(s.op.removesuffix(".default"), op_width) for s in steps)] if op_width else [""] * len(names)
    wide_name, wide_op = max([10, *map(len, names)]), max(map(len, ops))
    num_digits = max(4, len(str(len(steps))))

    def row(index: str, mark: str, name: str, op: str, num_bytes: str, what: str) -> str:
        return f"{index:>{num_digits}} {mark:<5} {name:<{wide_name}} {op:<{wide_op}} {num_bytes:>10}  {what}".rstrip()

    width = WIDTH + 1 - len(row("", "", "", "", "", "x"))
    lines = [row("step", "", names[0], ops[0], "live", "before the step")]
    quiet = 0
    for point, instructions in enumerate(points):
        at_end = point == len(steps)
        landmark = full or at_end or bool(instructions) or steps[point].phase == "turn"
        if landmark and quiet > 1:
            num_bytes = human_bytes(live[point - 1])
            lines[-quiet:] = [row("...", "", f"{quiet} steps", "", num_bytes, "")]
        quiet = 0 if landmark else quiet + 1
        num_bytes = human_bytes(live[point])
        what = _what(schedule, instructions, max(width, 20), full)
        if not at_end:
            lines.append(row(str(point), _MARK[steps[point].phase], names[point + 1], ops[point + 1], num_bytes, what))
        elif instructions:
            lines.append(row("end", "", "", "", num_bytes, what))
    return lines


def _live(schedule: Schedule) -> list[int]:
    """Bytes gathered and packed while each step runs, and at the end."""
    live, num_bytes = [], 0
    for state in replay(schedule):
        num_bytes = state.gathered_bytes + state.packing_bytes
        if state.step is not None:
            live.append(num_bytes)
    return [*live, num_bytes]


def _what(schedule: Schedule, instructions: Sequence[Instruction], width: int, full: bool) -> str:
    """The instructions of one point in words, with names as long as the width allows; neighbouring releases are one phrase."""
    merged: list[Instruction] = []
    for instruction in instructions:
        if merged and merged[-1].kind == instruction.kind == "release":
            merged[-1] = replace(merged[-1], parameters=merged[-1].parameters + instruction.parameters)
        else:
            merged.append(instruction)
    text = ""
    for name_width in (_NO_LIMIT,) if full else _NAME_WIDTHS:
        text = "; ".join(_phrase(schedule, i, name_width) for i in merged)
        if len(text) <= width:
            break
    return text


def _phrase(schedule: Schedule, instruction: Instruction, name_width: int) -> str:
    bucket = "?" if instruction.bucket is None else instruction.bucket
    if instruction.kind == "wait":
        return f"wait {bucket}"
    if instruction.kind in ("wait_reduce", "all_reduce", "wait_all_reduce"):
        return f"{instruction.kind.replace('_', ' ')} {bucket}"
    packed = packed_members(schedule, instruction)
    direct = [n for n in instruction.parameters if n not in set(packed)]
    names = shorten((direct or packed or ("nothing",))[0], name_width)
    names += f" +{len(direct) - 1}" if len(direct) > 1 else ""
    if packed:
        names = f"{names} +{len(packed)} packed" if direct else f"packed {names}" + (f" +{len(packed) - 1}" if packed[1:] else "")
    if instruction.kind in ("release", "reshard"):
        return f"{instruction.kind} {names}"
    if _from_secondary(schedule, instruction):
        return f"gather {bucket} from secondary shards: {names}"
    return f"{'gather' if instruction.kind == 'all_gather' else 'reduce'} {bucket}: {names}"
