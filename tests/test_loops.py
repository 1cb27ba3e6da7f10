"""Loops around a compiled model: changing lengths, functions of the model, and what torch's own tools show of it.

What ends in a right result or a clear error in a whole training script is among the trouble cases, of kind "around".
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zfx
from tests.harness import rank_outcomes, run_ranks

RELEASED = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


# ---- lengths -------------------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.a, self.c = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        return self.c(h + F.scaled_dot_product_attention(h, h, torch.tanh(self.a(h)), is_causal=True))


def language_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    length = int(torch.randint(2, 30, (), generator=generator))  # torch captures a size of 1 for itself
    ids = torch.randint(9, (3, length + 1), generator=generator)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def changing_lengths(num_steps: int) -> tuple[float, int]:
    """Distance of the trained parameters to the reference's, and the number of captures."""
    torch.manual_seed(0)
    plain = Language().double()
    replicas = [copy.deepcopy(plain) for _ in range(dist.get_world_size())]
    model: Any = zfx.compile(plain, limits=zfx.Limits(max_live_parameters=400, param_persistence_threshold=0))
    models = [model, *replicas]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        language_loss(model, dist.get_rank(), step).backward()
        for rank, replica in enumerate(replicas):
            language_loss(replica, rank, step).backward()
        for same in zip(*(replica.parameters() for replica in replicas)):
            mean = sum(p.grad for p in same) / len(same)  # type: ignore[misc]
            for p in same:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(model.parameters(), replicas[0].parameters())
    return max(float((p.detach().full_tensor() - q).abs().max()) for p, q in pairs), len(model._zfx_engine.blueprint.captured)


