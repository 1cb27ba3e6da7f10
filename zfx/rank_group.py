"""Steps that every rank of a group takes together: what fails on one is raised on all.

Nothing here is on the way of a training step. It has communicators of its own (gloo), so that a save in the background never
meets a collective of the training, and devices never wait for it.
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
from .agreement import Agreement, digest_of
from .errors import CheckpointError, ZfxError

T = TypeVar("T")
TORCH_FAILS = (Exception, CheckpointException)  # torch's is no Exception, so that nobody catches it by the way
_NEVER = timedelta(days=30)  # agreement counts its patience itself


class RankGroup:
    """The ranks of a process group, or one process alone. Making it is a collective call.

    Args:
        group: whose ranks; None: all of the default group; without a process group, this process.
        timeout_s: how long ranks wait for one that does not come to a step.
        work_s: how long they wait for one that came and is at work.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float, work_s: float) -> None:
        self.group: dist.ProcessGroup | None = None
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
        self.agreement = Agreement(groups[1], self.store, f"zfx/checkpoint/{groups[1].group_name}", timeout_s)

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
            CheckpointError: it failed on some rank, or a rank is gone. The same message on every rank; `ranks` says which failed.
        """
        value: Any = None
        error: BaseException | None = None
        try:
            value = work()
        except Exception as raised:
            error = raised
        mine = (value, None if error is None else _words(error), getattr(error, "path", None), getattr(error, "name", None))
        found: list[Any] = [None] * self.world_size
        if self.group is None:
            found = [mine]
        else:
            try:
                dist.all_gather_object(found, mine, group=self.group)
            except (RuntimeError, ValueError) as gone:
                raise CheckpointError(f"{what}: a rank is gone, or took too long ({_first_line(gone)})") from error
        failed = [rank for rank, one in enumerate(found) if one[1] is not None]
        if failed:
            _, words, path, name = found[failed[0]]
            where = "" if self.world_size == 1 else f" on rank {failed[0]}" + (f" and {len(failed) - 1} more" if failed[1:] else "")
            raise CheckpointError(f"{what} failed{where}: {words}", path=path, name=name, ranks=failed) from error
        return [one[0] for one in found]

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
    rank = min(failures)
    first = failures[rank][0]
    where = f" on rank {rank}" + (f" and {len(failures) - 1} more" if len(failures) > 1 else "")
    path, name = getattr(first, "path", None), getattr(first, "name", None)
    return CheckpointError(f"{what} failed{where}: {_words(first)}", path=path, name=name, ranks=sorted(failures))


def _words(error: BaseException) -> str:
    if isinstance(error, ZfxError):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
