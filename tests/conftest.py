"""Settings of all tests: one thread, a reproducible hypothesis, and stacks instead of a silent hang."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Generator

# Before torch is imported, and inherited by the processes that tests start: ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True, max_examples=40)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Longer than any honest test takes on a busy machine; a test marked `slow` gets the second.
HANG_SECONDS, SLOW_HANG_SECONDS = 300.0, 1200.0
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # capturing is suspended here: this is the real stderr


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # a million objects of torch, transformers and pytest, which every collection would look through


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the run, showing every thread's stack, if one test (fixtures included) takes too long."""
    seconds = SLOW_HANG_SECONDS if item.get_closest_marker("slow") else HANG_SECONDS
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
