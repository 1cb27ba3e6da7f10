"""Calibrate: measure a cost model on the machine or cluster at hand, through the operators and the wire that training uses.

    torchrun --nproc-per-node 8 -m zfx calibrate --out costs.json        then: zfx.compile(model, costs="costs.json")

    kinds         sample operators of each kind over sizes        ->  a Rate: overhead, and flops or bytes per microsecond
    collectives   zfx's own all-gathers and reduce-scatters       ->  what they take from compute, and two Links for the rest
    graphs        every operator of a model's captured graphs     ->  a Rate for that operator on those very shapes

A round runs everything once, as a training step does, so that nothing is warmer than it will be; each figure is the median over the
rounds, so that a slow spell of the machine hits all alike. All ranks measure at once, as they do in training, and rank 0's
table is broadcast: plans follow from it, and must be equal. One process without torchrun measures compute only.

Kinds are enough for comparing schedules. Where the step time itself matters, on a CPU above all, pass the model's graphs: one rate
a kind can't tell a product that fits the cache from one that doesn't.

[Note: what collectives take from compute] On a CPU they run on the cores that compute, on a GPU on some of its processors. Each
is therefore measured twice: alone, and beside about twice as much compute. The share of its time that it adds to the latter goes
into `CostModel.busy_us`, and only the rest into its link, so that the sum is right where nothing overlaps, too.
"""

from __future__ import annotations

import math
import operator
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import map_aggregate

from . import runtime
from .api import find_ranks
from .bucket import Transfers
from .channels import Channels, channels_for
from .costs import CostModel, Link, Rate, load_costs, save_costs
from .passes.duration import KINDS, PRODUCTS, Work, work_of
from .passes.nodes import number, tensors
from .shard import Layout

__all__ = ["calibrate", "load_costs", "save_costs"]

Progress = Callable[[int, int, str], None]
Key = tuple[Any, ...]

_COLLECTIVE_BYTES = tuple(2**power for power in range(14, 25, 2))
_GPU_REPEATS = 20  # launched back to back: what the device takes, not what it takes to ask
_MEMBERS = 4  # messages in a bucket: what a transformer's block has of large parameters
_LEAST_US = 1e-3  # what a clock can tell


def calibrate(
    graphs: Iterable[Mapping[str, fx.GraphModule]] = (), *, num_rounds: int = 9, progress: Progress = lambda done, total, what: None
) -> CostModel:
    """Measure the costs of this machine with the process group at hand (torchrun's, if there is none yet). A collective call.

    Args:
        graphs: `model.zfx.graphs`, or some of them, the same on every rank: each operator is timed on the shapes that it has there.
        num_rounds: how many times everything is measured.
        progress: called before each round with (rounds done, rounds in all, what is measured).

    Returns:
        The same cost model on every rank, for the process group's world size.

    Example:
        >>> costs = calibrate(num_rounds=1)
        >>> costs.rates[0].kind, costs.compute_us("matmul.float32", 10**9, 10**6) > 0
        ('elementwise', True)
    """
    mesh = find_ranks(None, None)[0] if dist.is_initialized() or "RANK" in os.environ else None
    channels = channels_for(mesh, 60.0) if mesh is not None and mesh.size() > 1 else None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    clock = _Clock(device)
    samples, replays = list(_samples(device)), [_Replay(clock, pair) for pair in graphs]
    collectives = [] if channels is None else _collectives(channels, device)
    what = f"operators of {len(replays)} graphs and {len(samples)} samples, {len(collectives)} collectives"
    for done in range(num_rounds):
        progress(done, num_rounds, what)
        for node in samples:
            clock.run(node)
        for replay in replays:
            replay.run()
        for collective in collectives:
            collective.run()
    progress(num_rounds, num_rounds, "done")
    costs = CostModel(rates=tuple(_rates(clock, samples)), source=_source(device, channels, num_rounds))
    return costs if channels is None else _shared(_with_collectives(costs, collectives), channels)


