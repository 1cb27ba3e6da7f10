"""Models on the meta device are born sharded: what they get is what the plain model would have, and no rank ever holds it whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx
from tests.harness import rank_outcomes, run_ranks
from tests.meter import Meter
from tests.test_parity_transformers import MODELS
from zfx.born import construct
from zfx.shard import unique_parameters

SLACK_BYTES = 64 << 10  # samples of values, the generator's state


class Block(nn.Module):
    """A transformer of torch's own layers; its head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.norm(self.layer(self.embed(ids))))[0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), nn.Linear(5, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.PReLU(), nn.ConvTranspose2d(5, 2, 2), nn.GroupNorm(1, 2))


def hugging_face(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        spec = MODELS[name]
        return getattr(transformers, spec.model)(getattr(transformers, spec.config)(**spec.options))

    return build


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "convolutions": convolutions, "block": Block,
    **{name: hugging_face(name) for name in ("llama", "llama_tied", "gpt2", "t5", "bert", "mixtral", "whisper")},
}


def born_and_plain(name: str, replicas: int, seed: int = 3) -> tuple[nn.Module, nn.Module, bool]:
    """The two, and whether the generator is where it would be."""
    torch.manual_seed(seed)
    plain = BUILDERS[name]()
    after = torch.rand(5)
    with torch.device("meta"):
        model = BUILDERS[name]()
    torch.manual_seed(seed)
    model = zfx.compile(model, replicas=replicas)
    return model, plain, torch.equal(after, torch.rand(5))


def differences(model: nn.Module, plain: nn.Module) -> list[str]:
    ours, theirs = dict(model.named_parameters(remove_duplicate=False)), dict(plain.named_parameters(remove_duplicate=False))
    found = [n for n, p in theirs.items() if p.dtype != ours[n].dtype or not torch.equal(p, ours[n].full_tensor())]
    buffers = dict(model.named_buffers(remove_duplicate=False))
    theirs_too = plain.named_buffers(remove_duplicate=False)
    found += [n for n, b in theirs_too if b.dtype != buffers[n].dtype or not torch.equal(b, buffers[n])]
    found += ["names"] if ours.keys() != theirs.keys() else []
    found += ["ties"] if [o.name for _, os in unique_parameters(model) for o in os] != [
        o.name for _, os in unique_parameters(plain) for o in os] else []
    return found


def every_builder(names: list[str], replicas: int = 1) -> dict[str, Any]:
    found = {}
    for name in names:
        model, plain, same_generator = born_and_plain(name, replicas)
        found[name] = (differences(model, plain), same_generator)
    return found


@pytest.mark.parametrize("world_size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_born_models_are_bit_for_bit_the_plain_ones(world_size: int) -> None:
    for outcome in run_ranks(world_size, every_builder, list(BUILDERS)):
        assert outcome == {name: ([], True) for name in BUILDERS}


def test_born_in_replicas() -> None:
    names = ["mlp", "block"]
    for outcome in run_ranks(4, every_builder, names, 2):
        assert outcome == {name: ([], True) for name in names}


# ---- the user's own initialisation ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Values that only its constructor knows, and one of torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 2.0))
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.linear = nn.Linear(5, 6)
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale) @ self.turned * self.scalar + self.table[:4]


def fill(model: nn.Module) -> None:
    """All sorts of ways to write: views, data, out=, factories on the parameter's device, reading back, coming back."""
    odd: Any = model
    odd.scale.data.fill_(2.0)
    odd.scalar.copy_(torch.randn((), device=odd.scalar.device))
    odd.turned.normal_()
    odd.linear.reset_parameters()
    nn.init.orthogonal_(odd.linear.weight)
    nn.init.trunc_normal_(odd.turned, std=0.5, a=-0.5, b=0.5)
    odd.linear.weight[2:4].mul_(3.0)
    odd.scale.add_(odd.linear.weight.sum(0))
    torch.arange(6.0, out=odd.table)
    odd.linear.weight.t()[1].zero_()
    odd.turned[1:] += odd.turned[:-1].clone()


def ways_to_write() -> list[str]:
    with torch.device("meta"):
        model = Odd()
    plain = copy.deepcopy(model).to_empty(device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        fill(plain)
    torch.manual_seed(5)
    return differences(zfx.compile(model, init_fn=fill), plain)


@pytest.mark.parametrize("world_size", [1, 3])
def test_init_fn_gives_what_it_gives_a_plain_model(world_size: int) -> None:
    assert run_ranks(world_size, ways_to_write) == [[]] * world_size


def refusals() -> dict[str, str]:
    said = {}

    def expect(key: str, error: type[Exception], build: Callable[[], nn.Module], **options: Any) -> None:
        with torch.device("meta"):
            model = build()
        with pytest.raises(error) as caught:
            zfx.compile(model, **options)
        said[key] = str(caught.value)

    def partly(model: Any) -> None:
        fill(model)
        model.scale.data = model.scale.data  # as people do
        model.late[:2].fill_(1.0)

    def with_late() -> nn.Module:
        model = Odd()
        model.late = nn.Parameter(torch.ones(5))
        return model

    def replace(model: Any) -> None:
        fill(model)
        model.scale = nn.Parameter(torch.ones(5))

    def shared() -> nn.Module:
        model = Odd()
        model.part = nn.Parameter(model.scale.detach()[:2])
        return model

    def attribute() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].steps = torch.arange(3)
        return model

    expect("constructor", ValueError, Odd)
    expect("part", ValueError, with_late, init_fn=partly)
    expect("replaced", ValueError, Odd, init_fn=replace)
    expect("shared", ValueError, shared, init_fn=fill)
    expect("attribute", ValueError, attribute)
    expect("per module", ValueError, Odd, init_fn=lambda m: isinstance(m, nn.Linear) and nn.init.normal_(m.weight))
    with pytest.raises(ValueError) as caught:
        zfx.compile(mlp(), init_fn=fill)
    said["real"] = str(caught.value)
    return said


