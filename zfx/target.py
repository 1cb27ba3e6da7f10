"""Targets: what the command line is asked to plan, as a model without weights and the inputs of one call.

    hf:config.json          a causal language model of a transformers config (a file, or a folder that holds config.json)
    package.module:function a function that returns the model, on the meta device, and example inputs
    path/to/file.py:function
    llama-3-70b             an example: examples/configs/NAME.json, or the function `example` of examples/NAME.py

The function may take `batch`, `seq` and `dtype`, and gets what the user set of them. It returns `(model, inputs)`, where inputs are
one tensor, a tuple of arguments or a dict of keyword arguments, or `(model, args, kwargs)`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_EXAMPLES = (Path("examples"), Path(__file__).resolve().parent.parent / "examples")


class TargetError(ValueError):
    """The target can't be made a model, and why."""


@dataclass(frozen=True)
class Target:
    """A model and one call of it.

    Attributes:
        num_tokens: that one call of one rank trains on, where that is known.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int | None = None


def load(text: str, *, batch: int | None = None, seq: int | None = None, dtype: str | None = None) -> Target:
    """The target that a text names.

    Args:
        batch, seq: default to 1 and to the config's context, at most 4,096. Only for targets that can use them.
        dtype: a name of `DTYPES`. Default: the config's, else bfloat16.

    Raises:
        TargetError: no such target, it returns something else, or it has no use for an option that was given.
    """
    if dtype is not None and dtype not in DTYPES:
        raise TargetError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    options: dict[str, Any] = {"batch": batch, "seq": seq, "dtype": dtype}
    if text.startswith("hf:"):
        return _of_config(Path(text.removeprefix("hf:")), **options)
    if ":" in text:
        return _of_function(text, options)
    return _of_example(text, options)


# ---- examples ----------------------------------------------------------------------------------------------------------


def examples() -> dict[str, Path]:
    """The examples that are there, by name. Those of the working directory come before those beside the package."""
    found: dict[str, Path] = {}
    for root in _EXAMPLES:
        for path in (*sorted(root.glob("configs/*.json")), *sorted(root.glob("*.py"))):
            if path.suffix == ".json" or "def example(" in path.read_text(encoding="utf-8", errors="replace"):
                found.setdefault(path.stem, path)
    return found


def _of_example(name: str, options: dict[str, Any]) -> Target:
    known = examples()
    if name not in known:
        raise TargetError(
            f"no example is called {name!r} ({'known are ' + ', '.join(known) if known else 'no examples are here'}); a target is "
            "module:function, file.py:function, hf:path/to/config.json or an example's name"
        )
    path = known[name]
    return _of_config(path, **options) if path.suffix == ".json" else _of_function(f"{path}:example", options)


# ---- transformers ------------------------------------------------------------------------------------------------------


def _of_config(path: Path, batch: int | None, seq: int | None, dtype: str | None) -> Target:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise TargetError("an hf: target needs transformers: pip install transformers") from None
    values = _read_config(path / "config.json" if path.is_dir() else path)
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise TargetError(f'{path}: a transformers config names its architecture in "model_type"')
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:
        raise TargetError(f"{path}: transformers knows no config like this: {_line(error)}") from None
    batch = 1 if batch is None else batch
    seq = min(getattr(config, "max_position_embeddings", 4096), 4096) if seq is None else seq
    wanted = DTYPES[dtype] if dtype else getattr(config, "dtype", None) or torch.bfloat16
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    except Exception as error:
        raise TargetError(f"{path}: transformers makes no causal language model of {kind!r}: {_line(error)}") from None
    ids = torch.empty((batch, seq), dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return Target(f"{path.stem} ({type(model).__name__})", model, (), inputs, batch * seq)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise TargetError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise TargetError(f"{path} is not a transformers config: it holds no JSON object")
    return values


# ---- functions ---------------------------------------------------------------------------------------------------------


def _of_function(text: str, options: dict[str, Any]) -> Target:
    function = _find(text)
    given = {key: value for key, value in options.items() if value is not None}
    try:
        known = inspect.signature(function).parameters
    except ValueError:
        known = inspect.signature(lambda: None).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    unknown = [key for key in given if key not in known and not takes_all]
    if unknown:
        raise TargetError(f"{text} takes no {unknown[0]!r}: --{unknown[0]} is for functions with such a parameter")
    if "dtype" in given:
        given["dtype"] = DTYPES[given["dtype"]]
    try:
        result = function(**given)
    except Exception as error:
        raise TargetError(f"{text} raised {type(error).__name__}: {_line(error)}") from error
    return _checked(text, result)


def _checked(text: str, result: Any) -> Target:
    wanted = "(model, inputs) or (model, args, kwargs)"
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise TargetError(f"{text} must return {wanted}, got {_kind(result)}")
    model, inputs, *more = result
    if not isinstance(model, nn.Module):
        raise TargetError(f"{text} must return {wanted} with an nn.Module, got {_kind(model)}")
    kwargs: Any = more[0] if more else {}
    if not more and isinstance(inputs, Mapping):
        inputs, kwargs = (), inputs
    args = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TargetError(f"{text} must return {wanted} with inputs as a tensor, a tuple or a dict, got {_kind(result[1])}")
    return Target(f"{text} ({type(model).__name__})", model, tuple(args), dict(kwargs))


def _find(text: str) -> Callable[..., Any]:
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise TargetError(f"{text!r} is not module:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise TargetError(f"{place} has no function {name!r}")
    return function


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # classes of the file find their module, as in an import
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(f"{path} can't be run: {type(error).__name__}: {_line(error)}") from error
    return module


def _from_path(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise TargetError(f"cannot import {name}: {type(error).__name__}: {_line(error)}") from error


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"{type(value).__name__}"


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
