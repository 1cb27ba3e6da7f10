"""Checkpoints that are damaged, hostile, or of something else are refused by name; nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zfx
from tests.checkpoint_jobs import Awkward, Job, refused, saved
from tests.harness import run_ranks
from zfx import dcp_reader, manifest

# ---- damaged -----------------------------------------------------------------------------------------------------------


def test_a_truncated_or_flipped_or_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints, path, model, optimizer = saved(tmp_path)
    files = sorted(os.listdir(path))
    assert len(files) > 5
    for name in files:
        content = (path / name).read_bytes()
        for damaged in (
            content[:-1],
            content[: len(content) // 2],
            b"",
            flipped(content, 0),
            flipped(content, len(content) // 2),
            None,
        ):
            if damaged is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(damaged)
            refused(checkpoints, model, optimizer, name)
        (path / name).write_bytes(content)
    assert checkpoints.load(model=model, optimizer=optimizer).step == 1


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def damaged_for_all(folder: str) -> None:
    job, checkpoints = Job(), zfx.Checkpointer(folder)
    path = checkpoints.save(1, **job.parts)
    job.train(1)
    checkpoints.save(2, **job.parts)
    state = job.digests()
    dist.barrier()
    if dist.get_rank() == 0:
        victim = path.with_name("step-00000002") / "__1_0_0.distcp"
        victim.write_bytes(flipped(victim.read_bytes(), 3000))
    dist.barrier()
    with pytest.raises(zfx.CheckpointError, match=r"step-00000002/__1_0_0\.distcp is damaged.*step="):
        checkpoints.load(**job.parts)
    assert job.digests() == state
    assert checkpoints.load(1, **job.parts).step == 1


def test_damage_that_one_rank_sees_is_refused_on_all(tmp_path: Path) -> None:
    run_ranks(2, damaged_for_all, str(tmp_path))


def test_something_else_than_was_saved_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints, _, model, optimizer = saved(tmp_path)

    class Other(Awkward):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(5, 2).double()
            self.extra = nn.Linear(2, 2).double()

    other = Other()
    refused(checkpoints, other, torch.optim.Adam(other.parameters()), "has no 'extra.weight', 'extra.bias'")
    del other.extra
    refused(checkpoints, other, torch.optim.Adam(other.parameters()), "'narrow.weight'", "shape (1, 5)", "(2, 5)")
    half = Awkward(torch.bfloat16)
    refused(checkpoints, half, torch.optim.Adam(half.parameters()), "dtype torch.float64 in the checkpoint and torch.bfloat16")
    del half.narrow
    refused(checkpoints, half, torch.optim.Adam(half.parameters()), "has 'narrow.weight', 'narrow.bias', which the model has not")
    refused(checkpoints, model, torch.optim.SGD(model.parameters()), "SGD", "Adam")
    params = [p for p in model.parameters() if p.requires_grad]
    refused(checkpoints, model, torch.optim.Adam(params[:-1]), "'strided'" if params[-1] is model.strided else "parameter group 0")
    refused(checkpoints, model, torch.optim.Adam([{"params": params[:2]}, {"params": params[2:]}]), "2 parameter groups")
    two = [torch.optim.Adam(params[:2]), torch.optim.Adam(params[2:])]
    refused(checkpoints, model, two, "holds 1 optimizers")  # type: ignore[arg-type]
    refused(checkpoints, model, optimizer, "no scheduler", scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    refused(checkpoints, model, optimizer, "no scaler", scaler=torch.amp.GradScaler("cpu"))
    refused(checkpoints, model, optimizer, "no data position", data=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    refused(checkpoints, model, optimizer, "no manifest.json", path=tmp_path)
    refused(checkpoints, model, optimizer, "no manifest.json", path=tmp_path / "nothing here")
    model.head.weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
    bare = zfx.Checkpointer(tmp_path / "bare")
    bare.save(1, model=model)
    model.head.weight = model.embed.weight
    refused(bare, model, optimizer, "ties 'head.weight' to 'embed.weight'", "two different tensors")


# ---- hostile -----------------------------------------------------------------------------------------------------------


class Bomb:
    """What a hostile pickle does when it is read: it runs something."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def plain(folder: Path) -> Path:
    torch.manual_seed(0)
    model = Awkward()
    dcp.save({"model": model.state_dict(), "note": {"a": 1}}, checkpoint_id=folder, no_dist=True)
    return folder


