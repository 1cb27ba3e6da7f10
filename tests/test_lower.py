"""The lowered graphs: what is in them, and that no variable outlives its last reader."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn

import zfx


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.mid(torch.relu(self.up(x))))) * self.scale


LIMITS = [
    zfx.Limits(),
    zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0),
    zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0, prefetch_bucket_size=1, reduce_bucket_size=1),
]


def graphs(limits: zfx.Limits) -> tuple[zfx.Schedule, dict[str, fx.GraphModule]]:
    model = zfx.compile(MLP(), world_size=2, limits=limits)
    return model.zfx.plan(torch.randn(4, 6)), model.zfx.graphs[0]


@pytest.mark.parametrize("limits", LIMITS)
def test_the_nodes_are_the_instructions_of_the_schedule(limits: zfx.Limits) -> None:
    schedule, both = graphs(limits)
    nodes = [n for phase in ("forward", "backward") for n in both[phase].graph.nodes]
    launches = ("all_gather", "reduce_scatter")
    called = [(n.target.__name__, n.args[1]) for n in nodes if getattr(n.target, "__name__", "") in launches]
    assert called == [(i.kind, i.bucket) for i in schedule.instructions if i.kind in launches]
    assert not [n for n in nodes if str(n.target).startswith("zfx.")], "a naive operator is left"
    held = [i for i in schedule.instructions if i.kind == "release" and set(i.parameters) != {"scale"}]
    assert len([n for n in nodes if getattr(n.target, "__name__", "") in ("release", "let_go")]) >= len(held)


@pytest.mark.parametrize("limits", LIMITS)
def test_no_variable_outlives_its_last_reader(limits: zfx.Limits) -> None:
    for graph in graphs(limits)[1].values():
        for node in graph.graph.find_nodes(op="placeholder"):
            assert node.name == node.target, "FX would keep the value under a second name"
        code = graph.code
        for name in re.findall(r"^    (\w+) = arrived", code, re.MULTILINE):
            returned = code.split("return", 1)[1]
            assert f"{name} = " in code.split(f"    {name} = arrived", 1)[1] or name in returned, f"{name} is never dropped"


def test_what_is_kept_is_saved_and_not_gathered_again() -> None:
    schedule, both = graphs(zfx.Limits())
    assert set(schedule.kept) == {"mid.weight", "down.weight", "scale"}
    names = {n.name for n in both["backward"].graph.find_nodes(op="placeholder")}
    assert {"mid_weight", "down_weight", "scale"} <= names
    assert "all_gather" not in both["backward"].code


def test_the_code_names_parameters() -> None:
    both = graphs(zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0))[1]
    assert "up_weight_shard" in both["forward"].code
    assert "release([up_weight, up_bias])" in both["forward"].code
    assert "up_weight_grad" in both["backward"].code
