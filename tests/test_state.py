"""The model changes between two steps: the next one works with the new values, or an error says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zfx
from tests.harness import rank_outcomes, run_ranks
from tests.test_parity_transformers import MODELS

RELEASE_ALL = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)


class Tied(nn.Module):
    """Rows that two or three ranks share unevenly, a tie, a scalar, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.ones(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids) * self.scale + self.mean)))


def build(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().double()


def ids() -> torch.Tensor:
    return torch.tensor([[1, 2, 6], [0, 3, 5]])


def whole(state: Any) -> dict[str, torch.Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in state.items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(ids()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# ---- values that are loaded or edited ------------------------------------------------------------------------------------


def load_whole(model: Any, plain: Any) -> None:
    model.load_state_dict(build(1).state_dict())
    plain.load_state_dict(build(1).state_dict())


def load_assign(model: Any, plain: Any) -> None:
    model.load_state_dict(build(2).state_dict(), assign=True)
    plain.load_state_dict(build(2).state_dict())


def load_float(model: Any, plain: Any) -> None:
    state = build(3).float().state_dict()
    model.load_state_dict(state)
    plain.load_state_dict(state)


def load_some(model: Any, plain: Any) -> None:
    state = {"body.weight": torch.ones(5, 5), "mean": torch.zeros(5), "more": torch.ones(1)}
    ours, theirs = model.load_state_dict(state, strict=False), plain.load_state_dict(state, strict=False)
    assert sorted(ours.missing_keys) == sorted(theirs.missing_keys) and ours.unexpected_keys == theirs.unexpected_keys == ["more"]


def load_sharded(model: Any, plain: Any) -> None:
    state = {n: t.clone() for n, t in model.state_dict().items()}
    for t in state.values():
        t.mul_(0.5)
    model.load_state_dict(state)
    with torch.no_grad():
        for t in (*plain.parameters(), *plain.buffers()):
            t.mul_(0.5)


def load_replicated(model: Any, plain: Any) -> None:
    mesh, state = model.body.weight.device_mesh, build(4).state_dict()
    given = {n: distribute_tensor(t, mesh, [Replicate()]) if n != "mean" else t for n, t in state.items()}
    model.load_state_dict(given)
    plain.load_state_dict(state)


def own_state(model: Any, plain: Any) -> None:
    state = whole(model.state_dict())
    assert {n: t.dtype for n, t in state.items()} == {n: t.dtype for n, t in plain.state_dict().items()}
    plain.load_state_dict(state)  # whole values go into a plain model
    model.load_state_dict(model.state_dict())


def prune(model: Any, plain: Any) -> None:
    with model.zfx.gathered(["body.weight", "head.weight"], writeback=True) as full:
        for t in full.values():
            t[t.abs() < 0.2] = 0.0
    with torch.no_grad():
        for t in (plain.body.weight, plain.head.weight):
            t[t.abs() < 0.2] = 0.0


def in_place(model: Any, plain: Any) -> None:
    with torch.no_grad():
        for changed in (model, plain):
            changed.body.weight.mul_(0.5).add_(0.01)
            changed.scale.data.fill_(0.7)
            changed.mean.zero_()


def other_tensor(model: Any, plain: Any) -> None:
    """A DTensor cut as zfx cuts is taken as it is."""
    values = build(5).body.weight
    model.body.weight = nn.Parameter(distribute_tensor(values.detach(), model.body.weight.device_mesh, [Shard(0)]))
    plain.body.weight = nn.Parameter(values.detach().clone())


def assigned_and_mended(model: Any, plain: Any) -> None:
    """What torch ignores is said, and then done as it works."""
    values = build(6).body.bias.detach()
    before = model.body.bias.data
    model.body.bias.data = before * 2
    for _ in range(2):
        with pytest.raises(ValueError, match="was assigned"):
            model(ids())
    with torch.no_grad():
        model.body.bias.copy_(distribute_tensor(values, before.device_mesh, [Shard(0)]))
        plain.body.bias.copy_(values)


def frozen(model: Any, plain: Any) -> None:
    for changed in (model, plain):
        changed.body.weight.requires_grad_(False)


def to_the_same(model: Any, plain: Any) -> None:
    model.to(torch.float64).cpu()


def twice(model: Any, plain: Any) -> None:
    """Into another kind of numbers and back."""
    for changed in (model, plain):
        changed.float().double()


CHANGES = (
    load_whole, load_assign, load_float, load_some, load_sharded, load_replicated, own_state, prune, in_place, to_the_same, twice,
    assigned_and_mended, other_tensor, frozen,
)


def follow(accumulate: int) -> dict[str, float]:
    """After each change, two steps as a plain model takes them; the largest difference."""
    found = {}
    model, plain = zfx.compile(build(), limits=RELEASE_ALL, accumulate=accumulate), build()
    for change in CHANGES:
        change(model, plain)
        assert model.head.weight is model.embed.weight
        ours, theirs = torch.optim.SGD(model.parameters(), lr=0.3), torch.optim.SGD(plain.parameters(), lr=0.3)
        losses = [float((step(model, ours) - step(plain, theirs)).abs()) for _ in range(2)]
        state = whole(model.state_dict())
        found[change.__name__] = max(*losses, *(float((state[n] - t).abs().max()) for n, t in plain.state_dict().items()))
    return found


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_the_next_step_uses_the_new_values(world_size: int, accumulate: int) -> None:
    for found in run_ranks(world_size, follow, accumulate):
        assert {name: error for name, error in found.items() if not error <= 1e-10} == {} and len(found) == len(CHANGES)


def averaged() -> float:
    """An exponential moving average in a deep copy, which then runs by itself."""
    model, plain = zfx.compile(build(), limits=RELEASE_ALL), build()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    ema, plain_ema = copy.deepcopy(model), copy.deepcopy(plain)
    for trained, mean in ((model, ema), (plain, plain_ema)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(2):
            step(trained, optimizer)
            with torch.no_grad():
                for a, b in zip(mean.parameters(), trained.parameters()):
                    a.lerp_(b, 0.3)
    assert ema.head.weight is ema.embed.weight is not model.embed.weight
    ema.load_state_dict(ema.state_dict())
    with torch.no_grad():
        out = float((ema(ids()) - plain_ema(ids())).abs().max())
        return max(out, float((model(ids()) - plain(ids())).abs().max()))


def test_a_moving_average_in_a_copy() -> None:
    assert all(difference <= 1e-10 for difference in run_ranks(2, averaged))


# ---- changes that are refused --------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}

    def expect(key: str, change: Callable[[Any], Any], call: bool = True) -> None:
        model = zfx.compile(build(), limits=RELEASE_ALL)
        with pytest.raises((ValueError, RuntimeError, zfx.CaptureError)) as caught:
            change(model)
            if call:
                model(ids())
        said[key] = f"{type(caught.value).__name__}: {caught.value}"

    def set_attribute(name: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
        return lambda m: setattr(m.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], value(m))

    expect("shapes", lambda m: m.load_state_dict({**build().state_dict(), "body.weight": torch.ones(5, 6)}), call=False)
    expect("missing", lambda m: m.load_state_dict({"mean": torch.ones(5)}), call=False)
    expect("assign", lambda m: m.load_state_dict(build().float().state_dict(), assign=True), call=False)
    expect("half", lambda m: m.half())
    expect("data", lambda m: setattr(m.body.weight, "data", m.body.weight.data * 2))
    expect("meta", lambda m: m.to("meta"))
    expect("plain parameter", set_attribute("body.weight", lambda m: nn.Parameter(torch.ones(5, 5).double())))
    expect("replicated", set_attribute("body.weight", lambda m: nn.Parameter(
        distribute_tensor(torch.ones(5, 5).double(), m.body.weight.device_mesh, [Replicate()]))))
    expect("columns", set_attribute("body.weight", lambda m: nn.Parameter(
        distribute_tensor(torch.ones(5, 5).double(), m.body.weight.device_mesh, [Shard(1)]))))
    expect("untied", set_attribute("head.weight", lambda m: nn.Parameter(m.head.weight.detach().clone())))
    expect("untied first", set_attribute("embed.weight", lambda m: nn.Parameter(m.embed.weight.detach().clone())))
    expect("deleted", lambda m: delattr(m.body, "weight"))
    expect("module", set_attribute("body", lambda m: nn.Linear(5, 5).double()))
    expect("more rows", set_attribute("embed.weight", lambda m: nn.Parameter(
        distribute_tensor(torch.ones(9, 5).double(), m.embed.weight.device_mesh, [Shard(0)]))))

    llama: Any = zfx.compile(MODELS["llama_tied"].build(torch.float32))
    assert llama.resize_token_embeddings() is llama.get_input_embeddings() is llama.resize_token_embeddings(97)
    with pytest.raises(ValueError) as caught:
        llama.resize_token_embeddings(120)
    said["resize"] = str(caught.value)
    with pytest.raises(ValueError) as caught:
        llama.save_pretrained("nowhere", safe_serialization=False)
    said["pickle"] = str(caught.value)
    for key, use in (("load", lambda m: zfx.load_pretrained(m, ".")), ("save", lambda m: zfx.save_pretrained(m, "."))):
        with pytest.raises(ValueError) as caught:
            use(build())
        said[key] = str(caught.value)
    return said


def test_what_can_not_be_followed_is_an_error_that_names_it() -> None:
    said = run_ranks(2, refusals)[0]
    for key, words in {
        "shapes": "size mismatch for body.weight", "missing": "Missing key(s) in state_dict",
        "assign": "'scale' torch.float32", "half": "float16", "meta": "is on meta now",
        "data": "assigned to .data of parameter 'body.weight'",
        "plain parameter": "'body.weight' is not the shard", "replicated": "'body.weight' is not cut",
        "columns": "'body.weight' is not cut", "untied": "'embed.weight' was tied to 'head.weight'",
        "untied first": "'embed.weight'",
        "deleted": "'body.weight'", "module": "body", "more rows": "'embed.weight'", "resize": "zfx.save_pretrained",
        "pickle": "safetensors", "load": "zfx.compile", "save": "zfx.compile",
    }.items():
        assert words in said[key], (key, said[key])


def on_one_rank(how: str) -> None:
    model = zfx.compile(build(), timeout=5)
    if how == "one":
        if dist.get_rank() == 0:
            model.load_state_dict(build(1).state_dict())
        else:
            model(ids())
    else:
        model.load_state_dict(build(dist.get_rank()).state_dict())


@pytest.mark.parametrize("how", ["one", "values"])
def test_ranks_that_load_differently_are_told(how: str) -> None:
    outcomes = rank_outcomes(2, on_one_rank, how, timeout=60)
    assert [o.error and o.error.type_name for o in outcomes] == ["RankMismatch"] * 2
