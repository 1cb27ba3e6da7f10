"""Replicate x shard: 2 x 2 ranks compute what 4 do, and what one does on all data; every room knows the all-reduce."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zfx
from tests.harness import rank_outcomes, run_ranks
from tests.test_live_parameters import live_bytes
from zfx.channels import channels_for
from zfx.simulate import simulate
from zfx.wire import CollectiveWire

SMALL_BUCKETS = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0, prefetch_bucket_size=60, reduce_bucket_size=60)
NOTHING_KEPT = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)


class Uneven(nn.Module):
    """Rows that 2 and 4 ranks can't share evenly, a 0-dim parameter, a frozen one, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.lonely = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale + self.frozen + self.lonely


class Tied(nn.Module):
    """The head is the embedding; a recurrent layer runs as a leaf between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.mix = nn.GRU(6, 6, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mix(self.tokens(ids))[0]))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=16, use_cache=False, attn_implementation="eager",
    ))  # fmt: skip


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return found if isinstance(found, torch.Tensor) else found.logits


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "uneven": (Uneven, lambda: torch.randn(4, 5, dtype=torch.float64)),
    "tied": (Tied, lambda: torch.randint(0, 11, (2, 5))),
    "llama": (llama, lambda: torch.randint(0, 37, (2, 6))),
}


def batches(name: str, rank: int, num_steps: int) -> list[torch.Tensor]:
    torch.manual_seed(100 + rank)
    return [MODELS[name][1]() for _ in range(num_steps)]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def whole(values: Iterator[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if v is None else (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for v in values]


def trained(model: nn.Module, steps: list[list[torch.Tensor]]) -> tuple[list[Any], list[Any], list[float]]:
    """First gradients, last parameters and the norms that were clipped, after AdamW steps. Each step has the batches to average."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    first, norms = None, []
    for rows in steps:
        for x in rows:
            (output(model, x).square().mean() / len(rows)).backward()
        first = first or whole(p.grad for p in model.parameters())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return first or [], whole(iter(model.parameters())), norms


def assert_near(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs):
        if isinstance(a, float):
            assert a == pytest.approx(b, abs=1e-10, rel=1e-10)
        elif a is None or b is None:
            assert a is b
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


# ---- the same numbers -----------------------------------------------------------------------------------------------------


def equals(name: str, shapes: list[tuple[int, int]], sharded_too: bool, num_steps: int) -> None:
    rank, data = dist.get_rank(), [batches(name, r, num_steps) for r in range(4)]
    reference = trained(built(name), [[data[r][s] for r in range(4)] for s in range(num_steps)])
    found = {}
    for shape in shapes:
        torch._dynamo.reset()
        model = zfx.compile(built(name), mesh=mesh_of(*shape), limits=SMALL_BUCKETS)
        found[shape] = trained(model, [[x] for x in data[rank]])
        for mine, theirs in zip(found[shape], reference):
            assert_near(mine, theirs)
        for p in model.parameters():
            assert p.placements == (Replicate(), Shard(0) if p.dim() else Replicate())
    if not sharded_too:
        return
    torch._dynamo.reset()
    sharded = trained(zfx.compile(built(name), limits=SMALL_BUCKETS), [[x] for x in data[rank]])
    for mine, theirs in zip(found[1, 4], sharded):  # one replica: bit for bit
        for a, b in zip(mine, theirs):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


SHAPES = [(2, 2), (1, 4), (4, 1)]


@pytest.mark.parametrize(("name", "shapes", "sharded_too"), [
    ("uneven", SHAPES, False),
    pytest.param("tied", [(2, 2)], False, marks=[pytest.mark.slow]),
    *(pytest.param(name, SHAPES, True, marks=[pytest.mark.slow]) for name in MODELS),
])
def test_as_one_process_and_as_four_shards(name: str, shapes: list[tuple[int, int]], sharded_too: bool) -> None:
    run_ranks(4, equals, name, shapes, sharded_too, 3, timeout=300)


# ---- what runs ------------------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes and numbers of what goes through each channel of this rank: those of tensors, as they are handed to the wire."""
    seen: Counter[str] = Counter()
    wires: list[tuple[Any, str, Any]] = []

    def watch(wire: Any, channel: str, method: str) -> None:
        before = getattr(wire, method)

        def counting(tensors: Any, *rest: Any, **more: Any) -> Any:
            seen[f"{channel}.{method}"] += 1
            seen[f"{channel}.{method} bytes"] += sum(t.numel() * t.element_size() for t in tensors)
            return before(tensors, *rest, **more)

        wires.append((wire, method, before))
        setattr(wire, method, counting)

    channels = counted.channels  # type: ignore[attr-defined]
    watch(channels.gathers, "gathers", "all_gather")
    watch(channels.reductions, "reductions", "reduce_scatter")
    watch(channels.across, "across", "all_reduce")
    try:
        yield seen
    finally:
        for wire, method, _ in wires:
            delattr(wire, method)


