"""The class of a compiled model: a subclass of its own, in which a call goes through the engine, and whole tensors may be loaded.

Made anew for each model, which it must not outlive.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ._compat import make_dtensor
from .agreement import digest_of
from .conversion import is_transformers
from .dtensors import explained_methods
from .engine import Engine, is_gathered
from .errors import LoopError
from .fingerprint import fingerprint
from .handle import Handle
from .shard import shard_of, unique_parameters


def subclass(base: type[nn.Module], place: tuple[str, str] | None) -> type[nn.Module]:
    """
    Args:
        place: module path and name of one of its parameters, if it has any.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "_zfx_engine" not in self.__dict__ or is_gathered(self, place):  # made from parts of it, or called in its function
            return base.forward(self, *args, **kwargs)
        return self.__dict__["_zfx_engine"](self, args, kwargs)

    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_zfx_engine"].held.values.clear()
        base.zero_grad(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(explained_methods(base))
        namespace.update(copying(base))
        if hasattr(base, "generate"):
            namespace.update(generate=_generate(base))
        namespace.update(
            zero_grad=zero_grad,
            forward=forward,
            load_state_dict=_load_state_dict(base),
            zfx=property(lambda self: Handle(self, self.__dict__["_zfx_engine"])),
            __module__=base.__module__,
            __doc__=base.__doc__,
            __qualname__=base.__qualname__,
        )
        if is_transformers(base):
            namespace.update(save_pretrained=_save_pretrained, resize_token_embeddings=_resize_token_embeddings)

    return types.new_class(base.__name__, (base,), exec_body=body)


def copying(base: type[nn.Module]) -> dict[str, Any]:
    """Copies within the process, and an error for those that leave it."""

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        return copy._reconstruct(self, memo, *base.__reduce_ex__(self, 4))  # type: ignore[attr-defined]

    def shallow_copy(self: nn.Module) -> nn.Module:
        return copy._reconstruct(self, None, *base.__reduce_ex__(self, 4))  # type: ignore[attr-defined]

    def refused(self: nn.Module, *args: Any) -> Any:
        raise LoopError(
            f"a compiled model can't be pickled or shared with other processes: this rank holds shards of {base.__name__}. Save "
            "its state with torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True)), and compile in each process"
        )

    methods: dict[str, Any] = {"share_memory": refused, "__reduce_ex__": refused}
    if not hasattr(base, "__deepcopy__"):
        methods["__deepcopy__"] = deepcopy
    if not hasattr(base, "__copy__"):
        methods["__copy__"] = shallow_copy
    return methods


def _generate(base: Any) -> Callable[..., Any]:
    """transformers' `generate`, with `synced_gpus=True` where there are several ranks: whoever has its text goes on with them."""

    @functools.wraps(base.generate)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        takes_it = "synced_gpus" in inspect.signature(base.generate).parameters
        if takes_it and kwargs.get("synced_gpus") is None and self.__dict__["_zfx_engine"].blueprint.world_size > 1:
            kwargs["synced_gpus"] = True
        return base.generate(self, *args, **kwargs)

    return generate


def _load_state_dict(base: type[nn.Module]) -> Any:
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, with whole tensors or DTensors: of a whole one every rank takes its rows. A collective call.

        Values are copied into the parameters that are there, also with `assign=True`, so that optimizers keep their parameters;
        the tensors given must then have the dtypes that the model has.

        Raises:
            RankMismatch: ranks give different tensors (a sample of their values is compared).
            ValueError: `assign=True` would change a dtype.
            RuntimeError: as torch's: names or shapes do not match.
        """
        engine: Engine = self.__dict__["_zfx_engine"]
        if engine.blueprint.channels is None:
            return base.load_state_dict(self, state_dict, strict=strict, assign=assign)
        lines = [f"load_state_dict of {engine.blueprint.model_name}, strict={strict}, assign={assign}"]
        own = {name for name, _ in self.named_buffers()}  # each rank's own, so that their values may differ
        lines += [f"{name}: {_described(value, name not in own)}" for name, value in state_dict.items()]
        engine.blueprint.channels.agreement.begin(digest_of(lines), lines)
        if assign:
            _check_dtypes(self, state_dict)
        return base.load_state_dict(self, _cut(self, engine, state_dict), strict=strict)

    return load_state_dict


def _described(value: Any, with_values: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = f"{tuple(value.shape)} {value.dtype}"
    if hasattr(value, "_local_tensor"):
        return f"{kind}, a DTensor"
    if value.is_meta:
        return f"{kind} on meta"
    return f"{kind} with values {fingerprint(value)}" if with_values else kind


def _check_dtypes(model: nn.Module, given: Mapping[str, Any]) -> None:
    for name, own in model.state_dict().items():
        value = given.get(name)
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and value.dtype != own.dtype:
            raise ValueError(
                f"load_state_dict(assign=True) would make {name!r} {value.dtype}, and the model was compiled with {own.dtype}: "
                "leave assign out to convert the values, or convert the model before zfx.compile"
            )


def _cut(model: nn.Module, engine: Engine, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with this rank's part, as a DTensor, of each whole tensor that is for a parameter and has its shape."""
    blueprint, cut = engine.blueprint, dict(given)
    assert blueprint.channels is not None
    for param, owners in unique_parameters(model):
        layout = blueprint.layouts[blueprint.index[owners[0].name]]
        for owner in owners:
            value = given.get(owner.name)
            if isinstance(value, torch.Tensor) and not hasattr(value, "_local_tensor") and tuple(value.shape) == layout.shape:
                local = shard_of(layout, value.detach(), blueprint.channels.gathers.rank, param._local_tensor.device)  # type: ignore[attr-defined]
                cut[owner.name] = make_dtensor(local, param._spec)  # type: ignore[attr-defined]
    metadata = getattr(given, "_metadata", None)
    if metadata is not None:
        ordered = type(given)(cut)  # type: ignore[call-arg]
        ordered._metadata = metadata  # type: ignore[attr-defined]
        return ordered
    return cut


def _save_pretrained(self: nn.Module, save_directory: Any, max_shard_size: int | str = "50GB", **options: Any) -> None:
    """`zfx.save_pretrained`. A collective call: every rank makes it."""
    from .pretrained import save_pretrained

    options.pop("is_main_process", None)
    if options.pop("safe_serialization", True) and not options:
        save_pretrained(self, save_directory, max_shard_size=max_shard_size)
        return
    raise ValueError(
        f"a compiled model is saved in safetensors files, by max_shard_size alone; not known: {', '.join(options) or 'pickle'}. "
        "zfx.save_pretrained writes a directory, from which a plain model can be loaded for anything else"
    )


def _resize_token_embeddings(self: Any, new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
    """Refused where it would change a parameter's shape."""
    embeddings = self.get_input_embeddings()
    if new_num_tokens in (None, embeddings.weight.shape[0]) and not args and not options.get("pad_to_multiple_of"):
        return embeddings
    raise ValueError(
        "a compiled model's parameters keep their shapes: resize the embeddings before zfx.compile. For a model that is being "
        "trained: zfx.save_pretrained(model, directory), from_pretrained(directory), resize_token_embeddings, zfx.compile anew"
    )
