"""Born sharded: a model on the meta device gets its first values one parameter at a time, and each rank keeps its rows of each.

    init code:   weight.uniform_(-a, a)    bias.uniform_(-a, a)       weight2.normal_()
    held whole:  weight                    bias                       weight2              never two unless an operation takes both
    kept:                                  weight's rows              + bias's rows        ...

The initialisers run as they are, on the meta model. A dispatch mode gives a meta tensor values when an operation first reads or
writes them, and cuts them to this rank's rows before the next parameter gets values. Every rank draws all values from its own
default generator, on the CPU: ranks that begin with the same generator agree, whatever the world size and the device.

[Note: the order of construction] A plain model draws while it is constructed: a module's children first, in the order in which they
are set, then the module's own `reset_parameters`; a transformers model ends its constructor with `initialize_weights`, inner models
before outer ones. `construct` walks the same way and so uses up the generator in the same way, also where a value is drawn only
to be drawn anew. Tied parameters are untied for that time, because constructors draw both before they tie them. What can't be
known from the finished model: constructors that draw by themselves, copy modules, or set children in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ._compat import without_torch_functions
from .fingerprint import fingerprint
from .shard import Layout, Owner, shard_of, unique_parameters

Key = int  # of a storage on the meta device

_OVERWRITES = {f"aten::{name}_" for name in ("zero", "fill", "copy", "normal", "uniform", "random", "bernoulli", "exponential")}
_META = torch.device("meta")


def skip_init(model: nn.Module) -> None:
    """As `zfx.compile(..., init_fn=zfx.skip_init)`: draw nothing, since `zfx.load_pretrained` comes next.

    Until then floating-point parameters are NaN, so that one which is forgotten is seen. Buffers get their values.
    """
    construct(model)


def is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for _, tensor in _held(model)) or any(p.is_meta for p in model.parameters())


def initial_shards(
    model: nn.Module,
    layouts: Sequence[Layout],
    init_fn: Callable[[nn.Module], Any] | None,
    rank: int,
    device: torch.device,
    gather: Callable[[int, torch.Tensor], torch.Tensor],
) -> tuple[dict[int, torch.Tensor], list[str]]:
    """This rank's part of every parameter that is on the meta device, by number. Buffers on meta are replaced where they hang.

    Args:
        init_fn: gives the values, called once with the whole model. None: `construct`, as the constructor would have.
        gather: a whole parameter out of the ranks' parts; used where an initialiser comes back to a parameter that was cut already.

    Returns:
        The shards, and a line for each parameter with some of its values, for ranks to agree on.

    Raises:
        ValueError: a parameter or buffer was given no value, or not all of it; a parameter was replaced.
    """
    by_default = init_fn is None or init_fn is skip_init
    values = _Values(model, layouts, rank, device, gather, dropped=init_fn is skip_init, protected=by_default)
    untied = _untied(model) if by_default else contextlib.nullcontext()
    owners = [(owner, param) for param, owned in unique_parameters(model) for owner in owned]
    with untied, torch.no_grad(), values, _LooksReal():
        (init_fn or construct)(model)
    for owner, param in owners:
        if owner.module._parameters[owner.attribute] is not param:
            raise ValueError(
                f"the initialiser replaced parameter {owner.name!r}, which zfx.compile is about to shard; write into it instead "
                "(normal_, copy_ and the like)"
            )
    values.finish()
    _replace_buffers(model, values)
    return values.shards, values.lines


# ---- the initialisers of a constructor -----------------------------------------------------------------------------------


def construct(model: nn.Module) -> None:
    """Initialise as the constructor would have: see [Note: the order of construction]."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            visit(child)
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        draw = _DRAWS.get(f"{type(module).__module__}.{type(module).__qualname__}")
        if reset is not None:
            reset()
        elif draw is not None:
            draw(module)
        if hasattr(module, "_init_weights") and hasattr(module, "initialize_weights"):
            cast(Any, module).initialize_weights()

    visit(model)


def _conv1d(module: Any) -> None:
    nn.init.normal_(module.weight, std=0.02)
    nn.init.zeros_(module.bias)


