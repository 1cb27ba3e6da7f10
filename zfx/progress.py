"""Progress of long reads and writes: a tqdm bar where tqdm is installed and stderr is a terminal, else lines of the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger("zfx")
_EVERY_S = 10.0


@contextlib.contextmanager
def progress(what: str, total_bytes: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Inside, call what is given with numbers of bytes as they are done.

    Args:
        quiet: count for nobody, as on all ranks but the first.
    """
    if quiet:
        yield lambda num_bytes: None
        return
    bar = _bar(what, total_bytes)
    start = said = time.monotonic()
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal said, done
        done += num_bytes
        if bar is not None:
            bar.update(num_bytes)
        elif (now := time.monotonic()) - said > _EVERY_S:
            said = now
            log.info("%s: %.0f of %.0f MiB after %.0f s", what, done / 2**20, total_bytes / 2**20, now - start)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()
    log.info("%s: %.1f MiB in %.1f s", what, done / 2**20, time.monotonic() - start)


def _bar(what: str, total_bytes: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, leave=False)
