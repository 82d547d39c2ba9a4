"""Keepers as named actors of a Ray cluster. The only module that imports ray.

Ray places a keeper on a host with free GPUs, starts it again when it ends, and on another host when
its own is lost. Nothing else passes Ray: no token, no prompt, no tenant, and no secret, since a
keeper reads what it needs on its host. A process that is connected to a cluster ends about a minute
after the cluster's head, by Ray's hand; so nothing else runs in it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from msgspec.structs import replace
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from gateway.fleet.errors import FleetError
from gateway.fleet.seat_keeper import SeatKeeper
from gateway.fleet.seats import KeeperReport, RayNode, Seat

NAMESPACE: Final = "trunkline"
"""Of the actors' names in the cluster."""
CONNECT_S: Final = 5.0
ANSWER_S: Final = 5.0
"""Longest wait for a keeper's report; one without a place never answers."""
HEAD_LOSS: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable for how long a host's processes outlive the head of the cluster."""
HEAD_LOSS_S: Final = 60.0
"""Ray's own value."""
REFUSED: Final = "AuthenticationError"
"""What Ray's command says where a cluster asks for a token and gets none."""


class RayKeeper:
    """The actor: a keeper, in a process that Ray starts."""

    def __init__(self, seat: dict[str, Any]) -> None:
        self._host = ray.util.get_node_ip_address()
        self._keeper = SeatKeeper(msgspec.convert(seat, Seat), self._host, time.monotonic)

    def report(self) -> dict[str, Any]:
        """Return a KeeperReport as builtins."""
        head_loss_s = float(os.environ.get(HEAD_LOSS, HEAD_LOSS_S))
        report = replace(self._keeper.report(), node=self._host, head_loss_s=head_loss_s)
        found: dict[str, Any] = msgspec.to_builtins(report)
        return found

    def leave(self) -> None:
        """See `SeatKeeper.leave`."""
        self._keeper.leave()


class RayCluster:
    """A connection to a running cluster. A process has one at a time; its calls block."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT of the head, or "auto": RAY_ADDRESS, or the cluster of this machine.
        Raises FleetError."""
        _check_reachable(address)
        try:
            with _quiet():
                ray.init(
                    address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR"
                )
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise FleetError(
                f"--address {address}: {_first_line(error)}; expected the HOST:PORT of a Ray"
                " cluster, and in RAY_AUTH_MODE=token its token"
            ) from error

    def close(self) -> None:
        """Disconnect; the actors go on."""
        ray.shutdown()

    def nodes(self) -> list[RayNode]:
        """Return the live nodes."""
        return [
            RayNode(node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
            for node in ray.nodes()
            if node["Alive"]
        ]

    def takes_anyone(self) -> bool:
        """Return whether it answers one who shows no token; asks it, in a process of its own."""
        return _takes_anyone(ray.get_runtime_context().gcs_address)

    def names(self) -> list[str]:
        """Return the names of all keepers."""
        return sorted(ray.util.list_named_actors())

    def start(self, seat: Seat, gpus: int) -> None:
        """Have Ray keep an engine; where there is one of its name already, that one stays."""
        ray.remote(RayKeeper).options(
            name=seat.name,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=gpus,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy="SPREAD",
        ).remote(msgspec.to_builtins(seat))

    def reports(self, names: Sequence[str]) -> list[KeeperReport]:
        """Ask keepers how they are, within `ANSWER_S`."""
        asked = {}
        for name in names:
            with suppress(ValueError):  # it has ended meanwhile
                asked[name] = ray.get_actor(name).report.remote()
        if not asked:
            return []
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        return [_report(name, call, call in answered) for name, call in asked.items()]

    def end(self, name: str) -> None:
        """Let a keeper's engine finish its requests and end; then end the keeper. Blocks for as
        long as the engine's `drain_timeout_s`. One that does not answer is ended at once."""
        try:
            keeper = ray.get_actor(name)
        except ValueError:  # it has ended meanwhile
            return
        if any(one.state != "waiting" for one in self.reports([name])):
            with suppress(RayError):  # its process ends, or its host is lost
                ray.get(keeper.leave.remote())
        ray.kill(keeper, no_restart=True)

    def request(self, replicas: int, gpus: int) -> None:
        """Have the cluster's autoscaler make room for so many engines, from now on."""
        request_resources(bundles=[{"GPU": gpus} if gpus else {"CPU": 1}] * replicas)


def _report(name: str, call: Any, is_answered: bool) -> KeeperReport:
    if is_answered:
        try:
            return msgspec.convert(ray.get(call), KeeperReport)
        except RayError as error:
            return KeeperReport(name, "waiting", reason=type(error).__name__)
    return KeeperReport(name, "waiting")


def _check_reachable(address: str) -> None:
    """Raise FleetError if nothing listens there: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise FleetError(
            f"--address {address}: {error.strerror or error}; expected the HOST:PORT of a Ray"
            " cluster's head"
        ) from error


def _takes_anyone(address: str) -> bool:
    """Whether a cluster answers one that shows no token."""
    command = Path(sys.executable).with_name("ray")
    found = str(command) if command.exists() else shutil.which("ray")
    assert found is not None, "the package ray has its command"
    environment = {name: value for name, value in os.environ.items() if not _is_token(name)}
    done = subprocess.run(
        [found, "status", "--address", address],
        env={**environment, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    return REFUSED not in done.stdout + done.stderr


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what Ray writes to standard error while it connects: the reason is raised, too."""
    errors = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(errors, 2)
        os.close(errors)


def _is_token(variable: str) -> bool:
    return variable.startswith("RAY_AUTH")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
