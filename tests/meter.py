"""Bytes of tensors that are alive, counted where they are made: memory that depends neither on allocators nor on the process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zfx._compat import StorageWeakRef


class Meter(TorchDispatchMode):
    """Inside, `peak_bytes` is the most that storages took at once: those of `known` tensors, and all that operations return."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        for tensor in known:
            self._see(tensor)
        self._count()

    def _see(self, tensor: torch.Tensor) -> None:
        if not hasattr(tensor, "_local_tensor") and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _count(self) -> None:
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, out)
        self._count()
        return out
