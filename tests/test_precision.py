"""Mixed precision: 16-bit parameters are gathered and computed with, float32 shards are what the optimizer sees.

The reference computes with a plain copy in 16 bits, averages its gradients over ranks in float32 and steps float32 masters. zfx
equals it bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx
from tests.harness import rank_outcomes, run_ranks
from tests.test_parity_transformers import MODELS
from zfx import wire

BF16 = zfx.Precision(torch.bfloat16)


def _differences(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x.dtype != y.dtype or not torch.equal(x, y)]


def _reference(masters: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy that computes in `dtype`; buffers stay as they are."""
    model = copy.deepcopy(masters)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def _step(masters: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    for master, p in zip(masters.parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            mean = p.grad.float()
            dist.all_reduce(mean)
            master.grad = mean / dist.get_world_size()
            p.grad = None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters.parameters(), model.parameters(), strict=True):
            p.copy_(master)


def transformer(name: str, dtype: torch.dtype, num_steps: int) -> list[int]:
    masters = MODELS[name].build(torch.float32)
    reference = _reference(masters, dtype)
    model = zfx.compile(copy.deepcopy(masters), precision=zfx.Precision(dtype))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, masters))
    generator = torch.Generator().manual_seed(dist.get_rank())
    a, b = [], []
    for _ in range(num_steps):
        batch = MODELS[name].batch(generator, dtype)
        loss = reference(**batch).loss
        b.append(loss.detach())
        _step(masters, reference, theirs, loss)
        loss = model(**batch).loss
        a.append(loss.detach())
        loss.backward()
        ours.step()
        ours.zero_grad()
    a += [p.full_tensor() for p in model.parameters()]
    b += [p.detach() for p in masters.parameters()]
    return _differences(a, b)


@pytest.mark.parametrize(("name", "dtype"), [
    ("llama", torch.bfloat16), ("mixtral", torch.bfloat16),
    *(pytest.param(n, torch.bfloat16, marks=pytest.mark.slow) for n in ("llama_tied", "gpt2", "t5", "vit")),
    pytest.param("llama", torch.float16, marks=pytest.mark.slow),
])  # fmt: skip
def test_ten_steps_equal_the_reference_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    assert run_ranks(2, transformer, name, dtype, 10) == [[], []]


