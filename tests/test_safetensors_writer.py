"""The writer of safetensors directories: what it writes is what safetensors reads, whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zfx.errors import CheckpointError
from zfx.safetensors_writer import DTYPES, Entry, SafetensorsWriter, size_in_bytes
from zfx.weight_files import WeightFiles


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 4, generator=g)
    return {
        "b.weight": wide, "a.weight": wide.t(), "half": wide.half()[:3], "bf": wide.bfloat16(), "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4), "ids": torch.arange(5), "mask": wide > 0, "ünï \"quoted\"": wide[1:2].double(),
    }


def entries(values: dict[str, torch.Tensor]) -> list[Entry]:
    return [Entry(name, t.dtype, tuple(t.shape)) for name, t in values.items()]


def write(directory: Path, values: dict[str, torch.Tensor], **options: object) -> None:
    with SafetensorsWriter(directory, entries(values), **options) as writer:  # type: ignore[arg-type]
        for name in sorted(values, reverse=True):  # any order
            writer.add(name, values[name])


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def test_one_file_is_byte_for_byte_what_safetensors_writes(tmp_path: Path) -> None:
    values = {n: t.contiguous() for n, t in tensors().items() if n not in ("half", "ids")}  # their order is free
    write(tmp_path / "ours", values, metadata={"format": "pt"})
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    values = {str(dtype): torch.arange(6).to(dtype) for dtype in DTYPES}
    write(tmp_path, values)
    read = load_file(tmp_path / "model.safetensors")
    assert {n: t.dtype for n, t in read.items()} == {n: t.dtype for n, t in values.items()}
    assert all(torch.equal(read[n].view(torch.uint8), t.view(torch.uint8)) for n, t in values.items())


def test_shards_and_their_index(tmp_path: Path) -> None:
    values = tensors()
    write(tmp_path, values, max_shard_bytes=100, index_metadata={"more": 1})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and sorted(os.listdir(tmp_path)) == [*files, "model.safetensors.index.json"]
    read = {}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as f:
            read[name] = f.get_tensor(name)
    assert same(read, values)
    assert index["metadata"] == {"more": 1, "total_size": sum(t.numel() * t.element_size() for t in values.values())}
    for file in files:
        held = load_file(tmp_path / file)
        assert len(held) == 1 or sum(t.numel() * t.element_size() for t in held.values()) <= 100


def test_a_save_replaces_an_earlier_one_of_another_shape(tmp_path: Path) -> None:
    for limit in (60, 100, 10**6, 100):
        write(tmp_path, tensors(), max_shard_bytes=limit)
        names = set(os.listdir(tmp_path))
        if limit == 10**6:
            assert names == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert names == {*index["weight_map"].values(), "model.safetensors.index.json"}


def test_nothing_is_left_or_touched_by_a_failed_save(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.ones(2)})
    for values, extra, says in (
        ({"w": torch.zeros(2), "v": torch.ones(1)}, {}, "not written"),
        ({"w": torch.zeros(2)}, {"x": torch.ones(1)}, "'x' was not declared"),
        ({"w": torch.zeros(2)}, {"w": torch.ones(3)}, "declared as"),
        ({"w": torch.zeros(2)}, {"w": torch.ones(2).double()}, "declared as"),
    ):
        with pytest.raises(CheckpointError, match=says), SafetensorsWriter(tmp_path, entries(values)) as writer:
            for name, tensor in (extra or {"w": values["w"]}).items():
                writer.add(name, tensor)
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(tmp_path, entries({"w": torch.zeros(2)})) as writer:
        writer.add("w", torch.zeros(2))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["model.safetensors"] and load_file(tmp_path / "model.safetensors")["w"].tolist() == [1, 1]


def test_what_can_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    entry = Entry("w", torch.float32, (2,))
    for bad, says in (
        ([entry, entry], "taken"),
        ([Entry("__metadata__", torch.float32, ())], "taken"),
        ([Entry("w", torch.complex128, ())], "complex128"),
        ([Entry("w", torch.float32, (1 << 60,))], "has room for"),
    ):
        with pytest.raises(CheckpointError, match=says):
            SafetensorsWriter(tmp_path, bad)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        SafetensorsWriter(tmp_path / "file" / "directory", [entry])
    assert os.listdir(tmp_path) == ["file"]


def test_links_in_the_directory_are_replaced_and_never_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    target = tmp_path / "out"
    target.mkdir()
    for name in ("model.safetensors", "config.json"):
        (target / name).symlink_to(precious)
    with SafetensorsWriter(target, [Entry("w", torch.float32, (2,))]) as writer:
        writer.add("w", torch.ones(2))
        (writer.folder / "config.json").write_text("{}")
    assert precious.read_text() == "mine"
    assert (target / "config.json").read_text() == "{}" and not (target / "model.safetensors").is_symlink()


@pytest.mark.parametrize("before", [100, 10**6])
@pytest.mark.parametrize("after", [100, 10**6])
def test_a_crash_at_any_moment_leaves_no_mixture(before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tensors(), {n: torch.zeros_like(t) for n, t in tensors().items()}
    outcomes = []
    for moment in itertools.count():
        directory = tmp_path / str(moment)
        write(directory, old, max_shard_bytes=before)
        left = iter(range(moment))

        def crash(real: Callable[..., None], left: Iterator[int] = left) -> Callable[..., None]:
            def run(*args: object, **kwargs: object) -> None:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                real(*args, **kwargs)

            return run

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "fsync", "rmdir"):
                patch.setattr(os, name, crash(getattr(os, name)))
            with contextlib.suppress(KeyboardInterrupt):
                write(directory, new, max_shard_bytes=after)
        try:
            with WeightFiles(directory) as files:
                read = {name: files.read(name) for name in files.names}
            outcomes.append("old" if same(read, old) else "new" if same(read, new) else "mixed")
        except CheckpointError as error:
            outcomes.append("none" if "holds none of" in str(error) else str(error))
        if outcomes[-2:] == ["new", "new"]:
            break
    assert outcomes[0] == "old" and outcomes[-1] == "new" and set(outcomes) <= {"old", "none", "new"}
    assert outcomes == sorted(outcomes, key=["old", "none", "new"].index)


def test_sizes() -> None:
    assert [size_in_bytes(s) for s in (7, "12B", "5KB", "1.5 MB", "2gb", "1TB")] == [7, 12, 5000, 1500000, 2 * 10**9, 10**12]
    for bad in (0, -1, True, 1.5, "", "5", "5XB", "-5GB", None):
        with pytest.raises(ValueError, match="max_shard_size"):
            size_in_bytes(bad)  # type: ignore[arg-type]
