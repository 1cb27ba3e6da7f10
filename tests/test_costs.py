"""What things are estimated to cost: rates and links, presets by hand-computed formulas, and the durations of captured graphs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zfx
from zfx.costs import CostModel, Link, Rate
from zfx.ir import Schedule
from zfx.passes import plan, timing
from zfx.passes.duration import KINDS, duration_us, kind_of, work_of
from zfx.passes.timeline import read
from zfx.passes.view import actual_us
from zfx.presets import DEVICES, NETWORKS, costs_for, device_for
from zfx.simulate import simulate
from zfx.testing import chain

aten = torch.ops.aten


# ---- the record --------------------------------------------------------------------------------------------------------


def test_a_kind_takes_the_rate_of_its_longest_beginning() -> None:
    rates = (
        Rate("elementwise"),
        Rate("matmul", 1.0),
        Rate("matmul.bfloat16", 2.0),
        Rate("matmul.bfloat16.aten.mm.default(2x2)", 3.0),
    )
    costs = CostModel(rates=rates)
    for kind, rate in {
        "matmul": 1, "matmul.float32": 1, "matmul.float32.aten.mm.default(2x2)": 1, "matmul.bfloat16": 2,
        "matmul.bfloat16.aten.mm.default(2x3)": 2, "matmul.bfloat16.aten.mm.default(2x2)": 3, "matmuls": 0, "": 0, "copy.x": 0,
    }.items():  # fmt: skip
        assert costs.rate_of(kind) is rates[rate], kind
    assert costs.compute_us("matmul.bfloat16", 10**6, 0) == 2.0 + 10**6 / 50_000
    assert costs == CostModel(rates=rates) and hash(costs) == hash(CostModel(rates=rates)), "what it remembers is no part of it"


def test_work_is_limited_by_flops_or_bytes() -> None:
    rate = Rate("matmul", 5.0, 1000.0, 100.0)
    assert rate.us(10_000, 0) == 15.0 and rate.us(10_000, 10_000) == 105.0 and rate.us(0, 0) == 5.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Link(-1.0),
        lambda: Link(bytes_per_us=0.0),
        lambda: Rate("x", flops_per_us=0.0),
        lambda: Rate("x", overhead_us=math.nan),
        lambda: CostModel(rates=()),
        lambda: CostModel(rates=(Rate("a"), Rate("a"))),
        lambda: CostModel(launch_us=-1.0),
    ],
)
def test_wrong_numbers_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must"):
        wrong()


def test_what_collectives_take_from_compute_is_booked_by_every_clock() -> None:
    assert CostModel(launch_us=2.0, busy_bytes_per_us=4.0).busy_us(8) == 4.0 and CostModel(launch_us=2.0).busy_us(8) == 2.0
    costs = CostModel(Link(1.0, 10.0), Link(1.0, 10.0), launch_us=2.0, busy_bytes_per_us=4.0)
    schedule = plan(chain(5, costs=costs), zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0))
    simulation = simulate(schedule)
    assert simulation.overhead_us == sum(costs.busy_us(span.num_bytes) for span in simulation.spans) > 0
    assert simulation.finish_us == pytest.approx(timing.simulate(read(schedule), actual_us(schedule.program)).finish_us)


# ---- presets -----------------------------------------------------------------------------------------------------------


def test_one_tier_by_hand() -> None:
    """8 ranks on NVLink 4 at 80 %: three doublings of 1.2 us after 10 us, and 7/8 of the bytes over 360 GB/s."""
    link = costs_for("h100", "nvlink:8", 8).gather
    assert link.latency_us == pytest.approx(10 + 3 * 1.2)
    assert link.us(8 * 360_000_000) - link.latency_us == pytest.approx(7000)


def test_two_tiers_by_hand() -> None:
    """64 ranks: the ring makes 56 hops inside nodes and 7 between them, at the pace of NVLink (8 NICs carry 320 GB/s: slower)."""
    ring = costs_for("h100", "nvlink:8,ib", 64).gather
    assert ring.latency_us == pytest.approx(10 + 56 * 1.9 + 7 * 4.0)
    assert ring.bytes_per_us == pytest.approx(8 * 50e3 * 0.8 * 64 / 63)
    # on 1,024 ranks that many hops cost more than entering nodes first and ranks then
    tree = costs_for("h100", "nvlink:8,ib", 1024).gather
    assert tree.latency_us == pytest.approx(10 + 3 * 1.2 + 7 * 8.5)
    assert 1 / tree.bytes_per_us == pytest.approx((1 - 1 / 128) / 320e3 + (1 - 1 / 8) / 360e3)


def test_replicas_by_hand() -> None:
    """Gathers stay inside a node; between two nodes each rank exchanges its shard with the other, 8 NICs for 8 ranks at 80 %."""
    costs = costs_for("h100", "nvlink:8,ib", 16, replicas=2)
    assert (costs.gather, costs.reduce) == (costs_for("h100", "nvlink:8", 8).gather,) * 2
    assert costs.all_reduce.us(40_000_000) == pytest.approx(10 + 2 * 4.0 + 1000)
    # two replicas of 4 to a node, 8 nodes: 15 of 16 parts go around twice, by 8 NICs for 4 ranks; 8 hops inside nodes, 7 between
    ring = costs_for("h100", "nvlink:8,ib", 64, replicas=16).all_reduce
    assert ring.us(0) == pytest.approx(10 + 2 * (8 * 1.9 + 7 * 4.0))
    assert ring.bytes_per_us == pytest.approx(320e3 / 4 * 16 / 15 / 2)
    # a replica of two nodes has twice the links
    wide = costs_for("h100", "nvlink:8,ib", 32, replicas=2).all_reduce
    assert wide.bytes_per_us == pytest.approx(40e3)
    two = costs_for("cpu", "loopback", 4, replicas=2).all_reduce
    assert two.us(2_000_000) == pytest.approx(200 + 1000), "each rank sends its shard once"
    with pytest.raises(ValueError, match="16 ranks can't be divided among 3 replicas"):
        costs_for("h100", "nvlink:8,ib", 16, replicas=3)


def test_links_and_own_numbers() -> None:
    one, eight = (costs_for("h100", f"nvlink:8,{tier}", 64).gather for tier in ("ib*1", "ib*8"))
    assert eight == costs_for("h100", "nvlink:8,ib400", 64).gather and one.bytes_per_us < eight.bytes_per_us / 5
    own = costs_for("custom:flops=300e12,bandwidth=2e12,memory=48e9,overhead_us=1", "pcie4:8,ib*2@20/6", 16)
    assert own.rate_of("matmul.bfloat16") == Rate("matmul", 1.0, 300e6, 2e6)
    assert device_for("custom:flops=300e12,bandwidth=2e12,memory=48e9").memory_bytes == 48_000_000_000
    assert own.gather.latency_us in (pytest.approx(10 + 14 * 2.5 + 6.0), pytest.approx(10 + 3 * 1.9 + 6.0))
    assert costs_for("cpu", "loopback", 2).gather == Link(100.0, 4000.0), "each rank lacks half"
    assert costs_for("cpu", "loopback", 4).gather.latency_us == 300.0, "one message to each of the others"


def test_generations_follow_the_device() -> None:
    assert costs_for("a100", "nvlink:8,ib", 16).gather == costs_for("a100", "nvlink3:8,ib200", 16).gather
    assert costs_for("h100", "nvlink:8,ib", 16).gather == costs_for("h100", "nvlink4:8,ib400", 16).gather
    assert costs_for("h100", "", 1).gather.latency_us == 0.0 and costs_for("h100", "nvlink:8,ib", 1).launch_us == 0.0


@given(
    st.sampled_from(sorted(DEVICES)),
    st.sampled_from([n for n in NETWORKS if n != "loopback"]),
    st.integers(1, 300),
    st.integers(0, 2**32),
)
def test_every_preset_is_a_sane_cost_model(device: str, network: str, world_size: int, num_bytes: int) -> None:
    costs = costs_for(device, network, world_size)
    assert costs == costs_for(device, network, world_size)
    assert costs.gather_us(num_bytes) <= costs.gather_us(num_bytes + 1)
    assert costs.gather_us(num_bytes) <= costs_for(device, f"{network}@0.01/1000", world_size).gather_us(num_bytes)
    assert 1 <= costs.pack_threshold_bytes <= 2**27
    lacking = num_bytes * (world_size - 1) / world_size  # one rank takes this in by its own links, at the wire's full rate
    assert world_size == 1 or costs.gather_us(num_bytes) >= lacking / NETWORKS[network].bytes_per_us * (1 - 1e-9)


def test_products_are_faster_in_lower_precision() -> None:
    for name in ("a100", "h100", "h200", "mi300x"):
        costs = costs_for(name, "ib", 2)
        half, full = (costs.compute_us(f"matmul.{dtype}", 10**12, 0) for dtype in ("bfloat16", "float32"))
        assert half < full / 5 and costs.compute_us("convolution.float16", 10**12, 0) == half
        assert costs.compute_us("attention.bfloat16", 10**12, 0) > half
        assert costs.compute_us("matmul.float8_e5m2", 10**12, 0) == full, "a precision without a peak of its own"


@pytest.mark.parametrize(
    ("device", "network", "world_size", "words"),
    [
        ("h1000", "ib", 8, "unknown device 'h1000'; known are a100, h100, h200, mi300x, cpu"),
        ("custom", "ib", 8, "is not KEY=NUMBER; keys are flops, bandwidth, memory"),
        ("custom:flops=1e12,bandwidth=1e9", "ib", 8, "lacks memory"),
        ("custom:flops=1e12,bandwidth=1e9,memory=0", "ib", 8, "'memory=0' must be"),
        ("custom:flops=nan,bandwidth=1e9,memory=1", "ib", 8, "'flops=nan' must be"),
        ("custom:flop=1,bandwidth=1e9,memory=1", "ib", 8, "'flop=1' must be one of flops"),
        ("h100", "nvlinq:8,ib", 8, "unknown network 'nvlinq:8'.*nvlink3.*loopback.*nvlink .here nvlink4."),
        ("mi300x", "nvlink:8,ib", 8, "unknown network 'nvlink:8'"),
        ("h100", "nvlink,ib", 8, "'nvlink' must say how many ranks"),
        ("h100", "nvlink:8,ib:12", 8, "'ib:12' must reach a multiple of the 8 ranks"),
        ("h100", "nvlink:8,ib:8", 8, "'ib:8' must reach a multiple"),
        ("h100", "nvlink:8", 16, "reaches 8 ranks, not 16: add a tier, as in nvlink:8,ib"),
        ("h100", "", 2, "reaches 1 ranks, not 2"),
        ("h100", "ib@0", 2, "must be numbers above 0"),
        ("h100", "ib@1/-1", 2, "numbers above 0, and latency"),
        ("h100", "ib@1e", 2, "must be numbers above 0"),
        ("h100", "ib*0", 2, "must be numbers above 0"),
        ("h100", "nvlink:8,,ib", 2, "unknown network ''"),
        ("h100", "ib", 0, "world_size must be"),
        ("h100", "ib", True, "world_size must be"),
    ],
)
def test_bad_strings_are_refused_in_clear_words(device: str, network: str, world_size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        costs_for(device, network, world_size)


# ---- kinds -------------------------------------------------------------------------------------------------------------

OPERATORS = {
    "matmul": "mm addmm bmm _grouped_mm mv",
    "convolution": "convolution convolution_backward",
    "attention": "_scaled_dot_product_flash_attention_for_cpu_backward _flash_attention_forward",
    "elementwise": "add mul expand tanh_backward threshold_backward maximum logical_and rsqrt where native_dropout_backward",
    "transcendental": "gelu gelu_backward _softmax exp expm1 silu silu_backward pow tanh log_sigmoid_forward",
    "reduction": "sum mean amax max cumsum native_layer_norm native_layer_norm_backward _softmax_backward_data nll_loss_backward "
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d native_batch_norm_backward linalg_vector_norm",
    "copy": "clone _to_copy copy copy_ cat stack new_zeros arange select_backward constant_pad_nd",
    "indexing": "embedding embedding_dense_backward index index_put gather scatter_add",
    "random": "native_dropout bernoulli rand_like randn",
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, row in OPERATORS.items() for name in row.split()])
def test_kinds_of_operators(kind: str, name: str) -> None:
    packet = getattr(aten, name)
    assert {kind_of(getattr(packet, overload)) for overload in packet.overloads()} == {kind}
    assert set(OPERATORS) == set(KINDS)


# ---- durations of captured graphs --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


class GPT(nn.Module):
    """Embeddings by token and (sliced) by place, blocks, a tied head."""

    def __init__(self, dim: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, dim), nn.Parameter(torch.randn(64, dim))
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
        self.head = nn.Linear(dim, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.places[: ids.shape[1]]))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3))


class Experts(nn.Module):
    """Three matrices in one parameter, each read by one product; a weight that is computed from parameters."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, dim, dim))
        self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(dim, dim, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(sum(x @ self.experts[i] for i in range(3)))


class WithLeaf(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(dim, dim, batch_first=True), nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0])


