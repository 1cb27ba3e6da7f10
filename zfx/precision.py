"""Precision: which dtypes a compiled model gathers, computes and reduces in. The shards stay what they were: the master weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

_WIDE = torch.float32


@dataclass(frozen=True, slots=True)
class Precision:
    """Mixed precision by dtypes. The names and defaults are those of FSDP2's `MixedPrecisionPolicy`, but for `reduce_dtype`.

    Floating-point parameters are cast shard by shard before they are gathered, so that half the bytes travel; the optimizer sees
    the shards, and gradients, in their own dtype. Parameters that are not floating-point (or are complex) stay as they are, and so
    do those of BatchNorm: torch computes it with the dtype of its running statistics, which are buffers.

    Attributes:
        param_dtype: what parameters are gathered in and computed with. None: their own.
        reduce_dtype: what gradients are averaged in. None: float32 where parameters are gathered in 16 bits, else their own. (FSDP2
            reduces in `param_dtype` by default.) Over gloo gradients travel in their own dtype and only the sum is wide. With
            replicas the sums of 16-bit gradients stay in float32 from the first stage to the second, but if this says otherwise.
        output_dtype: what floating-point tensors in the model's output are cast to. None: as they come.
        cast_inputs: cast floating-point tensors in the model's arguments to `param_dtype`, if that is set. Default True.
        buffer_dtype: what floating-point buffers are cast to once, in `zfx.compile`. None: never touched, so that running means and
            rotary frequencies keep their precision.

    Raises:
        TypeError: a dtype is not a floating-point `torch.dtype`.

    Example:
        >>> import torch
        >>> Precision(torch.bfloat16).reduce_in(torch.bfloat16)
        torch.float32
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "cast_inputs":
                if not isinstance(value, bool):
                    raise TypeError(f"Precision.cast_inputs must be True or False, got {value!r}")
            elif value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(f"Precision.{field.name} must be a floating-point torch.dtype or None, got {value!r}")

    def gathered_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a parameter of `dtype` is gathered in."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def for_module(self, module: nn.Module) -> Precision:
        """What holds for the parameters of this very module."""
        return Precision() if isinstance(module, _BatchNorm) else self

    def reduce_in(self, gathered: torch.dtype) -> torch.dtype | None:
        """The dtype that a gradient of dtype `gathered` is averaged in; None: the wire's own choice for that dtype."""
        if not gathered.is_floating_point:
            return None
        if self.reduce_dtype is None and self.param_dtype is not None and gathered.itemsize < _WIDE.itemsize:
            return _WIDE
        return self.reduce_dtype

    def cast_arguments(self, values: Any) -> Any:
        return _cast(values, self.param_dtype) if self.cast_inputs and self.param_dtype is not None else values

    def cast_output(self, values: Any) -> Any:
        return values if self.output_dtype is None else _cast(values, self.output_dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v, values)