def test_what_can_not_be_known_is_refused_by_name() -> None:
    said = run_ranks(2, refusals)[0]
    assert all(name in said["constructor"] for name in ("scale", "scalar", "turned", "table", "init_fn"))
    assert "linear" not in said["constructor"]
    assert "late (in part)" in said["part"] and "scale" not in said["part"]
    assert "replaced parameter 'scale'" in said["replaced"]
    assert "part" in said["shared"] and "larger tensor" in said["shared"]
    assert "0.steps" in said["attribute"] and "model.apply" in said["per module"]
    assert "on the meta device" in said["real"]


def partly_real(init_fn: Any) -> list[bool]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    model.append(nn.Linear(5, 5))
    model[0].bias = nn.Parameter(torch.full((5,), 7.0))
    before = model[2].weight.detach().clone()
    zfx.compile(model, init_fn=init_fn)
    now = {n: p.full_tensor() for n, p in model.named_parameters()}
    return [torch.equal(now["2.weight"], before), bool((now["0.bias"] == 7).all()), not bool(now["0.weight"].isnan().any())]


def test_what_is_there_already_is_not_initialised_anew() -> None:
    assert run_ranks(2, partly_real, None) == [[True, True, True]] * 2
    assert run_ranks(2, partly_real, zfx.skip_init) == [[True, True, False]] * 2


def skipped() -> tuple[bool, list[str], bool]:
    torch.manual_seed(0)
    plain = hugging_face("llama_tied")()
    with torch.device("meta"):
        model = hugging_face("llama_tied")()
    before = torch.get_rng_state()
    zfx.compile(model, init_fn=zfx.skip_init)
    buffers = dict(model.named_buffers())
    wrong = [n for n, b in plain.named_buffers() if not torch.equal(b, buffers[n])]
    return all(bool(p._local_tensor.isnan().all()) for p in model.parameters()), wrong, torch.equal(before, torch.get_rng_state())


def test_skip_init_draws_nothing_and_shows_what_is_forgotten() -> None:
    assert run_ranks(2, skipped) == [(True, [], True)] * 2


def ranks_that_differ(how: str) -> None:
    with torch.device("meta"):
        model = Odd() if how == "values" else mlp()
    rank = dist.get_rank()
    if how == "seed":
        torch.manual_seed(rank)
        zfx.compile(model, timeout=20)

    def differently(model: nn.Module) -> None:
        if how == "raises" and rank == 1:
            raise KeyError("not on this rank")
        if how == "raises":
            construct(model)
        if how == "values":
            torch.manual_seed(rank)
            fill(model)

    zfx.compile(model, init_fn=differently, timeout=20)


@pytest.mark.parametrize(("how", "says"), [
    ("seed", "random state"), ("values", "initial values of"), ("raises", "not on this rank"),
])
def test_ranks_that_would_begin_differently_are_told(how: str, says: str) -> None:
    outcomes = rank_outcomes(2, ranks_that_differ, how, timeout=60)
    kinds = [o.error.type_name if o.error else o.status for o in outcomes]
    assert kinds == ["RankMismatch", "KeyError" if how == "raises" else "RankMismatch"]
    assert all(says in o.error.message for o in outcomes if o.error)


# ---- memory --------------------------------------------------------------------------------------------------------------


def gpt(width: int, depth: int, vocabulary: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def peaks(width: int, depth: int, vocabulary: int) -> dict[str, int]:
    """Most bytes alive while a model is born, and while one that is there is sharded; and what these are measured by."""
    with torch.device("meta"):
        model = gpt(width, depth, vocabulary)
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    with Meter() as born:
        zfx.compile(model)
    shards = sum(p._local_tensor.untyped_storage().nbytes() for p in model.parameters())
    del model
    plain = gpt(width, depth, vocabulary)
    with Meter(plain.parameters()) as converted:
        zfx.compile(plain)
    return dict(born=born.peak_bytes, converted=converted.peak_bytes, shards=shards, largest=max(sizes), whole=sum(sizes))


def check_peaks(found: list[dict[str, int]]) -> None:
    for rank in found:
        assert max(rank["shards"], rank["largest"]) <= rank["born"] <= rank["shards"] + rank["largest"] + SLACK_BYTES
        assert rank["whole"] <= rank["converted"] <= rank["whole"] + rank["largest"] // len(found) + SLACK_BYTES


def test_memory_is_the_shards_and_one_parameter() -> None:
    check_peaks(run_ranks(2, peaks, 128, 2, 2000))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_of_a_model_of_200m_parameters(world_size: int) -> None:
    found = run_ranks(world_size, peaks, 1024, 10, 16000, timeout=600)
    assert found[0]["whole"] > 4 * 190e6
    print(found[0])
    check_peaks(found)
