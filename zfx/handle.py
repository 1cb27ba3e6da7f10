"""`model.zfx`: what a user asks of a compiled model."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from . import dump, text
from .bucket import Transfers
from .build import Capture
from .engine import Engine
from .ir import Schedule
from .shard import unique_parameters


class Handle:
    """The handle of one compiled model.

    Example:
        >>> import torch, zfx
        >>> model = zfx.compile(torch.nn.Linear(4, 4), world_size=2)   # no process group: it can be planned
        >>> schedule = model.zfx.plan(torch.randn(3, 4))
        >>> [b.parameters for b in schedule.buckets if b.kind == "all_gather"]
        [('weight', 'bias')]
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """One schedule for each graph captured so far (training, no_grad, eval, other shapes), in order of capture."""
        return tuple(self._engine.blueprint.schedules)

    @property
    def graphs(self) -> tuple[dict[str, torch.fx.GraphModule], ...]:
        """The lowered GraphModules of each schedule, by phase ("forward", "backward")."""
        return tuple(self._engine.blueprint.graphs)

    @property
    def world_size(self) -> int:
        return self._engine.blueprint.world_size

    @property
    def limits(self) -> Any:
        return self._engine.blueprint.settings.limits

    def plan(self, *args: Any, **kwargs: Any) -> Schedule:
        """The schedule that a call with these inputs would run, without running it.

        Needs no process group: a model compiled for any `world_size` can be planned on any machine. Grad mode and train/eval
        are taken as they are.

        Raises:
            CaptureError: the forward can't be captured, or these inputs already have a plan.
            InfeasibleBudget: no schedule respects the limits.
        """
        return self._engine.plan(self._model, args, kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> Capture:
        """The graphs of a call with these inputs, for planning them many times: other world sizes, costs and limits.

        Nothing is planned, run or sent; as in `plan`, neither a process group nor memory for weights is needed.

        Raises:
            CaptureError: the forward can't be captured, or these inputs already have a plan.

        Example:
            >>> import torch, zfx
            >>> with torch.device("meta"):
            ...     model = zfx.compile(torch.nn.Linear(4, 4), world_size=2)
            >>> captured = model.zfx.capture(torch.randn(3, 4, device="meta"))
            >>> [captured.program(n, zfx.CostModel()).static_bytes for n in (1, 2, 4)]
            [160, 80, 40]
        """
        return self._engine.capture(self._model, args, kwargs)

    def dump(self, path: str | os.PathLike[str], index: int | None = None) -> None:
        """Write a schedule to `path`, by its suffix: .html (a page to look at), .trace.json (Perfetto), .json, .dot, .graphml.

        Args:
            index: which of `schedules`. Default: the latest one with a backward, else the latest.

        Raises:
            ValueError: nothing was captured yet, `index` is not one of `schedules`, or the suffix is not known.
        """
        dump.save(self._choose(index), path)

    def report(self, index: int | None = None) -> str:
        """Totals for a person: memory, volume, time, and how far they are from the best possible. `index` as in `dump`.

        Raises:
            ValueError: nothing was captured yet, or `index` is not one of `schedules`.
        """
        return text.report(self._choose(index))

    def _choose(self, index: int | None) -> Schedule:
        schedules = self._engine.blueprint.schedules
        if not schedules:
            raise ValueError("nothing is captured yet: call the model once, or model.zfx.plan(*example_inputs)")
        if index is not None:
            if not -len(schedules) <= index < len(schedules):
                raise ValueError(f"there is no schedule {index}: {len(schedules)} captured so far")
            return schedules[index]
        return next((s for s in reversed(schedules) if s.program.turn is not None), schedules[-1])

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What else there is to run with the model's parameters: a part of it, or its forward and a loss that reads a weight.

        Args:
            function: takes the model and other arguments. Inside it parameters are whole, `model(x)` is the model's own
                forward, and so is every method and submodule.

        Returns:
            A function of those other arguments. It is captured, planned and run as the forward is, with gradients, under the same
            limits; its schedules are added to `schedules`. Make it once: what it captured goes with it.

        Example:
            >>> import torch, zfx
            >>> model = zfx.compile(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
            >>> encode = model.zfx.function(lambda model, x: model[0](x).tanh())
            >>> encode(torch.randn(3, 4)).shape
            torch.Size([3, 8])
            >>> torch.distributed.destroy_process_group()
        """
        if not callable(function):
            raise TypeError(f"zfx.function takes a function of the model and other arguments, got {type(function).__name__}")
        engine, model, entry = self._engine, self._model, self._engine.entry(function)
        return functools.wraps(function)(lambda *args, **kwargs: engine(model, args, kwargs, entry))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backwards keep each rank's own whole gradients and reduce nothing; the first backward outside reduces the sum.

        Without it every micro-batch is reduced, and its gradient's shard added to `.grad`: the same sum up to rounding, with
        more traffic and without the memory of whole gradients (counted in the schedules, and in `memory_budget`: under one,
        the first use of `no_sync` plans anew). What counts is where the backward runs. On every rank alike.

        While gradients wait, `.grad` is what it was, and a step of a `torch.optim` optimizer raises `LoopError`.
        `model.zero_grad()` drops them; `optimizer.zero_grad()` does not know of them.
        Inside `reference()`, and for `torch.autograd.grad`, everything is reduced at once.

        Example, one step over several micro-batches::

            *first, last = micro_batches
            with model.zfx.no_sync():
                for batch in first:
                    model(**batch).loss.backward()
            model(**last).loss.backward()
            optimizer.step()
        """
        return self._engine.no_sync()

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model runs uncompiled over the naive gathers: slow, unlimited, for comparison. On every rank alike."""
        before, self._engine.eager = self._engine.eager, True
        try:
            yield
        finally:
            self._engine.eager = before

    @contextlib.contextmanager
    def gathered(self, names: str | Iterable[str] | None = None, writeback: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """Whole parameters inside a `with`, as plain tensors by name, on every rank. A collective call.

        Args:
            names: which parameters (any of a tied parameter's names; None: all).
            writeback: on leaving, every rank takes its rows from its own copy; all ranks must have made the same change.
                Without it changes are dropped.

        Raises:
            ValueError: no such parameter.
            RankMismatch: ranks ask for different parameters.

        Example, one step of pruning::

            with model.zfx.gathered(["head.weight"], writeback=True) as full:
                full["head.weight"][full["head.weight"].abs() < 1e-3] = 0
        """
        engine, blueprint = self._engine, self._engine.blueprint
        wanted = self._resolve(names)
        if blueprint.channels is None:
            yield {name: engine.slots[i].holder[engine.slots[i].key].detach().clone() for name, i in wanted.items()}
            return
        order = sorted(set(wanted.values()))
        values = {}
        if order:
            channels = blueprint.agree(f"gathered({', '.join(blueprint.names[i] for i in order)}, writeback={writeback})")
            transfers = Transfers([blueprint.layouts[i].in_full_precision() for i in order], [False] * len(order))
            with torch.no_grad():
                shards = engine.shards()
                full = transfers.all_gather(channels.gathers, [shards[i] for i in order]).wait()
            values = {i: (f.clone() if blueprint.layouts[i].replicated else f) for i, f in zip(order, full)}
        yield {name: values[i] for name, i in wanted.items()}
        if writeback:
            with torch.no_grad():
                shards = engine.shards()
                for i, value in values.items():
                    shards[i].copy_(value if blueprint.layouts[i].replicated else value[blueprint.own_rows(i)])

    def _resolve(self, names: str | Iterable[str] | None) -> dict[str, int]:
        index = self._engine.blueprint.index
        every = {owner.name: index[owners[0].name] for _, owners in unique_parameters(self._model) for owner in owners}
        if names is None:
            return {layout.name: i for i, layout in enumerate(self._engine.blueprint.layouts)}
        chosen = [names] if isinstance(names, str) else list(names)
        unknown = [n for n in chosen if n not in every]
        if unknown:
            raise ValueError(f"no parameter named {unknown[0]!r}; the model has {', '.join(list(every)[:8])}, ...")
        return {name: every[name] for name in chosen}
