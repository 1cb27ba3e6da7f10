"""State as JSON and tensors: what schedulers, scalers, data loaders and users keep, without a pickle.

    {"step": 3, "betas": (0.9, 0.95), "shadow": tensor}
    {"step": 3, "betas": {"$tuple": [0.9, 0.95]}, "shadow": {"$tensor": 0}}    and    [tensor]

Only plain values are taken: None, bool, int, float, str, bytes, list, tuple, set, dict, tensors, numpy arrays and scalars, dtypes.
They come back equal and of the same type; anything else is refused by name, since reading it back would mean running somebody's
code.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MARKS = ("$tensor", "$array", "$scalar", "$tuple", "$set", "$dict", "$bytes", "$float", "$dtype", "$size")
_DEEPEST = 100


def pack(value: Any, where: str) -> tuple[Any, list[torch.Tensor]]:
    """The value as JSON data, and the tensors that it refers to by number.

    Args:
        where: what the value is, for messages.

    Raises:
        TypeError: something in it is not plain; the message says where and of what type it is.

    Example:
        >>> pack({"lr": (0.1,)}, "scheduler")
        ({'lr': {'$tuple': [0.1]}}, [])
    """
    tensors: list[torch.Tensor] = []
    return _pack(value, where, tensors, 0), tensors


def unpack(data: Any, tensors: Sequence[torch.Tensor], where: str) -> Any:
    """What `pack` was given.

    Raises:
        ValueError: `data` is not what `pack` returns.
    """
    try:
        return _unpack(data, tensors, where, 0)
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"{where} is damaged: {error}") from None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError if there is no such dtype."""
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return _DTYPES[name]


def _pack(value: Any, where: str, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > _DEEPEST:
        raise TypeError(f"{where} is nested more than {_DEEPEST} levels deep, or contains itself")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [_pack(v, f"{where}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if kind is tuple:
        return {"$tuple": [_pack(v, f"{where}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        return _pack_mapping(value, where, tensors, depth)
    if kind in (set, frozenset):
        return {"$set": [_pack(v, where, tensors, depth + 1) for v in sorted(value, key=repr)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _number(value.detach(), tensors)}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        tensor = torch.from_numpy(value.copy() if value.shape else value.reshape(1).copy())
        return {"$array" if value.shape else "$scalar": _number(tensor, tensors)}
    raise TypeError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which can't be stored: a checkpoint holds numbers, strings, "
        "lists, tuples, sets, dicts and tensors only, because reading anything else back would run code"
    )


def _pack_mapping(value: Mapping[Any, Any], where: str, tensors: list[torch.Tensor], depth: int) -> Any:
    packed = [(k, _pack(v, f"{where}[{k!r}]", tensors, depth + 1)) for k, v in value.items()]
    if all(type(k) is str and k not in _MARKS for k in value):
        return dict(packed)
    return {"$dict": [[_pack(k, f"a key of {where}", tensors, depth + 1), v] for k, v in packed]}


def _number(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> int:
    tensors.append(tensor)
    return len(tensors) - 1


def _unpack(data: Any, tensors: Sequence[torch.Tensor], where: str, depth: int) -> Any:
    if depth > 2 * _DEEPEST:
        raise ValueError(f"{where} is nested too deep")

    def inner(item: Any) -> Any:
        return _unpack(item, tensors, where, depth + 1)

    if isinstance(data, list):
        return [inner(item) for item in data]
    if not isinstance(data, dict):
        return data
    mark = next(iter(data), None)
    if len(data) != 1 or mark not in _MARKS:
        return {key: inner(item) for key, item in data.items()}
    body = data[mark]
    makers: dict[str, Callable[[], Any]] = {
        "$tensor": lambda: tensors[_index(body)],
        "$array": lambda: tensors[_index(body)].numpy(),
        "$scalar": lambda: tensors[_index(body)].numpy()[0],
        "$tuple": lambda: tuple(inner(item) for item in body),
        "$set": lambda: {inner(item) for item in body},
        "$dict": lambda: {inner(k): inner(v) for k, v in body},
        "$bytes": lambda: base64.b64decode(body, validate=True),
        "$float": lambda: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[body],
        "$dtype": lambda: dtype_of(body),
        "$size": lambda: torch.Size(body),
    }
    return makers[mark]()


def _index(body: Any) -> int:
    if type(body) is not int or body < 0:
        raise ValueError(f"{body!r} is no number of a tensor")
    return body
