"""Every private or moving torch name that zfx stands on, in one place. Tested on torch 2.11 to 2.14 where available."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import nonstrict_trace
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


def allow_rnn() -> Any:
    """While active, Dynamo lets RNN modules pass by (they run as leaves; it would refuse to look at them)."""
    return torch._dynamo.config.patch(allow_rnn=True)


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


def without_torch_functions() -> Any:
    """While active, no torch function mode sees what is called."""
    return torch._C.DisableTorchFunction()


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
    "allow_rnn",
    "aot_autograd",
    "default_partition",
    "default_store",
    "dtensor_spec",
    "dynamo_errors",
    "file_view",
    "fresh_symbols_ignored",
    "make_dtensor",
    "nonstrict_trace",
    "on_compile",
    "outer_storage",
    "recompile_limit",
    "reduce_scatter_single",
    "without_torch_functions",
]
