"""ZeRO checkpoints of DeepSpeed become checkpoints of zfx: weights, moments, groups; hostile and incomplete ones are refused.

The directories are made here, in the layout that DeepSpeed's `deepspeed/utils/zero_to_fp32.py` reads and its engine's
`save_checkpoint` writes (version 0.19.8), with objects of DeepSpeed's classes in them as the real ones have. Directories that
DeepSpeed 0.19.8 itself wrote (stages 2 and 3, two ranks) were imported too, by hand: DeepSpeed is no dependency of these tests.
"""

from __future__ import annotations

import enum
import math
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zfx
from tests.checkpoint_jobs import digest
from tests.harness import run_ranks
from tests.test_checkpoint_hostile import Bomb
from zfx.cli import run as cli
from zfx.deepspeed_checkpoint import convert


class Model(nn.Module):
    """Rows and elements that do not divide, tied, frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)) + self.frozen.sum(0) + self.table)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    weights = [p for n, p in named if n.endswith("weight")]
    rest = [p for n, p in named if not n.endswith("weight")]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        ids = torch.randint(7, (4,), generator=torch.Generator().manual_seed(step))
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def deepspeed() -> Iterator[dict[str, type]]:
    """Classes under DeepSpeed's names, for as long as a directory is written; gone when it is read."""

    class ZeroStageEnum(enum.IntEnum):
        gradients = 2
        weights = 3

    class LossScaler:
        def __init__(self) -> None:
            self.cur_scale = 1.0

    found: dict[str, type] = {}
    for module, kind in (("deepspeed.runtime.zero.config", ZeroStageEnum), ("deepspeed.runtime.fp16.loss_scaler", LossScaler)):
        kind.__module__, kind.__qualname__ = module, kind.__name__
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        setattr(sys.modules[module], kind.__name__, kind)
        found[kind.__name__] = kind
    yield found
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]


