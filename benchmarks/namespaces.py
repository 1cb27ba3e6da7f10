"""Two network namespaces joined by a veth pair whose rate is shaped: a slow network between two processes of one machine.

    namespace of rank 0                     namespace of rank 1
    zfx0 10.77.0.1  [tbf rate]  <=======>  zfx1 10.77.0.2  [tbf rate]

[Note: nothing to clean up] The namespaces have no names. Each lives as long as the processes inside, first of all its holder, a
`sleep`; a veth pair goes with the namespaces of its ends. Everything that runs inside is killed by the kernel when the process
that started it dies (`setpriv --pdeathsig`), however that happens. So an earlier run can't have left anything behind.

Linux, root, `ip` and `tc` (iproute2), `unshare`, `nsenter` and `setpriv` (util-linux).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

_WITH_US = ("setpriv", "--pdeathsig", "KILL")


class ShapedLink:
    """The pair of namespaces, for the time of a `with`.

    Args:
        gbit_per_s: rate of each direction, in units of 1e9 bits a second.

    Raises:
        OSError, CalledProcessError: this process may not make namespaces, or a tool is missing.
    """

    addresses = ("10.77.0.1", "10.77.0.2")
    interfaces = ("zfx0", "zfx1")

    def __init__(self, gbit_per_s: float) -> None:
        self.gbit_per_s = gbit_per_s
        self._holders: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> ShapedLink:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _open(self) -> None:
        for _ in self.interfaces:
            self._holders.append(subprocess.Popen([*_WITH_US, "unshare", "--net", "sleep", "infinity"]))
        for holder in self._holders:
            _wait_until_apart(holder)
        ours, theirs = self.interfaces
        peer = ["peer", "name", theirs, "netns", str(self._holders[1].pid)]
        self.call(0, ["ip", "link", "add", ours, "type", "veth", *peer])
        for end, (name, address) in enumerate(zip(self.interfaces, self.addresses)):
            self.call(end, ["ip", "address", "add", f"{address}/30", "dev", name])
            self.call(end, ["ip", "link", "set", "lo", "up"])
            self.call(end, ["ip", "link", "set", name, "up"])
            shape = ["rate", f"{self.gbit_per_s * 1e3:g}mbit", "burst", "256kb", "latency", "50ms"]
            self.call(end, ["tc", "qdisc", "add", "dev", name, "root", "tbf", *shape])

    def inside(self, end: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in the namespace of `end`, for as long as its parent lives."""
        return [*_WITH_US, "nsenter", "--target", str(self._holders[end].pid), "--net", *command]

    def call(self, end: int, command: Sequence[str]) -> str:
        """Run a short command in the namespace of `end`; what it printed."""
        return subprocess.run(self.inside(end, command), check=True, text=True, capture_output=True).stdout


def _wait_until_apart(holder: subprocess.Popen[Any], patience_s: float = 10.0) -> None:
    """Until the holder has left our network namespace.

    Raises:
        PermissionError: it could not.
    """
    end = time.monotonic() + patience_s
    while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        if holder.poll() is not None or time.monotonic() > end:
            raise PermissionError("this process may not make a network namespace; the benchmark needs root")
        time.sleep(0.01)
