"""The engine of one compiled model: its layouts, its channels, and how a call goes through the captured graphs.

It hangs on the model and holds no reference to it, so that both die together. It holds no state of a run either.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from . import build, capture
from ._compat import backward_accumulates, forget_captures
from .blueprint import Blueprint
from .errors import CaptureError
from .held import Held
from .ir import Schedule
from .leaf import copy_leaves, raise_failure
from .ops import all_gather
from .shard import Layout, Owner, ToLocal
from .versions import Outsides
from .window import Window

_numbers = itertools.count()
MARK = "_zfx_owner"  # on every module that holds parameters: the id of the blueprint that they belong to


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter is found at each call (`holder[key]`), the places that captured code reads it from, and where else a tied
    one hangs: `others` must still hold the same."""

    holder: dict[str, Any]
    key: str
    places: tuple[tuple[str, str], ...]
    others: tuple[tuple[dict[str, Any], str], ...] = ()

    @classmethod
    def of(cls, owners: Sequence[Owner]) -> Slot:
        first, *others = owners
        return cls(
            first.module._parameters,
            first.attribute,
            tuple((o.path, o.attribute) for o in owners),
            tuple((o.module._parameters, o.attribute) for o in others),
        )

    def copied(self, memo: dict[int, Any]) -> Slot:
        """The slot of a deep copy."""
        others = tuple((memo[id(holder)], key) for holder, key in self.others)
        return replace(self, holder=memo[id(self.holder)], others=others)


@dataclass(slots=True)
class Entry:
    """One function of the model: as it is, over gathered parameters, and the same under torch.compile.

    Attributes:
        generation: of plans; where the engine's is a later one, what was captured is captured anew.
    """

    function: Callable[..., Any]
    traced: Callable[..., Any]
    compiled: Callable[..., Any]
    generation: int


def is_gathered(model: nn.Module, place: tuple[str, str] | None) -> bool:
    """Whether the parameter at this place is a whole value just now: a call of the model is then one inside its own captured code,
    and means its own forward. Not a flag on the model: where forward hooks a tensor, Dynamo leaves one set."""
    if place is None:
        return torch.compiler.is_compiling()
    module: nn.Module | None = model
    for name in place[0].split(".") if place[0] else ():
        module = module._modules.get(name) if module is not None else None
    value = None if module is None else module._parameters.get(place[1])
    return value is not None and not isinstance(value, nn.Parameter) and not isinstance(value, DTensor)


