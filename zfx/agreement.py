"""Ranks agree before an execution begins, or every one of them raises `RankMismatch`.

Before the first collective of an execution each rank contributes a short digest of what it is about to run to one tiny
all-reduce (the largest digest and the largest negated digest: equal and opposite where all agree; and a flag, whether one of them
has something to ask the others later on). It travels on a gloo group of its own, so no device waits for it. Only where ranks
differ, or one does not come, is more said: through the store that the process group was made with, every rank that is still there
leaves its description, and reads the others'.

[Note: slow is not gone] A rank that compiles a new graph is late, not gone: it says so in the store, and the others' patience
starts anew while it does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._compat import default_store, on_compile
from .errors import RankMismatch

_GRACE_S = 3.0  # how long a rank that has failed waits for the others' last words; at most a quarter of the timeout
_alive: weakref.WeakSet[Agreement] = weakref.WeakSet()


class Agreement:
    """One group of ranks that start every execution together.

    Args:
        group: a gloo group of these ranks, used for nothing else.
        store: the key-value store of the default process group.
        key: prefix in the store, the same on every rank and unique to this object.
        timeout_s: how long to wait for a rank that does not come.
        work_s: how much longer for one that says why, as it compiles, reads or writes: [Note: slow is not gone].
    """

    def __init__(self, group: dist.ProcessGroup, store: Any, key: str, timeout_s: float, work_s: float = 1800.0) -> None:
        self.group, self.store, self.key, self.timeout_s, self.work_s = group, store, key, timeout_s, work_s
        self.grace_s = min(_GRACE_S, timeout_s / 4)
        self.rank, self.world_size = group.rank(), group.size()
        self.global_ranks = dist.get_process_group_ranks(group)
        self.count = 0
        self.broken: RankMismatch | None = None
        _alive.add(self)
        on_compile(_say_compiling, _say_compiled)

    def begin(self, digest: int, description: Sequence[str], flag: bool = False) -> bool:
        """Return once every rank has come here with the same digest; whether the flag of any of them is set.

        Raises:
            RankMismatch: a rank runs something else, or did not come within the timeout.
        """
        if self.broken is not None:
            raise RankMismatch(
                f"an earlier execution ended in a RankMismatch, nothing can run after it: {self.broken}",
                ranks=self.broken.ranks,
                first_difference=self.broken.first_difference,
            )
        if self.world_size == 1:
            return flag
        self.count += 1
        vote = torch.tensor([digest, -digest, flag], device="cpu")
        self._finish(dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group, async_op=True), description)
        if int(vote[0]) != -int(vote[1]):
            self._fail(description, f"ranks are about to run different plans (execution {self.count})", self.timeout_s)
        return bool(vote[2])

    def least(self, what: str, measure: Callable[[], int]) -> int:
        """The smallest of what the ranks measure, each once every rank has come here for the same thing.

        Raises:
            RankMismatch: as `begin`.
        """
        self.begin(digest_of([what]), [what])
        vote = torch.tensor([measure()], device="cpu")
        if self.world_size > 1:
            self._finish(dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self.group, async_op=True), [what])
        return int(vote)

    def everywhere(self, flags: Sequence[bool], description: Sequence[str]) -> list[bool]:
        """Which of these are true on every rank. All ranks come here with as many, within an execution that they agreed on."""
        if self.world_size == 1:
            return list(flags)
        vote = torch.tensor(list(flags), dtype=torch.int32, device="cpu")
        self._finish(dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self.group, async_op=True), description)
        return [bool(flag) for flag in vote.tolist()]

    def tell(self, what: str, value: Any) -> list[Any]:
        """What every rank says, by rank: anything small that can be pickled. A collective call, as `begin`.

        Raises:
            RankMismatch: as `begin`.
        """
        self.begin(digest_of([what]), [what])
        if self.world_size == 1:
            return [value]
        own = bytearray(pickle.dumps(value))
        most = torch.tensor([len(own)], device="cpu")
        self._finish(dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group, async_op=True), [what])
        words = torch.zeros(int(most), dtype=torch.uint8, device="cpu")
        words[: len(own)] = torch.frombuffer(own, dtype=torch.uint8)
        found = [torch.empty_like(words) for _ in range(self.world_size)]
        self._finish(dist.all_gather(found, words, group=self.group, async_op=True), [what])
        return [pickle.loads(bytes(row.tolist())) for row in found]  # what follows a pickle in its row is not looked at

    def lost(self, error: BaseException, description: Sequence[str]) -> RankMismatch:
        """A collective of the running execution failed: find out who is gone."""
        return self._diagnose(description, f"a collective failed ({_first_line(error)})")

    def _finish(self, work: Any, description: Sequence[str]) -> None:
        # the all-reduce itself may take for ever; patience is counted here, because a gloo operation that ran into its own
        # timeout can't be waited for again
        allowed = self.timeout_s - self.grace_s
        patience, end = time.monotonic() + allowed, time.monotonic() + allowed + self.work_s
        while True:
            left = patience - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.05, min(left, 5.0))))
                return
            except RuntimeError as error:
                if work.is_completed() and "imed out" not in str(error):
                    self._fail(description, f"a rank left before execution {self.count} ({_first_line(error)})")
                if work.is_completed():
                    return
            if self._someone_compiles():
                patience = min(end, time.monotonic() + allowed)
            if time.monotonic() > patience:
                self._fail(description, f"a rank did not start execution {self.count} within {self.timeout_s:g} s")

    def _someone_compiles(self) -> bool:
        try:
            keys = [f"{self.key}/compiling/{r}" for r in range(self.world_size)]
            return any(self.store.check([k]) and self.store.get(k) == b"1" for k in keys)
        except Exception:  # the store is gone with the rank that held it
            return False

    def _fail(self, description: Sequence[str], what: str, grace_s: float | None = None) -> None:
        raise self._diagnose(description, what, grace_s)

    def _diagnose(self, description: Sequence[str], what: str, grace_s: float | None = None) -> RankMismatch:
        theirs = self._last_words(description, self.grace_s if grace_s is None else grace_s)
        missing = [r for r in range(self.world_size) if r not in theirs]
        different = [r for r, words in theirs.items() if words != list(description)]
        if missing:
            names = ", ".join(f"rank {self.global_ranks[r]}" for r in missing)
            text = (
                f"{what}: {names} did not come. It raised an error, ran out of data, took another path, died (see its output), or "
                f"is slower than timeout={self.timeout_s:g} s allows. This rank ({self.global_ranks[self.rank]}) was about to run "
                f"{description[0]}."
            )
            error = RankMismatch(text, ranks=[self.global_ranks[r] for r in missing], first_difference="missing")
        elif different:
            other = different[0]
            mine_line, their_line = _first_difference(description, theirs[other])
            text = (
                f"{what}: rank {self.global_ranks[self.rank]} has {mine_line!r} where rank {self.global_ranks[other]} has "
                f"{their_line!r}. Every rank must use the same parameters in the same order; a branch that depends on a "
                f"rank's own data must use the same modules on every rank."
            )
            error = RankMismatch(
                text, ranks=[self.global_ranks[r] for r in different], first_difference=f"{mine_line} / {their_line}"
            )
        else:
            error = RankMismatch(
                f"{what}; every rank is there and has the same plan: the network or a collective failed", first_difference="none"
            )
        self.broken = error
        return error

    def _last_words(self, description: Sequence[str], grace_s: float) -> dict[int, list[str]]:
        """What every rank that is still there was about to run, by rank."""
        theirs = {self.rank: list(description)}
        try:
            self.store.set(f"{self.key}/last/{self.rank}", json.dumps(list(description)))
            end = time.monotonic() + grace_s
            while len(theirs) < self.world_size and time.monotonic() < end:
                for rank in range(self.world_size):
                    key = f"{self.key}/last/{rank}"
                    if rank not in theirs and self.store.check([key]):
                        theirs[rank] = json.loads(self.store.get(key))
                time.sleep(0.05)
        except Exception:  # the store went with rank 0: those who left no words count as missing
            pass
        return theirs


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Inside, this rank may be late for a long time (it reads or writes files): [Note: slow is not gone]."""
    _say("1")
    try:
        yield
    finally:
        _say("0")


def _say_compiling(_: Any) -> None:
    _say("1")


def _say_compiled(_: Any) -> None:
    _say("0")


def _say(busy: str) -> None:
    """Leave word for every group of the present process group that this rank compiles, or has stopped."""
    store: Any = default_store() if dist.is_initialized() else None
    for agreement in list(_alive):
        if agreement.world_size > 1 and agreement.store is store and agreement.broken is None:
            with contextlib.suppress(Exception):  # the store went with the rank that held it
                agreement.store.set(f"{agreement.key}/compiling/{agreement.rank}", busy)


def digest_of(description: Sequence[str]) -> int:
    """62 bits of SHA-256, so that it and its negation fit an int64."""
    return int.from_bytes(hashlib.sha256("\n".join(description).encode()).digest()[:8], "big") >> 2


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for a, b in zip(mine, theirs):
        if a != b:
            return a, b
    shorter = min(len(mine), len(theirs))
    return (mine[shorter] if len(mine) > shorter else "the end"), (theirs[shorter] if len(theirs) > shorter else "the end")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