@pytest.mark.parametrize("num_steps", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_ranks_that_draw_different_lengths_never_wait_and_capture_three_times_at_most(num_steps: int) -> None:
    for distance, num_captures in run_ranks(2, changing_lengths, num_steps, timeout=280):
        assert distance <= 1e-10 and num_captures <= 3, (distance, num_captures)


# ---- generation ----------------------------------------------------------------------------------------------------------------


def generate(synced: bool | None) -> list[int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = zfx.compile(LlamaForCausalLM(LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, eos_token_id=None, pad_token_id=0,
    )), timeout=12)  # fmt: skip
    ids = torch.tensor([[1, 2, 3]])
    options: dict[str, Any] = {} if synced is None else {"synced_gpus": synced}
    options.update(max_new_tokens=2 + 3 * dist.get_rank(), do_sample=False)
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    model(input_ids=ids, labels=ids).loss.backward()
    return tokens.shape[1]


@pytest.mark.slow
def test_ranks_that_stop_at_different_lengths_are_told_unless_they_generate_together() -> None:
    for outcome in rank_outcomes(2, generate, False):
        assert outcome.error and outcome.error.type_name == "RankMismatch", outcome


# ---- one rank is enough --------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 6), nn.Linear(6, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.enc(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dec(self.encode(x))


def functions() -> None:
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    plain = Encoder()
    model: Any = zfx.compile(copy.deepcopy(plain), limits=RELEASED)

    def both(model: Any, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Documented."""
        return model.encode(x) * scale, model(x) @ model.dec.weight

    run = model.zfx.function(both)
    assert run.__doc__ == "Documented."
    found, wanted = run(x, scale=2.0), both(plain, x, scale=2.0)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    (found[0].sum() + found[1].square().sum() + model(x).sum()).backward()
    (wanted[0].sum() + wanted[1].square().sum() + plain(x).sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    assert len(model.zfx.schedules) == 2 and all(any(b.kind == "reduce_scatter" for b in s.buckets) for s in model.zfx.schedules)
    with model.zfx.reference():
        assert torch.equal(run(x)[1], both(plain, x)[1])
    with pytest.raises(zfx.LoopError, match=r"encode\(\).*zfx\.function"):
        model.encode(x)
    with pytest.raises(TypeError, match="function"):
        model.zfx.function("encode")
    assert torch.equal(model(x), plain(x)), "what failed has left nothing behind"


def copies_and_files() -> None:
    x = torch.randn(3, 4).double()
    model: Any = zfx.compile(mlp())
    model(x).sum().backward()
    for attempt in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO()), model.share_memory):
        with pytest.raises(zfx.LoopError, match="get_model_state_dict"):
            attempt()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(2)
    assert not torch.equal(other(x), model(x)) and torch.equal(copy.copy(model)(x), model(x))
    part = model[:2]  # made from parts, of the model's own class: it gathers nothing
    with pytest.raises(RuntimeError, match="DTensor"):
        part(x)


def refused() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("row", self.a.weight.detach()[1])

    with pytest.raises(ValueError, match=r"'row' shares memory with parameter 'a.weight'"):
        zfx.compile(Views())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flat = torch.randn(32)
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    zfx.compile(model)  # side by side in one storage is no alias
    tied = nn.Linear(4, 4)
    tied.weight = (held := nn.Linear(4, 4)).weight
    with pytest.raises(ValueError, match="held by a Linear outside the model"):
        zfx.compile(nn.Sequential(tied))
    del held
    first = nn.Sequential(tied)
    weight = tied.weight
    zfx.compile(first)
    second = nn.Linear(4, 4)
    second.weight = weight
    with pytest.raises(ValueError, match=r"tied to 'Sequential.0.weight' of a model that was compiled before"):
        zfx.compile(nn.Sequential(second))
    with pytest.raises(zfx.CaptureError, match="'w' is sparse"):

        class Sparse(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(5, 4))

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return F.embedding(ids, self.w, sparse=True)

        zfx.compile(Sparse())(torch.tensor([1, 2]))


def norms() -> None:
    """Clipping where the last rank has no row of a weight: torch alone knows no largest of no elements."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1)).double()
    model = zfx.compile(copy.deepcopy(plain), limits=RELEASED)
    x = torch.ones(3, 4, dtype=torch.float64)
    for foreach in (True, False, None):
        for order in (float("inf"), 2.0, 1.0):
            for one in (plain, model):
                one.zero_grad()
                one(x).square().sum().backward()
            wanted, found = (torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, order, foreach=foreach) for m in (plain, model))
            assert torch.allclose(found.full_tensor(), wanted, rtol=1e-12), (foreach, order, found, wanted)  # type: ignore[attr-defined]
            for p, q in zip(model.parameters(), plain.parameters()):
                assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-12), (foreach, order)  # type: ignore[union-attr,arg-type]
    assert torch.linalg.vector_norm(model[1].weight, float("inf")).full_tensor() == plain[1].weight.abs().max()  # type: ignore[operator]


def shown_by_the_profiler() -> None:
    model = zfx.compile(mlp(), limits=RELEASED)
    x = torch.randn(3, 4).double()
    model(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x).sum().backward()
    names = {event.name for event in profile.events() if event.name.startswith("zfx::")}
    assert {"zfx::all_gather 0.weight +5", "zfx::wait all_gather 0.weight +5", "zfx::reduce_scatter 4.bias +5"} <= names, names


def said_by_the_log() -> None:
    stream = io.StringIO()
    log, handler = logging.getLogger("zfx"), logging.StreamHandler(stream)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        model = zfx.compile(mlp())
        model(torch.randn(3, 4).double())
        model(torch.randn(5, 4).double())
        model[0].weight.requires_grad_(False)
        model(torch.randn(5, 4).double())
        with torch.no_grad():
            model(torch.randn(5, 4).double())
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    said = [line for line in stream.getvalue().splitlines() if "captured graph" in line]
    assert len(said) == 4
    reasons = ("first call", "where it was [3, 4] float64", "float64 with a gradient", "first call with no_grad")
    for line, words in zip(said, reasons):
        assert line.startswith("Sequential: captured graph") and words in line, line
    assert "planned" in stream.getvalue() and "ready in" in stream.getvalue()


def several() -> None:
    functions()
    copies_and_files()
    refused()
    shown_by_the_profiler()
    said_by_the_log()


def test_functions_copies_refusals_profiler_and_log() -> None:
    assert run_ranks(1, several) == [None]


def test_norms_where_a_rank_has_no_row_of_a_parameter() -> None:
    run_ranks(2, norms)