class Engine:
    """See the module. Made by `zfx.compile`.

    Args:
        slots: one a layout.
        forward: the forward of the model's own class.
        has_rnn: Dynamo has to be told to let recurrent modules pass.
    """

    def __init__(self, blueprint: Blueprint, slots: Sequence[Slot], forward: Callable[..., Any], has_rnn: bool) -> None:
        self.blueprint, self.slots, self.forward, self.has_rnn = blueprint, tuple(slots), forward, has_rnn
        self.eager = False
        rank = 0 if blueprint.channels is None else blueprint.channels.gathers.rank
        self.outsides: Outsides | None = None
        self.local_shapes = [layout.local_shape(rank) for layout in blueprint.layouts]
        num_micro_batches = blueprint.settings.accumulate
        self.window = Window(num_micro_batches) if num_micro_batches > 1 else None
        blueprint.window = None if self.window is None else weakref.ref(self.window)
        held_by = self.slots  # not by the engine: a cycle would keep its parameters alive until they are collected
        self.held = Held(blueprint.names, lambda: [slot.holder[slot.key] for slot in held_by])
        blueprint.held = weakref.ref(self.held)
        self.generation = 0
        self.main = self.entry(self.forward)

    def entry(self, function: Callable[..., Any]) -> Entry:
        """A function of the model and other arguments, to be called through the engine; its captures are its own."""
        traced = self._make_traced(function)
        return Entry(function, traced, capture.compiled(self.blueprint, traced), self.generation)

    def _renew(self, entry: Entry) -> None:
        """Forget what an entry has captured for plans that hold no longer."""
        new = self.entry(entry.function)
        entry.traced, entry.compiled, entry.generation = new.traced, new.compiled, new.generation

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, gradients wait. Under a budget in bytes, what waits needs room, so everything is planned anew the first time."""
        blueprint = self.blueprint
        if blueprint.settings.limits.memory_budget is not None and not blueprint.holds:
            blueprint.holds = True
            self.generation += 1
        return self.held.waiting()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """The engine of a deep copy of the model: same plan, same ranks, its own parameters and captures. `memo` knows the copies
        of the dicts that hold the parameters, since a module's engine comes last in its `__dict__`."""
        copy_leaves([m for m in memo.values() if isinstance(m, nn.Module)])
        slots = [slot.copied(memo) for slot in self.slots]
        for slot in slots:
            slot.holder[slot.key].grad = None  # deepcopy gives a plain parameter none, but a DTensor its own's
        blueprint = self.blueprint.again()
        for copied in memo.values():
            attributes = copied.__dict__ if isinstance(copied, nn.Module) else copied  # the outermost's are not in place yet
            if isinstance(attributes, dict) and attributes.get(MARK) == self.blueprint.id:
                attributes[MARK] = blueprint.id
        return Engine(blueprint, slots, self.forward, self.has_rnn)

    # ---- the call ------------------------------------------------------------------------------------------------------

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entry: Entry | None = None) -> Any:
        blueprint, entry = self.blueprint, entry or self.main
        if entry.generation != self.generation:
            self._renew(entry)
        if blueprint.channels is None:
            raise RuntimeError(
                f"this model was compiled for world_size={blueprint.world_size} without a process group: it can be planned "
                f"(model.zfx.plan(*example_inputs)) but not run. To train it, start the script with\n"
                f"    torchrun --nproc-per-node {blueprint.world_size} your_script.py"
            )
        shards = self.shards()
        if self.eager:
            return entry.traced(model, shards, args, kwargs)
        with capture.explained(lambda: self.check_modules(model), self.has_rnn):
            return entry.compiled(model, shards, args, kwargs)

    def shards(self) -> list[torch.Tensor]:
        """This rank's shards as plain tensors, joined to the DTensor parameters where a gradient will be wanted."""
        params: list[Any] = [slot.holder.get(slot.key) for slot in self.slots]
        try:
            local: list[torch.Tensor] = [p._local_tensor for p in params]
        except AttributeError:
            raise self._foreign(params) from None
        self._check_places(params, local)
        if self.window is not None:
            self.window.enter(params, waiting=bool(self.held.values))
        if torch.is_grad_enabled():
            wanted = [i for i, p in enumerate(params) if p.requires_grad]
            if wanted:
                changed = self._refuse_changed(wanted)
                for i, shard in zip(wanted, ToLocal.apply(changed, self._finish(wanted), *[params[i] for i in wanted])):
                    local[i] = shard
        return local

    def watch(self) -> None:
        """From now on, see when somebody assigns to `p.data`."""
        params = [slot.holder[slot.key] for slot in self.slots]
        self.outsides, self.devices = Outsides(params), [p._local_tensor.device for p in params]

    def _check_places(self, params: Sequence[Any], local: Sequence[torch.Tensor]) -> None:
        """Refuse a parameter that was replaced in one of its places, or is cut in another way: values would be silently wrong."""
        if self.outsides is None:  # a deep copy, whose parameters are not in place when it's made
            self.watch()
        assert self.outsides is not None
        assigned = self.outsides.assigned(params)
        if assigned is not None:
            raise ValueError(
                f"something was assigned to .data of parameter {self.blueprint.names[assigned]!r}: torch ignores that for a "
                "DTensor, which keeps its old values. Use p.copy_(values) under torch.no_grad() instead; it also ends this error"
            )
        for number, (slot, part) in enumerate(zip(self.slots, local)):
            if part.device != self.devices[number]:
                raise ValueError(
                    f"parameter {self.blueprint.names[number]!r} was on {self.devices[number]} when the model was compiled and "
                    f"is on {part.device} now; move the model before zfx.compile"
                )
            if part.shape != self.local_shapes[number]:
                raise ValueError(
                    f"parameter {self.blueprint.names[number]!r} is not cut as zfx cut it: this rank holds "
                    f"{tuple(part.shape)} of it instead of {self.local_shapes[number]}. Copy values into the parameter that "
                    "was there, or compile the model anew"
                )
            if any(holder.get(key) is not params[number] for holder, key in slot.others):
                other = ".".join(filter(None, slot.places[1]))
                raise ValueError(
                    f"parameter {self.blueprint.names[number]!r} was tied to {other!r} when the model was compiled, and one of "
                    "them was replaced since; tie or untie parameters before zfx.compile"
                )

    def _refuse_changed(self, wanted: list[int]) -> Callable[[list[int]], None]:
        blueprint = self.blueprint

        def changed(indices: list[int]) -> None:
            """Raise if a backward reads one of these, as autograd does for a plain parameter: [Note: versions of shards]."""
            names = [blueprint.names[wanted[i]] for i in indices]
            read = [name for name in names if name in blueprint.read_in_backward]
            if read:
                raise RuntimeError(
                    f"parameter {read[0]!r} was modified by an inplace operation (optimizer step, load_state_dict, copy_) between "
                    "a forward and its backward, which needs the value that the forward used; run the backward first"
                )

        return changed

    def _finish(self, wanted: list[int]) -> Callable[[list[int]], dict[int, torch.Tensor]]:
        blueprint, alive = self.blueprint, weakref.ref(self.held)

        def finish(indices: list[int]) -> dict[int, torch.Tensor]:
            """At the end of a backward: the reduced gradients of those that waited and that it did not complete itself."""
            held = alive()
            if held is None or held.depth or not held.values or not backward_accumulates():
                return {}
            found = blueprint.reduce_held(held.take([wanted[i] for i in indices]))
            return {i: found[wanted[i]] for i in indices if wanted[i] in found}

        return finish

    def check_modules(self, model: nn.Module) -> None:
        """Refuse a model whose modules are not those that were compiled. Asked only when a capture has failed.

        Raises:
            ValueError: a module was replaced or removed.
            CaptureError: one has a backward hook, or a leaf knows the reason.
        """
        raise_failure()
        for path, module in model.named_modules():
            if module is not model and (module._backward_hooks or module._backward_pre_hooks):
                raise CaptureError(
                    f"the module {path!r} has a backward hook, which Dynamo does not trace",
                    advice="hook a tensor in forward (output.register_hook(...)), a parameter, or the outermost module; or name a "
                    "module around this one in zfx.compile(..., leaf_modules=[...]): it runs eagerly, hooks and all",
                )
        for layout, slot in zip(self.blueprint.layouts, self.slots):
            for path, _ in slot.places:
                module = dict(model.named_modules(remove_duplicate=False)).get(path)
                if module is None or module.__dict__.get(MARK) != self.blueprint.id:
                    raise ValueError(
                        f"the module {path or type(model).__name__!r}, which holds parameter {layout.name!r}, was replaced "
                        "or removed after zfx.compile; compile the model anew after changing its modules"
                    )

    def _foreign(self, params: Sequence[Any]) -> ValueError:
        name = next(layout.name for layout, p in zip(self.blueprint.layouts, params) if not hasattr(p, "_local_tensor"))
        return ValueError(
            f"parameter {name!r} is not the shard that zfx put there: it was replaced after zfx.compile, or the model is called "
            f"through torch.func.functional_call with whole tensors, which sharded parameters do not support. Change values "
            f"inside `with model.zfx.gathered([{name!r}], writeback=True):`, or compile the model anew."
        )

    def _make_traced(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        blueprint_id = self.blueprint.id
        constants = tuple((list(o.shape), o.gathered_dtype, o.order, _inverse(o.order)) for o in self.blueprint.layouts)
        precision = self.blueprint.settings.precision
        places = tuple(slot.places for slot in self.slots)

        def traced(model: nn.Module, shards: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
            swapped = []  # (holder, key, what was there); never looked into, so that Dynamo needn't either
            for index, (shard, (shape, dtype, order, inverse)) in enumerate(zip(shards, constants)):
                value = all_gather(shard, shape, index, blueprint_id, dtype)
                if order is not None:
                    value = value.permute(order).contiguous().permute(inverse)
                for path, key in places[index]:
                    module = model.get_submodule(path)
                    if getattr(module, MARK, None) != blueprint_id:  # guarded: a module put in its place is seen at the next call
                        raise RuntimeError("a module was replaced")
                    holder = module._parameters
                    swapped.append((holder, key, holder[key]))
                    holder[key] = value
            try:
                args, kwargs = precision.cast_arguments((args, kwargs))
                return precision.cast_output(forward(model, *args, **kwargs))
            finally:
                for holder, key, before in swapped:
                    holder[key] = before

        # Dynamo keeps its cache on the code object, and by its name which sizes have changed: each of ours has its own
        code = traced.__code__
        own = types.FunctionType(
            code.replace(co_name=f"zfx_{self.blueprint.model_name}_{next(_numbers)}"),
            dict(traced.__globals__),
            code.co_name,
            traced.__defaults__,
            traced.__closure__,
        )
        weakref.finalize(own, forget_captures, own.__code__, own.__globals__).atexit = False
        return own

    # ---- planning without running --------------------------------------------------------------------------------------

    def plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """Capture with example inputs and plan; nothing is computed, nothing is sent."""
        schedules, count = self.blueprint.schedules, len(self.blueprint.schedules)
        with contextlib.suppress(build.Planned), build.only("plan"):
            self._trace(model, args, kwargs)
        if len(schedules) == count:
            raise CaptureError("nothing new was captured: these inputs already have a plan", advice="see model.zfx.schedules")
        return schedules[-1]

    def capture(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> build.Capture:
        """Capture with example inputs, and no more."""
        try:
            with build.only("capture"):
                self._trace(model, args, kwargs)
        except build.Captured as captured:
            return captured.found
        raise CaptureError("nothing was captured: these inputs already have a plan", advice="capture before the first plan")

    def _trace(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.main.generation != self.generation:
            self._renew(self.main)
        with capture.explained(lambda: self.check_modules(model), self.has_rnn):
            if self.blueprint.channels is not None:
                self.main.compiled(model, self.shards(), args, kwargs)
                return
            params = [slot.holder[slot.key] for slot in self.slots]
            shards = [_example_shard(layout, param) for layout, param in zip(self.blueprint.layouts, params)]
            args, kwargs = tree_map_only(torch.Tensor, _stand_in, (args, kwargs))
            with _meta_replaced(model):
                self.main.compiled(model, shards, args, kwargs)


def engine_of(model: nn.Module) -> Engine:
    """Raises ValueError where the model is not one that `zfx.compile` returned."""
    engine = model.__dict__.get("_zfx_engine") if isinstance(model, nn.Module) else None
    if engine is None:
        raise ValueError(f"this takes a model that zfx.compile returned, got a {type(model).__name__} that is not compiled")
    return engine


def _example_shard(layout: Layout, param: torch.Tensor) -> torch.Tensor:
    shape = (layout.chunk, *layout.shape[1:]) if layout.shape else ()
    shard = torch.empty(shape, dtype=layout.dtype, device=_real(param.device))  # never written, so a CPU never pays for it
    return shard.requires_grad_() if torch.is_grad_enabled() and param.requires_grad else shard


# [Note: no meta tensors] Torch traces them otherwise than what will run: attention falls apart into its products, and some
# operators (the loss of a language model among them) lose their backward. So CPU tensors that nobody writes stand in for them.
def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor
    return torch.empty_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _meta_replaced(model: nn.Module) -> Iterator[None]:
    """See [Note: no meta tensors]: for the time being, buffers and other tensors of the modules stand in, too."""
    holders = [holder for module in model.modules() for holder in (module._buffers, module.__dict__)]
    found = [(h, key, v) for h in holders for key, v in h.items() if isinstance(v, torch.Tensor) and v.is_meta]
    for holder, key, tensor in found:
        holder[key] = _stand_in(tensor)
    try:
        yield
    finally:
        for holder, key, tensor in found:
            holder[key] = tensor


def _inverse(order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if order is None else tuple(sorted(range(len(order)), key=order.__getitem__))
