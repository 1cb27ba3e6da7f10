"""Leaf modules: code that can't be traced runs eagerly, as one opaque node of the graph.

In the forward graph a leaf is one call on gathered parameters and inputs, without autograd. In the backward graph it is one call
that runs the module again, under autograd, from the random state that the forward began with, and differentiates. So nothing of
it lives between the two but its inputs, its buffers and 5 kB of random state; its parameters are gathered and released like any
others. The price is one more forward of the leaf. Both runs are under the autocast that the model called the leaf under.

RNN modules (LSTM, GRU, RNN) are always leaves: Dynamo does not trace them. Both runs use the train/eval flags of the
capture; other attributes of a leaf must not change between a forward and its backward.

Which of its parameters a leaf uses is known when it has run, and differs by rank, as does which of its outputs are read:
[Note: nothing] and [Note: unread] in nothing.py.

[Note: shapes of a leaf] What a leaf returns must be known at capture. It is run there on fake tensors; one that looks at data can't
be, and is taken to return one tensor shaped like its first floating-point input. The real outputs are compared with what was
planned at every call.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ._compat import _reparametrize_module, fresh_symbols_ignored, nonstrict_trace
from .errors import CaptureError
from .nothing import Tangents, is_missing, nothing, unread
from .random_state import random_state, set_random_state

_leaves: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_ids = itertools.count()


def make_leaves(model: nn.Module, leaf_modules: Sequence[type[nn.Module] | nn.Module]) -> None:
    """Give every leaf a subclass of its class whose forward is one node. Leaves inside leaves are part of the outer one.

    Raises:
        TypeError: an entry is neither a module class nor a module.
        ValueError: an entry names the whole model, or nothing in it.
    """
    for entry in leaf_modules:
        if not isinstance(entry, nn.Module) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"leaf_modules holds module classes or modules, got {entry!r}")
    classes: tuple[type, ...] = (nn.RNNBase, *(entry for entry in leaf_modules if isinstance(entry, type)))
    instances = {id(entry) for entry in leaf_modules if isinstance(entry, nn.Module)}
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) not in inside and (isinstance(module, classes) or id(module) in instances):
            found.append(module)
            inside.update(id(m) for m in module.modules())
    for entry in leaf_modules:
        hit = any(m is entry or (isinstance(entry, type) and isinstance(m, entry)) for m in model.modules())
        if not hit:
            raise ValueError(
                f"leaf_modules names {entry.__name__ if isinstance(entry, type) else type(entry).__name__}, "
                "which the model does not contain"
            )
    if any(m is model for m in found):
        if leaf_modules:
            raise ValueError("the whole model can't be a leaf: nothing would be left to schedule")
        raise CaptureError(
            f"{type(model).__name__} itself is a recurrent layer (LSTM, GRU, RNN), which is not captured",
            advice="put it inside a module of your own; it then runs as a leaf",
        )
    for module in found:
        _make_leaf(module)


def raise_failure() -> None:
    """Called when a capture has failed: raise what a leaf said of it, if one did."""
    if _failures:
        failure = _failures[-1]
        _failures.clear()
        raise failure


def _make_leaf(module: nn.Module) -> None:
    base = type(module)
    _register(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return base.forward(self, *args, **kwargs)
        params, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        training = [m.training for m in self.modules()]  # looked at here, so that the captured code is guarded on it
        args = tuple(_NONE if a is None else a for a in args)  # a graph can't be handed None
        kwargs = {k: _NONE if a is None else a for k, a in kwargs.items()}
        output, changed = _call(self.__dict__["_zfx_leaf"], params, buffers, training, args, kwargs)
        for name, value in changed.items():
            buffers[name].copy_(value)
        return output

    module.__class__ = types.new_class(
        base.__name__,
        (base,),
        exec_body=lambda ns: ns.update(forward=forward, __module__=base.__module__, __qualname__=base.__qualname__),
    )


def _register(module: nn.Module) -> None:
    leaf_id = next(_ids)
    _leaves[leaf_id] = module
    module.__dict__["_zfx_leaf"] = leaf_id


def copy_leaves(modules: Iterable[nn.Module]) -> None:
    """Give the leaves among deep copies of modules an identity of their own."""
    for module in modules:
        if "_zfx_leaf" in module.__dict__:
            _register(module)


_NONE = "zfx: no value"


class _Site:
    """One call of a leaf as it was captured: everything about it but its tensors."""

    def __init__(
        self, leaf_id: int, params: list[str], buffers: list[str], training: list[bool], inputs: Any, others: list[Any]
    ) -> None:
        self.leaf_id, self.params, self.buffers, self.inputs, self.others = leaf_id, params, buffers, inputs, others
        self.training = training
        self.autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]
        self.outputs: Any = None
        self.guessed = False  # see [Note: shapes of a leaf]
        self.result_others: list[Any] = []
        self.result_shapes: list[tuple[Any, torch.dtype]] = []
        self.grad_sources: list[Tangents] = []  # of the gradients that the backward is given


_sites: dict[int, _Site] = {}
_failures: list[CaptureError] = []  # raised while Dynamo traced, which says something else of it
_site_ids = itertools.count()


@nonstrict_trace
def _call(
    leaf_id: int,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    training: list[bool],
    args: Any,
    kwargs: Any,
) -> Any:
    """Runs while AOTAutograd traces: put one `zfx::leaf` node into the graph."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    others = [None if isinstance(x, torch.Tensor) or (isinstance(x, str) and x == _NONE) else x for x in flat]
    site = _Site(leaf_id, list(params), list(buffers), training, (spec, [isinstance(x, torch.Tensor) for x in flat]), others)
    site_id = next(_site_ids)
    _sites[site_id] = site
    weakref.finalize(_leaves[leaf_id], _sites.pop, site_id, None)
    needs = [t.requires_grad for t in (*params.values(), *tensors)]
    results = torch.ops.zfx.leaf(list(params.values()), [b.clone() for b in buffers.values()], tensors, needs, site_id)
    outputs, changed = results[: len(results) - len(buffers) - 1], results[len(results) - len(buffers) - 1 : -1]
    return _rebuild(site, outputs), {name: value.detach() for name, value in zip(buffers, changed)}


