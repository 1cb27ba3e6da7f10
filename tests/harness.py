"""Real processes for distributed tests: one warm pool of workers, one fresh process group per job.

    values = run_ranks(2, job, arg)             # value of job(arg) on each rank; RanksFailed if any rank did not return
    outcomes = rank_outcomes(2, job, arg)       # what became of each rank, for tests that expect trouble

A job is a module-level function; it runs on `world_size` workers, inside an initialised gloo group over loopback, on one
thread. Importing torch takes seconds, so workers live on and serve the next job, of any world size; a worker that hung,
crashed or could not clean up after a job is killed and replaced, so a broken group never poisons the next job.

What can become of a rank is told apart in `Outcome.status`:

    ok      returned a value
    error   raised: type, message, traceback and the exception's picklable attributes are kept
    crash   the process is gone without a word: killed by a signal, or `os._exit`
    hang    was still running at the timeout: the stacks of its threads are kept
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

DEFAULT_TIMEOUT_S = 90.0
START_TIMEOUT_S = 120.0  # importing torch, on a busy machine
CLEANUP_TIMEOUT_S = 20.0
DUMP_S = 1.0  # for a hung rank to write its stacks
EXIT_S = 5.0  # for a dying process to be gone
LINGER_S = 1.0  # a rank that returned leaves its group this long after, unless all have returned
GO = b"go"
LOG_BYTES = 20_000

Status = Literal["ok", "error", "crash", "hang"]


@dataclass(frozen=True)
class RankError:
    """An exception that a rank raised, as plain data.

    Attributes:
        type_name: name of its class, e.g. `RankMismatch`.
        bases: names of all its base classes, its own first.
        message: `str(exception)`.
        attributes: what is set on the instance and can be pickled (e.g. `RankMismatch.ranks`).
    """

    type_name: str
    bases: tuple[str, ...]
    message: str
    traceback: str
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        attributes = {}
        for name, value in vars(error).items():
            with contextlib.suppress(Exception):
                pickle.dumps(value)
                attributes[name] = value
        kind = type(error)
        return cls(kind.__name__, tuple(k.__name__ for k in kind.__mro__), str(error), traceback.format_exc(), attributes)

    @property
    def first_line(self) -> str:
        return f"{self.type_name}: {(self.message.strip().splitlines() or [''])[0]}"


@dataclass(frozen=True)
class Outcome:
    """What became of one rank. `exit_code` is that of a crash (negative: the signal); `log` is what it wrote."""

    rank: int
    status: Status
    seconds: float
    value: Any = None
    error: RankError | None = None
    exit_code: int | None = None
    log: str = ""

    def __str__(self) -> str:
        head = f"rank {self.rank}: {self.status} after {self.seconds:.1f} s"
        if self.error is not None:
            return f"{head}\n{self.error.traceback}"
        if self.status == "crash":
            return f"{head}, exit code {self.exit_code}\n{self.log[-4000:]}"
        return f"{head}\n{self.log[-6000:]}" if self.status == "hang" else head


class RanksFailed(AssertionError):
    """Some rank of a job did not return. `outcomes` has all of them."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        super().__init__("\n".join(str(o) for o in outcomes))


# --------------------------------------------------------------------------------------------------------------------
# In the worker
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store_port: int
    collective_timeout_s: float


_current: _Job | None = None
_num_groups = 0


def init_group() -> None:
    """Create this job's default process group. Called before each job; again by a job that destroyed its group."""
    global _num_groups
    job = _current
    assert job is not None, "init_group() is for jobs"
    limit = timedelta(seconds=job.collective_timeout_s)
    store = dist.TCPStore("127.0.0.1", job.store_port, world_size=None, is_master=False, timeout=limit)
    store = dist.PrefixStore(f"group{_num_groups}", store)
    _num_groups += 1
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=limit)


