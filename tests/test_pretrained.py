"""transformers' directories into compiled models and back: the same values, in whatever form, and nothing hostile gets in."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import zfx
from tests.harness import RankError, rank_outcomes, run_ranks
from tests.meter import Meter
from tests.test_parity_transformers import MODELS, _batch
from zfx.errors import CheckpointError

NAMES = ("llama", "llama_tied", "mixtral", "t5", "bert", "gpt2")
RELEASE_ALL = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)


def plain_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 1) -> Any:
    import transformers

    spec = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, spec.config)(**spec.options)
    return getattr(transformers, spec.model)._from_config(config, dtype=dtype).train()


def read_by_rows(name: str, directory: str, **options: Any) -> Any:
    """A model that was never whole."""
    with torch.device("meta"):
        model = plain_model(name, **options)
    model = zfx.compile(model, init_fn=zfx.skip_init, limits=RELEASE_ALL)
    assert not zfx.load_pretrained(model, directory)
    return model


def differences(model: nn.Module, plain: nn.Module) -> list[str]:
    ours = dict(model.named_parameters(remove_duplicate=False))
    found = [n for n, p in plain.named_parameters(remove_duplicate=False) if not torch.equal(p, ours[n].full_tensor())]
    buffers = dict(model.named_buffers())
    return found + [n for n, b in plain.named_buffers() if not torch.equal(b, buffers[n])]


def same_directories(ours: Path, theirs: Path) -> bool:
    names = sorted(os.listdir(theirs))
    return sorted(os.listdir(ours)) == names and all((ours / n).read_bytes() == (theirs / n).read_bytes() for n in names)


# ---- there and back ------------------------------------------------------------------------------------------------------


def there_and_back(root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NAMES:
        for kind in ("bin", "several") if name in ("mixtral", "t5", "llama_tied") else ("one",):  # saved as it was loaded last
            model = read_by_rows(name, f"{root}/{name}/{kind}")
            found[f"{name} from {kind}"] = differences(model, plain_model(name))
        zfx.save_pretrained(model, f"{root}/{name}/ours", max_shard_size="20KB")
        model.save_pretrained(f"{root}/{name}/ours-one")
    return found


def test_all_layouts_there_and_back(tmp_path: Path) -> None:
    for name in NAMES:
        plain = plain_model(name)
        plain.save_pretrained(tmp_path / name / "one")
        plain.save_pretrained(tmp_path / name / "several", max_shard_size="20KB")
        (tmp_path / name / "bin").mkdir()
        torch.save(plain.state_dict(), tmp_path / name / "bin" / "pytorch_model.bin")  # tied parameters under all their names
    for found in run_ranks(3, there_and_back, str(tmp_path)):
        assert {key: wrong for key, wrong in found.items() if wrong} == {}
    for name in NAMES:
        plain = plain_model(name)
        assert same_directories(tmp_path / name / "ours-one", tmp_path / name / "one"), "byte for byte what transformers writes"
        again = type(plain).from_pretrained(tmp_path / name / "ours")
        state = again.state_dict()
        assert again.dtype == torch.float64 and all(torch.equal(state[n], t) for n, t in plain.state_dict().items())
        if name == "mixtral":
            again.set_experts_implementation("batched_mm")  # not kept in a config
        batch = _batch(MODELS[name], 0, 0, torch.float64)
        with torch.no_grad():
            for p in again.parameters():
                p.data = p.data.clone()  # where values lie in a file decides how the processor adds them up
            assert torch.equal(again.eval()(**batch).logits, plain.eval()(**batch).logits)


def one_step(name: str, directory: str, out: str) -> tuple[float, bool]:
    """The largest difference to the plain model's step, and whether what is saved is what was trained."""
    model, plain = read_by_rows(name, directory), plain_model(name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.train()
    model(**_batch(MODELS[name], rank, 0, torch.float64)).loss.backward()
    for r in range(world_size):
        plain(**_batch(MODELS[name], r, 0, torch.float64)).loss.backward()
    for p in plain.parameters():
        p.grad = None if p.grad is None else p.grad / world_size  # some of it is computed in float32: not before
    for trained in (model, plain):
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
    zfx.save_pretrained(model, out, max_shard_size="30KB")
    again = type(plain).from_pretrained(out)
    ours, theirs = again.state_dict(), plain.state_dict()
    same = all(torch.equal(ours[n], t.full_tensor() if hasattr(t, "full_tensor") else t) for n, t in model.state_dict().items())
    return max(float((ours[n] - t).abs().max()) for n, t in theirs.items() if t.is_floating_point()), same


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "llama" else pytest.mark.slow) for name in NAMES
])
def test_a_step_between_load_and_save_is_the_plain_models(name: str, tmp_path: Path) -> None:
    plain_model(name).save_pretrained(tmp_path / "in", max_shard_size="30KB")
    for difference, same in run_ranks(3, one_step, name, str(tmp_path / "in"), str(tmp_path / "out")):
        assert difference <= 1e-10 and same


