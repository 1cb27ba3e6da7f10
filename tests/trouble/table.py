"""The table of how trouble cases end, as a Markdown page that runs of some of them bring up to date."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .cases import REGISTRY
from .runner import Report, problems

WORLDS = (2, 3)
_ROOT = Path(__file__).parents[2]
_HEAD = """# Trouble cases

Training scripts that went wrong for others, or easily could, and how each ends under zfx: with everything released after use, on 2
and on 3 ranks, in float64 unless the case is about another dtype. "match": every loss, gradient, parameter and buffer equals the
single-process reference (a replica a rank, gradients averaged), most within 1e-10. "error": every rank raised that error, at once.
The scripts are `tests/trouble/cases/`; this page is written by `python -m tests.trouble --write docs/trouble.md [CASE ...]`.

"""


def write(path: Path, reports: Sequence[Report]) -> None:
    """Put these outcomes into the table at `path`; rows of other cases stay as they are."""
    rows = _read(path)
    for report in reports:
        rows.setdefault(report.case_id, {})[report.world_size] = _outcome(report)
    lines = ["| case | what goes wrong elsewhere | 2 ranks | 3 ranks |", "|---|---|---|---|"]
    for case_id, case in REGISTRY.items():
        if case_id in rows:
            outcomes = " | ".join(rows[case_id].get(world, "") for world in WORLDS)
            lines.append(f"| {case_id} ({case.kind}) | {_cell(case.symptom)} | {outcomes} |")
    path.write_text(_HEAD + "\n".join(lines) + "\n")


def _outcome(report: Report) -> str:
    detail = _cell(report.detail).replace(f"{_ROOT}/", "")  # where this checkout lies is nobody's business
    text = report.end if report.end == "match" else f"{report.end}: {detail[:160]}"
    return text if not problems(report) else f"**not as expected** {text}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _read(path: Path) -> dict[str, dict[int, str]]:
    rows: dict[str, dict[int, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.replace("\\|", "\0").split("|")]
        if len(cells) == 6 and (case_id := cells[1].split(" ")[0]) in REGISTRY:
            rows[case_id] = {world: cell.replace("\0", "\\|") for world, cell in zip(WORLDS, cells[3:5])}
    return rows
