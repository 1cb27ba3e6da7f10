"""How many parameters are gathered and how many gradients reduced in a step: exactly what the model and the limits call for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zfx
from tests.harness import run_ranks
from zfx import runtime

N, DIM = 6, 8
RELEASED = dict(max_reuse_distance=0, param_persistence_threshold=0)


class Chain(nn.Module):
    """Equal blocks, each one parameter that its backward reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Counter:
    """Parameters gathered, gradients reduced, and the bytes of whole gradients."""

    def __init__(self) -> None:
        self.gathered, self.reduced, self.reduced_bytes = 0, 0, 0

    def take(self) -> tuple[int, int]:
        counts = self.gathered, self.reduced
        self.gathered = self.reduced = self.reduced_bytes = 0
        return counts


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """To be entered before graphs are made: they hold the functions that they call."""
    counter, gather, reduce = Counter(), runtime.all_gather, runtime.reduce_scatter

    def gathers(plan: Any, bucket: int, shards: Any) -> Any:
        counter.gathered += len(shards)
        return gather(plan, bucket, shards)

    def reduces(plan: Any, bucket: int, grads: Any) -> Any:
        counter.reduced += len(grads)
        counter.reduced_bytes += sum(g.nbytes for g in grads)
        return reduce(plan, bucket, grads)

    runtime.all_gather, runtime.reduce_scatter = gathers, reduces
    try:
        yield counter
    finally:
        runtime.all_gather, runtime.reduce_scatter = gather, reduce


def counts() -> dict[str, tuple[int, int]]:
    """(gathers, reductions) of one step, by setting."""
    found, x = {}, torch.randn(5, DIM, requires_grad=True)  # so that the first block's backward reads its weight too
    with counting() as counter:
        for kept in (1, 2, 3, N):
            limits = zfx.Limits(max_live_parameters=kept * DIM * DIM, param_persistence_threshold=0)
            model = zfx.compile(Chain(), limits=limits)
            for _ in range(2):
                counter.take()
                model(x).sum().backward()
            found[f"room for {kept}"] = counter.take()
        model = zfx.compile(Chain(), limits=zfx.Limits(**RELEASED))
        model(x).sum().backward()
        found["released"] = counter.take()
        with torch.no_grad():
            model.eval()(x)
        found["no_grad"] = counter.take()
        model.train()
        for block in model.blocks[1::2]:
            block.requires_grad_(False)
        model(x).sum().backward()
        found["every other frozen"] = counter.take()
        model.requires_grad_(False)
        model(x).sum().backward()
        found["all frozen"] = counter.take()
        model.requires_grad_(False)
        model(x.detach())
        found["all frozen, and no input wants a gradient"] = counter.take()
        tied = Chain()
        for block in tied.blocks[1:]:
            block.weight = tied.blocks[0].weight
        model = zfx.compile(tied, limits=zfx.Limits(**RELEASED))
        model(x).sum().backward()
        found["all tied"] = counter.take()
        limits = zfx.Limits(max_live_parameters=2 * DIM * DIM, param_persistence_threshold=0)
        model = zfx.compile(Chain(), limits=limits, accumulate=3)
        for _ in range(2):
            counter.take()
            with model.zfx.no_sync():
                model(x).sum().backward()
                model(x).sum().backward()
            model(x).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        found["three micro-batches, of which two wait"] = counter.take()
    return found


def test_each_block_is_gathered_and_reduced_as_often_as_the_limits_call_for() -> None:
    for found in run_ranks(2, counts):
        # the last block's reads on both sides of the turn are adjacent: it always stays
        assert found["room for 1"] == found["released"] == (2 * N - 1, N)
        assert found["room for 2"] == (2 * N - 2, N)
        assert found["room for 3"] == (2 * N - 3, N)
        assert found[f"room for {N}"] == (N, N)
        assert found["no_grad"] == (N, 0)
        assert found["every other frozen"] == (2 * N - 1, N // 2)
        assert found["all frozen"] == (2 * N - 1, 0)
        assert found["all frozen, and no input wants a gradient"] == (N, 0)
        assert found["all tied"][1] == 1
        # as many as without no_sync: what is carried from one to the next is carried here too
        assert found["three micro-batches, of which two wait"] == (N + (2 * 3 - 1) * (N - 2), N)


def lora() -> dict[str, Any]:
    """A frozen 8-block Llama with LoRA on attention and MLP: what one training step reduces and holds."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    model: Any = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"]))
    adapters = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
    with counting() as counter:
        model = zfx.compile(model, limits=zfx.Limits(**RELEASED))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        ids = torch.arange(12).view(2, 6)
        model(input_ids=ids, labels=ids).loss.backward()
        reduced_bytes, reduced = counter.reduced_bytes, counter.reduced
        optimizer.step()
    program, graphs = model.zfx.schedules[0].program, model.zfx.graphs[0]
    shards = {name: p.to_local().nbytes for name, p in model.named_parameters() if p.requires_grad}
    state = [v for s in optimizer.state.values() for v in s.values() if hasattr(v, "to_local")]
    return {
        "adapters": sum(adapters.values()),
        "adapters' shards": sum(shards.values()),
        "number": len(adapters),
        "reduced": reduced_bytes,
        "reduced number": reduced,
        "planned gradients": sum(p.grad_bytes for p in program.parameters),
        "completed": sum(len(step.completes) for step in program.steps),
        "gradients' shards": sum(p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None),
        "optimizer": sum(v.to_local().nbytes for v in state),
        "outputs": sum(o is not None for n in graphs["backward"].graph.nodes if n.op == "output" for o in n.args[0]),
    }


@pytest.mark.slow
def test_a_frozen_llama_with_lora_reduces_and_holds_the_adapters_alone() -> None:
    for found in run_ranks(2, lora):
        assert found["number"] == 8 * 3 * 2 == found["reduced number"] == found["completed"] == found["outputs"]
        assert found["adapters"] == found["reduced"] == found["planned gradients"] > 0
        assert found["adapters' shards"] == found["gradients' shards"] == found["optimizer"] // 2
        assert found["adapters' shards"] == found["adapters"] // 2
