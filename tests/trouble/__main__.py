"""`python -m tests.trouble [--world 2] [--limits released|default] [--engine zfx|fsdp2] [--write FILE] [CASE ...]`: a table."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from .cases import REGISTRY, options_of
from .runner import DEFAULT_LIMITS, Setting, problems, run_case
from .table import write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trouble", description="Run trouble cases and print how they end.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="ids of cases; all by default")
    parser.add_argument("--world", type=int, help="world size; each of the case's by default")
    parser.add_argument("--limits", choices=("released", "default"), default="released")
    parser.add_argument("--engine", choices=("zfx", "fsdp2"), default="zfx")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put what was run into this Markdown table")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what each rank said, if it is not as expected")
    args = parser.parse_args()
    if unknown := set(args.cases) - REGISTRY.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    limits = Setting().limits if args.limits == "released" else DEFAULT_LIMITS.limits
    counts: Counter[str] = Counter()
    for case_id in args.cases or REGISTRY:
        worlds = (args.world,) if args.world else options_of(REGISTRY[case_id].build()[3])["world_sizes"]
        for world in worlds:
            report = run_case(case_id, world, Setting(args.engine, limits))
            if args.write:
                write(args.write, [report])
            wrong = problems(report)
            counts["as expected" if not wrong else f"NOT as expected ({report.end})"] += 1
            mark = "no " if wrong else "ok "
            print(f"{mark} {case_id:32s} W={world} {report.seconds:5.1f} s  {str(report)[:200]}", flush=True)
            if wrong and args.verbose:
                print("\n".join([*wrong, *map(str, report.outcomes)]), flush=True)
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    return 0 if counts.keys() <= {"as expected"} else 1


if __name__ == "__main__":
    sys.exit(main())