class Small(nn.Module):
    """An odd number of rows, a 0-dim parameter, an integer one, a complex one, a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(9, 33), nn.BatchNorm1d(33), nn.Linear(33, 7)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.count = nn.Parameter(torch.arange(5), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.b(torch.tanh(self.norm(self.a(x)))) * self.scale
        return {"y": y, "seen": x, "z": (self.phase * y).real, "count": self.count.sum()}


def dtypes(precision: zfx.Precision) -> dict[str, Any]:
    torch.manual_seed(0)
    model = zfx.compile(Small(), precision=precision)
    out = model(torch.randn(6, 9))
    (out["y"].float().square().sum() + out["z"].float().sum()).backward()  # of all that has parameters
    with model.zfx.gathered() as full:
        whole = {name: value.dtype for name, value in full.items()}
    return {
        "output": {name: value.dtype for name, value in out.items()},
        "parameters": {name: p.dtype for name, p in model.named_parameters()},
        "gathered": whole,
        "gradients": {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None},
        "buffers": {name: b.dtype for name, b in model.named_buffers()},
    }


def test_each_setting_does_what_it_says() -> None:
    stored = {name: p.dtype for name, p in Small().named_parameters()}
    buffers = {name: b.dtype for name, b in Small().named_buffers()}
    for found in run_ranks(2, dtypes, BF16):
        assert found["output"]["y"] == found["output"]["seen"] == torch.bfloat16
        assert found["parameters"] == found["gathered"] == stored
        assert found["gradients"].items() <= stored.items() and len(found["gradients"]) == 8
        assert found["buffers"] == buffers
    wanted = zfx.Precision(torch.bfloat16, output_dtype=torch.float32, cast_inputs=False, buffer_dtype=torch.bfloat16)
    assert run_ranks(1, dtypes, zfx.Precision(torch.bfloat16, output_dtype=torch.float32))[0]["output"]["y"] == torch.float32
    (error,) = (o.error for o in rank_outcomes(1, dtypes, wanted))
    assert error is not None and "dtype" in error.message  # float32 input, bfloat16 weight: torch's own words


def bytes_sent(precision: zfx.Precision | None) -> tuple[int, int]:
    sent = [0, 0]
    original = wire.SendReceiveWire._exchange

    def counting(self: Any, send: Any, receive: Any, works: list[Any]) -> None:
        original(self, lambda peer: count(send(peer)), receive, works)

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sent[0] += tensor.numel() * tensor.element_size()
        return tensor

    wire.SendReceiveWire._exchange = counting  # type: ignore[method-assign]
    try:
        model = zfx.compile(nn.Linear(16, 16, bias=False), precision=precision)
        out = model(torch.randn(3, 16))
        sent[0], sent[1] = 0, sent[0]
        out.float().sum().backward()
    finally:
        wire.SendReceiveWire._exchange = original  # type: ignore[method-assign]
    return sent[1], sent[0]


def test_half_the_bytes_travel_in_both_directions() -> None:
    gathered, reduced = run_ranks(2, bytes_sent, None)[0]
    assert gathered == reduced == 16 * 16 * 4 // 2
    assert run_ranks(2, bytes_sent, BF16)[0] == (gathered // 2, reduced // 2)


def scaled(num_steps: int) -> list[tuple[float, bool]]:
    """Rank 1 overflows in the second step."""
    torch.manual_seed(0)
    model = zfx.compile(nn.Linear(8, 8), precision=zfx.Precision(torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    rows = []
    for step in range(num_steps):
        before = [p.detach().to_local().clone() for p in model.parameters()]
        x = torch.ones(2, 8) * (1e4 if step == 1 and dist.get_rank() == 1 else 1e-2)
        scaler.scale(model(x).float().sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(a, p.detach().to_local()) for a, p in zip(before, model.parameters()))
        rows.append((scaler.get_scale(), moved))
    return rows


def test_a_grad_scaler_skips_on_all_ranks_where_one_overflows() -> None:
    first, second = run_ranks(2, scaled, 3)
    assert first == second == [(1024.0, True), (512.0, False), (512.0, True)]


def nan_on_one() -> list[bool]:
    model = zfx.compile(nn.Linear(4, 3), precision=BF16)
    x = torch.ones(2, 4)
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    model(x).nan_to_num().float().sum().backward()
    return [bool(p.grad.full_tensor().isnan().any()) for p in model.parameters()]


def test_a_nan_in_one_ranks_gradient_is_seen_by_all() -> None:
    assert run_ranks(2, nan_on_one) == [[True, False]] * 2


class Autocasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.a(x)
        return self.b(y.to(x.dtype))


def autocast_inside() -> list[int]:
    torch.manual_seed(0)
    plain = Autocasting()
    model = zfx.compile(copy.deepcopy(plain))
    x = torch.randn(5, 8)
    plain(x).sum().backward()
    model(x).sum().backward()
    return _differences([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_autocast_inside_the_model_is_the_models_own() -> None:
    assert run_ranks(1, autocast_inside) == [[]]


def copied() -> list[int]:
    torch.manual_seed(0)
    model = zfx.compile(nn.Linear(6, 6), precision=BF16)
    again = copy.deepcopy(model)
    x = torch.randn(2, 6)
    return _differences([model(x).detach()], [again(x).detach()])


def test_a_deep_copy_keeps_its_precision() -> None:
    assert run_ranks(2, copied) == [[], []]


def test_the_schedule_counts_what_is_held() -> None:
    program = zfx.compile(nn.Linear(10, 7, bias=False), 2, precision=BF16).zfx.plan(torch.randn(3, 10)).program
    (parameter,) = program.parameters
    assert (parameter.num_bytes, parameter.grad_bytes) == (8 * 10 * 2, 7 * 10 * 2)
    assert program.static_bytes == 2 * 4 * 10 * 4  # a shard and its gradient's, four rows each, in float32


@pytest.mark.parametrize("wrong", [
    dict(param_dtype="bf16"), dict(param_dtype=torch.int32), dict(cast_inputs=1), dict(reduce_dtype=16),
])  # fmt: skip
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        zfx.Precision(**wrong)


def test_precision_must_be_one() -> None:
    with pytest.raises(TypeError, match=r"zfx\.Precision"):
        zfx.compile(nn.Linear(2, 2), 1, precision=torch.bfloat16)  # type: ignore[arg-type]
