"""Random small modules under random limits, on two ranks: right gradients, and the same bits whatever the schedule.

A module is a row of blocks that map `[batch, width]` to the same; each block is one trouble: a weight that is used again, frozen,
empty, 0-dim, of another dtype, not contiguous, in a list, ... Two steps of SGD are compared with plain replicas whose gradients are
averaged.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks

BATCH = 3
NUM_STEPS = 2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # else 1e-10: of a parameter's own dtype
BLOCKS = ("linear", "wide", "list", "dict", "scalar", "empty", "frozen", "lora", "float32", "bfloat16", "int", "complex", "buffer",
          "transposed", "unused", "conv", "shared", "again", "recur", "branch")


@dataclass(frozen=True)
class Spec:
    """A random module. `aux`: which of its other outputs the loss reads; `seed`: of its values and its batches."""

    width: int
    blocks: tuple[str, ...]
    aux: tuple[str, ...] = ()
    seed: int = 0


class Block(nn.Module):
    """One block; `earlier` are those before it."""

    def __init__(self, kind: str, width: int, earlier: list[Block]) -> None:
        super().__init__()
        self.kind, self.width = kind, width
        self.first = next((b for b in earlier if b.kind in ("linear", "wide")), None) if kind in ("shared", "again") else None
        getattr(self, f"make_{kind}", self.make_linear)(width)

    def make_linear(self, n: int) -> None:
        self.lin = nn.Linear(n, n)

    def make_wide(self, n: int) -> None:
        self.lin, self.down = nn.Linear(n, 2 * n + 1), nn.Linear(2 * n + 1, n, bias=False)

    def make_list(self, n: int) -> None:
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(n, n) * 0.4) for _ in range(2)])

    def make_dict(self, n: int) -> None:
        self.ws = nn.ParameterDict({"scale": nn.Parameter(torch.randn(n)), "shift": nn.Parameter(torch.randn(1, n))})

    def make_scalar(self, n: int) -> None:
        self.t = nn.Parameter(torch.tensor(0.2))

    def make_empty(self, n: int) -> None:
        self.w = nn.Parameter(torch.empty(0, n))

    def make_frozen(self, n: int) -> None:
        self.lin = nn.Linear(n, n).requires_grad_(False)

    def make_lora(self, n: int) -> None:
        self.lin = nn.Linear(n, n).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, n) * 0.3), nn.Parameter(torch.randn(n, 2) * 0.3)

    def make_float32(self, n: int) -> None:
        self.w = nn.Parameter(torch.randn(n, n, dtype=torch.float32) * 0.4)

    def make_bfloat16(self, n: int) -> None:
        self.w = nn.Parameter((torch.randn(n) * 0.4).bfloat16())

    def make_int(self, n: int) -> None:
        self.order = nn.Parameter(torch.randperm(n), requires_grad=False)

    def make_complex(self, n: int) -> None:
        self.w = nn.Parameter(torch.randn(n, dtype=torch.complex128) * 0.5)

    def make_buffer(self, n: int) -> None:
        self.lin = nn.Linear(n, n)
        self.register_buffer("mean", torch.zeros(n))

    def make_transposed(self, n: int) -> None:
        self.w = nn.Parameter((torch.randn(n + 1, n) * 0.4).t())

    def make_conv(self, n: int) -> None:
        self.conv = nn.Conv1d(1, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, f"run_{self.kind}", self.run_linear)(x)

    def run_linear(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x))

    def run_wide(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.lin(x)))

    def run_list(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.ws:
            x = torch.tanh(x @ w)
        return x

    def run_dict(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.ws["scale"] + self.ws["shift"]

    def run_scalar(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.t.exp()

    def run_empty(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, F.linear(x, self.w)], dim=-1)

    def run_lora(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) + F.linear(F.linear(x, self.a), self.b)

    def run_float32(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x.float() @ self.w).double()

    def run_bfloat16(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w.double()

    def run_int(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(1, self.order)

    def run_complex(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).real + x

    def run_buffer(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.lin(x) + self.mean

    def run_transposed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w)[:, :-1]

    def run_unused(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0

    def run_conv(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, None]).sum(1)

    def run_shared(self, x: torch.Tensor) -> torch.Tensor:
        """Its own weight and, transposed, that of an earlier block."""
        x = torch.tanh(self.lin(x))
        weight = (self.first or self).lin.weight
        return F.linear(F.linear(x, weight), weight.t())

    def run_again(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.lin(x)) * (0.5 if self.first is None else self.first(x))

    def run_recur(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.lin(x))
        return x

    def run_branch(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) * x + self.lin(-x)


class Model(nn.Module):
    """The blocks in a row, a head, and more outputs than a loss needs."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        blocks: list[Block] = []
        for kind in spec.blocks:
            blocks.append(Block(kind, spec.width, blocks))
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(spec.width, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = [x]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return {"out": self.head(hidden[-1]), "hidden": hidden[len(hidden) // 2], "nested": ("text", [hidden[-1].mean()], None)}


def build(spec: Spec) -> Model:
    torch.manual_seed(spec.seed)
    torch.set_default_dtype(torch.float64)
    try:
        return Model(spec)
    finally:
        torch.set_default_dtype(torch.float32)


def loss_of(model: nn.Module, spec: Spec, rank: int, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(1 + 7 * rank + 1000 * step + spec.seed)
    x, y = (torch.randn(BATCH, n, generator=g, dtype=torch.float64) for n in (spec.width, 2))
    out = model(x)
    loss = (out["out"] - y).square().mean()
    if "hidden" in spec.aux:
        loss = loss + out["hidden"].square().sum()
    return loss + out["nested"][1][0] if "nested" in spec.aux else loss


# --------------------------------------------------------------------------------------------------------------------
# On a rank
# --------------------------------------------------------------------------------------------------------------------


Seen = dict[str, "torch.Tensor | None"]


def _full(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def _look(seen: Seen, step: int, model: nn.Module, loss: torch.Tensor) -> None:
    seen[f"{step} loss"] = loss.detach().clone()
    seen.update({f"{step} grad {n}": _full(p.grad) for n, p in model.named_parameters()})
    seen.update({f"{step} buffer {n}": b.detach().clone() for n, b in model.named_buffers()})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def plain(spec: Spec) -> Seen:
    """What this rank has to see: one plain replica a rank, gradients averaged."""
    world, rank = dist.get_world_size(), dist.get_rank()
    team = [build(spec) for _ in range(world)]
    optimizers = [_optimizer(model) for model in team]
    seen: Seen = {}
    for step in range(NUM_STEPS):
        losses = [loss_of(model, spec, r, step) for r, model in enumerate(team)]
        for loss in losses:
            loss.backward()
        for params in zip(*[model.parameters() for model in team]):
            if params[0].grad is not None:
                wide = torch.promote_types(params[0].dtype, torch.float64)
                mean = (sum(p.grad.to(wide) for p in params) / world).to(params[0].dtype)
                for p in params:
                    p.grad = mean.clone()
        _look(seen, step, team[rank], losses[rank])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    seen.update({f"param {n}": p.detach().clone() for n, p in team[rank].named_parameters()})
    return seen


def sharded(spec: Spec, limits: Any) -> Seen:
    import zfx

    model = zfx.compile(build(spec), dist.get_world_size(), limits=limits)
    optimizer, seen = _optimizer(model), {}
    for step in range(NUM_STEPS):
        loss = loss_of(model, spec, dist.get_rank(), step)
        loss.backward()
        _look(seen, step, model, loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seen.update({f"param {n}": _full(p) for n, p in model.named_parameters()})
    return seen


def _feasible(spec: Spec, limits: Any) -> tuple[Seen, Any]:
    """Run under the limits; if they are too tight, under the smallest that the error names, which must do."""
    import zfx

    for _ in range(4):  # the forward alone, and then with its backward, may each ask for more
        try:
            return sharded(spec, limits), limits
        except zfx.InfeasibleBudget as error:
            assert error.limit_name == "max_live_parameters" and error.limit < error.smallest_limit, error
            limits = dataclasses.replace(limits, max_live_parameters=error.smallest_limit)
    raise AssertionError("the smallest limit that errors name is still too small")


def parity(spec: Spec, many_limits: tuple[Any, ...]) -> list[str]:
    """What is wrong; a job."""
    wanted, first, bad = plain(spec), None, []
    for asked in many_limits:
        got, limits = _feasible(spec, asked)
        first = got if first is None else first
        bad += [f"{limits}: {line}" for line in _far(wanted, got)]
        bad += [f"{limits} changes the bits of {key}" for key, value in got.items() if not _same(first[key], value)]
    return bad


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


def _far(wanted: Seen, got: Seen) -> list[str]:
    if wanted.keys() != got.keys():
        return [f"names differ: {sorted(wanted.keys() ^ got.keys())}"]
    loosest = max([TOLERANCE.get(v.dtype, 0.0) for v in wanted.values() if v is not None])  # the second step sees rounded ones
    bad = []
    for key, a in wanted.items():
        b = got[key]
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            if a is not b:
                bad.append(f"{key}: {b if b is None else (b.shape, b.dtype)}, not {a if a is None else (a.shape, a.dtype)}")
        elif a.numel() and not float((far := (a - b).abs() / a.abs().clamp_min(1)).max()) <= max(loosest, 1e-10):
            bad.append(f"{key}: {float(far.max()):.3g}")
    return bad


# --------------------------------------------------------------------------------------------------------------------
# The tests
# --------------------------------------------------------------------------------------------------------------------


SPECS = st.builds(
    Spec,
    width=st.integers(1, 7),
    blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5).map(tuple),
    aux=st.sets(st.sampled_from(["hidden", "nested"])).map(lambda names: tuple(sorted(names))),
    seed=st.integers(0, 99),
)
ELEMENTS = st.one_of(st.sampled_from([0, 10**9]), st.integers(0, 300))


def limits_strategy() -> st.SearchStrategy[Any]:
    import zfx

    return st.builds(
        zfx.Limits,
        max_live_parameters=st.one_of(st.just(10**9), st.integers(1, 600)),
        max_reuse_distance=ELEMENTS,
        prefetch_bucket_size=ELEMENTS,
        reduce_bucket_size=ELEMENTS,
        param_persistence_threshold=ELEMENTS,
    )


def check(spec: Spec, many_limits: tuple[Any, ...]) -> None:
    found = run_ranks(2, parity, spec, many_limits, timeout=120)
    assert not any(found), "\n".join(f"rank {rank}: {line}" for rank, bad in enumerate(found) for line in bad[:6])


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking takes minutes; `slow` does it


@settings(max_examples=8, phases=PHASES)
@given(SPECS, st.tuples(limits_strategy(), limits_strategy()))
def test_random_modules_under_random_limits(spec: Spec, many_limits: tuple[Any, ...]) -> None:
    check(spec, many_limits)


@pytest.mark.slow
@settings(max_examples=25)
@given(SPECS, st.tuples(limits_strategy(), limits_strategy(), limits_strategy()))
def test_more_random_modules(spec: Spec, many_limits: tuple[Any, ...]) -> None:
    check(spec, many_limits)


@pytest.mark.parametrize("kind", BLOCKS)
def test_each_block_alone(kind: str) -> None:
    import zfx

    released = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)
    check(Spec(5, ("linear", kind), ("hidden",)), (released, zfx.Limits()))


def test_a_wrong_gradient_is_noticed() -> None:
    a: Seen = {"0 grad w": torch.ones(2, dtype=torch.float64), "0 grad v": None}
    assert _far(a, dict(a)) == []
    for change in (torch.ones(2, dtype=torch.float64) + 1e-9, None, torch.ones(2), torch.ones(1, dtype=torch.float64)):
        assert _far(a, {**a, "0 grad w": change})
    assert _far(a, {**a, "0 grad v": torch.zeros(2)})
