"""The benchmark on a shaped link runs, and leaves no network namespace and no process behind, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "shaped_link.py"
COMMAND = [sys.executable, str(SCRIPT), "--workload", "tiny", "--rounds", "2", "--rates", "1"]


def _may_make_namespaces() -> bool:
    """Whether the tools are there and the kernel lets us."""
    try:
        for command in (["unshare", "--net", "ip", "link", "add", "a0", "type", "veth", "peer", "name", "a1"], ["tc", "-V"]):
            subprocess.run(["setpriv", *command], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0 or not _may_make_namespaces(), reason="needs root and namespaces"),
]


def _environment(mark: str) -> dict[str, str]:
    """By which all processes of one run are found, whoever their parents are by then."""
    return os.environ | {"SHAPED_LINK_TEST": mark}


def _namespaces(mark: str) -> set[str]:
    """The network namespaces that processes of that run are in: without names, they last no longer than these."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if f"SHAPED_LINK_TEST={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.add(os.readlink(process / "ns" / "net"))
    return found


def _wait_for(condition: Callable[[], bool], patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def test_it_measures_and_cleans_up(tmp_path: Path) -> None:
    out, mark = tmp_path / "out.json", str(tmp_path)
    subprocess.run([*COMMAND, "--json", str(out)], check=True, timeout=600, env=_environment(mark))
    assert not _namespaces(mark)
    systems = json.loads(out.read_text())["1.0"]["systems"]
    kept, released = systems["zfx, default limits"], systems["zfx, nothing kept"]
    assert 0 < kept["sent_bytes"] < released["sent_bytes"] and released["bound_s"] > 0
    assert len(systems["FSDP2"]["steps_s"]) == 2


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_leaves_nothing_behind_when_it_is_stopped(end: signal.Signals, tmp_path: Path) -> None:
    mark = str(tmp_path)
    process = subprocess.Popen(COMMAND, env=_environment(mark), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(lambda: len(_namespaces(mark)) == 3, 120.0)  # its own and the ranks' two
        process.send_signal(end)
        assert process.wait(60) != 0
        _wait_for(lambda: not _namespaces(mark), 30.0)
    finally:
        process.kill()
        process.wait()