def edited(folder: Path, edit: Callable[[Any], None]) -> None:
    """Change what `.metadata` says."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def first_info(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "model.embed.weight")


def to_path(name: str) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        first_info(metadata).relative_path = name

    return edit


def grow(metadata: Any) -> None:
    metadata.state_dict_metadata["model.embed.weight"].size = torch.Size([2**40, 5])


def far(metadata: Any) -> None:
    metadata.state_dict_metadata["model.embed.weight"].chunks[0].offsets = torch.Size([7, 0])


def beyond(metadata: Any) -> None:
    first_info(metadata).offset = 2**50


def negative(metadata: Any) -> None:
    first_info(metadata).offset = -5


def nowhere(metadata: Any) -> None:
    metadata.storage_data = {i: v for i, v in metadata.storage_data.items() if i.fqn != "model.embed.weight"}


def other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.embed.weight"].properties.dtype = torch.float32


HOSTILE: dict[str, tuple[Callable[[Any], None], str]] = {
    "parent": (to_path("../secret"), "outside"),
    "absolute": (to_path("/etc/passwd"), "outside"),
    "link": (to_path("link"), "outside"),
    "directory": (to_path("."), "missing"),
    "no file": (to_path("__9_9.distcp"), "missing"),
    "not a name": (to_path(3), "names no file"),  # type: ignore[arg-type]
    "huge": (grow, "do not make up its shape"),
    "outside": (far, "outside of (7, 5)"),
    "beyond": (beyond, "truncated"),
    "negative": (negative, "truncated"),
    "nowhere": (nowhere, "in no file"),
}


def test_hostile_metadata_is_refused_before_torch_reads_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 100_000)
    model = Awkward()
    checkpoints = zfx.Checkpointer(tmp_path / "runs")
    original = plain(tmp_path / "plain")
    (original / "link").symlink_to(tmp_path / "secret")
    for what, (edit, says) in HOSTILE.items():
        copy = tmp_path / what
        shutil.copytree(original, copy, symlinks=True)
        edited(copy, edit)
        with pytest.raises(zfx.CheckpointError) as caught:
            checkpoints.load(path=copy, model=model)
        assert says in str(caught.value), (what, str(caught.value))
    wrong = tmp_path / "dtype"
    shutil.copytree(original, wrong, symlinks=True)
    edited(wrong, other_dtype)
    with pytest.raises(zfx.CheckpointError, match=r"embed\.weight"):
        checkpoints.load(path=wrong, model=model)


def test_nothing_is_executed(tmp_path: Path) -> None:
    """Pickles in disguise: as metadata, as a tensor, as an object, in a manifest's place, in zfx's own and in a plain directory."""
    mark, model = tmp_path / "executed", Awkward()
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)
    assert mark.exists(), "the bomb works"
    mark.unlink()
    checkpoints, own, *_ = saved(tmp_path / "own")

    def attempt(folder: Path, name: str, content: bytes, checksums: bool) -> None:
        (folder / name).write_bytes(content)
        if checksums:  # whoever changes a file can change its checksum
            facts, files = manifest.read(folder)
            facts.pop("format"), facts.pop("version")
            manifest.write(folder, facts, {n: manifest.facts_of(folder / n) for n in files})
        with pytest.raises(zfx.CheckpointError):
            checkpoints.load(path=folder, model=model)
        assert not mark.exists(), f"{name} was executed"

    (tmp_path / "bomb.pt").write_bytes(b"")
    torch.save(Bomb(mark), tmp_path / "bomb.pt")
    as_tensor = (tmp_path / "bomb.pt").read_bytes()
    for name in [".metadata", "state.json", *(n for n in os.listdir(own) if n.endswith(".distcp"))][:4]:
        copy = tmp_path / f"own-{name}"
        shutil.copytree(own, copy)
        attempt(copy, name, bomb if not name.endswith(".distcp") else as_tensor * 50, checksums=True)
    original = plain(tmp_path / "plain")
    for name in (".metadata", "__0_0.distcp"):
        copy = tmp_path / f"plain-{name}"
        shutil.copytree(original, copy)
        attempt(copy, name, bomb if name == ".metadata" else (as_tensor * 100)[: (original / name).stat().st_size], checksums=False)

    # an object that torch's own reader would unpickle without a question
    dcp.save(
        {"model": model.state_dict(), "optim": {"param_groups": [{"lr": Bomb(mark), "params": ["embed.weight"]}]}},
        checkpoint_id=tmp_path / "object",
        no_dist=True,
    )
    optimizer = torch.optim.SGD([model.embed.weight])
    with pytest.raises(zfx.CheckpointError, match=r"param_groups\.0\.lr.*might run code"):
        checkpoints.load(path=tmp_path / "object", model=model, optimizer=optimizer)
    assert not mark.exists()


def test_a_manifest_names_only_files_of_its_directory(tmp_path: Path) -> None:
    checkpoints, path, model, optimizer = saved(tmp_path / "runs")
    for name in ("../../secret", "/etc/passwd", "a/b", "..", ""):
        body = json.loads((path / "manifest.json").read_text())
        body["files"][name] = [3, "00"]
        body.pop("sha256")
        body["sha256"] = manifest._digest(body)
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        (copy / "manifest.json").write_text(json.dumps(body))
        refused(checkpoints, model, optimizer, "not a plain file", path=copy)


def test_the_unpickler_of_metadata_knows_torchs_records_and_nothing_else() -> None:
    for module, name in (
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("copyreg", "_reconstructor"),
    ):
        with pytest.raises(pickle.UnpicklingError, match=name):
            dcp_reader._Unpickler(__import__("io").BytesIO(f"c{module}\n{name}\n.".encode())).load()
