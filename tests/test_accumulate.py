"""Micro-batches between two optimizer steps: what is carried changes no bit, is counted exactly, and never outlives its shards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zfx
from tests.harness import run_ranks
from tests.test_live_parameters import Model
from zfx import runtime
from zfx.replay import replay
from zfx.runtime import GatheredMeter

TIGHT = zfx.Limits(max_live_parameters=4_000, param_persistence_threshold=0)
NOTHING = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)
LIMITS = {"everything kept": zfx.Limits(), "tight": TIGHT, "nothing kept": NOTHING}


class Chain(nn.Module):
    """Equal layers, each one parameter that its backward reads again."""

    def __init__(self, n: int, dim: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class CountGathers:
    """Counts the parameters of every bucket that is gathered inside the `with`."""

    def __enter__(self) -> CountGathers:
        self.count, self.original = 0, runtime.all_gather

        def counting(plan: Any, bucket: int, shards: Sequence[torch.Tensor]) -> Any:
            self.count += len(shards)
            return self.original(plan, bucket, shards)

        runtime.all_gather = counting
        return self

    def __exit__(self, *_: object) -> None:
        runtime.all_gather = self.original


def gathered_in_windows(n: int, k: int, num_micro_batches: int, num_windows: int = 2) -> list[int]:
    with CountGathers() as counter:  # before the graphs are made: they hold the functions that they call
        model = zfx.compile(
            Chain(n), limits=zfx.Limits(max_live_parameters=64 * k, param_persistence_threshold=0), accumulate=num_micro_batches
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        x = torch.randn(5, 8, requires_grad=True)  # so that the first layer's backward reads its weight too
        for _ in range(num_windows):
            counter.count = 0
            for _ in range(num_micro_batches):
                model(x).sum().backward()
            counts.append(counter.count)
            optimizer.step()
            optimizer.zero_grad()
    return counts


@pytest.mark.parametrize(("n", "k", "num_micro_batches"), [
    (5, 2, 2), (4, 1, 3), (4, 4, 4), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((5, 2, 1), (5, 3, 3), (6, 4, 3))),
])  # fmt: skip
def test_a_chain_takes_the_fewest_gathers(n: int, k: int, num_micro_batches: int) -> None:
    expected = n + (2 * num_micro_batches - 1) * (n - k)
    for counts in run_ranks(2, gathered_in_windows, n, k, num_micro_batches):
        assert counts == [expected, expected]


def train(limits: zfx.Limits, accumulate: int, num_steps: int = 3, num_micro_batches: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = zfx.compile(Model(), limits=limits, accumulate=accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    seen = []
    for _ in range(num_steps):
        for _ in range(num_micro_batches):
            loss = model(torch.randint(37, (3, 4), generator=generator)).square().mean()
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [p.detach().to_local().clone() for p in model.parameters()]


def both(limits: zfx.Limits, accumulate: int) -> list[int]:
    """Indices of the values that differ from those without carrying."""
    plain, carried = train(limits, 1), train(limits, accumulate)
    return [i for i, (a, b) in enumerate(zip(plain, carried, strict=True)) if not torch.equal(a, b)]


# windows shorter than the loop's three micro-batches, the same, longer
@pytest.mark.parametrize(("name", "accumulate"), [
    ("tight", 3), ("everything kept", 2), ("nothing kept", 5),
    *(pytest.param(n, m, marks=pytest.mark.slow) for n, m in (
        ("tight", 2), ("tight", 5), ("everything kept", 3), ("everything kept", 5), ("nothing kept", 2), ("nothing kept", 3),
    )),
])  # fmt: skip
def test_no_bit_changes(name: str, accumulate: int) -> None:
    assert run_ranks(2, both, LIMITS[name], accumulate) == [[], []]


def live_bytes(limits: zfx.Limits) -> list[tuple[str, list[int], list[int]]]:
    torch.manual_seed(0)
    model = zfx.compile(Model(), limits=limits, accumulate=3)
    ids = torch.arange(12).view(3, 4)
    rows = []
    for _ in range(2):
        rows = []
        for window in ("first", "middle", "last"):
            seen: list[tuple[str, int]] = []
            with GatheredMeter() as meter:
                for value in model._zfx_engine.window._values:
                    if value.dim():  # a 0-dim parameter is the shard itself
                        meter.add(value)
                meter.on_node = lambda node, num_bytes: seen.append((node.meta.get("zfx_step"), num_bytes))  # noqa: B023
                model(ids).square().mean().backward()
                left = meter.num_bytes()
            schedule = next(s for s in model.zfx.schedules if s.program.window == window)
            states = list(replay(schedule))
            planned = {s.step.name: s.gathered_bytes + s.packing_bytes for s in states if s.step is not None}
            measured = {name: num_bytes for name, num_bytes in seen if name in planned}
            assert set(measured) == set(planned) - {"turn"}
            steps = [name for name in planned if name != "turn"]
            rows.append((window, [*(measured[s] for s in steps), left], [*(planned[s] for s in steps), states[-1].gathered_bytes]))
    return rows


@pytest.mark.parametrize("name", LIMITS)
def test_live_bytes_are_those_of_the_schedule_in_every_micro_batch(name: str) -> None:
    for rows in run_ranks(2, live_bytes, LIMITS[name]):
        assert [window for window, _, _ in rows] == ["first", "middle", "last"]
        for window, measured, planned in rows:
            assert measured == planned, window


def _loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(torch.randint(37, (3, 4), generator=torch.Generator().manual_seed(seed))).square().mean()


def two_in_flight(model: Any) -> None:
    a, b = _loss(model, 0), _loss(model, 1)
    b.backward()
    c = _loss(model, 2)
    a.backward()
    c.backward()


def no_backward(model: Any) -> None:
    _loss(model, 0)
    _loss(model, 1).backward()
    _loss(model, 2)
    _loss(model, 3).backward()


def evaluation_in_between(model: Any) -> None:
    _loss(model, 0).backward()
    with torch.no_grad():
        assert _loss(model, 1).isfinite()
    _loss(model, 1).backward()


def changed_in_between(model: Any) -> None:
    _loss(model, 0).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    _loss(model, 1).backward()


def written_back_in_between(model: Any) -> None:
    _loss(model, 0).backward()
    with model.zfx.gathered(writeback=True) as full:
        for value in full.values():
            value.mul_(0.9)
    _loss(model, 1).backward()


def other_shapes(model: Any) -> None:
    for seed, rows in enumerate((3, 5, 3, 4, 3)):
        model(torch.randint(37, (rows, 4), generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def backward_twice(model: Any) -> None:
    loss = _loss(model, 0)
    loss.backward(retain_graph=True)
    _loss(model, 1).backward()
    loss.backward()


def an_error_in_between(model: Any) -> None:
    _loss(model, 0).backward()
    with pytest.raises(Exception):  # noqa: B017  whatever the embedding says of a bad index
        model(torch.full((3, 4), 99))
    _loss(model, 1).backward()


ODD_LOOPS: tuple[Callable[[Any], None], ...] = (
    two_in_flight, no_backward, evaluation_in_between, changed_in_between, written_back_in_between, other_shapes, backward_twice,
    an_error_in_between,
)  # fmt: skip


def odd_loop(loop: Callable[[Any], None], limits: zfx.Limits) -> list[int]:
    results = []
    for accumulate in (1, 3):
        torch.manual_seed(0)
        model = zfx.compile(Model(layers=1), limits=limits, accumulate=accumulate)
        loop(model)
        loop(model)
        results.append([p.grad.to_local() for p in model.parameters()])
    return [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]


@pytest.mark.parametrize("loop", ODD_LOOPS)
@pytest.mark.parametrize("name", ["tight", *(pytest.param(name, marks=pytest.mark.slow) for name in LIMITS if name != "tight")])
def test_loops_that_do_not_go_as_planned_give_the_same_gradients(loop: Callable[[Any], None], name: str) -> None:
    assert run_ranks(2, odd_loop, loop, LIMITS[name]) == [[], []]


OPTIMIZERS = {
    "for-loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True),
}  # fmt: skip


def short_windows(options: dict[str, bool], clears: bool) -> list[int]:
    """The second window is short, as at the end of an epoch. Gradients are cleared, or only set to zero."""
    results = []
    for accumulate in (1, 3):
        torch.manual_seed(0)
        model = zfx.compile(Chain(3), accumulate=accumulate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        x, losses = torch.ones(2, 8, requires_grad=True), []
        for num_micro_batches in (3, 2, 3, 3):
            for _ in range(num_micro_batches):
                loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none=clears)
        results.append(losses)
    return [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_short_window_never_leaves_old_weights_behind(options: dict[str, bool], clears: bool) -> None:
    assert run_ranks(1, short_windows, options, clears) == [[]]


def cleared_by_hand() -> list[int]:
    """An optimizer of the user's own, which changes what torch does not count."""
    results = []
    for accumulate in (1, 3):
        torch.manual_seed(0)
        model = zfx.compile(Chain(3), accumulate=accumulate)
        x, losses = torch.ones(2, 8, requires_grad=True), []
        for num_micro_batches in (3, 2, 3):
            for _ in range(num_micro_batches):
                loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.detach())
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)
                p.grad = None
        results.append(losses)
    return [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]


