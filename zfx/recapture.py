"""Why a model was captured again, in words, for the log: `logging.getLogger("zfx")`, or `TORCH_LOGS=zfx`.

    zfx: GPT: captured graph 2 (training) because input 1 is [s0, 64] float32 where it was [3, 64] float32
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Signature:
    """What a capture was made for, as far as one can see from its inputs.

    Attributes:
        inputs: the tensors that the captured graph reads, parameters' shards among them: shape, dtype, and whether a gradient is
            wanted.
    """

    grad: bool
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> Signature:
        return cls(torch.is_grad_enabled(), tuple(_described(value) for value in inputs if isinstance(value, torch.Tensor)))


def _described(value: torch.Tensor) -> str:
    shape = ", ".join(str(size) for size in value.shape)
    return f"[{shape}] {str(value.dtype).removeprefix('torch.')}" + (" with a gradient" if value.requires_grad else "")


def reason(new: Signature, before: Sequence[Signature]) -> str:
    """Why what was captured before did not do for this call: the first difference to the most similar of them.

    Example:
        >>> reason(Signature(True, ("[5, 4] float32",)), [Signature(True, ("[3, 4] float32",))])
        'input 0 is [5, 4] float32 where it was [3, 4] float32'
    """
    if not before:
        return "it is the first call"
    modes = {True: "training", False: "no_grad"}
    alike = [s for s in before if s.grad == new.grad]
    if not alike:
        return f"it is the first call with {modes[new.grad]}"
    same = [s for s in alike if len(s.inputs) == len(new.inputs)]
    if not same:
        return f"it reads {len(new.inputs)} tensors where it read {len(alike[-1].inputs)}: another path, or other arguments"
    old = min(same, key=lambda s: sum(a != b for a, b in zip(s.inputs, new.inputs)))
    for i, (a, b) in enumerate(zip(old.inputs, new.inputs)):
        if a != b:
            return f"input {i} is {b} where it was {a}"
    return "a Python value that it reads, a flag or a hook of a module changed (TORCH_LOGS=recompiles names it)"
