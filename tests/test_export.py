"""`zfx export` and `zfx inspect`: offline, tensor by tensor, readable by transformers and by safetensors."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zfx
from tests.checkpoint_jobs import Awkward, Job
from tests.harness import live_tensors, run_ranks
from zfx.cli import run as cli
from zfx.export import contents_of, export


def saved_by_three(folder: str) -> dict[str, torch.Tensor]:
    job = Job("adam", torch.bfloat16)
    job.train(1)
    zfx.Checkpointer(folder, file_bytes=150).save(1, **job.parts)
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in job.model.state_dict().items()}


def test_what_three_ranks_saved_is_exported_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    whole = run_ranks(3, saved_by_three, str(tmp_path / "run"))[0]
    out = tmp_path / "out"
    assert cli(["export", str(tmp_path / "run"), str(out), "--max-shard-size", "150"]) == 0
    assert "no config.json" in capsys.readouterr().out
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2 and set(index) == set(whole) - {"head.weight"}
    found = {k: v for name in sorted(set(index.values())) for k, v in load_file(out / name).items()}
    assert all(torch.equal(found[name], whole[name]) and found[name].dtype == whole[name].dtype for name in index)
    fresh = Awkward(torch.bfloat16)
    missing = fresh.load_state_dict(found, strict=False)
    assert missing.missing_keys == ["head.weight"] and not missing.unexpected_keys
    assert cli(["export", str(tmp_path / "run"), str(out)]) == 2 and "not an empty directory" in capsys.readouterr().err

    assert cli(["export", str(tmp_path / "run"), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[name], whole[name].float()) for name in index)
    assert cli(["export", str(tmp_path / "run"), str(tmp_path / "x"), "--dtype", "float33"]) == 2

    capsys.readouterr()
    assert cli(["inspect", str(tmp_path / "run"), "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["world_size"], facts["verified"]) == (1, 3, True)
    embed = next(row for row in facts["tensors"] if row["name"] == "embed.weight")
    assert embed == {"name": "embed.weight", "shape": [7, 5], "dtype": "bfloat16", "num_bytes": 70, "num_pieces": 3,
                     "optimizer": ["exp_avg", "exp_avg_sq", "step"], "aliases": ["head.weight"]}  # fmt: skip
    assert facts["model_bytes"] == sum(whole[n].nbytes for n in index)
    assert cli(["inspect", str(tmp_path / "run"), "--full"]) == 0
    shown = capsys.readouterr().out
    assert "embed.weight = head.weight" in shown and "7 x 5" in shown and "scalar" in shown

    victim = next((tmp_path / "run" / "step-00000001").glob("__2_*"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert cli(["inspect", str(tmp_path / "run"), "--json"]) == 1
    assert victim.name in json.loads(capsys.readouterr().out)["error"]["message"]
    assert cli(["export", str(tmp_path / "run"), str(tmp_path / "y")]) == 1 and not (tmp_path / "y").exists()
    assert cli(["inspect", str(tmp_path / "nothing")]) == 2
    (tmp_path / "empty").mkdir()
    assert cli(["inspect", str(tmp_path / "empty")]) == 1


def test_a_transformers_model_goes_through_export_and_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
                                      num_key_value_heads=1, vocab_size=11, tie_word_embeddings=True)  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    zfx.Checkpointer(tmp_path / "run").save(4, model=model)
    assert cli(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model) and again.lm_head.weight is again.model.embed_tokens.weight
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, again(ids).logits)


class Peak:
    """The most bytes that tensors of at least 100 kB held in this process at any allocation, above where it began."""

    def __init__(self) -> None:
        self.most = 0

    def look(self, *args: Any) -> None:
        self.most = max(self.most, live_tensors(at_least_bytes=10**5)[1])


def check_bounds(folder: Path, width: int, num_layers: int, file_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save holds the run and at most one file's tensors; an export at most two tensors (a whole one, and a piece or its cast)."""
    from zfx import dcp_writer
    from zfx.dcp_reader import Source

    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
    for layer in model:  # as shards are: views of a storage that has room for more, which torch copies to write
        layer.weight.data = torch.zeros(width * width + width)[: width * width].view(width, width)
    layer_bytes = width * width * 4
    peak = Peak()
    peak.look()
    before = peak.most
    assert before >= num_layers * layer_bytes
    original = dcp_writer.manifest.facts_of
    monkeypatch.setattr(dcp_writer.manifest, "facts_of", lambda *a: (peak.look(), original(*a))[1])
    resolve = torch.distributed.checkpoint.DefaultSavePlanner.resolve_data
    monkeypatch.setattr(torch.distributed.checkpoint.DefaultSavePlanner, "resolve_data", lambda *a: (peak.look(), resolve(*a))[1])
    path = zfx.Checkpointer(folder / "run", file_bytes=file_bytes).save(1, model=model)
    assert peak.most - before <= max(file_bytes, layer_bytes) + layer_bytes + num_layers * width * 4
    del model, layer
    gc.collect()
    values = Source._values
    exporting = Peak()
    exporting.look()
    before = exporting.most  # what other tests of this process have left behind
    monkeypatch.setattr(Source, "_values", lambda *a: _looked(exporting, values(*a)))
    export(contents_of(path), folder / "out", torch.bfloat16)
    assert 0 < exporting.most - before <= 2.5 * layer_bytes


def _looked(peak: Peak, value: torch.Tensor) -> torch.Tensor:
    peak.look()
    return value


def test_save_and_export_hold_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bounds(tmp_path, 300, 5, 800_000, monkeypatch)


@pytest.mark.slow
def test_save_and_export_of_200_million_parameters_hold_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bounds(tmp_path, 2500, 32, 64 << 20, monkeypatch)
