"""Leaf modules: code that can't be traced runs as one node, forward and backward, on gathered parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx
from tests.harness import run_ranks

RELEASE_ALL = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)


class Experts(nn.Module):
    """Which rows go where depends on data: Dynamo can't follow. Its BatchNorm has buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (x[:, 0].abs() * 3).long().clamp(max=2).eq(i).nonzero()[:, 0]
            if rows.numel() > 0:
                out[rows] += expert(x[rows])
        return self.drop(self.norm(out))


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(4, 4), Experts(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.moe(torch.tanh(self.inp(x))))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inp, self.rnn, self.out = nn.Linear(3, 4), kind(4, 5, num_layers=2, batch_first=True, dropout=0.3), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, state = self.rnn(torch.tanh(self.inp(x)))
        hidden = state[0] if isinstance(state, tuple) else state
        return self.out(out[:, -1]) + hidden.sum()


class Wrong(nn.Module):
    """Returns another shape than its input, and looks at data first."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)[:1] if x.sum().item() > 0 else self.lin(x)


def build(name: str) -> tuple[nn.Module, tuple[type[nn.Module], ...], list[torch.Tensor]]:
    torch.manual_seed(0)
    batches = [torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)]
    if name == "moe":
        return MoE().double(), (Experts,), [b.double() for b in batches]
    return Recurrent(getattr(nn, name)).double(), (), [torch.randn(2 + r, 4, 3, dtype=torch.float64) for r in range(3)]


def compare(name: str) -> tuple[float, int]:
    """Largest gradient error against the mean over ranks after two steps of accumulation, and the number of leaf nodes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, leaves, batches = build(name)
    model = zfx.compile(copy.deepcopy(plain), limits=RELEASE_ALL, leaf_modules=leaves)
    total: dict[str, torch.Tensor] = {}
    for r in range(world_size):
        replica = copy.deepcopy(plain)
        torch.manual_seed(100 + r)
        for _ in range(2):
            replica(batches[r]).square().sum().backward()
        for n, p in replica.named_parameters():
            total[n] = total.get(n, 0) + (torch.zeros_like(p) if p.grad is None else p.grad) / world_size
        if r == rank:
            buffers, state = dict(replica.named_buffers()), torch.get_rng_state()
    torch.manual_seed(100 + rank)
    for _ in range(2):
        model(batches[rank]).square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state), "the user's random stream was shifted"
    for n, b in model.named_buffers():
        assert torch.allclose(b, buffers[n], rtol=0, atol=1e-12), n
        assert not b.requires_grad
    errors = [(p.grad.full_tensor() - total[n]).abs().max().item() for n, p in model.named_parameters()]
    nodes = [n for n in model.zfx.graphs[0]["forward"].graph.nodes if getattr(n.target, "__name__", "") == "forward_leaf"]
    return max(errors), len(nodes)


@pytest.mark.parametrize("name", ["moe", "LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_leaf_equals_the_plain_model(name: str, world_size: int) -> None:
    for error, leaves in run_ranks(world_size, compare, name):
        assert error <= 1e-10 and leaves == 1


def leaf_with_other_shape() -> str:
    model = zfx.compile(nn.Sequential(nn.Linear(4, 4), Wrong()), leaf_modules=[Wrong])
    with pytest.raises(zfx.CaptureError) as caught:
        model(torch.ones(5, 4))
    return str(caught.value)


def test_a_leaf_whose_shape_was_guessed_wrong_is_an_error() -> None:
    assert "Wrong" in run_ranks(1, leaf_with_other_shape)[0]


def copies() -> tuple[float, float]:
    torch.manual_seed(0)
    model = zfx.compile(MoE().eval(), leaf_modules=[Experts])
    other = copy.deepcopy(model)
    x = torch.ones(3, 4)
    with torch.no_grad():
        before = float(other(x).sum())
        for p in other.parameters():
            p.mul_(2)
        return float(model(x).sum()) - before, float(other(x).sum()) - before


def test_a_deep_copy_has_leaves_of_its_own() -> None:
    same, changed = run_ranks(2, copies)[0]
    assert same == 0.0 and changed != 0.0


@pytest.mark.parametrize(("leaves", "error", "says"), [
    ([nn.Conv2d], ValueError, "does not contain"),
    (["Linear"], TypeError, "module classes"),
    ([nn.Sequential], ValueError, "whole model"),
])
def test_wrong_leaves_are_refused(leaves: list, error: type[Exception], says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(error, match=says):
        zfx.compile(nn.Sequential(nn.Linear(2, 2)), world_size=2, leaf_modules=leaves)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(5, 6, num_layers=2, dropout=0.5), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, state: object = None) -> torch.Tensor:
        return self.out(self.rnn(x, state)[0])


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Numbering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.calls += 1
        return self.lin(x), self.calls


def eval_before_backward() -> float:
    torch.manual_seed(0)
    plain = Dropping().double()
    model = zfx.compile(copy.deepcopy(plain), limits=RELEASE_ALL)
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    for one in (plain, model):
        torch.manual_seed(1)
        loss = one(x).square().sum()
        one.eval()
        loss.backward()
    return max((p.grad - q.grad.full_tensor()).abs().max().item() for p, q in zip(plain.parameters(), model.parameters()))


def test_a_backward_runs_a_leaf_in_the_mode_of_its_forward() -> None:
    assert run_ranks(1, eval_before_backward)[0] <= 1e-10


def refused(leaf: type[nn.Module]) -> str:
    model = zfx.compile(nn.Sequential(nn.Linear(4, 4), leaf()), leaf_modules=[leaf])
    with pytest.raises(zfx.CaptureError) as caught:
        for _ in range(2):
            model(torch.ones(3, 4))
    return str(caught.value)


@pytest.mark.parametrize(("leaf", "says"), [(Changing, "changes an input in place"), (Numbering, "only tensors may change")])
def test_what_a_second_run_would_not_repeat_is_refused(leaf: type[nn.Module], says: str) -> None:
    assert says in run_ranks(1, refused, leaf)[0]