def planned(model: nn.Module, x: torch.Tensor, costs: CostModel | None = None) -> tuple[Schedule, Any]:
    torch._dynamo.reset()
    model = zfx.compile(model, world_size=2, costs=costs)
    return model.zfx.plan(x), model.zfx.graphs[-1]


COUNTING = CostModel(rates=(Rate("elementwise", 0.0, 1.0, 1e30),))  # microseconds are flops


@pytest.mark.parametrize(("make", "shape"), [(Conv, (4, 3, 12, 12)), (Experts, (4, 5, 12))])
def test_flops_are_those_that_torch_counts(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    schedule, _ = planned(make(), x, COUNTING)
    with FlopCounterMode(display=False) as counter:
        make()(x).sum().backward()
    assert round(sum(step.duration_us for step in schedule.program.steps)) == counter.get_total_flops()


def test_attention_on_cpus_counts_as_torch_counts_it_elsewhere() -> None:
    ids = torch.randint(0, 50, (3, 10))
    schedule, _ = planned(GPT(), ids, COUNTING)
    attention = [s.duration_us for s in schedule.program.steps if "attention_for_cpu" in s.name]
    forward = 2 * 2 * (3 * 2) * 10 * 10 * 8  # two products of 2 flops, batch x heads, rows, columns, head width
    assert [round(x) for x in attention] == [forward] * 2 + [forward * 5 // 2] * 2


def test_views_take_no_time_and_all_else_takes_some() -> None:
    for model, x in ((GPT(), torch.randint(0, 50, (2, 7))), (WithLeaf(), torch.randn(2, 5, 8)), (Experts(), torch.randn(3, 12))):
        _, graphs = planned(model, x)
        for graph in graphs.values():
            for node in graph.graph.nodes:
                if isinstance(node.target, torch._ops.OpOverload):
                    view = node.target.is_view or node.target is aten._unsafe_view.default
                    assert (duration_us(node, CostModel()) == 0.0) == view, node.format_node()


def test_a_measured_table_may_know_what_it_takes_to_ask_for_a_view() -> None:
    costs = CostModel(rates=(Rate("elementwise", 5.0), Rate("view", 3.0)))
    schedule, _ = planned(nn.Linear(4, 4), torch.randn(2, 4), costs)
    assert {s.duration_us for s in schedule.program.steps if s.op == "aten.t.default"} == {3.0}


def test_a_leaf_counts_its_parameters_for_each_row() -> None:
    schedule, _ = planned(WithLeaf(), torch.randn(2, 5, 8), COUNTING)
    leaves = [s.duration_us for s in schedule.program.steps if s.op.startswith("zfx.leaf")]
    numel = sum(p.numel() for p in nn.LSTM(8, 8).parameters())
    assert leaves == [2 * 10 * numel, 6 * 10 * numel]


def test_a_table_is_not_read_whole() -> None:
    model = nn.Sequential(nn.Embedding(100_000, 4), nn.Linear(4, 4))
    _, graphs = planned(model, torch.arange(6))
    (embedding,) = graphs["forward"].graph.find_nodes(op="call_function", target=aten.embedding.default)
    work = work_of(embedding)
    assert work is not None and (work.kind, work.num_flops) == ("indexing.float32.aten.embedding.default(100000x4,6)", 0)
    assert work.num_bytes == 6 * 8 + 2 * 6 * 4 * 4


def test_precision_is_in_the_kind() -> None:
    class Mixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    _, graphs = planned(Mixed(8, 8), torch.randn(3, 8))
    kinds = [
        work.kind.split(".")[:2] for g in graphs.values() for n in g.graph.nodes if n.op == "call_function" and (work := work_of(n))
    ]
    assert ["matmul", "bfloat16"] in kinds and ["copy", "float32"] in kinds and ["matmul", "float32"] not in kinds


def test_a_branch_takes_the_time_of_the_longer_side() -> None:
    class Branch(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.cond(y.sum() > 0, lambda y: y.sin().cos().exp(), lambda y: y + 1, (y,))

    costs = CostModel(rates=(Rate("elementwise", 1.0),))
    with torch.no_grad():
        schedule, graphs = planned(Branch(4, 4), torch.randn(2, 4), costs)
    (cond,) = [s for s in schedule.program.steps if s.op == "cond"]
    assert cond.duration_us == pytest.approx(3.0, abs=0.1)
    (node,) = [n for n in graphs["forward"].graph.nodes if str(n.target) == "cond"]
    assert duration_us(node, costs) == cond.duration_us, "the lowered graph knows its branches too"


# ---- durations by the parameters alone ---------------------------------------------------------------------------------


def nominal(schedule: Schedule) -> dict[str, Counter[float]]:
    """By parameter, the nominal durations of the steps that read it or complete its gradient; and those of all steps."""
    found: dict[str, Counter[float]] = defaultdict(Counter)
    for step in schedule.program.steps:
        for name in (*step.reads, *step.completes, "any"):
            found[name][step.nominal_us] += 1 if step.nominal_us else 0
    return {name: +counter for name, counter in found.items()}


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (GPT, ((2, 7), (5, 64), (3, 33))),
        (Conv, ((4, 3, 12, 12), (2, 3, 9, 17))),
        (Experts, ((4, 5, 12), (2, 7, 12), (3, 12))),
        (WithLeaf, ((2, 5, 8), (4, 3, 8))),
    ],
)
def test_nominal_durations_and_buckets_do_not_depend_on_data(
    make: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...]
) -> None:
    found = []
    for shape in shapes:
        torch.manual_seed(0)
        schedule, _ = planned(make(), torch.ones(shape, dtype=torch.int64) if make is GPT else torch.randn(shape))
        found.append((nominal(schedule), schedule.buckets, sum(s.duration_us for s in schedule.program.steps)))
    for by_parameter, buckets, _ in found[1:]:
        assert by_parameter == found[0][0] and buckets == found[0][1]
    assert len({duration for _, _, duration in found}) == len(found), "the shapes must differ in what they really take"