# constructors that draw without a method that could be called again
_DRAWS: dict[str, Callable[[nn.Module], None]] = {"transformers.pytorch_utils.Conv1D": _conv1d}


@contextlib.contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Inside, every place of a tied parameter but one has a parameter of its own, whose values are lost at the end.

    The one is where transformers says that the values come from, elsewhere the first.
    """
    targets = set(getattr(model, "all_tied_weights_keys", None) or {})
    swapped: list[tuple[Owner, nn.Parameter]] = []
    for param, owners in unique_parameters(model):
        source = next((o for o in owners if o.name not in targets), owners[0])
        for owner in owners:
            if owner is not source and param.is_meta:
                swapped.append((owner, param))
                owner.module._parameters[owner.attribute] = nn.Parameter(torch.empty_like(param), param.requires_grad)
    try:
        yield
    finally:
        for owner, param in swapped:
            owner.module._parameters[owner.attribute] = param


# ---- values for meta tensors ---------------------------------------------------------------------------------------------


class _LooksReal(TorchFunctionMode):
    """Meta tensors say that they are on the CPU: some initialisers of torch return at once for a meta tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            return False
        return torch.device("cpu") if isinstance(out, torch.device) and out == _META else out


class _Values(TorchDispatchMode):
    """Operations on meta tensors run on real ones. Views stay on meta: they are found again by their storage.

    Args:
        dropped: on meta only buffers are written.
        protected: nor is what the model holds on a real device.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Sequence[Layout],
        rank: int,
        device: torch.device,
        gather: Callable[[int, torch.Tensor], torch.Tensor],
        dropped: bool,
        protected: bool,
    ) -> None:
        super().__init__()
        self.layouts, self.rank, self.device, self.gather, self.dropped = layouts, rank, device, gather, dropped
        self.shards: dict[int, torch.Tensor] = {}
        self.lines: list[str] = []
        self._numbers: dict[Key, int] = {}
        self._alive: list[torch.Tensor] = []  # storages on meta are told apart by their address
        for number, (param, _) in enumerate(unique_parameters(model)):
            if param.is_meta:
                key = _key(param)
                if _numel(param) != param.numel():
                    raise ValueError(f"parameter {layouts[number].name!r} is a view of a larger tensor, which sharding would end")
                if key in self._numbers:
                    first = layouts[self._numbers[key]].name
                    raise ValueError(f"parameter {layouts[number].name!r} shares memory with {first!r}, which sharding would end")
                self._numbers[key] = number
                self._alive.append(param)
        self._buffers = {_key(tensor): name for name, tensor in _held(model) if tensor.is_meta}
        held = [*model.parameters(), *(tensor for _, tensor in _held(model))]
        self._protected = {_key(tensor) for tensor in held if not tensor.is_meta} if protected else set()
        self._whole: dict[Key, torch.Tensor] = {}
        self._written: set[Key] = set()
        self._doubtful: set[Key] = set()  # the first write did not reach all of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_functions():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        metas = [t for t in _tensors((args, kwargs)) if t.is_meta]
        writes, only_views = _aliases(func, args, kwargs)
        for t in writes:
            if _key(t) in self._protected:
                return t
        if only_views or (not metas and kwargs.get("device") != _META):
            return func(*args, **kwargs)
        targets = [t for t in writes if t.is_meta]
        if self.dropped and any(_key(t) not in self._buffers for t in targets):
            return targets[0]
        self._make_room({_key(t) for t in metas})
        for t in metas:
            self._give_value(t, overwritten=func._schema.name in _OVERWRITES and t is args[0] and t.numel() == _numel(t))
        real: dict[int, torch.Tensor] = {}

        def substitute(t: torch.Tensor) -> torch.Tensor:
            if not t.is_meta:
                return t
            value = self._whole[_key(t)].as_strided(t.size(), t.stride(), t.storage_offset())
            real[id(value)] = t
            return value

        args, kwargs = tree_map_only(torch.Tensor, substitute, (args, kwargs))
        if kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        out = func(*args, **kwargs)
        self._written.update(_key(t) for t in targets)
        return tree_map_only(torch.Tensor, lambda t: real.get(id(t), t), out)

    def _make_room(self, wanted: set[Key]) -> None:
        for key in [k for k in self._whole if k not in wanted and k not in self._buffers]:
            self._keep(key)

    def _give_value(self, tensor: torch.Tensor, overwritten: bool) -> None:
        key = _key(tensor)
        if key in self._whole:
            return
        number = self._numbers.get(key)
        if number is not None and number in self.shards and not overwritten:
            whole = self.gather(number, self.shards[number]).cpu().reshape(-1)
            order = self.layouts[number].order
            if order is not None:
                whole = whole.view(self.layouts[number].shape).permute(order).contiguous().view(-1)
        else:
            whole = torch.empty(_numel(tensor), dtype=tensor.dtype, device="cpu")
            if not overwritten:
                whole.fill_(torch.nan if tensor.dtype.is_floating_point else 0)
                self._doubtful.add(key)
        self._whole[key] = whole
        if number is None:
            self._alive.append(tensor)

    def _keep(self, key: Key) -> None:
        """Cut a parameter to this rank's rows; what is no parameter of the model (the other side of a tie) is forgotten."""
        whole, number = self._whole.pop(key), self._numbers.get(key)
        if number is None or key not in self._written:
            return
        layout = self.layouts[number]
        shape = layout.shape if layout.order is None else tuple(layout.shape[d] for d in layout.order)
        whole = whole.view(shape)
        if layout.order is not None:
            whole = whole.permute(tuple(sorted(range(len(shape)), key=layout.order.__getitem__)))
        if number in self.shards:
            self.shards[number].copy_(whole if layout.replicated else whole[slice(*layout.rows(self.rank))])
        else:
            self.shards[number] = shard_of(layout, whole, self.rank, self.device)
        self.lines.append(f"initial values of {layout.name}: {fingerprint(whole)}")

    def finish(self) -> None:
        """Everything has been initialised: cut what is still whole, and see that nothing was left out.

        Raises:
            ValueError: a parameter or a buffer has no value.
        """
        self._make_room(set())
        if self.dropped:
            for number in self._numbers.values():
                layout = self.layouts[number]
                empty = torch.full((1,), torch.nan if layout.dtype.is_floating_point else 0, dtype=layout.dtype)
                self.shards[number] = shard_of(layout, empty.expand(layout.shape), self.rank, self.device)
        left = [self.layouts[n].name for n in self._numbers.values() if n not in self.shards]
        left += [name for key, name in self._buffers.items() if key not in self._written]
        left += [
            f"{self.layouts[n].name} (in part)"
            for key, n in self._numbers.items()
            if key in self._doubtful and n in self.shards and not self.dropped and bool(self.shards[n].isnan().any())
        ]
        if left:
            names = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
            raise ValueError(
                f"no initialiser gave a value to {names}: a model on the meta device has lost what its constructor computed. Pass "
                "zfx.compile(..., init_fn=f), where f(model) is called once with the whole model and writes them all (for "
                "example by model.apply), or build what holds them on a real device"
            )

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._whole[_key(tensor)].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _replace_buffers(model: nn.Module, values: _Values) -> None:
    for module in model.modules():
        for holder in (module._buffers, module.__dict__):
            for name, tensor in list(holder.items()):
                if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                    holder[name] = values.buffer(tensor)


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the modules that are no parameters: buffers, and plain attributes."""
    for path, module in model.named_modules():
        for holder in (module._buffers, module.__dict__):
            for name, tensor in holder.items():
                if isinstance(tensor, torch.Tensor):
                    yield (f"{path}.{name}" if path else name), tensor


def _aliases(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors that an operation writes to, and whether it only makes views."""
    schema = func._schema
    given = {a.name: (args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(schema.arguments)}
    written = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    views = any(r.alias_info is not None for r in schema.returns) and not written
    return [t for t in _tensors(written)], views


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, tree)
    return found


def _key(tensor: torch.Tensor) -> Key:
    return tensor.untyped_storage()._cdata


def _numel(tensor: torch.Tensor) -> int:
    """Elements of the whole storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()
