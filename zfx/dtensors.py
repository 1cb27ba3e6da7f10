"""Where sharded parameters meet code that is not the model's own call: what torch's DTensor lacks there, and what it should say.

    model.encode(x)                  a shard meets a plain tensor: an error that says what to do instead of "mixed torch.Tensor ..."
    set_detect_anomaly(True)         asks of each gradient whether it has a NaN: an operator that DTensor has no rule for
    clip_grad_norm_(..., inf)        the largest of no elements at all, where a rank has no row of a parameter, is an error in torch
    p.register_hook(f)               autograd calls a parameter's hooks with None where a captured backward has nothing for it

[Note: hooks without a gradient] A backward in plain Python does not come by a parameter that a loss does not depend on, and so
calls none of its hooks. A captured one comes by all its parameters. Those that it has nothing for get hooks that notice.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ._compat import handle_operator
from .errors import LoopError


@functools.cache
def learn_operators() -> None:
    """Teach DTensor what it has no rule for. Once a process."""
    operator = getattr(torch.ops.aten, "_is_any_true", None)
    if operator is not None:
        register_sharding(operator.default)(_any_true)
    handle_operator(torch.ops.aten._foreach_norm.Scalar, _foreach_norm)
    handle_operator(torch.ops.aten.linalg_vector_norm.default, _vector_norm)


def _any_true(x: Any) -> list[tuple[list[Any], list[Any]]]:
    """True anywhere: the largest of the ranks' answers."""
    return [([Replicate()], [Replicate()]), *(([Partial("max")], [Shard(dim)]) for dim in range(len(x.shape)))]


class _IfGiven:
    """A hook of a parameter that is called only where there is a gradient; and remembers whether there was."""

    def __init__(self, hook: Callable[[Any], Any] | None = None) -> None:
        self.hook, self.given = hook, False

    def __call__(self, grad: Any) -> Any:
        self.given = grad is not None
        return self.hook(grad) if self.hook is not None and self.given else None


class _IfAccumulated:
    """A hook for after the accumulation that is called only where something was added."""

    def __init__(self, hook: Callable[[Any], Any], sees: _IfGiven) -> None:
        self.hook, self.sees = hook, sees

    def __call__(self, param: Any) -> None:
        if self.sees.given:
            self.hook(param)


def quiet_hooks(param: DTensor) -> None:
    """Called where a backward has nothing for this parameter, before its hooks are: see [Note: hooks without a gradient]."""
    after: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    loud = [key for key, hook in after.items() if not isinstance(hook, _IfAccumulated)]
    if loud:
        sees = _IfGiven()
        param.register_hook(sees)
        after.update((key, _IfAccumulated(after[key], sees)) for key in loud)
    before: dict[int, Any] = param._backward_hooks or {}
    before.update((key, _IfGiven(hook)) for key, hook in before.items() if not isinstance(hook, _IfGiven))


def _foreach_norm(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if order != math.inf or len(args) > 2 or kwargs.get("dtype") or not all(map(_is_placed, tensors)):
        return own(*args, **kwargs)
    return [_largest(tensor) for tensor in tensors]


def _vector_norm(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if order != math.inf or len(args) > 2 or kwargs.keys() - {"ord"} or not _is_placed(args[0]):
        return own(*args, **kwargs)
    return _largest(args[0])


def _is_placed(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and all(isinstance(p, (Shard, Replicate)) for p in tensor.placements)


def _largest(tensor: DTensor) -> DTensor:
    """The norm by infinity. A rank that has no element of a tensor has nothing that is larger than 0."""
    local = tensor._local_tensor
    value = local.abs().max() if local.numel() else local.new_zeros((), dtype=local.abs().dtype)
    placements = [Partial("max") if isinstance(p, Shard) else Replicate() for p in tensor.placements]
    return DTensor.from_local(value, tensor.device_mesh, placements, run_check=False)


def explained_methods(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods that a model's own class defines, but its forward, with an error of ours where they meet shards."""
    found = {name: m for name, m in vars(base).items() if isinstance(m, types.FunctionType) and not name.startswith("__")}
    return {name: _explained(name, method) for name, method in found.items() if name != "forward"}


def _explained(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise LoopError(
                f"{name}() of a compiled model reads parameters outside the model's own call, where they are shards (DTensors). "
                f"Run it as `{name} = model.zfx.function(lambda model, *args: model.{name}(*args))`, which is captured and planned "
                "as the forward is; whole values without gradients are those of `with model.zfx.gathered(...)`"
            ) from error

    return call