def test_clearing_gradients_begins_a_new_window() -> None:
    assert run_ranks(1, cleared_by_hand) == [[]]


def stepped_before_backward(options: dict[str, bool]) -> None:
    model = zfx.compile(Chain(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    x = torch.ones(2, 8, requires_grad=True)
    model(x).sum().backward()
    loss = model(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="was modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_between_forward_and_backward_is_seen(options: dict[str, bool]) -> None:
    assert run_ranks(1, stepped_before_backward, options) == [None]


def model_dies_in_a_window() -> tuple[bool, int]:
    with GatheredMeter() as meter:
        model = zfx.compile(Model(), accumulate=4)
        _loss(model, 0).backward()
        assert meter.num_bytes() > 0, "nothing was carried: this test shows nothing"
        alive = weakref.ref(model)
        del model
        gc.collect()
        return alive() is None, meter.num_bytes()


def test_what_is_carried_dies_with_the_model() -> None:
    assert run_ranks(2, model_dies_in_a_window) == [(True, 0)] * 2


def one_rank_steps_early() -> None:
    torch.manual_seed(0)
    model = zfx.compile(Model(), accumulate=4, timeout=20)
    _loss(model, 0).backward()
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    _loss(model, 1).backward()


def test_ranks_in_other_windows_say_so() -> None:
    from tests.harness import rank_outcomes

    for outcome in rank_outcomes(2, one_rank_steps_early):
        assert outcome.status == "error" and outcome.error.type_name == "RankMismatch", outcome
        assert "micro-batch that finds" in outcome.error.message


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, "3", True, None])
def test_a_wrong_number_is_refused(accumulate: Any) -> None:
    with pytest.raises(ValueError, match="accumulate"):
        zfx.compile(nn.Linear(2, 2), 1, accumulate=accumulate)
