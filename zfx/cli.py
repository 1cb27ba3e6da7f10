"""The command line: plan before you rent; look at, compare and check what was planned; read and convert checkpoints.

    zfx plan TARGET --world-size 64 --device h100 --network nvlink:8,ib        zfx show FILE       zfx diff OLD NEW
    zfx plan TARGET --find-world-size                                         zfx verify FILE     zfx calibrate
    zfx plan TARGET --world-size 64 --sweep --out frontier.svg
    zfx inspect CHECKPOINT      zfx export CHECKPOINT OUT      zfx import-deepspeed DIRECTORY OUT

Exit codes: 0 yes; 1 no (does not fit, can't be captured, invalid); 2 the question makes no sense (a missing file, an unknown name).
Results go to stdout, progress to stderr; with `--json`, stdout holds one JSON object whatever happens.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from . import dump, tables
from .cli_base import AsJson, No, Usage, amount, app, bar, busy, check_folder
from .costs import CostModel
from .errors import CaptureError, InfeasibleBudget, ZfxError
from .ir import Program, Schedule
from .limits import Limits

_NODE_SIZE = 8
_CAPTURE_RANKS = 1024  # captured graphs do not depend on it


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Never raises for what a user can do wrong."""
    from . import cli_schedules, cli_state  # noqa: F401  # the other commands

    try:
        code = app(list(arguments) or ["--help"], prog_name="zfx", standalone_mode=False)
        return int(code or 0)
    except (No, ZfxError) as error:
        facts = dict(error.facts) if isinstance(error, No) else {"type": type(error).__name__, **vars(error)}
        return _fail(arguments, str(error), 1, facts)
    except (Usage, ValueError, OSError) as error:
        return _fail(arguments, _reason(error), 2, {})
    except KeyboardInterrupt:
        return 130
    except typer.TyperException as error:  # the parser's own
        return _fail(arguments, error.format_message(), 2, {})


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _fail(arguments: Sequence[str], message: str, code: int, facts: Mapping[str, Any]) -> int:
    if "--json" in arguments:
        tables.print_json({"error": {"message": message, **facts}, "exit_code": code})
    else:
        Console(stderr=True, soft_wrap=True, highlight=False).print(Text(f"zfx: {message}"))
    return code


# ---- options -----------------------------------------------------------------------------------------------------------


def _budget(value: str) -> str:
    return value if value in ("auto", "none") else str(amount(value))


Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="module:function, file.py:function, hf:path/to/config.json, or an example's name.")
]


def _elements(name: str, what: str) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", parser=amount, metavar="ELEMENTS", help=what)


