"""What all commands share: the application, answers that are no, options, spinners and bars."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

app = typer.Typer(
    help="Plan ZeRO-3 training on clusters that are not here; show, compare and verify schedules; read and convert checkpoints.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class No(Exception):
    """The answer is no: exit code 1. `facts` go into the JSON."""

    def __init__(self, message: str, **facts: Any) -> None:
        self.facts = facts
        super().__init__(message)


class Usage(Exception):
    """The question makes no sense: exit code 2."""


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def amount(value: str) -> int:
    """A whole number as people write it: `1e9`, `1_000`, `80GB`, `80 GiB`, `1.5G`.

    Example:
        >>> amount("80GB"), amount("1.5 GiB"), amount("1e9")
        (80000000000, 1610612736, 1000000000)
    """
    compact = value.strip().replace("_", "").replace(" ", "")
    number = compact.rstrip("kKmMgGtTiIbB")
    unit = compact[len(number) :].lower().removesuffix("b")
    try:
        found = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{value!r} is not an amount such as 1e9, 80GB or 80GiB") from None
    if not math.isfinite(found) or found != int(found) or found < 0:
        raise typer.BadParameter(f"{value!r} is not a whole amount of at least 0")
    return int(found)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def check_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise Usage(f"cannot write {path}: there is no folder {path.parent}")


@contextlib.contextmanager
def busy(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with a clock where stderr is a terminal; elsewhere a line at the end of what took over a second."""
    console, start = Console(stderr=True), time.monotonic()
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console, transient=True
    )
    progress.disable = not console.is_terminal
    with progress:
        task = progress.add_task(what)
        yield lambda text: progress.update(task, description=text)
    if not console.is_terminal and time.monotonic() - start > 1:
        print(f"{what}: {time.monotonic() - start:.0f} s", file=console.file)


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    console, start = Console(stderr=True), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
    if not console.is_terminal and time.monotonic() - start > 1:
        print(f"{what} {total} times: {time.monotonic() - start:.0f} s", file=console.file)
