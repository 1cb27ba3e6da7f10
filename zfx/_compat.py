"""Every private or moving torch name that zfx stands on, in one place. Tested on torch 2.11 to 2.14 where available."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import nonstrict_trace
from torch._dynamo.eval_frame import reset_code
from torch._functorch.partitioners import default_partition
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.utils import _create_file_view as file_view
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.stateless import _reparametrize_module
from torch.serialization import _get_layout
from torch.utils.checkpoint import CheckpointPolicy

# torch 2.13 renamed the tensor forms of these collectives and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

dynamo_errors: tuple[type[BaseException], ...] = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit
    if hasattr(torch._dynamo.exc, "FailOnRecompileLimitHit")
    else torch._dynamo.exc.TorchDynamoException,
)

# what the pickle of a DCP directory's metadata refers to, beside the public records
DCP_PRIVATE_RECORDS: tuple[Any, ...] = (StorageInfo, StoragePrefix, _MEM_FORMAT_ENCODING, _get_layout)


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local` without checks, communication or autograd; for gradients and new parameters."""
    return DTensor(local, spec, requires_grad=False)


def dtensor_spec(mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(shape), tuple(reversed(strides)), dtype))


def default_store() -> Any:
    return _get_default_store()


@contextlib.contextmanager
def capturing(has_rnn: bool) -> Iterator[None]:
    """While active, Dynamo watches for hooks that are registered later on, which it ignores by default, and lets RNN modules pass
    by (they run as leaves; it would refuse to look at them). Around every call, so it does without the slower `config.patch`."""
    config = torch._dynamo.config
    before = config.skip_nnmodule_hook_guards, config.allow_rnn
    config.skip_nnmodule_hook_guards = False
    if has_rnn:
        config.allow_rnn = True
    try:
        yield
    finally:
        config.skip_nnmodule_hook_guards = before[0]
        if has_rnn:
            config.allow_rnn = before[1]


def fresh_symbols_ignored(tensors: Any) -> Any:
    """While active, data-dependent sizes that come up on these fake tensors need not appear in any output."""
    shape_env = next((t.fake_mode.shape_env for t in tensors if hasattr(t, "fake_mode")), None)
    return shape_env.ignore_fresh_unbacked_symbols() if shape_env is not None else contextlib.nullcontext()


def on_compile(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Have these called around every compilation of this process, deferred backwards included. Registers them once."""
    handler = torch._dynamo.callback_handler
    if start not in handler.start_callbacks:
        handler.register_start_callback(start)
        handler.register_end_callback(end)


def outer_storage(param: DTensor) -> int:
    """Which (empty) storage is behind the outside of a DTensor: another one once somebody has assigned to `param.data`."""
    return param.untyped_storage()._cdata


def backward_accumulates() -> bool:
    """Whether the backward that this thread runs adds to `.grad` of a parameter: `torch.autograd.grad` only returns gradients.

    The node that runs is the captured graph's, below which lies `ToLocal`, or that one; below it lie the parameters.
    """
    node = torch._C._current_autograd_node()
    for found in (node, *(below for below, _ in node.next_functions)) if node is not None else ():
        if found is not None and found.name().startswith("ToLocal"):
            leaves = [leaf for leaf, _ in found.next_functions if leaf is not None]
            try:
                return any(torch._C._will_engine_execute_node(leaf) for leaf in leaves)
            except RuntimeError:  # torch asks not to be asked about a parameter in torch.autograd.grad
                return False
    return True


@contextlib.contextmanager
def retainable_backwards() -> Iterator[None]:
    """While active, captured backwards may run again (`retain_graph=True`): AOTAutograd gives no saved tensor's memory away."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


def no_donated_buffers() -> None:
    """Called where AOTAutograd compiles a forward. Having looked for no donated buffers it leaves None, which it takes for some."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None:
        metadata.bw_donated_idxs = []


def profiling() -> bool:
    """Whether a torch profiler records in this process."""
    return torch.autograd._profiler_enabled()


def without_torch_functions() -> Any:
    """While active, no torch function mode sees what is called."""
    return torch._C.DisableTorchFunction()


def forget_captures(code: types.CodeType, scope: dict[str, Any]) -> None:
    """Drop what Dynamo has captured of a function that is gone, and what it has put among its globals, which were its own.

    Nothing else ever does: Dynamo keeps for ever the code that it has made, and with it the code that it was made of.
    """
    reset_code(code)
    scope.update(dict.fromkeys(scope))  # the names stay: Dynamo deletes its own, should it let go after all


def recompile_limit() -> int:
    return torch._dynamo.config.recompile_limit


__all__ = [
    "DCP_PRIVATE_RECORDS",
    "CheckpointPolicy",
    "DTensorSpec",
    "StorageInfo",
    "StoragePrefix",
    "StorageWeakRef",
    "_BoxedCodeGen",
    "_coalescing_manager",
    "_reparametrize_module",
    "all_gather_single",
    "aot_autograd",
    "backward_accumulates",
    "capturing",
    "default_partition",
    "default_store",
    "dtensor_spec",
    "dynamo_errors",
    "file_view",
    "forget_captures",
    "fresh_symbols_ignored",
    "make_dtensor",
    "no_donated_buffers",
    "nonstrict_trace",
    "on_compile",
    "outer_storage",
    "profiling",
    "recompile_limit",
    "reduce_scatter_single",
    "retainable_backwards",
    "without_torch_functions",
]