def _source(device: torch.device, channels: Channels | None, num_rounds: int) -> str:
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU with {torch.get_num_threads()} threads"
    ranks = "alone" if channels is None else f"on {channels.gathers.world_size} ranks, {dist.get_backend(channels.gathers.group)}"
    return f"measured on {name}, {ranks}: medians of {num_rounds}, torch {torch.__version__}"


def _shared(costs: CostModel, channels: Channels) -> CostModel:
    """Rank 0's costs, on every rank."""
    box = [costs]
    group = channels.gathers.group
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


# ---- operators ---------------------------------------------------------------------------------------------------------


class _Clock:
    """Times operators on made-up inputs, by their work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times_us: dict[Work, list[float]] = defaultdict(list)
        self.views_us: list[float] = []
        self._made: dict[Key, torch.Tensor] = {}

    def make(self, value: Any) -> Any:
        """A value of the same shape, strides and type, on the device; what looks the same is the same. Integers are 0 or 1: small
        enough for any table."""
        if isinstance(value, fx.Node):
            return map_aggregate(value.meta.get("val"), self.make)
        if isinstance(value, torch.SymInt):
            return number(value)
        if not isinstance(value, torch.Tensor):
            return self.device if isinstance(value, torch.device) else value
        shape, stride = tuple(map(number, value.shape)), tuple(map(number, value.stride()))
        key = (shape, stride, value.dtype)
        if key not in self._made:
            numel = 1 + sum((n - 1) * step for n, step in zip(shape, stride)) if prod(shape) else 0
            self._made[key] = (torch.rand(numel, device=self.device) * 2).to(value.dtype).as_strided(shape, stride)
        return self._made[key]

    @torch.no_grad()
    def run(self, node: fx.Node, args: Any = None, kwargs: Any = None) -> Any:
        """The operator's result; on made-up inputs, if none are given."""
        call: Any = node.target
        if args is None:
            args, kwargs = map_aggregate((node.args, node.kwargs), self.make)
        repeats = _GPU_REPEATS if self.device.type == "cuda" else 1
        _synchronize(self.device)
        start = time.perf_counter()
        for _ in range(repeats):
            result = call(*args, **kwargs)
        _synchronize(self.device)
        us = (time.perf_counter() - start) * 1e6 / repeats
        work = work_of(node)
        if work is not None:
            self.times_us[work].append(us)
        elif isinstance(call, torch._ops.OpOverload):
            self.views_us.append(us)
        return result

    def median_us(self, work: Work) -> float:
        return max(statistics.median(self.times_us[work]), _LEAST_US)


class _Replay:
    """A forward and its backward, run as in training, but for what zfx does: gathered parameters are made up, and nothing is sent.

    Values live as long as they do in training: an operator that writes into new memory takes longer than one whose memory was used
    just before.
    """

    def __init__(self, clock: _Clock, pair: Mapping[str, fx.GraphModule]) -> None:
        self._clock, self._graphs = clock, [pair[phase] for phase in ("forward", "backward") if phase in pair]

    def run(self) -> None:
        saved: dict[Key, list[torch.Tensor]] = defaultdict(list)
        for graph in self._graphs:
            values = _Player(graph, self._clock, saved).run()
            saved = defaultdict(list)
            for value in tensors(values):
                saved[tuple(value.shape), value.stride(), value.dtype].append(value)


class _Player(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, clock: _Clock, saved: Mapping[Key, list[torch.Tensor]]) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._clock, self._saved = clock, saved

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            made = self._clock.make(n)
            same = self._saved.get((tuple(made.shape), made.stride(), made.dtype)) if isinstance(made, torch.Tensor) else None
            return same.pop() if same else made
        if getattr(n.target, "__module__", "") == runtime.__name__:
            return {user.args[1]: self._clock.make(user) for user in n.users if user.target is operator.getitem}
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self._clock.run(n, args, kwargs)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- kinds -------------------------------------------------------------------------------------------------------------


