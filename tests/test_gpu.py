"""On CUDA devices: NCCL, streams, and memory that really comes back. One rank a device, at least one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def nccl():  # type: ignore[no-untyped-def]
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def stack(dim: int = 256, layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(dim, dim), nn.GELU()))).cuda()


RELEASE_ALL = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)


def test_one_rank_equals_the_plain_model(nccl: None) -> None:
    plain = stack()
    model = zfx.compile(copy.deepcopy(plain), limits=RELEASE_ALL)
    x = torch.randn(32, 256, device="cuda")
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p.grad.to_local(), q.grad)


def test_released_memory_comes_back(nccl: None) -> None:
    model = zfx.compile(stack(1024, 16), limits=RELEASE_ALL)
    x = torch.randn(8, 1024, device="cuda")
    model(x).square().mean().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        model(x)
        model(x)
    torch.cuda.synchronize()
    whole = 16 * 1024 * 1024 * 4
    assert torch.cuda.max_memory_allocated() - before < whole / 2
    assert torch.cuda.memory_allocated() == before


def test_born_written_and_read_on_the_device(nccl: None, tmp_path: Path) -> None:
    plain = stack()
    with torch.device("meta"):
        model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU())))
    torch.manual_seed(0)
    model = zfx.compile(model)
    zfx.save_pretrained(model, tmp_path)

    def same() -> bool:
        return all(p.is_cuda and torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), plain.parameters()))

    assert same()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    zfx.load_pretrained(model, tmp_path)
    assert same()


def test_a_run_on_a_gpu_is_saved_in_the_background_and_resumed_bit_for_bit(nccl: None, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = zfx.compile(stack(64, 2), limits=RELEASE_ALL)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            loss = model(torch.randn(8, 64, device="cuda")).square().mean()  # of the GPU's own random stream
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    train(model, optimizer)
    checkpoints = zfx.Checkpointer(tmp_path)
    checkpoints.save(3, model=model, optimizer=optimizer, background=True)
    losses = train(model, optimizer)
    checkpoints.wait()
    model, optimizer = build()
    checkpoints.load(model=model, optimizer=optimizer)
    assert all(s["step"].is_cuda for s in optimizer.state.values())
    assert train(model, optimizer) == losses


class Noisy(nn.Module):
    """What it returns depends on data, so it runs as a leaf, twice; both runs must draw the same mask, and the caller's stream move
    once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) if float(x.detach().sum()) == float(x.detach().sum()) else x


def test_a_leaf_draws_the_same_numbers_twice(nccl: None) -> None:
    plain = nn.Sequential(nn.Linear(64, 64), Noisy(), nn.Linear(64, 64)).cuda()
    model = zfx.compile(copy.deepcopy(plain), leaf_modules=[Noisy])
    x, drawn = torch.randn(8, 64, device="cuda"), []
    for each in (plain, model):
        torch.manual_seed(1)
        each(x).square().mean().backward()
        drawn.append(torch.rand(4, device="cuda"))
    assert torch.equal(*drawn)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.to_local(), q.grad)