# ---- commands ----------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    target: Target,
    world_size: Annotated[int | None, typer.Option("--world-size", "-n", metavar="N", help="Ranks.")] = None,
    replicas: Annotated[int, typer.Option(help="Replicas of the model: each is sharded over N / replicas ranks in a row.")] = 1,
    reshard_after_forward: Annotated[
        int | None, typer.Option(metavar="N", help="Secondary shards: the backward may gather from N ranks in a row, as of a node.")
    ] = None,
    device: Annotated[str, typer.Option(help="A preset (a100, h100, ...) or custom:...")] = "h100",
    network: Annotated[str, typer.Option(help="Tiers from the inside out.")] = "nvlink:8,ib",
    costs: Annotated[
        Path | None, typer.Option(help="Measured costs, as `zfx calibrate` writes them, in place of the presets.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Share of the device's memory to keep free.")] = 0.1,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw-fp32 or none.")] = "adamw",
    seq: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows on each rank.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the parameters, and so of their shards.")] = None,
    param_dtype: Annotated[
        str | None, typer.Option(help="What they are gathered and computed in (zfx.Precision), if that is another one.")
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Recompute each layer's activations (transformers models).")
    ] = False,
    backward: Annotated[bool, typer.Option("--backward/--no-backward", help="Training, or the forward alone.")] = True,
    accumulate: Annotated[int, typer.Option(help="Micro-batches an optimizer step.")] = 1,
    uniform: Annotated[bool, typer.Option("--uniform", help="Every rank runs these very shapes: see zfx.compile.")] = False,
    memory_budget: Annotated[
        str,
        typer.Option(parser=_budget, metavar="BYTES|auto|none", help="auto: the device's memory, less margin and optimizer."),
    ] = "auto",
    max_live_parameters: Annotated[int | None, _elements("max_live_parameters", "Default: none under a memory budget.")] = None,
    max_reuse_distance: Annotated[int | None, _elements("max_reuse_distance", "Default: none under a memory budget.")] = None,
    prefetch_bucket_size: Annotated[int | None, _elements("prefetch_bucket_size", "Most that one all-gather carries.")] = None,
    reduce_bucket_size: Annotated[int | None, _elements("reduce_bucket_size", "Most that one reduce-scatter carries.")] = None,
    param_persistence_threshold: Annotated[int | None, _elements("param_persistence_threshold", "Kept if this small.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Step time against memory; --out may then be a .png or .svg.")] = False,
    points: Annotated[int, typer.Option(help="Of the sweep.")] = 8,
    find_world_size: Annotated[bool, typer.Option("--find-world-size", help="How few ranks the model fits on.")] = False,
    out: Annotated[list[Path] | None, typer.Option(help="Write the schedule: .json, .dot, .graphml, ... May be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a model for a cluster: memory, time, volume, and how far from the best possible. Needs no GPU and no weights."""
    from . import target as targets
    from .estimate import OPTIMIZERS

    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    os.environ.pop("RANK", None)  # whoever started this, a job script perhaps, must not make it wait for other ranks
    if (world_size is None) != find_world_size:
        raise Usage("say --world-size N or --find-world-size, one of the two")
    if sweep and find_world_size:
        raise Usage("--sweep is for one --world-size")
    numbers = {"world-size": world_size, "replicas": replicas, "seq": seq, "batch": batch, "accumulate": accumulate}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise Usage(f"--{name} must be at least 1, got {value}")
    if world_size is not None and world_size % replicas:
        raise Usage(f"--world-size {world_size} can't be divided among --replicas {replicas}")
    smaller = _smaller_group(reshard_after_forward, world_size, replicas)
    if sweep and points < 2:
        raise Usage(f"--points must be at least 2, got {points}")
    if not 0 <= margin < 1:
        raise Usage(f"--margin must be a share from 0 up to 1, got {margin}")
    if param_dtype is not None and param_dtype not in targets.DTYPES:
        raise Usage(f"unknown --param-dtype {param_dtype!r}; known are {', '.join(targets.DTYPES)}")
    if optimizer not in OPTIMIZERS:
        raise Usage(f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
    _check_out(out or [], sweep)
    elements = {
        "max_live_parameters": max_live_parameters,
        "max_reuse_distance": max_reuse_distance,
        "prefetch_bucket_size": prefetch_bucket_size,
        "reduce_bucket_size": reduce_bucket_size,
        "param_persistence_threshold": param_persistence_threshold,
    }
    given = {name: value for name, value in elements.items() if value is not None}
    cluster = _Cluster(device, network, costs, margin, optimizer, memory_budget, given, replicas, smaller)
    if world_size is not None:
        cluster.costs_at(world_size)  # wrong names are told before the long work
    found = targets.load(target, batch=batch, seq=seq, dtype=dtype)
    if checkpoint:
        _checkpoint(found)
    captured = _captured(found, backward, param_dtype)

    def program_at(ranks: int) -> Program:
        program = captured.program(ranks, cluster.costs_at(ranks), replicas)
        return replace(program, uniform=uniform, reshard_to=smaller(ranks // replicas))

    if find_world_size:
        world_size = _fewest(captured, cluster, program_at, as_json)
    assert world_size is not None
    with busy("preparing"):
        program = program_at(world_size)
    question = {"target": found.name, "device": device, "network": network, "optimizer": OPTIMIZERS[optimizer].rule}
    if sweep:
        _sweep(captured, program, cluster, points, accumulate, question, out or [], as_json)
    else:
        _plan_once(captured, program, cluster, accumulate, question, found.num_tokens, out or [], as_json)


# ---- plan --------------------------------------------------------------------------------------------------------------


def _smaller_group(wanted: int | None, world_size: int | None, replicas: int) -> Callable[[int], int]:
    """From the ranks of a replica to those of the groups that parameters are resharded to. Numbers of ranks that can't be divided
    that way, which are only tried, do without."""
    from .api import smaller_group

    if wanted is not None and wanted < 2:
        raise Usage(f"--reshard-after-forward must be at least 2, got {wanted}")
    num_shards = 0 if world_size is None else world_size // replicas
    if wanted is not None and num_shards % wanted:
        raise Usage(f"--reshard-after-forward {wanted} does not divide the {num_shards} ranks that parameters are sharded over")
    return lambda num_shards: 0 if wanted is None or num_shards % wanted else smaller_group(wanted, num_shards)


class _Cluster:
    """What the options say of the cluster and the limits."""

    def __init__(
        self,
        device: str,
        network: str,
        costs: Path | None,
        margin: float,
        optimizer: str,
        budget: str,
        elements: Mapping[str, int],
        replicas: int,
        smaller: Callable[[int], int],
    ) -> None:
        from .estimate import OPTIMIZERS
        from .presets import device_for

        self.device, self.network, self.margin, self.budget = device, network, margin, budget
        self.optimizer = OPTIMIZERS[optimizer]
        self.memory_bytes = device_for(device).memory_bytes
        self.measured = None if costs is None else _read_costs(costs)
        self.elements, self.replicas, self.smaller = elements, replicas, smaller
        Limits(**elements)

    def costs_at(self, world_size: int) -> CostModel:
        from .presets import costs_for

        smaller = self.smaller(world_size // self.replicas)
        return self.measured or costs_for(self.device, self.network, world_size, self.replicas, smaller)

    def optimizer_bytes(self, captured: Any, program: Program) -> int:
        from .estimate import optimizer_bytes

        return optimizer_bytes(captured, program, self.optimizer)

    def limits(self, captured: Any, program: Program) -> Limits:
        """Under a memory budget DeepSpeed's element counts bound nothing, unless they were given."""
        from .estimate import NO_BOUND

        if self.budget == "none":
            return Limits(**self.elements)
        room = int(self.memory_bytes * (1 - self.margin)) - self.optimizer_bytes(captured, program)
        budget = max(room, 0) if self.budget == "auto" else int(self.budget)
        return Limits(**{"max_live_parameters": NO_BOUND, "max_reuse_distance": NO_BOUND, **self.elements, "memory_budget": budget})


def _read_costs(path: Path) -> CostModel:
    from .calibrate import load_costs

    return load_costs(path)


def _checkpoint(found: Any) -> None:
    enable = getattr(found.model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise Usage("--checkpoint is for transformers models; use torch.utils.checkpoint in a model of your own")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _captured(found: Any, backward: bool, param_dtype: str | None) -> Any:
    import torch

    from .api import compile as compile_
    from .precision import Precision
    from .target import DTYPES

    found.model.train(backward)
    precision = Precision(DTYPES[param_dtype]) if param_dtype else None
    model = compile_(found.model, world_size=_CAPTURE_RANKS, precision=precision)
    with busy(f"capturing {found.name}"), torch.set_grad_enabled(backward):
        try:
            captured = model.zfx.capture(*found.args, **found.kwargs)
        except CaptureError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            line = next((part for part in str(error).splitlines() if part.strip()), type(error).__name__)
            raise No(f"{found.name} can't be called with these inputs: {line}") from error
    if backward and captured.backward is None:
        raise No(
            f"{found.name}: no output of this call depends on a parameter that needs a gradient, so there is no backward to plan; "
            "say --no-backward to plan the forward alone"
        )
    return captured


def _plan_once(
    captured: Any,
    program: Program,
    cluster: _Cluster,
    accumulate: int,
    question: dict[str, Any],
    num_tokens: int | None,
    out: Sequence[Path],
    as_json: bool,
) -> None:
    from .estimate import estimate, facts, least

    limits, optimizer_bytes = cluster.limits(captured, program), cluster.optimizer_bytes(captured, program)
    device = {"device_bytes": cluster.memory_bytes, "margin": cluster.margin}
    with busy(f"planning {len(program.steps):,} steps"):
        try:
            found, refusal = estimate(program, limits, optimizer_bytes, accumulate), None
        except InfeasibleBudget as error:
            found, refusal = least(program, optimizer_bytes), error
    answer = {**question, **device, "fits": refusal is None, **facts(found)}
    answer["limits"] = {f.name: getattr(limits, f.name) for f in fields(limits)}
    if refusal is None:
        answer["tokens_per_second"] = num_tokens and num_tokens * program.world_size * accumulate / (found.step_us / 1e6)
        for path in out:
            _save(found.schedules, path)
    else:
        answer["error"] = {"message": str(refusal), "type": type(refusal).__name__, **vars(refusal)}
    if as_json:
        tables.print_json(answer)
    else:
        tables.print_plan(answer)
    if refusal is not None:
        raise typer.Exit(1)


def _save(schedules: Sequence[Schedule], path: Path) -> None:
    """One file; with several kinds of micro-batches one for each, named for its window."""
    for schedule in schedules:
        window = schedule.program.window
        name = path.name if len(schedules) == 1 else f"{path.name.partition('.')[0]}.{window}.{path.name.partition('.')[2]}"
        dump.save(schedule, path.with_name(name))


def _check_out(paths: Sequence[Path], sweep: bool) -> None:
    """A wrong name is told before the long work."""
    for path in paths:
        check_folder(path)
        if sweep:
            if path.suffix.lower() not in (".png", ".svg", ".pdf"):
                raise Usage(f"cannot draw {path}: --sweep writes .png, .svg or .pdf")
            try:
                import matplotlib  # noqa: F401
            except ImportError:
                raise Usage("drawing needs matplotlib: pip install 'zfx[cli]'") from None
        else:
            dump.writer_of(path)


def _fewest(captured: Any, cluster: _Cluster, program_at: Callable[[int], Program], as_json: bool) -> int:
    from .sweep import MOST_RANKS, find_world_size

    with busy("finding the fewest ranks") as said:
        answer = find_world_size(
            lambda ranks: program_at(ranks * cluster.replicas),
            lambda program: cluster.limits(captured, program),
            _node_size(cluster.network),
            MOST_RANKS,
            lambda ranks, fits: said(f"finding the fewest ranks: {ranks * cluster.replicas:,} {'fit' if fits else 'are too few'}"),
        )
    if answer.world_size is None:
        assert answer.refused is not None
        ranks, refusal = answer.refused
        raise No(
            f"no number of ranks is enough; {ranks * cluster.replicas:,} come closest: {refusal}",
            world_size=None,
            type="InfeasibleBudget",
            **vars(refusal),
        )
    if not as_json:
        before = f"; {answer.refused[0] * cluster.replicas:,} are too few" if answer.refused else ""
        print(f"fewest ranks: {answer.world_size * cluster.replicas:,}{before}\n")
    return answer.world_size * cluster.replicas


def _node_size(network: str) -> int:
    """How many ranks the innermost tier reaches, if the network says so."""
    ranks = re.match(r"[^,]*?:(\d+)", network)
    return int(ranks[1]) if ranks else _NODE_SIZE


def _sweep(
    captured: Any,
    program: Program,
    cluster: _Cluster,
    num_points: int,
    accumulate: int,
    question: dict[str, Any],
    out: Sequence[Path],
    as_json: bool,
) -> None:
    from .estimate import Estimate, facts
    from .sweep import draw, frontier

    optimizer_bytes = cluster.optimizer_bytes(captured, program)
    found: list[Estimate] = []
    with bar("planning", num_points) as advance:
        for one in frontier(program, cluster.limits(captured, program), optimizer_bytes, num_points, accumulate):
            found.append(one)
            advance()
    room = int(cluster.memory_bytes * (1 - cluster.margin))
    rows = [{"fits": one.peak_bytes + one.optimizer_bytes <= room, **facts(one)} for one in found]
    answer = {
        **question,
        "device_bytes": cluster.memory_bytes,
        "margin": cluster.margin,
        "world_size": program.world_size,
        "replicas": program.replicas,
        **({"reshard_to": program.reshard_to} if program.reshard_to else {}),
        "points": rows,
    }
    for path in out:
        draw(answer, path)
    if as_json:
        tables.print_json(answer)
    else:
        tables.print_sweep(answer)