def _rebuild(site: _Site, tensors: Sequence[torch.Tensor]) -> Any:
    spec, is_tensor = site.outputs
    tensors_, others = iter(tensors), iter(site.result_others)
    return pytree.tree_unflatten([next(tensors_) if t else next(others) for t in is_tensor], spec)


def _run(
    site: _Site, params: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The module's own forward on these parameters; the flat tensors of its output. `buffers` are changed in place."""
    module = _leaves[site.leaf_id]
    spec, is_tensor = site.inputs
    given = iter(tensors)
    args, kwargs = pytree.tree_unflatten([next(given) if t else other for t, other in zip(is_tensor, site.others)], spec)
    values = {**dict(zip(site.params, params)), **dict(zip(site.buffers, buffers))}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_training(module, site.training))
        for kind, dtype, enabled in site.autocast:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        stack.enter_context(_reparametrize_module(module, values, tie_weights=True))
        stack.enter_context(_fresh_flat_weights(module))
        output = type(module).__mro__[1].forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    flat, out_spec = pytree.tree_flatten(output)
    structure = (out_spec, [isinstance(x, torch.Tensor) for x in flat])
    others = [x for x in flat if not isinstance(x, torch.Tensor)]
    if site.outputs is None:
        site.outputs, site.result_others = structure, others
    elif not site.guessed and (structure, others) != (site.outputs, site.result_others):
        raise CaptureError(
            f"the leaf {type(module).__name__} returns {others!r} beside its tensors where it returned {site.result_others!r} "
            "when it was captured; only tensors may change from call to call",
            advice="return a tensor instead",
        )
    return [x for x in flat if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def _training(module: nn.Module, flags: Sequence[bool]) -> Iterator[None]:
    """The train/eval flags of the capture: a backward must run what its forward ran, whatever was set in between."""
    modules = list(module.modules())
    before = [m.training for m in modules]
    for m, flag in zip(modules, flags):
        m.training = flag
    try:
        yield
    finally:
        for m, flag in zip(modules, before):
            m.training = flag


@contextlib.contextmanager
def _fresh_flat_weights(module: nn.Module) -> Iterator[None]:
    """RNNs read their weights from a second list; make it name the present ones."""
    rnns = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    before = [m._flat_weights for m in rnns]
    for m in rnns:
        m._flat_weights = [getattr(m, name, None) for name in m._flat_weights_names]
    try:
        yield
    finally:
        for m, weights in zip(rnns, before):
            m._flat_weights = weights


# ---- the two nodes ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("zfx::leaf", mutates_args=())
def leaf(
    params: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    site: int,
) -> list[torch.Tensor]:
    """Outputs, then the buffers' new values, then the random state before the call."""
    return forward_leaf(params, buffers, inputs, needs, site)


@leaf.register_fake
def _(params: Any, buffers: Any, inputs: Any, needs: Any, site: int) -> list[torch.Tensor]:
    where = _sites[site]
    try:
        with fresh_symbols_ignored((*params, *inputs)):
            outputs = _run(where, params, [b.clone() for b in buffers], inputs)
    except Exception as error:  # whatever a module that looks at data runs into on tensors without data
        if isinstance(_leaves[where.leaf_id], nn.RNNBase) and any(enabled for _, _, enabled in where.autocast):
            failure = CaptureError(
                f"{type(_leaves[where.leaf_id]).__name__} is called under autocast, which torch can't trace",
                advice="wrap its call in torch.autocast(..., enabled=False) and cast its input there",
            )
            _failures.append(failure)
            raise failure from error
        like = next((t for t in inputs if t.is_floating_point()), None)
        if like is None:
            raise
        outputs = [like]
        where.outputs, where.result_others, where.guessed = (pytree.tree_structure(0), [True]), [], True
    outputs = [o.new_empty(o.shape) for o in outputs]
    where.result_shapes = [(tuple(o.shape), o.dtype) for o in outputs]
    state = torch.empty(random_state((*params, *inputs)).numel(), dtype=torch.uint8, device="cpu")
    return [*outputs, *(torch.empty_like(b) for b in buffers), state]


@torch.library.custom_op("zfx::leaf_backward", mutates_args=())
def leaf_backward(
    grads: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    state: torch.Tensor,
    needs: Sequence[bool],
    read: Sequence[int],
    site: int,
) -> list[torch.Tensor]:
    """Gradients of those parameters and inputs that need one, in order. `grads` are those of the outputs that are `read`."""
    return backward_leaf(grads, params, buffers, inputs, state, needs, read, site)


@leaf_backward.register_fake
def _(grads: Any, params: Any, buffers: Any, inputs: Any, state: Any, needs: Any, read: Any, site: int) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t, needed in zip((*params, *inputs), needs) if needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    params, buffers, tensors, ctx.needs, ctx.site = inputs
    ctx.counts = (len(params), len(buffers))
    ctx.set_materialize_grads(False)  # an output that nothing reads is no source of a gradient, not even of zeros
    ctx.save_for_backward(*params, *buffers, *tensors, output[-1])


def _backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    n, b = ctx.counts
    *saved, state = ctx.saved_tensors
    read = [i for i, g in enumerate(grads[: len(_sites[ctx.site].result_shapes)]) if g is not None]
    given, params, buffers, inputs = [grads[i] for i in read], saved[:n], saved[n : n + b], saved[n + b :]
    found = iter(torch.ops.zfx.leaf_backward(given, params, buffers, inputs, state, ctx.needs, read, ctx.site))
    every = [next(found) if needed else None for needed in ctx.needs]
    return every[:n], [None] * b, every[n:], None, None


leaf.register_autograd(_backward, setup_context=_setup_context)


def forward_leaf(
    params: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    site: int,
) -> list[torch.Tensor]:
    where = _sites[site]
    state = random_state((*params, *inputs))
    changed = [b.clone() for b in buffers]
    planned = where.result_shapes
    with torch.no_grad():
        own = [t.clone() for t in inputs]  # what the leaf changes must not reach the caller: the second run begins with these too
        outputs = _run(where, params, changed, own)
        if any(t._version for t in own):
            raise CaptureError(
                f"the leaf {type(_leaves[where.leaf_id]).__name__} changes an input in place",
                advice="use the out-of-place operation at its start (inplace=False)",
            )
    taken = {t.untyped_storage()._cdata for t in (*params, *inputs)}
    outputs = [(o.clone() if o.untyped_storage()._cdata in taken else o).contiguous() for o in outputs]
    _compare(where, outputs, planned)
    return [*outputs, *changed, state]


def _compare(site: _Site, outputs: list[torch.Tensor], planned: list[tuple[Any, torch.dtype]]) -> None:
    """See [Note: shapes of a leaf]. Symbolic sizes can't be compared here; what reads the output will."""

    def differs(output: torch.Tensor, shape: Any, dtype: torch.dtype) -> bool:
        return (
            output.dim() != len(shape)
            or output.dtype != dtype
            or any(isinstance(size, int) and size != real for size, real in zip(shape, output.shape))
        )

    if len(outputs) != len(planned) or any(differs(o, *p) for o, p in zip(outputs, planned)):
        real = [f"{tuple(o.shape)} {o.dtype}" for o in outputs]
        assumed = [f"{tuple(shape)} {dtype}" for shape, dtype in planned]
        raise CaptureError(
            f"the leaf {type(_leaves[site.leaf_id]).__name__} returned {real} where capture had to assume {assumed}",
            advice="give the leaf a boundary at which the shapes of its outputs do not depend on data",
        )


def backward_leaf(
    grads: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    state: torch.Tensor,
    needs: Sequence[bool],
    read: Sequence[int],
    site: int,
) -> list[torch.Tensor]:
    where, lacking = _sites[site], unread()
    there = {i: g for i, g, tangents in zip(read, grads, where.grad_sources) if not is_missing(tangents, lacking)}
    leaves = [t.detach().requires_grad_(needed) for t, needed in zip((*params, *inputs), needs)]
    now = random_state(leaves)
    set_random_state(state, leaves)
    try:
        with torch.enable_grad():
            outputs = _run(where, leaves[: len(params)], [b.clone() for b in buffers], leaves[len(params) :])
            pairs = [(o, there[i]) for i, o in enumerate(outputs) if o.requires_grad and i in there]
            wanted = [t for t in leaves if t.requires_grad]
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs:
                found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    finally:
        set_random_state(now, leaves)
    return [nothing(t) if g is None else g.contiguous() for t, g in zip(wanted, found)]


def tell_sources(site: int, tangents: Sequence[Tangents]) -> None:
    """Where the gradients come from that a leaf's backward is given."""
    _sites[site].grad_sources = list(tangents)


def may_skip(site: int) -> bool:
    """Whether a call of this leaf may leave parameters unused. torch's own recurrent layers use all of theirs."""
    return type(_leaves[_sites[site].leaf_id]).__mro__[1] not in (nn.LSTM, nn.GRU, nn.RNN)


# what the lowering puts in the place of the two operators: plain calls, under which autograd works
PLAIN_CALLS = {torch.ops.zfx.leaf.default: forward_leaf, torch.ops.zfx.leaf_backward.default: backward_leaf}
