"""What the command line prints: tables from the plain data that `--json` prints, so that both say the same."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import text
from .costs import CostModel

_WIDTH = 120  # of tables that do not go to a terminal


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDTH, color_system=None)


def print_json(value: Mapping[str, Any]) -> None:
    """Infinities and NaN, which JSON lacks, become null."""

    def plain(item: Any) -> Any:
        if isinstance(item, float) and not math.isfinite(item):
            return None
        if isinstance(item, Mapping):
            return {str(key): plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        return item if isinstance(item, (str, int, float, bool, type(None))) else repr(item)

    print(json.dumps(plain(value), indent=1, allow_nan=False))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold", no_wrap=i > 0)
    return table


def _bytes(value: int) -> str:
    return text.human_bytes(value)


def print_plan(answer: Mapping[str, Any]) -> None:
    console, memory, clock = _console(), answer["memory"], answer["time"]
    parameters = answer["parameters"]
    console.print(f"{answer['target']}: {parameters['count']:,} parameters with {parameters['elements']:,} elements")
    console.print(f"on {answer['world_size']:,} ranks{_replicas(answer)}; costs: {answer['costs']}")
    bounds = [f"{name}={value:,}" for name, value in answer["limits"].items() if value is not None and value < 2**62]
    console.print(f"limits: {', '.join(bounds)}\n")
    if not answer["fits"]:
        console.print(f"DOES NOT FIT: {answer['error']['message']}")
        console.print("What follows is the schedule that holds least, which is too much all the same.\n")

    console.print("Memory of a rank")
    kinds = {"parameters": "gathered", **{kind: kind for kind in ("packing", "gradients", "activations", "shards")}}
    if "reshard_to" in answer:
        kinds["secondary"] = "secondary"
    blanks = [""] * len(kinds)
    table = _table("", *kinds.values(), "total", "at step")
    for label, key in (("peak", "peak"), ("end of forward", "forward_end"), ("end of backward", "backward_end")):
        row = memory[key]
        if row is not None:
            table.add_row(label, *(_bytes(row[f"{kind}_bytes"]) for kind in (*kinds, "total")), text.shorten(row["step"], 32))
    table.add_row("optimizer state", *blanks, _bytes(memory["optimizer_bytes"]), "")
    table.add_row("peak with it", *blanks, _bytes(memory["total_bytes"]), "")
    room = int(answer["device_bytes"] * (1 - answer["margin"]))
    free = room - memory["total_bytes"]
    note = f"{_bytes(free)} free" if free >= 0 else f"{_bytes(-free)} short"
    table.add_row(f"{answer['device']} less {answer['margin']:.0%}", *blanks, _bytes(room), note)
    console.print(table)
    console.print(f"gathered: whole parameters; shards: parameters and their gradients. {answer['optimizer']}.\n")

    micro = f" of {answer['accumulate']:,} micro-batches" if answer["accumulate"] > 1 else ""
    console.print(f"Time of an optimizer step{micro}, without the optimizer itself")
    table = _table("", "", "")
    total = clock["step_us"] or 1.0
    rows = {"predicted": "step_us", "compute": "compute_us", "launching": "launch_us", "exposed communication": "exposed_us"}
    for label, key in rows.items():
        table.add_row(label, text.human_time(clock[key]), f"{clock[key] / total:.1%}")
    table.show_header = False
    console.print(table)
    if answer.get("tokens_per_second"):
        tokens = answer["tokens_per_second"]
        console.print(f"{tokens:,.0f} tokens/s, {tokens / answer['world_size']:,.0f} a rank")

    volume, kept, buckets = answer["volume"], answer["kept"], answer["buckets"]
    console.print("\nCommunication of a rank")
    table = _table("", "bytes", "busy", "buckets")
    table.add_row("gathered", _bytes(volume["gathered_bytes"]), text.human_time(clock["gather_us"]), f"{buckets['all_gather']:,}")
    if "reshard_to" in answer:
        busy, what = text.human_time(clock["secondary_us"]), "of it from secondary shards"
        table.add_row(what, _bytes(volume["secondary_bytes"]), busy, "")
    table.add_row("reduced", _bytes(volume["reduced_bytes"]), text.human_time(clock["reduce_us"]), f"{buckets['reduce_scatter']:,}")
    if answer["replicas"] > 1:
        busy = text.human_time(clock["all_reduce_us"])
        table.add_row("all-reduced", _bytes(volume["all_reduced_bytes"]), busy, f"{buckets['reduce_scatter']:,}")
    table.add_row("kept across the turn", _bytes(kept["bytes"]), "", "")
    if "reshard_to" in answer:
        table.add_row("secondary shards over it", _bytes(answer["resharded"]["bytes"]), "", "")
    console.print(table)

    console.print("\nCertificate: no schedule under these limits beats the bound")
    table = _table("", "achieved", "bound", "ratio", "what binds")
    for what, shown in (("time", text.human_time), ("volume", _bytes), ("peak", _bytes)):
        row = answer["certificate"][what]
        ratio = f"{row['ratio']:.3f}" if row["ratio"] is not None else "-"
        table.add_row(what, shown(row["achieved"]), shown(row["bound"]), ratio, row["binds"])
    console.print(table)


def _replicas(answer: Mapping[str, Any]) -> str:
    replicas = answer["replicas"]
    resharded = f", resharded to {answer['reshard_to']:,}" if "reshard_to" in answer else ""
    return (f", {replicas:,} replicas of {answer['world_size'] // replicas:,}" if replicas > 1 else "") + resharded


def print_sweep(answer: Mapping[str, Any]) -> None:
    console = _console()
    console.print(f"{answer['target']} on {answer['world_size']:,} x {answer['device']}{_replicas(answer)}, {answer['network']}")
    console.print(f"{answer['optimizer']}\n")
    table = _table("budget", "peak", "with optimizer", "step time", "exposed", "gathered", "kept", "time/bound", "fits")
    for row in answer["points"]:
        budget = row["limits"]["memory_budget"]
        table.add_row(
            "none" if budget is None else _bytes(budget),
            _bytes(row["memory"]["peak"]["total_bytes"]),
            _bytes(row["memory"]["total_bytes"]),
            text.human_time(row["time"]["step_us"]),
            text.human_time(row["time"]["exposed_us"]),
            _bytes(row["volume"]["gathered_bytes"]),
            _bytes(row["kept"]["bytes"]),
            f"{row['certificate']['time']['ratio']:.3f}",
            "yes" if row["fits"] else "no",
        )
    console.print(table)


def print_costs(costs: CostModel, path: Path) -> None:
    console = _console()
    console.print(f"{costs.source}\n")
    table = _table("", "overhead or latency", "flops/s", "bytes/s")
    for rate in costs.rates:
        table.add_row(
            rate.kind, text.human_time(rate.overhead_us), f"{rate.flops_per_us * 1e6:.2e}", f"{rate.bytes_per_us * 1e6:.2e}"
        )
    for name, link in (("all-gather", costs.gather), ("reduce-scatter", costs.reduce), ("all-reduce", costs.all_reduce)):
        table.add_row(name, text.human_time(link.latency_us), "", f"{link.bytes_per_us * 1e6:.2e}")
    console.print(table)
    console.print(f"\nwrote {path}")


def print_diff(found: Mapping[str, Any], most: int) -> None:
    console = _console()
    if not found:
        console.print("the schedules are the same")
    for section in ("limits", "totals", "program", "costs"):
        if section in found:
            console.print(section)
            table = _table("", "old", "new")
            for key, value in found[section].items():
                pair = value if isinstance(value, tuple) else ("", f"{len(value):,}: {', '.join(value[:3])}")
                table.add_row(key, *(_shown(key, side) for side in pair))
            console.print(table)
    for section in ("kept", "carried"):
        for key, names in found.get(section, {}).items():
            console.print(f"{section}, {key}: {len(names):,}")
            _print_names(console, names, most)
    for kind, row in found.get("buckets", {}).items():
        console.print(f"buckets of {kind}: {row['count'][0]:,} -> {row['count'][1]:,}")
        for side, mark in (("only_old", "-"), ("only_new", "+")):
            _print_names(console, [", ".join(members) for members in row[side]], most, mark)
    for kind, rows in found.get("moved", {}).items():
        console.print(f"{kind}: {len(rows):,} moved")
        table = _table("parameter", "before step", "now before step")
        for row in rows[:most]:
            sides = (("-" if side is None else text.shorten(side, 36)) for side in (row["from"], row["to"]))
            table.add_row(text.shorten(row["parameter"], 40), *sides)
        console.print(table)
        if len(rows) > most:
            console.print(f"  and {len(rows) - most:,} more")
    if "order" in found:
        console.print(found["order"])


def _shown(key: str, value: Any) -> str:
    if key.endswith("_us") and isinstance(value, float):
        return text.human_time(value)
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{_bytes(value)} ({value:,})"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else text.printable(str(value))[:60]


def _print_names(console: Console, names: Sequence[str], most: int, mark: str = " ") -> None:
    for name in names[:most]:
        console.print(f"  {mark} {text.printable(name)}", soft_wrap=True)
    if len(names) > most:
        console.print(f"  {mark} and {len(names) - most:,} more")


def print_checkpoint(answer: Mapping[str, Any], most: int | None) -> None:
    console = _console()
    saved = "not written by zfx"
    if answer["step"] is not None:
        saved = f"step {answer['step']:,}, saved by {answer['world_size']:,} ranks"
    console.print(f"{text.printable(answer['path'])}: {saved}{', verified' if answer['verified'] else ''}")
    console.print(
        f"model {answer['num_elements']:,} elements, {_bytes(answer['model_bytes'])}; "
        f"optimizer {_bytes(answer['optimizer_bytes'])}\n"
    )
    table = _table("tensor", "shape", "dtype", "bytes", "pieces", "optimizer")
    found = answer["tensors"]
    for row in found if most is None else found[:most]:
        name = row["name"] + (f" = {', '.join(row['aliases'])}" if row["aliases"] else "")
        shape = " x ".join(f"{n:,}" for n in row["shape"]) or "scalar"
        table.add_row(
            text.printable(name), shape, row["dtype"], _bytes(row["num_bytes"]), str(row["num_pieces"]), ", ".join(row["optimizer"])
        )
    console.print(table)
    if most is not None and len(found) > most:
        console.print(f"and {len(found) - most:,} more; --full shows them")
