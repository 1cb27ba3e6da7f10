"""Ranks fail together: what goes wrong on one of them, in work that each does for itself, is an error on all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .agreement import Agreement, at_work
from .errors import CheckpointError, RankMismatch, ZfxError


@contextlib.contextmanager
def together(agreement: Agreement, what: str, kind: type[ZfxError] = CheckpointError) -> Iterator[None]:
    """Ranks leave this block together, or all by an error. Inside nothing may be collective.

    A rank on which nothing went wrong raises `kind`, with the ranks that failed and what they said. It may take long: a rank
    inside the block is late, not gone.

    Args:
        what: what is being done, for messages; the same on every rank.

    Raises:
        RankMismatch: a rank did not come here.
    """
    error: Exception | None = None
    with at_work():
        try:
            yield
        except Exception as raised:
            error = raised
    if isinstance(error, RankMismatch):
        raise error
    try:
        if agreement.least(f"the end of {what}", lambda: 0 if error else 1):
            return
    except RankMismatch as mismatch:  # others wait elsewhere, and have been told that this rank is not with them
        raise (error or mismatch) from (mismatch if error else None)
    said = agreement.tell(f"the errors of {what}", f"{type(error).__name__}: {error}" if error else "")
    if error is not None:
        raise error
    failed = [rank for rank, text in enumerate(said) if text]
    text = "; ".join(f"rank {agreement.global_ranks[rank]}: {said[rank]}" for rank in failed[:4])
    raise kind(f"{what} failed on {text}", ranks=[agreement.global_ranks[rank] for rank in failed])  # type: ignore[call-arg]