class Plain(nn.Module):
    """No transformers model: a tie, a buffer that is kept and one that is not, a scalar, and more ranks than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.small = nn.Parameter(torch.arange(2.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def plain_there_and_back(root: str, replicas: int) -> list[Any]:
    torch.manual_seed(dist.get_world_size())
    model = zfx.compile(Plain(), replicas=replicas)
    values = {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in model.state_dict().items()}
    zfx.save_pretrained(model, root, max_shard_size=120)
    zfx.save_pretrained(model, root + "/one")
    torch.manual_seed(9)
    other = zfx.compile(Plain(), replicas=replicas)
    report = zfx.load_pretrained(other, root)
    now = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in other.state_dict().items()}
    same = [n for n, t in now.items() if not torch.equal(t, values[n])]
    again = Plain()
    missing = load_model(again, root + "/one/model.safetensors")  # safetensors' own
    same += [n for n, t in again.state_dict().items() if not torch.equal(t, values[n])]
    return [bool(report), same, [list(m) for m in missing]]


@pytest.mark.parametrize(("world_size", "replicas"), [(3, 1), (4, 2)])
def test_other_models_are_kept_under_the_names_of_their_state(world_size: int, replicas: int, tmp_path: Path) -> None:
    assert run_ranks(world_size, plain_there_and_back, str(tmp_path), replicas) == [[False, [], [[], []]]] * world_size
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(index) == ["embed.weight", "norm.bias", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var",
                             "norm.weight", "scale", "small"]


# ---- what does not fit ---------------------------------------------------------------------------------------------------


def misfits(root: str) -> dict[str, Any]:
    import transformers

    found: dict[str, Any] = {}

    def load(key: str, model: Any, strict: bool) -> None:
        before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
        try:
            report = zfx.load_pretrained(model, f"{root}/{key}", strict=strict)
            changed = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), before[n])]
            mismatched = [n for n, *_ in report.mismatched_keys]
            found[f"{key} {strict}"] = (report.missing_keys, report.unexpected_keys, mismatched, changed)
        except CheckpointError as error:
            unchanged = all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters())
            found[f"{key} {strict}"] = (str(error), unchanged)

    linear = lambda: zfx.compile(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)))  # noqa: E731
    for strict in (True, False):
        load("wrong", linear(), strict)
    load("half", linear(), True)
    spec = MODELS["llama"]
    config = getattr(transformers, spec.config)(**spec.options)
    load("base", zfx.compile(transformers.LlamaForCausalLM(config)), False)  # a base model's directory into a model with a head
    base = zfx.compile(transformers.LlamaModel(config))
    load("head", base, False)  # and the other way round
    load("untied", zfx.compile(plain_model("llama_tied", torch.float32)), True)
    return found


def test_names_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    def directory(name: str, values: dict[str, torch.Tensor]) -> None:
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "model.safetensors")

    wide = {"0.weight": torch.ones(5, 4), "0.bias": torch.ones(5), "1.weight": torch.ones(4, 5), "1.bias": torch.ones(4)}
    wrong = {"0.weight": torch.ones(5, 4), "0.bias": torch.ones(6), "1.weight": torch.ones(4, 5).int(), "more": torch.ones(1)}
    directory("wrong", wrong)
    directory("half", {n: t.bfloat16() for n, t in wide.items()})
    plain_model("llama", torch.float32).model.save_pretrained(tmp_path / "base")
    plain_model("llama", torch.float32).save_pretrained(tmp_path / "head")
    untied = dict(plain_model("llama", torch.float32).state_dict())
    directory("untied", untied)
    first, second = run_ranks(2, misfits, str(tmp_path))
    assert first == second or first["untied True"] != second["untied True"]
    text, unchanged = first["wrong True"]
    parts = ("1 missing: 1.bias", "1 unexpected: more", "0.bias ((6,) float32 there, (5,)", "int32")
    assert unchanged and all(part in text for part in parts)
    assert first["wrong False"] == (("1.bias",), ("more",), ["0.bias", "1.weight"], ["0.weight"])
    assert first["half True"] == ((), (), [], ["0.weight", "0.bias", "1.weight", "1.bias"])
    missing, unexpected, mismatched, changed = first["base False"]
    assert (missing, unexpected, mismatched) == (("lm_head.weight",), (), []) and "model.layers.0.mlp.up_proj.weight" in changed
    missing, unexpected, mismatched, changed = first["head False"]
    assert (missing, unexpected, mismatched) == ((), ("lm_head.weight",), []) and "layers.0.mlp.up_proj.weight" in changed
    assert "tied" in first["untied True"][0]


def different_files(root: str) -> None:
    model = zfx.compile(nn.Linear(4, 4), timeout=20)
    zfx.load_pretrained(model, f"{root}/{dist.get_rank()}")


@pytest.mark.parametrize(("how", "kinds", "says"), [
    ("missing", ["CheckpointError", "CheckpointError"], "holds none of"),
    ("truncated", ["CheckpointError", "CheckpointError"], "not a whole safetensors file"),
    ("other", ["RankMismatch", "RankMismatch"], "with 3 tensors"),
])
def test_files_that_one_rank_does_not_have_are_an_error_on_all(how: str, kinds: list[str], says: str, tmp_path: Path) -> None:
    values = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save_file(values | ({"more": torch.ones(1)} if how == "other" and rank else {}), tmp_path / str(rank) / "model.safetensors")
    file = tmp_path / "1" / "model.safetensors"
    if how == "missing":
        file.unlink()
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-4])
    outcomes = rank_outcomes(2, different_files, str(tmp_path), timeout=60)
    errors = [o.error for o in outcomes]
    assert [e and e.type_name for e in errors] == kinds and all(e and says in e.message for e in errors)


# ---- hostile directories -------------------------------------------------------------------------------------------------


class Exploit:
    """Leaves a file where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def with_header(header: Any, data: bytes = b"\0" * 80, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(start: int, stop: int, shape: tuple[int, ...] = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def write_hostile(root: Path) -> dict[str, str]:
    """Directories, with what the refusal must say."""
    good = root / "good.safetensors"
    save_file({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, good)
    marker = str(root / "executed")
    says: dict[str, str] = {}

    def add(name: str, text: str, write: Callable[[Path], Any]) -> None:
        (root / name).mkdir()
        write(root / name)
        says[name] = text

    def index(*files: Any, kind: str = "model.safetensors") -> Callable[[Path], Any]:
        names = ("weight", "bias")
        return lambda d: (d / f"{kind}.index.json").write_text(json.dumps({"weight_map": dict(zip(names, files))}))

    def raw(data: bytes, name: str = "model.safetensors") -> Callable[[Path], Any]:
        return lambda d: (d / name).write_bytes(data)

    add("parent", "not a plain file name", index("../good.safetensors", "../good.safetensors"))
    add("deeper", "not a plain file name", index("x/../../good.safetensors", "x/../../good.safetensors"))
    add("absolute", "not a plain file name", index(str(good), str(good)))
    add("windows", "not a plain file name", index("..\\good.safetensors", "C:good.safetensors"))
    add("null", "not a plain file name", index("a\0.safetensors", "b.safetensors"))
    add("number", "must map names to names", index(3, 4))
    add("list", "not an index of weights", lambda d: (d / "model.safetensors.index.json").write_text("[1, 2]"))
    add("deep", "not an index of weights", lambda d: (d / "model.safetensors.index.json").write_text("[" * 100_000))
    add("mixed", "not a .safetensors file", index("a.bin", "a.bin"))
    add("absent", "missing", index("a.safetensors", "a.safetensors"))
    add("not there", "does not hold 'bias'", lambda d: (index("a.safetensors", "b.safetensors")(d),
        save_file({"weight": torch.ones(4, 4)}, d / "a.safetensors"), save_file({"x": torch.ones(4)}, d / "b.safetensors")))
    add("link", "is a link", lambda d: (d / "model.safetensors").symlink_to(good))
    add("linked index", "is a link", lambda d: ((root / "i.json").write_text("{}"),
        (d / "model.safetensors.index.json").symlink_to(root / "i.json")))
    add("linked shard", "is a link", lambda d: (index("a.safetensors", "a.safetensors")(d), (d / "a.safetensors").symlink_to(good)))
    add("fifo", "not a regular file", lambda d: os.mkfifo(d / "model.safetensors"))
    add("long header", "not a whole safetensors", raw(with_header({"weight": tensor(0, 16)}, length=1 << 40)))
    add("huge header", "not a whole safetensors", raw(with_header(b"{}", length=(1 << 64) - 1)))
    w = tensor(0, 64, (4, 4))
    add("past the end", "not a whole safetensors", raw(with_header({"weight": w, "bias": tensor(64, 80 + 16, (8,))})))
    add("overlap", "not a whole safetensors", raw(with_header({"weight": w, "bias": tensor(48, 64)}, b"\0" * 64)))
    add("hole", "not a whole safetensors", raw(with_header({"weight": w, "bias": tensor(68, 84)}, b"\0" * 84)))
    add("size", "not a whole safetensors", raw(with_header({"weight": tensor(0, 64, (400, 4)), "bias": tensor(64, 80)})))
    add("overflow", "not a whole safetensors", raw(with_header({"weight": tensor(0, 64, (1 << 62, 1 << 62))})))
    add("negative", "not a whole safetensors", raw(with_header({"weight": tensor(0, 64, (-4, -4)), "bias": tensor(64, 80)})))
    add("backwards", "not a whole safetensors", raw(with_header({"weight": tensor(64, 0, (4, 4)), "bias": tensor(64, 80)})))
    add("dtype", "not a whole safetensors", raw(with_header({"weight": tensor(0, 64, (4, 4), "O"), "bias": tensor(64, 80)})))
    add("not json", "not a whole safetensors", raw(with_header(b"\xff" * 40)))
    add("empty", "not a whole safetensors", raw(b""))
    add("pickle in disguise", "not a whole safetensors", raw(pickle.dumps(Exploit(marker))))
    add("old pickle", "torch 1.6", raw(pickle.dumps(Exploit(marker)), "pytorch_model.bin"))
    add("code", "without running code", lambda d: torch.save({"weight": Exploit(marker)}, d / "pytorch_model.bin"))
    add("code at the side", "without running code", lambda d: torch.save(
        {"weight": torch.ones(4, 4), "bias": torch.ones(4), "x": Exploit(marker)}, d / "pytorch_model.bin"))
    add("zip in disguise", "not a whole safetensors", lambda d: torch.save({"weight": torch.ones(4)}, d / "model.safetensors"))
    add("safetensors in disguise", "torch 1.6", lambda d: shutil.copy(good, d / "pytorch_model.bin"))
    add("indexed code", "without running code", lambda d: (index("a.bin", "a.bin", kind="pytorch_model.bin")(d),
        torch.save({"weight": Exploit(marker)}, d / "a.bin")))
    add("no tensors", "not a tensor", lambda d: torch.save({"weight": [1, 2]}, d / "pytorch_model.bin"))
    add("nested", "not a tensor", lambda d: torch.save({"model": {"weight": torch.ones(4, 4)}}, d / "pytorch_model.bin"))
    add("no dict", "instead of tensors by name", lambda d: torch.save([torch.ones(4)], d / "pytorch_model.bin"))
    add("nothing", "holds none of", lambda d: None)
    return says


def load_all(root: str, names: list[str]) -> dict[str, str]:
    model = zfx.compile(nn.Linear(4, 4))
    said = {}
    for name in names:
        try:
            zfx.load_pretrained(model, f"{root}/{name}")
            said[name] = "loaded"
        except CheckpointError as error:
            said[name] = str(error)
    hub = f"{root}/hub/snapshots/abc"
    zfx.load_pretrained(model, hub)  # links of the hub's cache are followed
    said["hub"] = str(bool((model.weight.full_tensor() == 1).all()))
    return said


def test_hostile_directories_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    says = write_hostile(tmp_path)
    (tmp_path / "hub" / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "hub" / "blobs").mkdir()
    shutil.copy(tmp_path / "good.safetensors", tmp_path / "hub" / "blobs" / "123")
    (tmp_path / "hub" / "snapshots" / "abc" / "model.safetensors").symlink_to("../../blobs/123")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for said in run_ranks(2, load_all, str(tmp_path), list(says)):
        assert {name: said[name] for name, text in says.items() if text not in said[name]} == {}
        assert said["hub"] == "True"
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before, "nothing was executed or written"


# ---- writing goes wrong --------------------------------------------------------------------------------------------------


def full_disk(root: str) -> None:
    model = zfx.compile(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), timeout=20)
    zfx.save_pretrained(model, root)
    with torch.no_grad():
        model[0].weight.zero_()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # writes beyond fail, as on a full disk
    try:
        zfx.save_pretrained(model, root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def unwritable(root: str) -> None:
    zfx.save_pretrained(zfx.compile(nn.Linear(4, 4), timeout=20), root + "/file/directory")


def errors_of(job: Callable[..., None], *args: Any) -> list[RankError]:
    outcomes = rank_outcomes(2, job, *args, timeout=60)
    assert all(o.error for o in outcomes)
    return [o.error for o in outcomes if o.error]


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_what_was_there(tmp_path: Path) -> None:
    errors = errors_of(full_disk, str(tmp_path))
    assert [e.type_name for e in errors] == ["OSError", "CheckpointError"] and "rank 0" in errors[1].message
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert bool(load_file(tmp_path / "model.safetensors")["0.weight"].any()), "the earlier save is untouched"


def test_a_directory_that_can_not_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = errors_of(unwritable, str(tmp_path))
    assert [e.type_name for e in errors] == ["NotADirectoryError", "CheckpointError"]


# ---- memory --------------------------------------------------------------------------------------------------------------


MIXTRAL = dict(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_local_experts=6)
LLAMA_200M = dict(vocab_size=16000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10)


def peaks(root: str, kind: str, sizes_of_it: dict[str, int]) -> dict[str, int]:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(num_attention_heads=4, num_key_value_heads=4, **sizes_of_it)
    make = getattr(transformers, f"{kind}ForCausalLM")
    if dist.get_rank() == 0:
        make(config).save_pretrained(root + "/in")
    dist.barrier()
    with torch.device("meta"):
        model = make(config)
    with Meter() as reading:
        model = zfx.compile(model, init_fn=zfx.skip_init)
        zfx.load_pretrained(model, root + "/in")
    with Meter(p._local_tensor for p in model.parameters()) as writing:
        zfx.save_pretrained(model, root + "/out")
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    shards = sum(p._local_tensor.untyped_storage().nbytes() for p in model.parameters())
    return dict(reading=reading.peak_bytes, writing=writing.peak_bytes, shards=shards, largest=max(sizes), whole=sum(sizes))


def test_no_rank_holds_the_model_on_the_way_in_or_out(tmp_path: Path) -> None:
    slack = 16 << 10
    for rank, found in enumerate(run_ranks(3, peaks, str(tmp_path), "Mixtral", MIXTRAL)):
        assert found["shards"] + 2 * found["largest"] < found["whole"]
        # two of six experts: as they are read, and stacked, or stacked and joined
        assert found["reading"] <= found["shards"] + 2 * found["largest"] // 3 + slack
        assert found["writing"] <= found["shards"] + (2 if rank == 0 else 1) * found["largest"] + slack


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_rank_holds_200m_parameters_on_the_way_in_or_out(world_size: int, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(world_size, peaks, str(tmp_path), "Llama", LLAMA_200M, timeout=600)):
        print(found)
        assert found["whole"] > 4 * 190e6
        assert found["shards"] < found["reading"] <= found["shards"] + found["largest"] + (16 << 10)
        assert found["writing"] <= found["shards"] + (2 if rank == 0 else 1) * found["largest"] + (16 << 10)
