"""The random state that code on some tensors draws from, so that it can be run again with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    return next((t.device for t in tensors if t.is_cuda), None)


def random_state(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The random state that code on these tensors draws from: the CPU's and, where they are on a GPU, that one's."""
    device, state = _device_of(tensors), torch.get_rng_state()
    return state if device is None else torch.cat([state, torch.cuda.get_rng_state(device)])


def set_random_state(state: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Back to what `random_state` returned, for tensors on the same device."""
    device, size = _device_of(tensors), torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if device is not None:
        torch.cuda.set_rng_state(state[size:].clone(), device)
