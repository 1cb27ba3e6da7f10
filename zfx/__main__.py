"""`zfx` and `python -m zfx`: the command line, or one line that says what it needs."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(_say(f"zfx: the command line needs {error.name}: pip install 'zfx[cli]'"))
    from .cli import run

    sys.exit(run(sys.argv[1:]))


def _say(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
