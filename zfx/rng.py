"""The random streams of a rank: Python's, numpy's, torch's on the CPU and on the rank's GPU.

On the same number of ranks each rank gets its own streams back. On another number: rank r gets the streams that rank r saved; a
rank that no rank r of the checkpoint stands for gets new ones, seeded with the SHA-256 of (torch's stream of the checkpoint's rank
r modulo its world size, r). So a rerun on as many ranks draws the same numbers, and no two ranks draw the same.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

Streams = dict[str, Any]


def streams() -> Streams:
    """The state of every stream of this process, as plain data and tensors."""
    version, numbers, gauss = random.getstate()
    found: Streams = {
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        found["numpy"] = {
            "kind": str(kind),
            "keys": torch.from_numpy(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(found: Streams) -> None:
    """Set the streams of this process to what `streams` returned, as far as it has them."""
    python = found["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    torch.set_rng_state(found["torch"])
    if "numpy" in found and "numpy" in sys.modules:
        n = found["numpy"]
        keys = n["keys"].numpy().astype("uint32")
        sys.modules["numpy"].random.set_state((n["kind"], keys, n["position"], n["has_gauss"], n["cached"]))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])


def reseed(stand_in: Streams, rank: int) -> None:
    """Streams for a rank that the checkpoint has none for, by the rule above."""
    digest = hashlib.sha256(stand_in["torch"].numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)  # on every device
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
