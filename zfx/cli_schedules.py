"""`zfx show`, `verify`, `diff` and `calibrate`: schedules and costs that are there already."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import dump, tables, text
from .cli_base import AsJson, Usage, app, bar, check_folder
from .ir import Schedule

File = Annotated[Path, typer.Argument(metavar="FILE", help="A schedule as JSON.")]


@app.command()
def show(
    file: File,
    full: Annotated[bool, typer.Option("--full", help="Every step and every name.")] = False,
    totals: Annotated[bool, typer.Option("--report", help="Totals only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a schedule."""
    schedule = _read(file)
    if as_json:
        from .estimate import facts_of

        tables.print_json({"file": str(file), **facts_of(schedule)})
    else:
        print(text.report(schedule) if totals else text.render(schedule, full=full))


@app.command()
def verify(file: File, as_json: AsJson = False) -> None:
    """Check a schedule against every rule, and list what breaks them."""
    from .verify import RULES, violations

    schedule = _read(file)
    found = list(violations(schedule))
    if as_json:
        rows = [{"rule": v.rule, "message": str(v), "step": v.step, "parameter": v.parameter} for v in found]
        tables.print_json({"file": str(file), "valid": not found, "violations": rows})
    else:
        for violation in found:
            print(text.printable(str(violation)))
        print(f"{file}: {f'{len(found):,} violations' if found else f'valid by all {len(RULES)} rules'}")
    if found:
        raise typer.Exit(1)


@app.command("diff")
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD")],
    new: Annotated[Path, typer.Argument(metavar="NEW")],
    rows: Annotated[int, typer.Option(help="Most rows of each kind.")] = 10,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="1 if they differ.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two schedules: limits, what is kept, buckets, gathers and releases that moved, totals."""
    from .diff import diff

    found = diff(_read(old), _read(new))
    if as_json:
        tables.print_json({"old": str(old), "new": str(new), "same": not found, "differences": found})
    else:
        tables.print_diff(found, rows)
    if found and exit_code:
        raise typer.Exit(1)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="Where to write the costs.")] = Path("costs.json"),
    rounds: Annotated[int, typer.Option(help="How many times everything is measured.")] = 9,
    as_json: AsJson = False,
) -> None:
    """Measure costs on the machine at hand (under torchrun: on the cluster), and write them for `zfx plan --costs`."""
    from .calibrate import calibrate as measure
    from .calibrate import save_costs

    if rounds < 1:
        raise Usage(f"--rounds must be at least 1, got {rounds}")
    check_folder(out)
    with bar("measuring", rounds) as advance:
        costs = measure(num_rounds=rounds, progress=lambda done, total, what: advance() if done else None)
    if os.environ.get("RANK", "0") != "0":
        return
    save_costs(costs, out)
    if as_json:
        tables.print_json({"out": str(out), **asdict(costs)})
    else:
        tables.print_costs(costs, out)


def _read(path: Path) -> Schedule:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Usage(f"{path} is not a zfx schedule: it is no text") from None
    try:
        return dump.from_json(content)
    except ValueError as error:
        raise Usage(f"{path}: {error}") from None