def step(model: nn.Module, x: torch.Tensor) -> None:
    output(model, x).square().mean().backward()


def counts() -> dict[str, Any]:
    """What one step of a compiled model hands to each wire, beside what its schedule says; and what its code calls."""
    mesh = mesh_of(2, 2)
    model = zfx.compile(built("uneven"), mesh=mesh, limits=SMALL_BUCKETS)
    counted.channels = channels_for(mesh, 60.0)  # type: ignore[attr-defined]
    x = batches("uneven", dist.get_rank(), 1)[0]
    step(model, x)
    with counted() as seen:
        step(model, x)
    schedule = model.zfx.schedules[-1]
    spans = simulate(schedule).spans
    by_channel = {
        kind: (sum(s.kind == kind for s in spans), sum(s.num_bytes for s in spans if s.kind == kind))
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    return {"seen": seen, "planned": by_channel, "code": model.zfx.graphs[-1]["backward"].code, "schedule": str(schedule)}


def test_collectives_and_bytes_are_those_of_the_schedule() -> None:
    ranks = run_ranks(4, counts, timeout=120)
    for rank in ranks:
        seen, planned, code = rank["seen"], rank["planned"], rank["code"]
        assert seen["gathers.all_gather"] == planned["all_gather"][0]
        assert seen["gathers.all_gather bytes"] == planned["all_gather"][1]
        assert seen["reductions.reduce_scatter"] == planned["reduce_scatter"][0]
        assert seen["across.all_reduce"] == planned["all_reduce"][0] == planned["reduce_scatter"][0] > 1
        assert seen["across.all_reduce bytes"] <= planned["all_reduce"][1]
        assert code.count("zfx_runtime_all_reduce(") == code.count("zfx_runtime_wait_all_reduce(") == planned["all_reduce"][0]
        assert "4 ranks (2 replicas of 2)" in rank["schedule"] and "all reduce" in rank["schedule"]
    assert max(rank["seen"]["across.all_reduce bytes"] for rank in ranks) == ranks[0]["planned"]["all_reduce"][1]


def held() -> None:
    x = batches("uneven", dist.get_rank(), 1)[0]
    for limits in (NOTHING_KEPT, SMALL_BUCKETS, zfx.Limits()):
        torch._dynamo.reset()
        model = zfx.compile(built("uneven"), mesh=mesh_of(2, 2), limits=limits)
        steps, _, _ = live_bytes(model, lambda: step(model, x))  # noqa: B023
        assert steps and all(measured == planned for _, measured, planned in steps)


def others() -> None:
    """Micro-batches, precision, gathered(), the reference, copies, checkpoints, wider averages, and meshes that are wrong."""
    rank, mesh = dist.get_rank(), mesh_of(2, 2)
    data = [batches("uneven", r, 3) for r in range(4)]
    reference = built("uneven")
    for s in range(3):
        for r in range(4):
            (output(reference, data[r][s]).square().mean() / 4).backward()
    model = zfx.compile(built("uneven"), mesh=mesh, accumulate=3)
    for s in range(3):
        step(model, data[rank][s])
    assert_near(whole(p.grad for p in model.parameters()), [p.grad for p in reference.parameters()])
    with model.zfx.reference():
        model.zero_grad()
        for s in range(3):
            step(model, data[rank][s])
    assert_near(whole(p.grad for p in model.parameters()), [p.grad for p in reference.parameters()])

    plain = dict(built("uneven").named_parameters())
    with model.zfx.gathered(writeback=True) as full:
        assert all(torch.equal(value, plain[name]) for name, value in full.items())
        for value in full.values():
            value += 1
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), plain[name] + 1)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(state[name], value + 1) for name, value in plain.items())
    set_model_state_dict(model, dict(plain), options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(p.full_tensor(), plain[name]) for name, p in model.named_parameters())
    again = copy.deepcopy(model)
    step(again, data[rank][0])
    assert all(p.grad is None or p.grad.placements == p.placements for p in again.parameters())

    torch._dynamo.reset()
    wide = built("uneven")
    half = zfx.compile(built("uneven").float(), mesh=mesh, precision=zfx.Precision(torch.bfloat16))
    step(half, data[rank][0].float())
    for r in range(4):
        (output(wide, data[r][0]).square().mean() / 4).backward()
    for p, q in zip(half.parameters(), wide.parameters()):
        if q.grad is not None:
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.full_tensor().double(), q.grad, rtol=0.05, atol=0.05)

    with pytest.raises(ValueError, match=r"one dimension \(shard\) or two"):
        zfx.compile(built("uneven"), mesh=init_device_mesh("cpu", (1, 2, 2)))
    with pytest.raises(ValueError, match="replicas=4, but the mesh has 2"):
        zfx.compile(built("uneven"), mesh=mesh, replicas=4)
    with pytest.raises(ValueError, match="4 ranks can't be divided among replicas=3"):
        zfx.compile(built("uneven"), replicas=3)
    with pytest.raises(ValueError, match="ascending order"):
        zfx.compile(built("uneven"), mesh=DeviceMesh("cpu", [[1, 0], [3, 2]]))
    def small() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    with torch.device("meta"):
        on_meta = small()
    torch.manual_seed(0)
    born = zfx.compile(on_meta, mesh=mesh)
    for p, q in zip(born.parameters(), small().parameters()):
        assert torch.equal(p.full_tensor(), q)
    born.load_state_dict({name: q + 1 for name, q in small().state_dict().items()})
    for p, q in zip(born.parameters(), small().parameters()):
        assert torch.equal(p.full_tensor(), q + 1)

    made = zfx.compile(built("uneven"), replicas=2)
    assert made.up.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert made.up.weight.placements == (Replicate(), Shard(0))


