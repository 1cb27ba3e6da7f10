"""What docs/compatibility.md says zfx does has a test, and the test is there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.trouble.cases import REGISTRY

HERE = Path(__file__).parent
ROW = re.compile(r"^\|(?P<feature>[^|]+)\|[^|]+\|[^|]+\|(?P<zfx>[^|]+)\|(?P<tests>[^|]*)\|$")


def rows() -> list[re.Match[str]]:
    found = [ROW.match(line) for line in (HERE.parent / "docs" / "compatibility.md").read_text().splitlines()]
    return [row for row in found if row and row["feature"].strip() not in ("feature", "---")]


def missing(reference: str) -> bool:
    kind, _, name = reference.partition(" ")
    if kind == "case":
        return name not in REGISTRY
    file, _, function = reference.partition("::")
    path = HERE / file
    return not path.exists() or (function != "" and f"\ndef {function}(" not in path.read_text())


def test_each_claim_names_a_test_and_the_test_is_there() -> None:
    assert len(rows()) > 50
    for row in rows():
        references = re.findall(r"`([^`]+)`", row["tests"])
        assert references or row["zfx"].strip() == "no", f"no test shows this: {row['feature'].strip()}"
        assert not [r for r in references if missing(r)], row["feature"]
