"""Outputs that a loss does not read: what only they need keeps `.grad is None`, as on one process, whatever ranks read."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zfx
from tests.harness import run_ranks
from zfx.agreement import Agreement

RELEASED = zfx.Limits(max_reuse_distance=0, param_persistence_threshold=0)
Grads = dict[str, "torch.Tensor | None"]


@dataclass
class Out:
    main: torch.Tensor
    aux: torch.Tensor
    parts: dict[str, torch.Tensor]  # two views of one intermediate value
    best: torch.Tensor  # integers


class Heads(nn.Module):
    """Every head needs the body; `gain` is needed by the second head alone, and `side` by the parts; nobody needs `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.aux = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 5, bias=False)
        self.side, self.spare = nn.Linear(6, 4), nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, alone: bool = False) -> Any:
        h = torch.tanh(self.body(x))
        main = self.main(h)
        if alone:
            return main
        side = self.side(h) * 2
        return Out(main, self.aux(h) * self.gain, {"left": side[:, :2], "right": side[:, 2:]}, main.argmax(-1))


READ: dict[str, Callable[[Out], torch.Tensor]] = {
    "main": lambda out: out.main.square().mean(),
    "aux": lambda out: out.aux.square().mean(),
    "left": lambda out: out.parts["left"].square().mean(),
    "right": lambda out: out.parts["right"].square().mean(),
}
ALL = tuple(READ)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(3 + step // 7, 4, generator=generator, dtype=torch.float64)


def loss_of(model: Any, rank: int, step: int, read: tuple[str, ...]) -> torch.Tensor:
    if read == ("alone",):
        return model(batch(rank, step), alone=True).square().mean()
    out = model(batch(rank, step))
    return sum(READ[name](out) for name in read)  # type: ignore[return-value]


def build() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def mean_over_ranks(of: Callable[[nn.Module, int], None], make: Callable[[], nn.Module] = build) -> Grads:
    """Gradients of plain models, one a rank; a rank that has none counts as zero, and where none has one there is none."""
    found: list[Grads] = []
    for rank in range(dist.get_world_size()):
        model = make()
        of(model, rank)
        found.append({name: p.grad for name, p in model.named_parameters()})
    means: Grads = {}
    for name in found[0]:
        there = [grads[name] for grads in found if grads[name] is not None]
        means[name] = sum(there) / len(found) if there else None  # type: ignore[arg-type,operator]
    return means


def whole(model: nn.Module) -> Grads:
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


def compared(what: str, wanted: Grads, found: Grads) -> list[str]:
    """What differs, in words."""
    wrong = []
    for name, a in wanted.items():
        b = found[name]
        if (a is None) != (b is None):
            wrong.append(f"{what}: {name} has {'no' if b is None else 'a'} gradient")
        elif a is not None and b is not None and not torch.allclose(a, b, rtol=0, atol=1e-15):  # added up in another order
            wrong.append(f"{what}: {name} differs by {(a - b).abs().max()}")
    return wrong


@contextlib.contextmanager
def votes() -> Iterator[list[int]]:
    """One entry a vote that this rank takes part in."""
    seen: list[int] = []
    original = Agreement.everywhere

    def counting(self: Agreement, flags: Any, description: Any) -> list[bool]:
        seen.append(len(flags))
        return original(self, flags, description)

    Agreement.everywhere = counting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Agreement.everywhere = original  # type: ignore[method-assign]


Read = tuple[str, ...]
# what even and odd ranks read in one step, and whether they have to vote for it
STEPS: tuple[tuple[Read, Read, bool], ...] = (
    (("main",), ("main",), True),
    (ALL, ALL, False),
    (("main",), ("aux",), True),  # nothing of `side` anywhere
    (("aux", "right"), ("main", "left"), True),
    (ALL, ("main",), True),  # one rank reads all of them
    (("main", "aux", "left"), ("main", "aux", "right"), False),  # the other part's weights are needed all the same
    (("alone",), ("alone",), False),  # another graph
    (("left",), ("left",), True),
)


def steps(options: dict[str, Any]) -> list[str]:
    """Steps of an optimizer whose weight decay moves whatever has a gradient, and hooks that see who has one."""
    rank, wrong = dist.get_rank(), []
    plain = [build() for _ in range(dist.get_world_size())]
    mesh = dist.init_device_mesh("cpu", (2, 2)) if options.pop("hybrid", False) else None
    model: Any = zfx.compile(build(), mesh=mesh, **options)
    hooked: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: hooked.append(name))
        p.register_hook(lambda grad, name=name: hooked.append(name) if grad is None else grad * 1)
    ours = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    theirs = [torch.optim.AdamW(one.parameters(), weight_decay=0.5) for one in plain]
    for step, (*reads, voted) in enumerate(STEPS):

        def run(one: Any, r: int, step: int = step, reads: Any = reads) -> None:
            loss_of(one, r, step, reads[r % 2]).backward()

        hooked.clear()
        with votes() as seen:
            run(model, rank)
        wanted = mean_over_ranks(run, lambda: copy.deepcopy(plain[0]))
        wrong += compared(f"step {step}", wanted, whole(model))
        if sorted(hooked) != sorted(name for name, grad in wanted.items() if grad is not None):
            wrong.append(f"step {step}: hooks of {hooked}")
        if bool(seen) != (voted and any(reads[r % 2] != ALL for r in range(dist.get_world_size()))):
            wrong.append(f"step {step}: {len(seen)} votes")
        for one, optimizer in zip(plain, theirs):
            for name, p in one.named_parameters():
                p.grad = None if wanted[name] is None else wanted[name].clone()  # type: ignore[union-attr]
            optimizer.step()
        ours.step()
        ours.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain[0].parameters()):
            if not torch.allclose(p.full_tensor(), q, rtol=0, atol=1e-12):
                wrong.append(f"step {step}: {name} moved by {(p.full_tensor() - q).abs().max()} more or less")
    return wrong


def micro_batches() -> list[str]:
    """Gradients that wait, windows, and several backwards of one forward."""
    rank, wrong = dist.get_rank(), []
    waiting: tuple[tuple[str, tuple[Read, Read], tuple[Read, Read]], ...] = (
        ("nothing waits, nothing comes", (("main",), ("main",)), (("main",), ("main",))),
        ("something waits on one rank", (("main",), ("aux",)), (("main",), ("main",))),
        ("something comes on one rank", (("main",), ("main",)), (("aux", "left"), ("main",))),
        ("something waits, nothing comes", (ALL, ALL), (("main",), ("main",))),
        ("nothing waits, and another graph comes", (("main",), ("main",)), (("alone",), ("alone",))),
        ("something waits on one rank, and another graph comes", (("main",), ("main", "aux")), (("alone",), ("alone",))),
    )
    model: Any = zfx.compile(build(), limits=RELEASED, accumulate=2)
    for what, first, last in waiting:
        for waits in (True, False):

            def run(one: Any, r: int, first: Any = first, last: Any = last, waits: bool = waits) -> None:
                with one.zfx.no_sync() if waits and hasattr(one, "zfx") else contextlib.nullcontext():
                    loss_of(one, r, 0, first[r % 2]).backward()
                loss_of(one, r, 1, last[r % 2]).backward()

            run(model, rank)
            wrong += compared(f"{what}, waits={waits}", mean_over_ranks(run), whole(model))
            if model._zfx_engine.held.values:
                wrong.append(f"{what}: something still waits")
            model.zero_grad()

    def twice(one: Any, r: int) -> None:
        out = one(batch(r, 0))
        out.main.square().mean().backward(retain_graph=True)
        (out.aux if r else out.parts["left"]).square().mean().backward()

    def both_in_flight(one: Any, r: int) -> None:
        first, second = one(batch(r, 0)), one(batch(r, 1))
        READ["main"](second).backward()
        READ["aux" if r else "main"](first).backward()

    for several in (twice, both_in_flight):
        model.zero_grad()
        several(model, rank)
        wrong += compared(several.__name__, mean_over_ranks(several), whole(model))
    model.zero_grad()
    asked = torch.autograd.grad(loss_of(model, rank, 0, ("main",)), list(model.parameters()), allow_unused=True)
    wrong += compared("autograd.grad", mean_over_ranks(lambda one, r: loss_of(one, r, 0, ("main",)).backward()), {
        name: None if grad is None else grad.full_tensor() for (name, _), grad in zip(model.named_parameters(), asked)
    })
    return wrong


class Two(nn.Module):
    """Two inputs to two outputs, each through weights of its own, and one that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, in_place: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        if in_place:
            y.mul_(2)
        return torch.tanh(self.a(x)), torch.tanh(self.b(y)).flatten()[1:]


class Chosen(nn.Module):
    """A leaf: its outputs come from different weights, and one module is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[0] > 100:
            x = self.never(x)
        return self.a(x), self.b(x)


class WithLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.first, self.second, self.out = Chosen(), Chosen(), Chosen(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = self.leaf(x)
        third, _ = self.first(x)  # its second output is used by nothing
        fourth, fifth = self.second(x)
        return self.out(one) + third, other + fourth.cos() + fifth.detach()


class GivesNone(torch.autograd.Function):
    """Stops gradients as autograd stops them: by handing down none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stops: bool) -> torch.Tensor:
        ctx.stops = stops
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        return None if ctx.stops else grad, None


def heads_function(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return model(x, alone=True).square().mean(), model.aux.weight.sum(), model.gain * 2


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def connections() -> list[str]:
    """What gradients go on to: inputs, other compiled models, leaves; and a function of a model."""
    rank, wrong = dist.get_rank(), []

    def check(kind: type[nn.Module], *runs: Callable[[Any, int], None], **options: Any) -> Any:
        model = zfx.compile(made(kind), limits=RELEASED, **options)
        for run in runs:
            model.zero_grad()
            run(model, rank)
            wrong.extend(compared(run.__name__, mean_over_ranks(run, lambda: made(kind)), whole(model)))
        model.zero_grad()
        return model

    inputs: list[bool] = []

    def reads_first(model: Any, r: int) -> None:
        x, y = (batch(r, step).requires_grad_() for step in (0, 1))
        model(x, y)[0].sum().backward()
        inputs.append(x.grad is not None and y.grad is None)

    def reads_by_rank(model: Any, r: int) -> None:
        x, y = (batch(r, step).requires_grad_() for step in (0, 1))
        model(x, y)[r % 2].sum().backward()
        inputs.append((x.grad is None) == (r % 2 == 1) and (y.grad is None) == (r % 2 == 0))

    def in_place(model: Any, r: int) -> None:
        y = batch(r, 1).requires_grad_() * 1
        model(batch(r, 0), y, in_place=True)[0].sum().backward()

    def in_place_and_read(model: Any, r: int) -> None:
        leaf = batch(r, 1).requires_grad_()
        y = leaf * 1
        out = model(batch(r, 0), y, in_place=True)[0]
        (out.sum() + (y.sum() if r else 0.0)).backward()
        inputs.append((leaf.grad is None) == (r == 0))

    two = check(Two, reads_first, reads_by_rank, in_place, in_place_and_read)
    if not all(inputs):
        wrong.append(f"gradients of inputs: {inputs}")

    def first_of_leaf(model: Any, r: int) -> None:
        model(batch(r, 0))[0].sum().backward()

    def each_of_leaf(model: Any, r: int) -> None:
        model(batch(r, 0))[r % 2].sum().backward()

    def both_of_leaf(model: Any, r: int) -> None:
        sum(o.sum() for o in model(batch(r, 0))).backward()  # type: ignore[union-attr]

    check(WithLeaf, first_of_leaf, each_of_leaf, both_of_leaf, leaf_modules=[Chosen])

    def stops_everywhere(model: Any, r: int) -> None:
        GivesNone.apply(model(batch(r, 0), alone=True), True).sum().backward()

    def stops_on_one(model: Any, r: int) -> None:
        GivesNone.apply(model(batch(r, 0), alone=True), r == 0).sum().backward()

    def asks_function(model: Any, r: int) -> None:
        ask = model.zfx.function(heads_function) if hasattr(model, "zfx") else functools.partial(heads_function, model)
        ask(batch(r, 0))[r % 2].backward()

    check(Heads, stops_everywhere, stops_on_one, asks_function)

    chain = [two, zfx.compile(made(Two), limits=RELEASED)]

    def through(models: list[Any], r: int, reads: int) -> None:
        models[1](*(part.reshape(-1)[:8].reshape(2, 4) for part in models[0](batch(2, 0), batch(2, 0))))[reads].sum().backward()

    for reads_of in (lambda r: 0, lambda r: r % 2):
        plain = [[made(Two), made(Two)] for _ in range(dist.get_world_size())]
        for r, models in enumerate(plain):
            through(models, r, reads_of(r))
        through(chain, rank, reads_of(rank))
        for i, one in enumerate(chain):
            found = iter([models[i] for models in plain])
            wanted = mean_over_ranks(lambda model, r: None, lambda: next(found))  # noqa: B023
            wrong += compared(f"model {i} of two", wanted, whole(one))
            one.zero_grad()

    return wrong


@pytest.mark.parametrize("options", [
    {"limits": RELEASED},
    pytest.param({"limits": zfx.Limits(), "accumulate": 3}, marks=pytest.mark.slow),
])  # fmt: skip
def test_what_no_rank_reads_has_no_gradient(options: dict[str, Any]) -> None:
    for wrong in run_ranks(2, steps, options):
        assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (4, {"hybrid": True, "limits": RELEASED})])
def test_alone_and_with_replicas(world_size: int, options: dict[str, Any]) -> None:
    for wrong in run_ranks(world_size, steps, options):
        assert not wrong, wrong


@pytest.mark.parametrize("job", [micro_batches, connections])
def test_wherever_gradients_wait_or_go(job: Callable[[], list[str]]) -> None:
    for wrong in run_ranks(2, job, timeout=200):
        assert not wrong, wrong