def _perform(job: _Job, connection: Connection) -> None:
    """Run one job and report its outcome; on return nothing of it is left.

    Peers see closed connections: at once if the job raised; if it returned, after `LINGER_S`, or else the last bytes of a
    collective that others have not finished might get lost.
    """
    global _current, _num_groups
    _current, _num_groups = job, 0
    failed = False
    torch.manual_seed(0)
    try:
        init_group()
        report = pickle.dumps(("ok", job.function(*job.args)))
    except BaseException as error:
        report = pickle.dumps(("error", RankError.of(error)))
        traceback.clear_frames(error.__traceback__)
        failed = True
    connection.send_bytes(report)
    if not failed and connection.poll(LINGER_S):
        assert connection.recv_bytes() == GO
    torch._dynamo.reset()
    gc.collect()  # connections close when nothing refers to the group any more
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    _current = None
    gc.freeze()  # what lives on is torch's: never to be looked through again, or each job is slower than the one before
    connection.send_bytes(pickle.dumps(("ready", None)))


def _follow_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _worker(connection: Connection, log_path: str, parent: int) -> None:
    """Serve jobs until the other end closes."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    connection.send_bytes(pickle.dumps(("ready", None)))
    with contextlib.suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            if message != GO:  # else it came after LINGER_S
                _perform(pickle.loads(message), connection)


# --------------------------------------------------------------------------------------------------------------------
# In the test process
# --------------------------------------------------------------------------------------------------------------------


class _Worker:
    """One process of the pool, as its owner sees it."""

    def __init__(self, log_path: Path) -> None:
        self.log_path, self.log_start = log_path, 0
        self.connection, theirs = mp.Pipe()
        self.process = mp.get_context("spawn").Process(
            target=_worker, args=(theirs, str(log_path), os.getpid()), daemon=True, name=log_path.stem
        )
        self.process.start()
        theirs.close()

    def ready(self, timeout_s: float) -> bool:
        """Whether the worker says, within the time, that it can take a job."""
        try:
            return self.connection.poll(timeout_s) and pickle.loads(self.connection.recv_bytes())[0] == "ready"
        except (EOFError, OSError):
            return False

    def send(self, message: bytes) -> bool:
        """Whether the message could be sent."""
        try:
            self.connection.send_bytes(message)
        except OSError:
            return False
        return True

    def log(self) -> str:
        with open(self.log_path, "rb") as file:
            file.seek(max(self.log_start, self.log_path.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def stop(self, grace_s: float = 0.0) -> None:
        """End the process: by closing its connection, if it is given time, else by force."""
        self.connection.close()
        if grace_s:
            self.process.join(grace_s)
        self.process.kill()
        self.process.join()


class RankPool:
    """Workers that serve one job after another. A job of world size n runs on the first n; the pool grows as needed."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers: list[_Worker] = []
        self.num_started = 0

    def _start(self) -> _Worker:
        self.num_started += 1
        return _Worker(self.folder / f"worker{self.num_started}.log")

    def _grow(self, world_size: int) -> None:
        gone = [rank for rank, worker in enumerate(self.workers) if not worker.process.is_alive()]
        new = [self._start() for _ in range(len(gone) + max(0, world_size - len(self.workers)))]
        for rank, worker in zip(gone, new):  # a worker keeps its rank: torch caches by the mesh alone what a rank owns of a tensor
            self.workers[rank] = worker
        self.workers += new[len(gone) :]
        for worker in new:
            if not worker.ready(START_TIMEOUT_S):
                log = worker.log()
                self.close_workers()
                raise RuntimeError(f"a worker did not start:\n{log}")

    def outcomes(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float,
                 collective_timeout: float) -> list[Outcome]:
        """Run the job and say what became of each rank. Workers that are not fit for another job are replaced."""
        self._grow(world_size)
        team = self.workers[:world_size]
        store = dist.TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
        jobs = [pickle.dumps(_Job(function, args, rank, world_size, store.port, collective_timeout)) for rank in range(world_size)]
        for worker, job in zip(team, jobs):
            worker.log_start = worker.log_path.stat().st_size
            worker.send(job)  # if it is gone, _collect finds out
        found = _collect(team, timeout)
        fit = [found[rank].status in ("ok", "error") and worker.send(GO) for rank, worker in enumerate(team)]
        for ok, worker in zip(fit, team):
            if not (ok and worker.ready(CLEANUP_TIMEOUT_S)):
                worker.stop()
        return found

    def close_workers(self) -> None:
        for worker in self.workers:
            worker.stop(EXIT_S)
        self.workers = []

    def close(self) -> None:
        self.close_workers()
        shutil.rmtree(self.folder, ignore_errors=True)


