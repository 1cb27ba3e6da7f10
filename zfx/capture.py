"""Capture: torch.compile with a backend of ours, and its failures in the user's words.

    Dynamo graph -> AOTAutograd's joint graph -> partition -> extract -> plan -> verify -> lower -> GraphModules

Nothing here communicates: ranks may capture at different moments.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from . import build
from ._compat import aot_autograd, capturing, dynamo_errors, no_donated_buffers, recompile_limit, retainable_backwards
from .build import Captured, Planned
from .errors import CaptureError, ZfxError
from .ops import ALL_GATHER
from .partition import partition
from .recapture import Signature, reason
from .shard import Layout

if TYPE_CHECKING:
    from .blueprint import Blueprint

log = logging.getLogger("zfx")

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def compiled(blueprint: Blueprint, traced: Callable[..., Any]) -> Callable[..., Any]:
    """`traced` under torch.compile, whole graph or error."""
    levels = {"debug", "info", "warning", "error", "critical", "exception", "log"}
    for name in dir(logging.Logger):  # and what libraries add to it, such as transformers' warning_once
        if name in levels or name.endswith("_once"):
            torch._dynamo.config.ignore_logging_functions.add(getattr(logging.Logger, name))
    return torch.compile(traced, fullgraph=True, backend=_Backend(blueprint))


class _Backend:
    """Called by Dynamo with each graph that it captures. Dynamo keeps every backend for ever, so this one keeps no plans alive."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = weakref.ref(blueprint)

    @property
    def blueprint(self) -> Blueprint:
        blueprint = self._blueprint()
        assert blueprint is not None, "a model is captured only while its engine lives"
        return blueprint

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        blueprint = self.blueprint
        _check_captured(blueprint, gm, example_inputs)
        signature, start = Signature.of(example_inputs), time.perf_counter()
        why = reason(signature, blueprint.captured)
        blueprint.captured.append(signature)
        log.info(
            "%s: captured graph %d (%s) because %s",
            blueprint.model_name,
            len(blueprint.captured),
            "training" if signature.grad else "no_grad",
            why,
        )
        with retainable_backwards():
            compiled = self._compile(gm, example_inputs)
        log.info("%s: graph %d ready in %.2f s", blueprint.model_name, len(blueprint.captured), time.perf_counter() - start)
        return compiled

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        blueprint = self.blueprint
        return aot_autograd(
            fw_compiler=lambda g, _: self._forward(g),
            bw_compiler=lambda g, _: build.compile_part(blueprint, g),
            inference_compiler=lambda g, _: build.compile_inference(blueprint, g),
            partition_fn=lambda joint, inputs, **options: partition(blueprint, joint, inputs, **options),
        )(gm, example_inputs)

    def _forward(self, gm: fx.GraphModule) -> Callable[..., Any]:
        no_donated_buffers()
        return build.compile_part(self.blueprint, gm)


def _check_captured(blueprint: Blueprint, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    for value in example_inputs:
        if isinstance(value, nn.Parameter):
            raise CaptureError(
                f"the forward of {blueprint.model_name} reads a parameter of shape {tuple(value.shape)} that is not one of "
                "the model's as they were when it was compiled",
                advice="add parameters before zfx.compile, or compile the model anew after adding them",
            )
    for node in gm.graph.nodes:
        if node.target is not ALL_GATHER:
            continue
        _check_shard(blueprint.layouts[node.args[2]], node.args[0].meta.get("example_value"))
        if getattr(node.meta.get("example_value"), "_version", 0) > 0:
            name = blueprint.layouts[node.args[2]].name
            raise CaptureError(
                f"the forward changes parameter {name!r} in place; the change would be made to a gathered copy and lost",
                advice=f"make the change between steps, inside `with model.zfx.gathered([{name!r}], writeback=True):`",
                location=_line_of_change(node),
            )


def _check_shard(layout: Layout, shard: torch.Tensor | None) -> None:
    """A shard of another dtype or width than at compile time: the model was converted, or a parameter given other data."""
    if shard is None or (shard.dtype == layout.dtype and tuple(shard.shape[1:]) == layout.shape[1:]):
        return
    raise CaptureError(
        f"parameter {layout.name!r} was {layout.shape} {layout.dtype} when the model was compiled; its shard is now "
        f"{tuple(shard.shape)} {shard.dtype}",
        advice="convert or resize the model before zfx.compile",
    )


def _line_of_change(gather: fx.Node) -> str | None:
    """Where the captured code changes this value in place: the first operation on it (or a view of it) that ends in `_`."""
    related = {gather}
    for node in gather.graph.nodes:
        if any(a in related for a in node.all_input_nodes):
            related.add(node)
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', node.meta.get("stack_trace") or "")
            if name.endswith("_") and not name.endswith("__") and found:
                file, line, function = found[-1]
                return f"{file}:{line} in {function}"
    return None


@contextlib.contextmanager
def explained(check: Callable[[], None], has_rnn: bool) -> Iterator[None]:
    """Turn what torch.compile raises into a `CaptureError` that names the user's line, or into our own error that it wraps.

    Args:
        check: raises if it knows a better reason for a failed capture.
    """
    try:
        with capturing(has_rnn):
            yield
    except ZfxError:
        raise
    except dynamo_errors as error:
        inner: BaseException | None = error
        while inner is not None:
            if isinstance(inner, (ZfxError, Planned, Captured)):
                raise inner from None
            inner = getattr(inner, "inner_exception", None) or inner.__cause__
        check()
        raise _capture_error(error) from error


_ADVICE = {
    "recompile": (
        "The forward was captured anew too often: a Python value that it reads (a counter on a module, a float argument) changes "
        "at every call. Make it a tensor or a buffer, or keep it out of forward."
    ),
    "default": (
        "Rewrite that line so that it can be traced (torch.cond for a branch on data, tensor operations instead of .item() or "
        "numpy), or name the module that holds it in zfx.compile(..., leaf_modules=[...]): it then runs eagerly as one node."
    ),
}


def _capture_error(error: BaseException) -> CaptureError:
    text = str(error).strip()
    limit = "ecompile limit" in text or "recompile_limit" in text or type(error).__name__ == "FailOnRecompileLimitHit"
    reason = f"recompiled more than {recompile_limit()} times" if limit else _first_sentences(text)
    return CaptureError(
        reason, location=_location(error) or _location_in(text), advice=_ADVICE["recompile" if limit else "default"]
    )


def _first_sentences(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wanted = [line for line in lines if line.startswith(("Explanation:", "Hint:"))][:2]
    return " ".join([lines[0] if lines else "unknown", *wanted])


def _location_in(text: str) -> str | None:
    """Guards name the line that made them: `...  # self.count += 1  # model.py:68 in forward`."""
    found = re.findall(r"# (\S+:\d+ in \w+)", text)
    return found[-1] if found else None


def _location(error: BaseException) -> str | None:
    """The innermost frame of the user's own code: neither torch's nor ours."""
    frames: list[traceback.FrameSummary] = list(getattr(error, "real_stack", None) or [])
    own = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(_HERE)]
    last = (own or frames)[-1:] if frames else []
    return f"{last[0].filename}:{last[0].lineno} in {last[0].name}" if last else None
