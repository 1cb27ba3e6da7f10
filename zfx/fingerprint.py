"""A few of a tensor's values as text, for ranks to compare: enough to see that they were seeded or loaded differently."""

from __future__ import annotations

import hashlib

import torch

_NUM_SAMPLES = 64


def fingerprint(tensor: torch.Tensor) -> str:
    """Eight hexadecimal digits of at most 64 values, spread over the tensor.

    Example:
        >>> fingerprint(torch.zeros(3)) == fingerprint(torch.zeros(3)) != fingerprint(torch.ones(3))
        True
    """
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _NUM_SAMPLES)][:_NUM_SAMPLES].cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(bytes(some.tolist())).hexdigest()[:8]
