"""Saves that are killed, run out of disk, or meet ranks that do something else: one checkpoint always loads."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx
from tests.checkpoint_jobs import Job, digest, saved
from tests.harness import rank_outcomes, run_ranks
from zfx import manifest
from zfx.dcp_writer import Writer

# ---- killed ------------------------------------------------------------------------------------------------------------


def save_until_killed(folder: str, seed: int, victims: list[int], rounds: int) -> None:
    """Resume from the latest, then save every step, in both ways; the victims die at a random moment of it."""
    job, checkpoints = Job("adam"), zfx.Checkpointer(folder, keep=2, timeout=10, write_timeout=20, file_bytes=300)
    first = 0
    if checkpoints.latest() is not None:
        first = checkpoints.load(**job.parts).step
    if dist.get_rank() in victims:
        moment = random.Random(seed).uniform(0.0, 0.6)
        threading.Thread(target=lambda: (time.sleep(moment), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    for step in range(first, first + rounds):
        job.step()
        checkpoints.save(step + 1, **job.parts, background=bool(step % 2))
    checkpoints.wait()


def go_on(folder: str) -> tuple[int, dict[str, str], list[float]]:
    job, checkpoints = Job("adam", seed=3), zfx.Checkpointer(folder, keep=2)
    step = checkpoints.load(**job.parts).step if checkpoints.latest() is not None else 0
    if step == 0:
        job = Job("adam")
    state, losses = job.digests(), job.train(1)
    checkpoints.save(step + 1, **job.parts)
    return step, state, losses


def unbroken(num_steps: int) -> list[tuple[dict[str, str], list[float]]]:
    job, found = Job("adam"), []
    for _ in range(num_steps + 1):
        found.append((job.digests(), job.train(1)))
    return found


def kill_and_resume(folder: Path, num_kills: int) -> None:
    reached = []
    for number in range(num_kills):
        victims = [[1], [0, 1], [0]][number % 3]
        outcomes = rank_outcomes(2, save_until_killed, str(folder), number, victims, 40, timeout=60)
        assert all(outcomes[rank].status == "crash" for rank in victims), [str(o) for o in outcomes]
        for outcome in outcomes:
            if outcome.rank not in victims:
                assert outcome.error is not None, "a rank whose peer was killed raises"
        latest = zfx.Checkpointer(folder).latest()
        if latest is not None:
            manifest.check(latest, manifest.read(latest)[1])
        reached.append(run_ranks(2, go_on, str(folder))[0])
        left = [name for name in os.listdir(folder) if ".tmp-" in name]
        assert not left, "the next save removes what a crash left"
    wanted = run_ranks(2, unbroken, max(step for step, _, _ in reached))[0]
    for step, state, losses in reached:
        assert (state, losses) == wanted[step], f"step {step}"


def test_killed_at_random_moments_the_latest_checkpoint_loads(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 3)


@pytest.mark.slow
def test_killed_thirty_times(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 30)


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def dies_at(number: int, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Save step 2 in a child process that is gone before its `number`-th operation in the folder. Whether it came so far."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if event in EVENTS and args and isinstance(args[0], (str, os.PathLike)) and str(args[0]).startswith(str(folder)):
                count += 1
                if count == number:
                    os._exit(9)

        sys.addaudithook(hook)
        try:
            zfx.Checkpointer(folder, keep=1, file_bytes=500).save(2, model=model, optimizer=optimizer)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_dead_at_an_operation_of_a_save_one_checkpoint_loads(tmp_path: Path, stride: int) -> None:
    """Not at random: before every file that is opened, made, renamed or removed."""
    _, _, model, optimizer = saved(tmp_path / "before")
    before = {name: digest(value) for name, value in model.state_dict().items()}
    found = []
    for number in range(1, 300, stride):
        folder = tmp_path / f"run{number}"
        shutil.copytree(tmp_path / "before", folder)
        with torch.no_grad():
            model.scale.fill_(2.0)
        died = dies_at(number, folder, model, optimizer)
        steps = zfx.Checkpointer(folder).steps()
        step = zfx.Checkpointer(folder).load(model=model, optimizer=optimizer).step
        assert step == max(steps) and (float(model.scale.detach()) == 2.0) == (step == 2)
        assert step == 2 or {name: digest(value) for name, value in model.state_dict().items()} == before
        found.append((step, len(steps)))
        zfx.Checkpointer(folder, keep=1).save(3, model=model)
        assert os.listdir(folder) == ["step-00000003"], "what the crash left is gone"
        shutil.rmtree(folder)
        if not died:
            break
    assert not died and found[0] == (1, 1) and found[-1] == (2, 1) and (stride > 1 or (2, 2) in found)
    assert found == sorted(found, key=lambda one: (one[0], -one[1])) and len(found) > 24 / stride


def fails_in_the_middle(folder: str) -> None:
    rank, job, checkpoints = dist.get_rank(), Job(), zfx.Checkpointer(folder)
    checkpoints.save(1, **job.parts)
    real = Writer.write_data

    def failing(self: Writer, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return real(self, plan, planner)

    Writer.write_data = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(zfx.CheckpointError, match=r"saving step 2 failed on rank 1: .*No space left"):
            checkpoints.save(2, **job.parts)
        checkpoints.save(3, **job.parts, background=True)  # returns: the error comes later
        with pytest.raises(zfx.CheckpointError, match=r"saving step 3 in the background failed on rank 1: .*No space left"):
            checkpoints.save(4, **job.parts)
        checkpoints.save(5, **job.parts, background=True)
        with pytest.raises(zfx.CheckpointError, match="step 5 in the background"):
            checkpoints.wait()
        checkpoints.wait()  # told once
    finally:
        Writer.write_data = real  # type: ignore[method-assign]
    dist.barrier()
    assert checkpoints.steps() == [1]
    checkpoints.save(6, **job.parts)
    assert checkpoints.load(**job.parts).step == 6
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000006"]
    with pytest.raises(zfx.RankMismatch, match=r"step=7|step=8"):
        zfx.Checkpointer(folder, timeout=5).save(7 + rank, **job.parts)


def test_an_error_on_one_rank_is_raised_on_all_and_commits_nothing(tmp_path: Path) -> None:
    run_ranks(2, fails_in_the_middle, str(tmp_path))