def test_products_cost_their_parameters_for_the_nominal_rows() -> None:
    """Microseconds are flops: forward, gradient of the input (not of the first layer) and of the weight, 2 an element and row."""
    costs = replace(COUNTING, nominal_tokens=1000)
    schedule, _ = planned(
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 5, bias=False)), torch.randn(3, 4), costs
    )
    steps = [(s.name, s.nominal_us) for s in schedule.program.steps if s.nominal_us > 1]
    assert [us for _, us in steps] == [2000 * 24, 2000 * 30, 2000 * 30, 2000 * 30, 2000 * 24], steps


def test_products_with_parts_of_a_parameter_share_it() -> None:
    schedule, _ = planned(Experts(), torch.randn(4, 12), replace(COUNTING, nominal_tokens=1))
    total = sum(s.nominal_us for s in schedule.program.steps if s.phase == "forward")
    assert total == pytest.approx(2 * 3 * 144 + 2 * (144 + 12), rel=0.01), "experts once in all; direction and length of the mix"


def test_embeddings_norms_and_biases_cost_their_own_bytes() -> None:
    costs = CostModel(rates=(Rate("elementwise", 0.0, 1e30, 1.0),), nominal_tokens=10**6)  # microseconds are bytes
    schedule, _ = planned(nn.Sequential(nn.Embedding(100, 8), nn.LayerNorm(8)), torch.arange(5), costs)
    steps = {s.op.split(".")[1]: s.nominal_us for s in schedule.program.steps if s.nominal_us}
    assert steps["embedding"] == steps["embedding_dense_backward"] == 100 * 8 * 4
    assert steps["native_layer_norm"] == 2 * 8 * 4 and steps["native_layer_norm_backward"] == 4 * 8 * 4