def _samples(device: torch.device) -> Iterator[fx.Node]:
    """Operators of each kind, over sizes that models have."""
    aten = torch.ops.aten
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    cube, square = ((64, 128, 256, 512), (32, 128, 512)) if device.type == "cpu" else ((256, 1024, 4096), (256, 1024, 4096))
    tensor = partial(torch.empty, device="meta")
    for dtype in dtypes:
        for n in cube:
            yield _node(aten.mm.default, tensor(n, 4 * n, dtype=dtype), tensor(n, 4 * n, dtype=dtype).t())
            yield _node(aten.mm.default, tensor(n, n, dtype=dtype), tensor(n, 4 * n, dtype=dtype))
            image, filters = tensor(2, n // 4, 16, 16, dtype=dtype), tensor(n // 4, n // 4, 3, 3, dtype=dtype)
            yield _node(aten.convolution.default, image, filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            heads = tensor(2, 4, n, 64, dtype=dtype)
            if device.type == "cpu":
                yield _node(aten._scaled_dot_product_flash_attention_for_cpu.default, heads, heads, heads)
            elif dtype is torch.bfloat16:
                yield _node(aten._scaled_dot_product_flash_attention.default, heads, heads, heads)
        for n in square:
            x = tensor(n, 4 * n, dtype=dtype)
            yield _node(aten.add.Tensor, x, x)
            yield _node(aten.mul.Tensor, x, x)
            yield _node(aten.gelu.default, x)
            yield _node(aten._softmax.default, x, -1, False)
            yield _node(aten.native_layer_norm.default, x, [4 * n], x[0], x[0], 1e-5)
            yield _node(aten.sum.dim_IntList, x, [0])
            yield _node(aten.clone.default, tensor(n, 4, n, dtype=dtype).transpose(0, 1), memory_format=torch.contiguous_format)
            yield _node(aten.cat.default, [x, x])
            yield _node(aten.embedding.default, x, tensor(2 * n, dtype=torch.int64))
            yield _node(aten.native_dropout.default, x, 0.1, True)


def _node(target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """A node as a captured graph would hold it."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, map_aggregate(args, placeholder), map_aggregate(kwargs, placeholder))
    node.meta["val"] = target(*args, **kwargs)
    return node


def _rates(clock: _Clock, samples: Sequence[fx.Node]) -> Iterator[Rate]:
    """One for each kind and precision that was sampled, elementwise first (float32's stand for other precisions too); then one for
    each operator that was timed, by which it takes what was measured."""
    points: dict[str, list[tuple[Work, float]]] = defaultdict(list)
    for work in filter(None, map(work_of, samples)):
        kind, dtype = work.kind.split(".")[:2]
        points[kind if dtype == "float32" else f"{kind}.{dtype}"].append((work, clock.median_us(work)))
    lines = {}
    for name, found in points.items():
        product = name.split(".")[0] in PRODUCTS
        lines[name] = _fit([(work.num_flops if product else work.num_bytes, us) for work, us in found])
    for name in sorted(lines, key=lambda name: (name != "elementwise", KINDS.index(name.split(".")[0]), name)):
        product = name.split(".")[0] in PRODUCTS
        flops, num_bytes = (lines[name][1], lines["copy"][1]) if product else (lines["matmul"][1], lines[name][1])
        yield Rate(name, lines[name][0], flops, num_bytes)
    if clock.views_us:
        yield Rate("view", statistics.median(clock.views_us))
    for work in clock.times_us:
        us = clock.median_us(work)
        yield Rate(work.kind, 0.0, max(work.num_flops, 1) / us, max(work.num_bytes, 1) / us)


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, rate) of the line `us = a + size / rate` that is nearest to the points in relative terms; `a` is not negative.

    Least squares of `(a + b size - us) / us`, which has two unknowns; a slope that vanishes in the noise counts as the least one
    that a clock can tell.
    """
    rows = [(1 / us, size / us) for size, us in points]
    uu, uv, vv = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = uu * vv - uv * uv
    overhead = (u * vv - v * uv) / determinant if determinant > 1e-12 * uu * vv else 0.0
    overhead = max(overhead, 0.0)
    slope = (v - overhead * uv) / vv if vv else 0.0
    least = _LEAST_US / max(max(size for size, _ in points), 1)
    if slope < least:
        overhead, slope = u / uu, least
    return overhead, 1 / slope


# ---- collectives -------------------------------------------------------------------------------------------------------


class _Compute:
    """Work that collectives are run beside."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._matrix = torch.rand((256, 256) if device.type == "cpu" else (2048, 2048), device=device)
        self.run(3)
        start = time.perf_counter()
        self.run(10)
        self.unit_us = (time.perf_counter() - start) * 1e5

    def run(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._matrix, self._matrix)
        _synchronize(self.device)


class _Collective:
    """One all-gather or reduce-scatter of so many bytes, by the code that a schedule runs."""

    def __init__(self, channels: Channels, compute: _Compute, num_bytes: int, kind: str) -> None:
        self.kind, world_size = kind, channels.gathers.world_size
        rows = -(-num_bytes // 4 // world_size // _MEMBERS)
        self.num_bytes = 4 * rows * world_size * _MEMBERS
        transfers = Transfers([Layout("calibrate", (rows * world_size,), torch.float32, world_size)] * _MEMBERS, [False] * _MEMBERS)
        whole = torch.zeros(rows * world_size, device=compute.device)
        small = Transfers([Layout("meet", (world_size,), torch.float32, world_size)], [False])
        self._compute = compute
        self._meet: Callable[[], Any] = partial(small.all_gather, channels.gathers, [whole[:1]])
        if kind == "gather":
            self._launch: Callable[[], Any] = partial(transfers.all_gather, channels.gathers, [whole[:rows]] * _MEMBERS)
        else:
            self._launch = partial(transfers.reduce_scatter, channels.reductions, [whole] * _MEMBERS)
        self.times_us: list[float] = []
        self.busy_us: list[float] = []

    def run(self) -> None:
        """Alone, and beside compute: [Note: what collectives take from compute]."""
        alone_us = self._time(0)
        times = 1 + int(2 * alone_us / self._compute.unit_us)
        self._meet().wait()
        start = time.perf_counter()
        self._compute.run(times)
        compute_us = (time.perf_counter() - start) * 1e6
        self.times_us.append(alone_us)
        self.busy_us.append(self._time(times) - compute_us)

    def _time(self, compute: int) -> float:
        """From when all ranks have met."""
        self._meet().wait()
        _synchronize(self._compute.device)
        start = time.perf_counter()
        pending = self._launch()
        self._compute.run(compute)
        pending.wait()
        _synchronize(self._compute.device)
        return (time.perf_counter() - start) * 1e6


def _collectives(channels: Channels, device: torch.device) -> list[_Collective]:
    beside = _Compute(device)
    return [_Collective(channels, beside, num_bytes, kind) for num_bytes in _COLLECTIVE_BYTES for kind in ("gather", "reduce")]


def _with_collectives(costs: CostModel, collectives: Sequence[_Collective]) -> CostModel:
    """One share of their time is taken from compute, whatever the kind and size: single figures drown in noise. An all-reduce over
    replicas is not measured, but taken to be a reduce-scatter and an all-gather."""
    share = statistics.median(statistics.median(c.busy_us) / statistics.median(c.times_us) for c in collectives)
    share = min(max(share, 0.0), 0.99)
    lines = {
        kind: _fit([(c.num_bytes, max(statistics.median(c.times_us), _LEAST_US)) for c in collectives if c.kind == kind])
        for kind in ("gather", "reduce")
    }
    busy_us = share * statistics.mean(overhead for overhead, _ in lines.values())
    busy_us_per_byte = share * statistics.mean(1 / rate for _, rate in lines.values())
    links = {
        kind: Link(max(overhead - busy_us, 0.0), 1 / max(1 / rate - busy_us_per_byte, 0.01 / rate))
        for kind, (overhead, rate) in lines.items()
    }
    busy = 1 / busy_us_per_byte if busy_us_per_byte else math.inf
    gather, reduce = links["gather"], links["reduce"]
    both = Link(gather.latency_us + reduce.latency_us, 1 / (1 / gather.bytes_per_us + 1 / reduce.bytes_per_us))
    return replace(costs, gather=gather, reduce=reduce, all_reduce=both, launch_us=busy_us, busy_bytes_per_us=busy)
