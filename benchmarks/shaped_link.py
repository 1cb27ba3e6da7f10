"""Does communication hide behind compute? zfx and FSDP2 on two ranks, joined by a link of a given rate, without a GPU.

    python benchmarks/shaped_link.py                    gpt12 over 10, 2 and 1 Gbit/s; about ten minutes on two cores, as root
    python benchmarks/shaped_link.py --rates 1 --nice -15

Each rank has a network namespace of its own, one compute thread, and as its only way to the other a veth pair that `tc` shapes
(`namespaces.py`). The systems take turns step by step (`shaped_rank.py`). Printed for each rate:

    step        median seconds of forward, backward and update (clipping, AdamW), and the same over FSDP2's
    fwd+bwd     of that, what a schedule governs
    bound       the certificate's: no schedule under these limits is faster, with costs calibrated on this very link and model
    traffic     what the bytes that this rank sent take at the rate that the link was measured to have. The certificate gives
                gathers and reductions a channel each; here both share one link, so this is a bound, too
    ratio       fwd+bwd over the larger of the two bounds
    queued      how long the compute thread waited for a core: more than a tenth of the step, and other work was in the way

Neither bound knows how ranks disturb each other: the network stack, gloo's threads and the ranks share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from namespaces import ShapedLink
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
PORT = 29_600  # free: nothing else runs in the namespaces


def run_ranks(link: ShapedLink, workload: str, rounds: int, nice: int, timeout_s: float) -> dict[str, Any]:
    """Run a rank at each end of the link; what rank 0 measured.

    Raises:
        RuntimeError: a rank failed.
        TimeoutError: they took too long.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="shaped-link-") as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / "shaped_rank.py"), f"--workload={workload}", f"--rounds={rounds}", f"--out={out}"]
        try:
            for rank, interface in enumerate(link.interfaces):
                environment = _environment(link, rank, interface)
                ranks.append(subprocess.Popen(link.inside(rank, command), env=environment, start_new_session=True))
                if nice:  # of the session's group, which is what counts where the kernel groups processes by session
                    Path(f"/proc/{ranks[-1].pid}/autogroup").write_text(str(nice))
            end = time.monotonic() + timeout_s
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):
                    raise RuntimeError(f"a rank failed, exit codes {[rank.poll() for rank in ranks]}; see above")
                if time.monotonic() > end:
                    raise TimeoutError(f"the ranks took more than {timeout_s:g} s")
                time.sleep(0.2)
            if any(rank.returncode for rank in ranks):
                raise RuntimeError(f"a rank failed, exit codes {[rank.returncode for rank in ranks]}; see above")
            return json.loads(out.read_text())
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _environment(link: ShapedLink, rank: int, interface: str) -> dict[str, str]:
    ours = {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(link.interfaces)),
        "MASTER_ADDR": link.addresses[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses without names are no cause for warnings
    }
    return os.environ | ours


def table(gbit_per_s: float, record: dict[str, Any]) -> str:
    systems = record["systems"]
    base = systems["FSDP2"]["step_s"]
    lines = [
        f"{gbit_per_s:g} Gbit/s, torch {record['torch']}, load {record['load']:.1f}. The link at its best, MB/s each way: gathers "
        f"{record['gathers_mb_per_s']:.0f}, reductions {record['reductions_mb_per_s']:.0f}, both at once "
        f"{record['both_mb_per_s']:.0f}; a gather of 8 bytes takes {record['latency_ms']:.2f} ms, 16 collectives of "
        f"4 MiB take {record['busy_ms']:.0f} ms from compute beside them",
        f"{'':<40}{'step s':>8}{'/FSDP2':>8}{'fwd+bwd':>9}{'bound':>8}{'traffic':>9}{'ratio':>7}{'sent MB':>9}{'queued':>8}  binds",
    ]
    for name, row in systems.items():
        traffic_s = row["sent_bytes"] / 1e6 / record["both_mb_per_s"]
        bound_s = row.get("bound_s")
        bounds = f"{'':>8}{traffic_s:>9.2f}{'':>7}"
        if bound_s is not None:
            bounds = f"{bound_s:>8.2f}{traffic_s:>9.2f}{row['compute_s'] / max(bound_s, traffic_s):>7.2f}"
        lines.append(
            f"{name:<40}{row['step_s']:>8.2f}{row['step_s'] / base:>8.2f}{row['compute_s']:>9.2f}{bounds}"
            f"{row['sent_bytes'] / 1e6:>9.0f}{row['queued_s']:>8.2f}  {row.get('binds', '')}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 2, 1], metavar="GBIT", help="of each direction (10 2 1)")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each system, after two that are not (%(default)s)")
    parser.add_argument("--workload", choices=WORKLOADS, default="gpt12")
    parser.add_argument("--nice", type=int, default=0, help="of the ranks; below 0 they go before other work of the machine (0)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each rate (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    args = parser.parse_args()
    records = {}
    for gbit_per_s in args.rates:
        with ShapedLink(gbit_per_s) as link:
            records[gbit_per_s] = run_ranks(link, args.workload, args.rounds, args.nice, args.timeout)
        print(table(gbit_per_s, records[gbit_per_s]), end="\n\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
