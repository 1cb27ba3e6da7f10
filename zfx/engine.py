"""The engine of one compiled model: its layouts, its channels, and how a call goes through the captured graphs.

It hangs on the model and holds no reference to it, so that both die together. It holds no state of a run either.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from . import build, capture
from ._compat import _reparametrize_module
from .agreement import digest_of
from .bucket import Transfers
from .channels import Channels
from .errors import CaptureError
from .ir import CostModel, Schedule
from .leaf import copy_leaves
from .limits import Limits
from .ops import ENGINES, all_gather
from .shard import Layout, ToLocal

_ids = itertools.count()


class Engine:
    """See the module. Made by `zfx.compile`.

    Args:
        model_name: for messages.
        layouts: one a unique parameter, in the order of `unique_parameters`.
        slots: for each layout, the `_parameters` dict and the key under which the parameter is found at each call.
        channels: None where the model can only be planned.
    """

    def __init__(
        self,
        model_name: str,
        layouts: Sequence[Layout],
        slots: Sequence[tuple[dict[str, Any], str]],
        forward: Callable[..., Any],
        world_size: int,
        limits: Limits,
        costs: CostModel,
        channels: Channels | None,
        has_rnn: bool = False,
    ) -> None:
        self.model_name, self.layouts, self.slots = model_name, tuple(layouts), tuple(slots)
        self.world_size, self.limits, self.costs, self.channels = world_size, limits, costs, channels
        self.has_rnn = has_rnn
        self.index = {layout.name: i for i, layout in enumerate(layouts)}
        self.forward = forward
        self.schedules: list[Schedule] = []
        self.graphs: list[dict[str, torch.fx.GraphModule]] = []
        self.eager = False
        self.id = next(_ids)
        ENGINES[self.id] = self
        self.traced = self._make_traced(forward)
        self.compiled = capture.compiled(self)

    def add(self, schedule: Schedule) -> int:
        """Keep a schedule and room for its graphs; its number."""
        self.schedules.append(schedule)
        self.graphs.append({})
        return len(self.schedules) - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """The engine of a deep copy of the model: same plan, same ranks, its own parameters and captures. `memo` knows the copies
        of the dicts that hold the parameters, since a module's engine comes last in its `__dict__`."""
        copy_leaves([m for m in memo.values() if isinstance(m, nn.Module)])
        slots = [(memo[id(slot)], name) for slot, name in self.slots]
        return Engine(self.model_name, self.layouts, slots, self.forward, self.world_size, self.limits, self.costs, self.channels,
                      self.has_rnn)

    # ---- the call ------------------------------------------------------------------------------------------------------

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.channels is None:
            raise RuntimeError(
                f"this model was compiled for world_size={self.world_size} without a process group: it can be planned "
                f"(model.zfx.plan(*example_inputs)) but not run. To train it, start the script with\n"
                f"    torchrun --nproc-per-node {self.world_size} your_script.py"
            )
        shards = self.shards()
        if self.eager:
            return self.traced(model, shards, args, kwargs)
        with capture.explained(self):
            return self.compiled(model, shards, args, kwargs)

    def shards(self) -> list[torch.Tensor]:
        """This rank's shards as plain tensors, joined to the DTensor parameters where a gradient will be wanted."""
        params = [slot[name] for slot, name in self.slots]
        try:
            local = [p._local_tensor for p in params]
        except AttributeError:
            raise self._foreign(params) from None
        if torch.is_grad_enabled():
            wanted = [i for i, p in enumerate(params) if p.requires_grad]
            if wanted:
                for i, shard in zip(wanted, ToLocal.apply(*[params[i] for i in wanted])):
                    local[i] = shard
        return local

    def _foreign(self, params: Sequence[Any]) -> ValueError:
        name = next(layout.name for layout, p in zip(self.layouts, params) if not hasattr(p, "_local_tensor"))
        return ValueError(
            f"parameter {name!r} is not the shard that zfx put there: it was replaced after zfx.compile, or the model is called "
            f"through torch.func.functional_call with whole tensors, which sharded parameters do not support. Change values "
            f"inside `with model.zfx.gathered([{name!r}], writeback=True):`, or compile the model anew."
        )

    def _make_traced(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        layouts, engine_id = self.layouts, self.id
        constants = tuple((layout.name, list(layout.shape), layout.order, _inverse(layout.order)) for layout in layouts)

        def traced(model: nn.Module, shards: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
            values = {}
            for index, (shard, (name, shape, order, inverse)) in enumerate(zip(shards, constants)):
                value = all_gather(shard, shape, index, engine_id)
                if order is not None:
                    value = value.permute(order).contiguous().permute(inverse)
                values[name] = value
            with _reparametrize_module(model, values, tie_weights=True):
                return forward(model, *args, **kwargs)

        # Dynamo keeps its cache on the code object: a copy of it gives every engine a cache of its own
        code = traced.__code__
        own = types.FunctionType(
            code.replace(co_name=f"zfx_{self.model_name}"),
            dict(traced.__globals__),
            code.co_name,
            traced.__defaults__,
            traced.__closure__,
        )
        return own

    # ---- the naive operators -------------------------------------------------------------------------------------------

    def gather_now(self, index: int, shard: torch.Tensor) -> torch.Tensor:
        assert self.channels is not None
        self.agree(f"all_gather {self.layouts[index].name}")
        value = Transfers([self.layouts[index]], [False]).all_gather(self.channels.gathers, [shard]).wait()[0]
        return value.clone() if self.layouts[index].replicated else value

    def reduce_now(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        assert self.channels is not None
        self.agree(f"reduce_scatter {self.layouts[index].name}")
        shard = Transfers([self.layouts[index]], [False]).reduce_scatter(self.channels.reductions, [grad]).wait()[0]
        return shard.clone() if self.world_size == 1 else shard

    def agree(self, what: str) -> None:
        assert self.channels is not None
        line = f"{what} of {self.model_name}"
        self.channels.agreement.begin(digest_of([line]), [line])

    # ---- planning without running --------------------------------------------------------------------------------------

    def plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """Capture with example inputs and plan; nothing is computed, nothing is sent."""
        count = len(self.schedules)
        if self.channels is None:
            grad = torch.is_grad_enabled()
            shards = [_example_shard(layout, slot[name], grad) for layout, (slot, name) in zip(self.layouts, self.slots)]
        else:
            shards = self.shards()
        try:
            with capture.explained(self), build.planning_only():
                self.compiled(model, shards, args, kwargs)
        except build.Planned:
            pass
        if len(self.schedules) == count:
            raise CaptureError("nothing new was captured: these inputs already have a plan", advice="see model.zfx.schedules")
        return self.schedules[-1]


def _example_shard(layout: Layout, param: torch.Tensor, grad: bool) -> torch.Tensor:
    shape = (layout.chunk, *layout.shape[1:]) if layout.shape else ()
    shard = torch.empty(shape, dtype=layout.dtype, device=param.device)  # never written, so a CPU never pays for it
    return shard.requires_grad_() if grad and param.requires_grad else shard


def _inverse(order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if order is None else tuple(sorted(range(len(order)), key=order.__getitem__))