def _collect(team: Sequence[_Worker], timeout: float) -> list[Outcome]:
    """Wait until each worker has reported or died, or the time is over."""
    start = time.monotonic()
    found: dict[int, Outcome] = {}
    while len(found) < len(team) and (left := start + timeout - time.monotonic()) > 0:
        open_ranks = {w.connection: rank for rank, w in enumerate(team) if rank not in found}
        for connection in wait(list(open_ranks), left):
            rank = open_ranks[connection]
            found[rank] = _receive(rank, team[rank], time.monotonic() - start)
    hung = [rank for rank in range(len(team)) if rank not in found]
    for rank in hung:
        team[rank].dump_stacks()
    if hung:
        time.sleep(DUMP_S)
    for rank in hung:
        found[rank] = Outcome(rank, "hang", time.monotonic() - start, log=team[rank].log())
    return [found[rank] for rank in range(len(team))]


def _receive(rank: int, worker: _Worker, seconds: float) -> Outcome:
    try:
        status, value = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, OSError):
        worker.process.join(EXIT_S)
        return Outcome(rank, "crash", seconds, exit_code=worker.process.exitcode, log=worker.log())
    if status == "error":
        return Outcome(rank, "error", seconds, error=value, log=worker.log())
    return Outcome(rank, "ok", seconds, value=value, log=worker.log())


_pool: RankPool | None = None


def _close_pool() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
    _pool = None


def rank_outcomes(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S,
                  collective_timeout: float | None = None) -> list[Outcome]:
    """Run `function(*args)` on `world_size` ranks and say what became of each.

    Args:
        function: a module-level function. It and its arguments, its value too, must be picklable.
        timeout: seconds after which a rank that has not returned counts as hung and is killed.
        collective_timeout: seconds after which a collective of the default group gives up. Half of `timeout` by default, so
            that ranks that wait for one that is gone raise before they are killed.
    """
    global _pool
    if _pool is None:
        _pool = RankPool()
        atexit.register(_close_pool)
    return _pool.outcomes(world_size, function, args, timeout, collective_timeout or timeout / 2)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S,
              collective_timeout: float | None = None) -> list[Any]:
    """The values of `function(*args)` on `world_size` ranks, in rank order; see `rank_outcomes`.

    Raises:
        RanksFailed: a rank raised, crashed or hung; the message has each rank's traceback, log or stacks.
    """
    outcomes = rank_outcomes(world_size, function, *args, timeout=timeout, collective_timeout=collective_timeout)
    if any(o.status != "ok" for o in outcomes):
        raise RanksFailed(outcomes)
    return [o.value for o in outcomes]


def live_tensors(at_least_bytes: int = 0) -> tuple[int, int]:
    """How many real tensors Python can reach in this process, and the bytes of their storages. Collect garbage first.

    Storages that are smaller than `at_least_bytes` do not count.
    """
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    found = [t for t in tensors if not isinstance(getattr(t, "_local_tensor", t), FakeTensor)]  # torch's caches hold fake ones
    sizes: dict[int, int] = {}
    for t in found:
        if t.layout == torch.strided and t.device.type != "meta" and not hasattr(t, "_local_tensor"):
            storage = t.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return len(found), sum(size for size in sizes.values() if size >= at_least_bytes)
