"""A Ray cluster for tests, in a process of its own with temporary files of its own.

Run as `python -m tests.e2e.ray_cluster GPUS GPUS …`: a head and further nodes, each with so many
GPUs in name and a loopback address of its own. It prints the head's address when all are up, and
then does what the lines of its standard input say: `lose NODE` and `lose head` kill, the end of the
input ends everything. Ray ends a process that has lost its head, so none of it runs in a test.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STORE_BYTES = 80 << 20
PR_SET_CHILD_SUBREAPER = 36
QUICK = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "120",
}
"""No reports to anyone, hosts that outlive their head, a lost node that is noticed soon, and
patience with a busy machine."""
START_S = 120.0


class ClusterOfRay:
    """A running cluster. `environment`: with which commands reach it; its token is in it."""

    def __init__(self, folder: Path, *, has_token: bool = True) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            **QUICK,
            "RAY_TMPDIR": str(folder),
            "PYTHONPATH": str(ROOT),
        }
        if has_token:
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(20)}
            self.environment |= token
        self.folder = folder
        self.address = ""

    def start(self, *gpus: int) -> None:
        """Begin to start it, with a node of so many GPUs each; the first is the head."""
        command = [sys.executable, "-m", "tests.e2e.ray_cluster", *map(str, gpus)]
        with (self.folder / "cluster.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )

    def wait(self) -> None:
        """Wait until it is up. Raises AssertionError with its log."""
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, (self.folder / "cluster.log").read_text()

    def lose(self, what: str) -> None:
        """Kill a node, or the `head`'s server; return once it is dead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"lost {what}\n"

    def kill(self) -> None:
        """Kill all of its processes, and then the one that adopted the orphans among them."""
        while found := _descendants(self._process.pid):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()


@contextmanager
def ray_cluster(*gpus: int, has_token: bool = True) -> Iterator[ClusterOfRay]:
    """Begin to start a cluster, and kill it afterwards. Its folder's path is short: it has
    sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    cluster = ClusterOfRay(folder, has_token=has_token)
    cluster.start(*gpus)
    try:
        yield cluster
    finally:
        cluster.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _descendants(pid: int) -> list[int]:
    """Return the ids of the running processes below a process."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _adopt_orphans() -> None:
    """Have the kernel make this process the parent of those below it whose parent ends."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(gpus: list[int]) -> None:
    """Run a cluster until the end of standard input."""
    from ray.cluster_utils import Cluster

    _adopt_orphans()
    cluster: Any = Cluster()
    for at, count in enumerate(gpus):
        cluster.add_node(
            wait=False,
            num_cpus=1,
            num_gpus=count,
            object_store_memory=STORE_BYTES,
            node_ip_address=f"127.0.0.{2 + at}",
            include_dashboard=False,
        )
    cluster.wait_for_nodes(timeout=START_S)
    _say(cluster.address)
    for line in sys.stdin:
        what = line.strip()
        if what == "head":
            (server,) = cluster.head_node.all_processes["gcs_server"]
            server.process.kill()
            server.process.wait()
        else:
            (node,) = [one for one in cluster.worker_nodes if one.node_ip_address == what]
            cluster.remove_node(node, allow_graceful=False)
        _say(f"lost {what}")
    os._exit(0)


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]])
