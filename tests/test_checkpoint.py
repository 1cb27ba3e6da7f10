"""A run that is saved and resumed goes on as if it had never stopped: bit for bit on as many ranks, to 1e-10 on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import zfx
from tests.checkpoint_jobs import Awkward, Job, digest, draws
from tests.harness import run_ranks
from zfx.dcp_writer import copied

VARIANTS = {
    "replicas-float64": ("adam", torch.float64),  # saved by two replicas of two shards
    "sgd-bfloat16": ("sgd", torch.bfloat16),
    "adam-float64": ("adam", torch.float64),
    "sgd-float32": ("sgd", torch.float32),
    "foreach-bfloat16": ("foreach", torch.bfloat16),
}
DEFAULT, ALL = list(VARIANTS)[:2], list(VARIANTS)


def save_and_go_on(folder: str, names: list[str]) -> dict[str, Any]:
    """Per variant: the state when it was saved, and the five steps after. Here it is resumed on as many ranks."""
    found = {}
    for name in names:
        kind, dtype = VARIANTS[name]
        replicas = 2 if name.startswith("replicas") else 1
        job, checkpoints = Job(kind, dtype, replicas=replicas), zfx.Checkpointer(Path(folder) / name)
        checkpoints.save(0, **job.parts)
        assert not job.optimizer.state, "a save only reads"
        early = job.train(3)
        checkpoints.save(3, **job.parts, extras={"best": (1.5, float("inf")), "mean": torch.arange(3)})
        saved, seen, numbers, losses = job.digests(), job.model.seen.clone(), draws(), job.train(5)

        again = Job(kind, dtype, seed=7, replicas=replicas)
        resumed = checkpoints.load(**again.parts)
        assert resumed.step == 3 and resumed.world_size == dist.get_world_size() and resumed.extras["best"] == (1.5, float("inf"))
        assert again.digests() == saved and draws() == numbers and torch.equal(again.model.seen, seen)
        assert again.train(5) == losses and again.digests() == job.digests(), "bit for bit"
        if name == "replicas-float64":
            assert Job(kind, dtype, replicas=2).train(3) == early, "a save before the first step changes nothing"
            first = Job(kind, dtype, seed=7, replicas=2)
            assert checkpoints.load(0, **first.parts).step == 0 and not first.optimizer.state
            assert first.train(3) == early
        found[name] = (saved, losses)
    return found


def resume(folder: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        job = Job(*VARIANTS[name], seed=9)
        resumed = zfx.Checkpointer(Path(folder) / name).load(3, **job.parts)
        assert resumed.data == [{"next": 3}] * 4 and job.position.next == 3
        found[name] = (job.digests(), job.train(5))
    return found


def check_resumed(folder: Path, names: list[str], worlds: tuple[int, ...]) -> None:
    saved = run_ranks(4, save_and_go_on, str(folder), names, timeout=300)
    for world in worlds:
        for resumed in run_ranks(world, resume, str(folder), names, timeout=300):
            for name, (state, losses) in saved[0].items():
                assert resumed[name][0] == state, f"{name} on {world} ranks"
                if name.endswith("float64"):
                    assert resumed[name][1] == pytest.approx(losses, rel=1e-10, abs=1e-10)


def test_four_ranks_save_and_three_and_one_resume(tmp_path: Path) -> None:
    check_resumed(tmp_path, DEFAULT, (3, 1))


@pytest.mark.slow
def test_every_kind_of_run_on_every_number_of_ranks(tmp_path: Path) -> None:
    check_resumed(tmp_path, ALL, (2, 3, 1))


def compiled_in_the_background(folder: str) -> None:
    job = Job("adam", torch.float32, compiled=True)
    job.train(2)
    with zfx.Checkpointer(folder, keep=2, file_bytes=200) as checkpoints:
        checkpoints.save(2, **job.parts, background=True)
        losses = job.train(3)  # while it is written
        checkpoints.save(5, **job.parts, background=True)
        after = job.digests()
    again = Job("adam", torch.float32, compiled=True, seed=3)
    assert checkpoints.load(2, **again.parts).step == 2
    assert again.train(3) == losses and again.digests() == after
    # in the middle of gradients that an earlier step left, into tensors that the optimizer has already
    assert checkpoints.load(**again.parts).step == 5 and again.digests() == after
    for step in (6, 7):
        checkpoints.save(step, **job.parts)
    assert checkpoints.steps() == [6, 7] and checkpoints.latest() == Path(folder) / "step-00000007"
    checkpoints.save(7, **job.parts)
    assert checkpoints.steps() == [6, 7] and checkpoints.latest() == Path(folder) / "step-00000007.2"
    dist.barrier()
    assert sorted(p.name for p in Path(folder).iterdir()) == ["step-00000006", "step-00000007.2"]


def test_a_compiled_model_saves_in_the_background_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(2, compiled_in_the_background, str(tmp_path))


# ---- DCP is the format -------------------------------------------------------------------------------------------------


def torch_alone(folder: str) -> None:
    """Through torch's own functions, as for FSDP2, with every option."""
    job = Job()
    job.train(2)
    saved = job.digests()
    state = dict(zip(("model", "optim"), get_state_dict(job.model, job.optimizer)))
    dcp.save(state, checkpoint_id=f"{folder}/plain")
    dcp.save({"model": job.model.state_dict()}, checkpoint_id=f"{folder}/model")
    zfx.Checkpointer(f"{folder}/ours").save(2, **job.parts)
    losses = job.train(3)
    job = Job()
    job.train(2)
    full = StateDictOptions(full_state_dict=True)
    offloaded = get_state_dict(job.model, job.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole = get_state_dict(job.model, job.optimizer, options=full)
    assert (offloaded[0] == {}) == (dist.get_rank() > 0)
    assert whole[0]["embed.weight"].shape == (7, 5) and whole[1]["state"]["scale"]["exp_avg"].shape == ()
    sharded = get_state_dict(job.model, job.optimizer, options=StateDictOptions(cpu_offload=True))

    def goes_on(again: Job, what: str) -> None:
        found = again.digests()
        assert {k: v for k, v in found.items() if k != "scheduler"} == {k: v for k, v in saved.items() if k != "scheduler"}, what
        again.position.next = 2
        again.scheduler.load_state_dict(state_of_scheduler)
        assert again.train(3) == losses, what

    state_of_scheduler = job.scheduler.state_dict()
    for what, (model_state, optim_state), options in (
        ("full", whole, full),
        ("sharded", sharded, None),
        ("from rank 0", offloaded, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
    ):
        again = Job(seed=4)
        own = copied(model_state), copied(optim_state)  # torch's functions may hand out, and take, the very tensors of a run
        # not by set_state_dict: where a rank has no state of its own, that takes it for a call without a model, and the others wait
        set_model_state_dict(again.model, own[0], options=options)
        set_optimizer_state_dict(again.model, again.optimizer, own[1], options=options)
        goes_on(again, what)
    for what, path in (("dcp.load", "plain"), ("zfx's own, by dcp.load", "ours/step-00000002")):
        again = Job(seed=4)
        state = {"model": get_model_state_dict(again.model), "optim": get_optimizer_state_dict(again.model, again.optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/{path}")
        set_model_state_dict(again.model, state["model"])
        set_optimizer_state_dict(again.model, again.optimizer, state["optim"])
        goes_on(again, what)
    again = Job(seed=4)
    resumed = zfx.Checkpointer(folder).load(path=f"{folder}/plain", model=again.model, optimizer=again.optimizer)
    assert resumed.step == 0
    goes_on(again, "torch's, by zfx")
    again = Job(seed=4)
    zfx.Checkpointer(folder).load(path=f"{folder}/model", model=again.model)
    assert digest(again.model.strided) == saved["strided"]


def test_torch_functions_save_and_load_as_for_fsdp2(tmp_path: Path) -> None:
    run_ranks(3, torch_alone, str(tmp_path))


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


def fsdp2_saves(folder: str) -> dict[str, str]:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for name, flat in (("nested", False), ("flat", True)):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = dict(zip(("net", "opt"), get_state_dict(model, optimizer, options=options)))
        dcp.save({"app": state}, checkpoint_id=f"{folder}/{name}")
    names = dict(model.named_parameters())
    return {n: digest(p) for n, p in names.items()} | {n: digest(optimizer.state[p]["exp_avg"]) for n, p in names.items()}


def zfx_loads(folder: str) -> list[dict[str, str]]:
    found = []
    for name in ("nested", "flat"):
        torch.manual_seed(8)
        model = zfx.compile(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        zfx.Checkpointer(folder).load(path=f"{folder}/{name}", model=model, optimizer=optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        with model.zfx.reference():
            model(torch.ones(2, 3)).sum().backward()
        names = dict(model.named_parameters())
        found.append(
            {n: digest(p) for n, p in names.items()} | {n: digest(optimizer.state[p]["exp_avg"]) for n, p in names.items()}
        )
        optimizer.step()
    return found


def test_a_checkpoint_of_fsdp2_loads(tmp_path: Path) -> None:
    saved = run_ranks(2, fsdp2_saves, str(tmp_path))[0]
    assert run_ranks(3, zfx_loads, str(tmp_path))[0] == [saved, saved]


# ---- all parts ---------------------------------------------------------------------------------------------------------


class Odd:
    """State of every plain kind."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def all_parts(folder: str) -> None:
    import numpy

    rank = dist.get_rank()
    job, other = Job(), nn.Parameter(torch.ones(3))
    generator_and_critic = [
        torch.optim.SGD(job.model.body.parameters(), lr=0.1, momentum=0.5),
        torch.optim.Adam(list(job.model.narrow.parameters()), lr=torch.tensor(0.25)),
    ]
    with job.model.zfx.reference():
        job.loss(torch.tensor([1, 2 + rank]), torch.zeros(2, 7, dtype=torch.float64))
    for optimizer in generator_and_critic:
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    value = {
        1: [None, True, 2**70, -0.5, float("nan")],
        "a": {"b": (b"x\0", {3, 1}, torch.Size([2])), "$tuple": 1},
        (1, "k"): torch.bfloat16,
        "arrays": [numpy.arange(3, dtype="int16"), numpy.float32(1.5)],
        "mine": torch.full((2,), rank, dtype=torch.int8),
    }
    checkpoints = zfx.Checkpointer(folder)
    checkpoints.save(1, model=job.model, optimizer=generator_and_critic, scaler=scaler, data=Odd(value), extras=value)
    again = Job(seed=3)
    optimizers = [
        torch.optim.SGD(again.model.body.parameters(), lr=1.0, momentum=0.5),
        torch.optim.Adam(list(again.model.narrow.parameters()), lr=torch.tensor(1.0)),
    ]
    into, fresh = Odd(), torch.amp.GradScaler("cpu", init_scale=2.0)
    resumed = checkpoints.load(model=again.model, optimizer=optimizers, scaler=fresh, data=into)
    assert fresh.get_scale() == 8.0 and optimizers[0].param_groups[0]["lr"] == 0.1
    assert torch.equal(optimizers[1].param_groups[0]["lr"], torch.tensor(0.25))
    for mine, theirs in zip(generator_and_critic, optimizers):
        for p, q in zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"]):
            assert {k: digest(v) for k, v in mine.state[p].items()} == {k: digest(v) for k, v in theirs.state[q].items()}
    got = into.value
    assert (
        repr(got[1]) == repr(value[1])
        and got["a"] == value["a"]
        and type(got["a"]["b"]) is tuple
        and got[(1, "k")] is torch.bfloat16
    )
    assert (
        got["arrays"][0].dtype == numpy.int16 and type(got["arrays"][1]) is numpy.float32 and got["mine"].tolist() == [rank, rank]
    )
    assert resumed.extras["mine"].tolist() == [0, 0], "extras are rank 0's"
    assert [one["value"]["mine"].tolist() for one in resumed.data] == [[r, r] for r in range(dist.get_world_size())]

    def refused(error: type[Exception], *words: str, **parts: Any) -> None:
        with pytest.raises(error) as caught:
            checkpoints.save(9, **{"model": job.model, **parts})
        assert all(word in str(caught.value) for word in words), caught.value
        assert checkpoints.steps() == [1]

    refused(zfx.CheckpointError, "extras", "'f'", "function", extras={"f": [all_parts]})
    refused(zfx.CheckpointError, "optimizer 0", "not one of the model's", optimizer=torch.optim.SGD([other]))
    refused(zfx.CheckpointError, "two optimizers", "narrow.weight", optimizer=[generator_and_critic[1], generator_and_critic[1]])
    refused(TypeError, "load_state_dict", data=3)
    refused(TypeError, "optimizer", optimizer=job.model)
    if rank == 1:
        job.model.register_buffer("late", torch.zeros(2))
    refused(zfx.CheckpointError, "rank 1", "other parameters")


def test_every_part_of_a_run_and_what_is_refused(tmp_path: Path) -> None:
    run_ranks(2, all_parts, str(tmp_path))


def test_a_plain_model_in_one_process_and_wrong_arguments(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    model, checkpoints = Awkward(), zfx.Checkpointer(tmp_path / "a" / "b", keep=None)
    assert checkpoints.latest() is None and checkpoints.steps() == []
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    with checkpoints:
        checkpoints.save(10**9, model=model, optimizer=optimizer, background=True)
    again = Awkward()
    optimizer = torch.optim.Adam(again.parameters())
    assert checkpoints.load(model=again, optimizer=optimizer).step == 10**9
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert again.head.weight is again.embed.weight
    for keyword, value in (("keep", 0), ("keep", True), ("timeout", 0), ("file_bytes", -1)):
        with pytest.raises(ValueError, match=keyword):
            zfx.Checkpointer(tmp_path, **{keyword: value})
    for step in (-1, 1.0, True):
        with pytest.raises(ValueError, match="step"):
            checkpoints.save(step, model=model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model"):
        checkpoints.save(1, model=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        checkpoints.load(1, path="x", model=model)
    with pytest.raises(zfx.CheckpointError, match=r"no checkpoint of step 3 in .*steps there: 1000000000"):
        checkpoints.load(3, model=model)
