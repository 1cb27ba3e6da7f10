"""Ranks do things together: what fails on one, in work that each does for itself, is an error on all.

    together(agreement, what)     a block of work; the rank that failed raises its own error, the others one that names it
    RankGroup.every(what, work)   the same, of a checkpointer's ranks; each gets the values of all, or all raise the same error
    RankGroup.guarded(...)        collectives of torch's own, which do that by themselves, with errors of ours

Nothing here is on the way of a training step. A checkpointer has communicators of its own (gloo), so that a save in the background
never meets a collective of the training, and devices never wait for it.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from ._compat import default_store
from .agreement import Agreement, at_work, digest_of
from .errors import CheckpointError, RankMismatch, ZfxError

T = TypeVar("T")
TORCH_FAILS = (Exception, CheckpointException)  # torch's is no Exception, so that nobody catches it by the way
_NEVER = timedelta(days=30)  # agreement counts its patience itself


@contextlib.contextmanager
def together(agreement: Agreement, what: str, kind: type[CheckpointError | RankMismatch] = CheckpointError) -> Iterator[None]:
    """Ranks leave this block together, or all by an error. Inside nothing may be collective.

    A rank on which nothing went wrong raises `kind`, with the ranks that failed and what the first of them said. It may take
    long: a rank inside the block is late, not gone.

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
        failure = _failure(what, agreement.tell(f"the end of {what}", _said(error)), agreement.global_ranks, kind)
    except RankMismatch as mismatch:  # others wait elsewhere, and have been told that this rank is not with them
        raise (error or mismatch) from (mismatch if error else None)
    if failure is not None:
        raise error or failure


class RankGroup:
    """The ranks of a process group, or one process alone. Making it is a collective call.

    Args:
        group: whose ranks; None: all of the default group; without a process group, this process.
        timeout_s: how long ranks wait for one that does not come to a step.
        work_s: how long they wait for one that came and is at work.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float, work_s: float) -> None:
        self.group: dist.ProcessGroup | None = None  # for torch's own collectives
        self.agreement: Agreement | None = None
        self.rank, self.world_size = 0, 1
        self.store: Any = None
        if not dist.is_initialized():
            return
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        some = len(ranks) != dist.get_world_size()
        groups = [
            dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=some)
            for limit in (timedelta(seconds=work_s), _NEVER)
        ]
        self.group, self.rank, self.world_size = groups[0], groups[0].rank(), len(ranks)
        self.store = default_store()
        self.agreement = Agreement(groups[1], self.store, f"zfx/checkpoint/{groups[1].group_name}", timeout_s, work_s)

    def is_current(self) -> bool:
        """Whether the process group that it was made in is still there."""
        if not dist.is_initialized():
            return self.store is None
        return self.store is default_store()

    def begin(self, lines: Sequence[str]) -> None:
        """Return once every rank has come here with the same lines.

        Raises:
            RankMismatch: ranks call different things, or one did not come in time.
        """
        if self.agreement is not None:
            self.agreement.begin(digest_of(lines), lines)

    def every(self, what: str, work: Callable[[], T]) -> list[T]:
        """The values of `work()` on every rank, by rank.

        Raises:
            CheckpointError: it failed on some rank. The same message on every rank; `ranks` says which failed.
            RankMismatch: a rank is gone.
        """
        value: Any = None
        error: Exception | None = None
        with at_work():
            try:
                value = work()
            except Exception as raised:
                error = raised
        mine = (value, _said(error))
        found = [mine] if self.agreement is None else self.agreement.tell(f"the end of {what}", mine)
        ranks = [] if self.agreement is None else self.agreement.global_ranks
        failure = _failure(what, [said for _, said in found], ranks, CheckpointError)
        if failure is not None:
            raise failure from error
        return [one for one, _ in found]

    def guarded(self, what: str, work: Callable[[], T]) -> T:
        """`work()`, a collective of torch's own that raises on every rank if it fails on one.

        Raises:
            CheckpointError: in place of torch's error.
        """
        try:
            return work()
        except ZfxError:
            raise
        except TORCH_FAILS as error:
            raise explained(what, error) from error


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Torch warns of a process without ranks, which is a choice here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def explained(what: str, error: BaseException) -> CheckpointError:
    """Torch's CheckpointException names the ranks that failed, and what each of them raised."""
    failures = getattr(error, "failures", None)
    if not failures:
        return CheckpointError(f"{what} failed: {_words(error)}")
    said = [_said(failures[rank][0] if rank in failures else None) for rank in range(max(failures) + 1)]
    failure = _failure(what, said, range(len(said)), CheckpointError)
    assert isinstance(failure, CheckpointError)
    return failure


_Said = tuple[str, "str | None", "str | None"]  # what an error says, the file and the name that it is about


def _said(error: BaseException | None) -> _Said | None:
    if error is None:
        return None
    path, name = getattr(error, "path", None), getattr(error, "name", None)
    return _words(error), None if path is None else str(path), None if name is None else str(name)


def _failure(
    what: str, said: Sequence[_Said | None], ranks: Sequence[int], kind: type[CheckpointError | RankMismatch]
) -> CheckpointError | RankMismatch | None:
    """The error that what the ranks said comes to, if it comes to one.

    Args:
        ranks: their numbers; none for one process alone.
    """
    failed = [i for i, one in enumerate(said) if one is not None]
    if not failed:
        return None
    words, path, name = said[failed[0]]  # type: ignore[misc]
    numbers = [ranks[i] for i in failed] if ranks else failed
    where = f" on rank {numbers[0]}" + (f" and {len(failed) - 1} more" if failed[1:] else "") if len(ranks) > 1 else ""
    text = f"{what} failed{where}: {words}"
    return CheckpointError(text, path=path, name=name, ranks=numbers) if kind is CheckpointError else kind(text, ranks=numbers)


def _words(error: BaseException) -> str:
    if isinstance(error, ZfxError):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()
