"""The front door: what it refuses, what it plans without a process group, and misuse between calls that must be seen."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx
from tests.harness import rank_outcomes, run_ranks

RELEASE_ALL = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize(("arguments", "error", "says"), [
    (dict(world_size=0), ValueError, "world_size"),
    (dict(world_size="2"), ValueError, "world_size"),
    (dict(world_size=2, limits={"max_live_parameters": 1}), TypeError, "from_deepspeed"),
    (dict(world_size=2, costs={"a": 1}), TypeError, "CostModel"),
    (dict(world_size=2, timeout="60"), ValueError, "timeout"),
    (dict(world_size=2, timeout=float("inf")), ValueError, "30 days"),
    (dict(world_size=2, mesh="cpu"), TypeError, "DeviceMesh"),
    (dict(world_size=2, leaf_modules=nn.Linear), TypeError, "list of module classes"),
])
def test_wrong_arguments_are_refused(arguments: dict, error: type[Exception], says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(error, match=says):
        zfx.compile(mlp(), **arguments)


def test_not_a_module_or_twice() -> None:
    with pytest.raises(TypeError, match="Module"):
        zfx.compile(torch.ones(3), world_size=2)  # type: ignore[type-var]
    model = zfx.compile(mlp(), world_size=2)
    with pytest.raises(ValueError, match="already"):
        zfx.compile(model, world_size=2)
    with pytest.raises(ValueError, match="'0' is compiled"):
        zfx.compile(nn.Sequential(model), world_size=2)


@pytest.mark.parametrize(("prepare", "says"), [
    (lambda m: torch.optim.SGD(m.parameters(), 0.1), "optimizer SGD was built before"),
    (lambda m: m[0].weight.register_hook(lambda g: g), "'0.weight' has a hook"),
    (lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None), "'0.weight' has a hook"),
])
def test_what_would_go_stale_is_refused(prepare, says: str) -> None:  # type: ignore[no-untyped-def]
    gc.collect()
    model = mlp()
    held = prepare(model)
    with pytest.raises(ValueError, match=says):
        zfx.compile(model, world_size=2)
    del held


def test_sparse_embeddings_are_refused_when_planning_too() -> None:
    with pytest.raises(ValueError, match="'0' makes sparse gradients"):
        zfx.compile(nn.Sequential(nn.Embedding(5, 4, sparse=True)), world_size=2)


def test_planned_without_a_process_group() -> None:
    model = zfx.compile(mlp(), world_size=64, limits=RELEASE_ALL)
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node 64"):
        model(torch.ones(2, 4))
    with pytest.raises(ValueError, match="nothing is captured"):
        model.zfx.report()
    schedule = model.zfx.plan(torch.ones(2, 4))
    assert schedule.program.world_size == 64 and model.zfx.schedules == (schedule,)
    with torch.no_grad():
        assert model.zfx.plan(torch.ones(2, 4)).program.turn is None
    with model.zfx.gathered("0.bias") as full:
        full["0.bias"].fill_(7)
    assert not (model[0].bias == 7).any(), "changes without writeback are dropped"
    with pytest.raises(ValueError, match="no parameter named 'x'"), model.zfx.gathered("x"):
        pass


def test_a_meta_model_can_be_planned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
    schedule = zfx.compile(model, world_size=8).zfx.plan(torch.empty(2, 4096, device="meta"))
    assert sum(p.num_elements for p in schedule.program.parameters) == 2 * (4096 * 4096 + 4096)


def test_models_of_one_class_learn_no_sizes_from_one_another() -> None:
    """Dynamo takes a size for a variable once it has seen two values of it: in one model, not in a second of another width."""
    for width in (3, 5, 7):
        model = zfx.compile(nn.Sequential(nn.Linear(width, width)), world_size=2)
        model.zfx.plan(torch.ones(width + 1, width))
        for graph in model.zfx.graphs[0].values():
            values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
            assert not any(isinstance(size, torch.SymInt) for v in values for size in (v, *getattr(v, "shape", ())))


def misuse() -> list[str]:
    said = []

    def expect(error: type[Exception], action) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(error) as caught:
            action()
        said.append(str(caught.value))

    x = torch.ones(3, 4)
    model = zfx.compile(mlp(), limits=RELEASE_ALL)
    loss = model(x).sum()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    expect(RuntimeError, loss.backward)
    model = zfx.compile(mlp(), limits=RELEASE_ALL)
    model(x)
    model[2] = nn.Linear(6, 6)
    expect(ValueError, lambda: model(x))
    model = zfx.compile(mlp(), limits=RELEASE_ALL)
    model(x)
    model.append(nn.Linear(2, 2))
    expect(zfx.CaptureError, lambda: model(x))
    model = zfx.compile(mlp(), limits=RELEASE_ALL)
    model[0].weight = nn.Parameter(torch.ones(6, 4))
    expect(ValueError, lambda: model(x))
    model = zfx.compile(mlp(), limits=RELEASE_ALL)
    expect(zfx.CaptureError, lambda: model.double()(x.double()))
    model = zfx.compile(mlp(), limits=RELEASE_ALL)
    expect(NotImplementedError, lambda: torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True))
    return said


def test_misuse_between_calls_is_an_error() -> None:
    said = run_ranks(2, misuse)[0]
    assert len(said) == 6
    for text, words in zip(said, ("modified by an inplace", "'2'", "not one of", "'0.weight'", "float64", "double backward")):
        assert words in text


def changed_parameter_that_no_backward_reads() -> float:
    model = zfx.compile(mlp(), limits=RELEASE_ALL)
    loss = model(torch.ones(3, 4)).sum()
    with torch.no_grad():
        model[4].bias.add_(1.0)  # plain torch allows it too: no derivative needs a bias
    loss.backward()
    return float(model[4].bias.grad.full_tensor().sum())


def test_a_change_that_no_backward_reads_is_allowed() -> None:
    assert run_ranks(2, changed_parameter_that_no_backward_reads)[0] == 6.0


def writeback() -> tuple[bool, bool]:
    plain = mlp()
    model = zfx.compile(copy.deepcopy(plain), limits=RELEASE_ALL)
    x = torch.ones(3, 4)
    model(x)
    with model.zfx.gathered(["0.weight", "4.bias"], writeback=True) as full, torch.no_grad():
        full["0.weight"].mul_(2)
        full["4.bias"].fill_(3)
        plain[0].weight.mul_(2)
        plain[4].bias.fill_(3)
    with model.zfx.gathered() as full:
        same = all(torch.equal(full[n], p) for n, p in plain.named_parameters())
    return same, torch.equal(model(x), plain(x))


@pytest.mark.parametrize("world_size", [1, 3])
def test_gathered_writes_back_on_every_rank(world_size: int) -> None:
    assert run_ranks(world_size, writeback) == [(True, True)] * world_size


def differently_seeded() -> None:
    torch.manual_seed(dist.get_rank())
    zfx.compile(nn.Linear(4, 4), timeout=20)


def test_ranks_that_start_from_different_weights_are_told() -> None:
    for outcome in rank_outcomes(2, differently_seeded, timeout=60):
        assert outcome.error and outcome.error.type_name == "RankMismatch" and "parameter weight" in outcome.error.message
