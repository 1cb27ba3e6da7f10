"""Models and jobs that the tests of checkpoints share: whatever is awkward to shard, in one small model."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zfx

GLOBAL_BATCH = 12  # divides over 1, 2, 3, 4 and 6 ranks, so that the mean over ranks is the mean over samples


class Awkward(nn.Module):
    """Rows that do not divide (7), fewer rows than ranks (1), tied, frozen, 0-dim and non-contiguous parameters; a buffer of each
    rank's own, and one that all share."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
        self.narrow = nn.Linear(5, 1)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.strided = nn.Parameter(torch.randn(5, 5).t())
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("table", torch.arange(4.0))
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(ids)) @ self.strided * self.scale.exp() + self.frozen.sum(0)
        with torch.no_grad():
            self.seen.add_(hidden.detach().sum(0))
        return self.head(hidden) + self.narrow(hidden)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")]},
        {"params": [p for n, p in model.named_parameters() if not n.endswith("weight")], "lr": 0.002},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.05, foreach=kind == "foreach")


class Position:
    """A data loader's position, as a stateful loader keeps one."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Job:
    """One rank's run: model, optimizer, scheduler, position."""

    def __init__(
        self, kind: str = "adam", dtype: torch.dtype = torch.float64, seed: int = 0, compiled: bool = False, replicas: int = 1
    ) -> None:
        torch.manual_seed(seed)
        mesh = None
        if replicas > 1:
            mesh = dist.init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
        self.model = zfx.compile(Awkward(dtype), mesh=mesh, timeout=30)
        self.compiled = compiled
        self.optimizer = optimizer_of(kind, self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda step: 0.9**step, lambda step: 1.0])
        self.position = Position()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "data": self.position}

    def step(self) -> float:
        """One step on this rank's part of a batch that depends on the position alone; the mean loss of all ranks."""
        generator = torch.Generator().manual_seed(self.position.next)
        self.position.next += 1
        ids = torch.randint(7, (GLOBAL_BATCH,), generator=generator)
        wanted = torch.randn(GLOBAL_BATCH, 7, generator=generator, dtype=torch.float64)
        mine = slice(*(GLOBAL_BATCH * r // dist.get_world_size() for r in (dist.get_rank(), dist.get_rank() + 1)))
        if self.compiled:
            loss = self.loss(ids[mine], wanted[mine])
        else:
            with self.model.zfx.reference():
                loss = self.loss(ids[mine], wanted[mine])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def loss(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = (self.model(ids).to(torch.float64) - wanted).square().mean()
        loss.backward()
        return loss

    def train(self, num_steps: int) -> list[float]:
        return [self.step() for _ in range(num_steps)]

    def digests(self) -> dict[str, str]:
        """SHA-256 of every whole tensor of model and optimizer, by name; the same on every number of ranks."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        found = {n: digest(p) for n, p in self.model.named_parameters()}
        for p, entries in self.optimizer.state.items():
            found.update({f"{names[id(p)]}:{k}": digest(v) for k, v in entries.items() if isinstance(v, torch.Tensor)})
        groups = self.optimizer.param_groups
        plain = [{k: list(v) if isinstance(v, tuple) else v for k, v in g.items() if k != "params"} for g in groups]
        found["groups"] = repr(plain)  # torch's own loading makes lists of tuples
        found["scheduler"] = repr(sorted(self.scheduler.state_dict().items(), key=lambda item: item[0]))
        return found


def digest(t: torch.Tensor) -> str:
    whole = (t.full_tensor() if isinstance(t, DTensor) else t).detach().contiguous().reshape(-1)
    return f"{tuple(t.shape)} {t.dtype} {hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()}"


def draws() -> tuple[float, float, float]:
    """A number of each random stream."""
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def whole(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def saved(folder: Path) -> tuple[zfx.Checkpointer, Path, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    checkpoints = zfx.Checkpointer(folder, file_bytes=400)
    path = checkpoints.save(1, model=model, optimizer=optimizer, extras={"a": torch.ones(2)})
    return checkpoints, path, model, optimizer


def refused(checkpoints: zfx.Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer, *words: str, **where: Any) -> None:
    """Loading raises, says these words, and changes nothing."""
    before = {name: digest(value) for name, value in model.state_dict().items()}
    with pytest.raises(zfx.CheckpointError) as caught:
        checkpoints.load(model=model, optimizer=optimizer, **where)
    assert all(word in str(caught.value) for word in words), caught.value
    assert {name: digest(value) for name, value in model.state_dict().items()} == before