def slices(values: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Stage 3: a parameter's elements in `world` slices of one size, the last ones padded (with anything)."""
    part = math.ceil(values.numel() / world)
    padded = torch.full((part * world,), 777.0)
    padded[: values.numel()] = values.reshape(-1).float()
    return list(padded.split(part))


def parts(values: list[torch.Tensor], world: int) -> list[torch.Tensor]:
    """Stages 1 and 2: parameters end to end, in `world` parts, without the padding at the end."""
    flat = torch.cat([v.reshape(-1).float() for v in values])
    return list(flat.split(2 * math.ceil(flat.numel() / (2 * world))))


def write_zero(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, world: int, kinds: dict[str, type]
) -> Path:
    directory = folder / "global_step2"
    directory.mkdir(parents=True)
    (folder / "latest").write_text("global_step2\n")
    names = {p: n for n, p in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    if stage == 3:  # sub-groups: the first parameter group has two
        flats, owners = [groups[0][:1], groups[0][1:], groups[1]], [[0, 1], [2]]
    else:
        flats, owners = groups, [[0], [1]]

    def flat(values: list[torch.Tensor], rank: int) -> torch.Tensor:
        return torch.cat([slices(v, world)[rank] for v in values]) if stage == 3 else parts(values, world)[rank]

    frozen = OrderedDict((n, p) for n, p in model.named_parameters() if not p.requires_grad)
    for rank in range(world):
        inner = {
            "state": {
                number: {
                    "step": torch.tensor(2.0),
                    "exp_avg": flat([optimizer.state[p]["exp_avg"] for p in members], rank),
                    "exp_avg_sq": flat([optimizer.state[p]["exp_avg_sq"] for p in members], rank),
                }
                for number, members in enumerate(flats)
            },
            "param_groups": [
                {**{k: v for k, v in group.items() if k != "params"}, "params": mine}
                for group, mine in zip(optimizer.param_groups, owners)
            ],
        }
        weights = [nn.Parameter(flat([p.detach() for p in members], rank)) for members in flats]
        state = {
            "zero_stage": kinds["ZeroStageEnum"](stage),
            "loss_scaler": kinds["LossScaler"](),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": world if stage == 3 else [world, world],
            **({"optimizer_state_dict": inner, "fp32_flat_groups": weights} if stage == 3 else {}),
            **({"base_optimizer_state": inner, "single_partition_of_fp32_groups": weights} if stage < 3 else {}),
        }
        torch.save({"optimizer_state_dict": state, "ds_config": {"zero_optimization": {"stage": stage}}, "ds_version": "0.19.8"},
                   directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")  # fmt: skip
        module = OrderedDict((n, torch.empty(0) if n in names.values() else v) for n, v in model.state_dict().items())
        pieces = OrderedDict((n, slices(p.detach(), world)[rank] if stage == 3 else p.detach()) for n, p in frozen.items())
        if stage == 3 or rank == 0:
            torch.save(
                {
                    "module": module,
                    "buffer_names": ["table"],
                    "param_shapes": [OrderedDict((names[p], p.shape) for p in members) for members in flats],
                    "frozen_param_shapes": OrderedDict((n, p.shape) for n, p in frozen.items()),
                    "frozen_param_fragments": pieces,
                    "shared_params": {"head.weight": "embed.weight"},
                    "global_steps": 2,
                    "ds_version": "0.19.8",
                },
                directory / (f"zero_pp_rank_{rank}_" * (stage == 3) + "mp_rank_00_model_states.pt"),
            )
    return folder


def loaded(out: str) -> tuple[dict[str, str], dict[str, str], list[float]]:
    torch.manual_seed(5)
    model = zfx.compile(Model())
    optimizer = optimizer_of(model)
    optimizer.param_groups[0]["lr"] = 5.0
    resumed = zfx.Checkpointer(out).load(model=model, optimizer=optimizer)
    assert resumed.step == 2 and resumed.extras["deepspeed"]["world_size"] == resumed.world_size
    names = {p: n for n, p in model.named_parameters()}
    state = {f"{names[p]}:{k}": digest(v) for p, entries in optimizer.state.items() for k, v in entries.items()}
    weights = {n: digest(v) for n, v in model.state_dict().items()}
    with model.zfx.reference():
        return weights, state, train(model, optimizer, 2, 5)


@pytest.mark.parametrize(("stage", "world"), [(3, 2), (3, 3), (2, 3)])
def test_a_run_of_deepspeed_goes_on(tmp_path: Path, deepspeed: dict[str, type], stage: int, world: int) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 2)
    source = write_zero(tmp_path / "zero", model, optimizer, stage, world, deepspeed)
    forget()
    assert cli(["import-deepspeed", str(source), str(tmp_path / "out")]) == 0
    assert "deepspeed" not in sys.modules
    names = {p: n for n, p in model.named_parameters()}
    state = {f"{names[p]}:{k}": digest(v) for p, entries in optimizer.state.items() for k, v in entries.items()}
    weights = {n: digest(v) for n, v in model.state_dict().items()}
    losses = train(model, optimizer, 2, 5)
    ranks = 2 if (stage, world) == (3, 3) else 1  # a plain comparison once; and once on another number of ranks
    for found in run_ranks(ranks, loaded, str(tmp_path / "out")):
        assert found[0] == weights and found[1] == state
        assert found[2] == pytest.approx(losses, rel=1e-5)


def test_incomplete_and_hostile_directories_are_refused(tmp_path: Path, deepspeed: dict[str, type]) -> None:
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 2)
    source = write_zero(tmp_path / "zero", model, optimizer, 3, 3, deepspeed) / "global_step2"
    forget()
    mark = tmp_path / "executed"

    def refused(says: str, name: str, content: bytes | None) -> None:
        before = (source / name).read_bytes()
        (source / name).unlink()
        if content is not None:
            (source / name).write_bytes(content)
        with pytest.raises(zfx.CheckpointError) as caught:
            convert(source, tmp_path / "out")
        assert says in str(caught.value), caught.value
        (source / name).write_bytes(before)
        assert not mark.exists()
        assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")

    optim, states = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_2_mp_rank_00_model_states.pt"
    refused("rank 1", optim, None)
    refused("3 saved", "zero_pp_rank_2_mp_rank_00_optim_states.pt", None)
    refused(f"{states} is missing", states, None)
    refused(optim, optim, (source / optim).read_bytes()[:-200])
    torch.save(Bomb(mark), tmp_path / "bomb")
    refused(f"{optim} is refused", optim, (tmp_path / "bomb").read_bytes())
    import pickle

    refused(states, states, pickle.dumps(Bomb(mark)))
    with pytest.raises(zfx.CheckpointError, match=r"no \*_optim_states\.pt"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "zero" / "latest").write_text("../../etc")
    with pytest.raises(zfx.CheckpointError, match="not a directory beside it"):
        convert(tmp_path / "zero", tmp_path / "out")
    (source / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    with pytest.raises(zfx.CheckpointError, match="tensor- or expert-parallel"):
        convert(source, tmp_path / "out")