def exact_averages() -> None:
    """Sums of 16-bit gradients stay in float32 between the stages: 257 = 256 + 1 is not a bfloat16, and 1/4 of it is not either;
    float16's largest number, on every rank, has itself for a mean."""
    for shape in ((2, 2), (4, 1), (1, 4)):
        for dtype, values, mean in ((torch.bfloat16, (256.0, 1.0, 256.0, 3.0), 129.0), (torch.float16, (65504.0,) * 4, 65504.0)):
            torch._dynamo.reset()
            layer = nn.Linear(2, 5, bias=False).to(dtype)
            with torch.no_grad():
                layer.weight.zero_()
            model = zfx.compile(nn.Sequential(layer, nn.Identity()), mesh=mesh_of(*shape))
            x = torch.full((1, 2), values[dist.get_rank()], dtype=dtype)
            model(x).sum().backward()
            assert model[0].weight.grad.full_tensor().tolist() == [[mean] * 2] * 5, (shape, dtype)


def real_collectives() -> None:
    """What runs on NCCL, here over gloo's own collectives: the same numbers."""
    data = [batches("uneven", r, 1) for r in range(4)]
    reference = built("uneven")
    wire_for, manager = zfx.channels.wire_for, zfx.wire._coalescing_manager
    zfx.channels.wire_for = CollectiveWire
    zfx.wire._coalescing_manager = lambda group, device, async_ops: manager(group, None, async_ops)  # as gloo knows it
    try:
        torch._dynamo.reset()
        model = zfx.compile(built("uneven"), mesh=mesh_of(2, 2), limits=SMALL_BUCKETS, timeout=59.0)
        step(model, data[dist.get_rank()][0])
    finally:
        zfx.channels.wire_for, zfx.wire._coalescing_manager = wire_for, manager
    for r in range(4):
        (output(reference, data[r][0]).square().mean() / 4).backward()
    assert_near(whole(p.grad for p in model.parameters()), [p.grad for p in reference.parameters()])


def all_of_it() -> None:
    held()
    real_collectives()
    others()
    exact_averages()


def test_held_bytes_micro_batches_precision_gathered_and_wrong_meshes() -> None:
    run_ranks(4, all_of_it, timeout=240)


# ---- ranks that disagree --------------------------------------------------------------------------------------------------


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        return (self.second if second else self.first)(x)


def other_replica() -> None:
    """The two ranks of the second replica run another branch than those of the first: each replica agrees within itself."""
    torch.manual_seed(0)
    model = zfx.compile(Forked(), mesh=mesh_of(2, 2), timeout=8.0)
    model(torch.ones(3, 4), dist.get_rank() >= 2)


def other_start() -> None:
    torch.manual_seed(dist.get_rank() // 2)
    zfx.compile(Forked(), mesh=mesh_of(2, 2), timeout=8.0)


def stays_away() -> float:
    torch.manual_seed(0)
    model = zfx.compile(Forked(), mesh=mesh_of(2, 2), timeout=4.0)
    out = model(torch.ones(3, 4), True)
    if dist.get_rank() == 3:
        time.sleep(7)
        return 0.0
    start = time.monotonic()
    with pytest.raises(zfx.RankMismatch, match="rank 3 did not come"):
        out.sum().backward()
    return time.monotonic() - start


@pytest.mark.parametrize(("job", "difference"), [(other_replica, "second.weight"), (other_start, "parameter first.weight")])
def test_replicas_that_disagree_are_named(job: Callable[[], None], difference: str) -> None:
    outcomes = rank_outcomes(4, job, timeout=60)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None and outcome.error.type_name == "RankMismatch", str(outcome)
        assert sorted(outcome.error.attributes["ranks"]) == ([2, 3] if rank < 2 else [0, 1])
        assert difference in outcome.error.message


def test_a_rank_of_another_replica_that_stays_away_is_named() -> None:
    assert max(run_ranks(4, stays_away, timeout=60)) <= 6
