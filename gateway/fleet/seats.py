"""What a fleet is asked for, and what is told of it; which requests a cluster cannot meet.

Pure values. A *seat* is where an engine may run: its name, and where its host has what the keeper
reads. No secret is in it: folders are named, and read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Literal

from msgspec import Struct

from engine.api import EngineRole
from gateway.config.fleet import is_fleet_name
from gateway.fleet.errors import FleetError

REPLICAS_MAX = 64
"""Most engines of a model; the gateway's directory of prefixes has as many bits."""


class Seat(Struct, frozen=True):
    """An engine's name, and its host's paths. `tls`: the folder of `engine-NAME`; "" for `fleet` in
    the data directory. `model`: "" for that of the host's configuration."""

    name: str
    data_dir: str
    config_file: str = ""
    tls: str = ""
    model: str = ""
    ports: tuple[int, int] = (7443, 7506)
    """The first and the last port that it may listen on."""
    role: EngineRole | None = None
    """What gateways use it for; None: what the host's configuration says."""


class RayNode(Struct, frozen=True):
    """A live node of a cluster."""

    address: str
    gpus: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine are meant to reach it."""
        try:
            return ip_address(self.address).is_loopback
        except ValueError:
            return False


KeeperState = Literal["waiting", "starting", "ready", "draining", "failed", "ended"]


class KeeperReport(Struct, frozen=True):
    """What a keeper says of itself; `waiting`: it does not answer, since Ray has no place for it,
    or starts it, or has lost its host."""

    name: str
    state: KeeperState
    address: str = ""
    """HOST:PORT where it listens."""
    epoch: str = ""
    age_s: float = 0.0
    """Seconds since its engine began to serve."""
    pid: int = 0
    """Of the keeper."""
    node: str = ""
    head_loss_s: float | None = None
    """How long its host outlives the head of its cluster; None if it does not tell."""
    reason: str = ""


def seat_names(replicas: int, names: str) -> list[str]:
    """Return the names that were asked for: `names`, separated by commas, or e0, e1 and so on.
    Raises FleetError."""
    found = [name.strip() for name in names.split(",")] if names else []
    found = found or [f"e{number}" for number in range(replicas)]
    if not 1 <= len(found) <= REPLICAS_MAX:
        raise FleetError(f"{len(found)} engines; expected 1 to {REPLICAS_MAX}")
    for at, name in enumerate(found):
        if not is_fleet_name(name):
            raise FleetError(f"{name[:80]!r}: expected a name of letters, digits, dots and hyphens")
        if name in found[:at]:
            raise FleetError(f"{name!r} names two engines; expected each name once")
    return found


def check_authentication(nodes: Sequence[RayNode], takes_anyone: Callable[[], bool]) -> None:
    """Raise FleetError if others than this machine may use these nodes without a token.
    `takes_anyone`: asks the cluster, and is called only if it matters."""
    open_to = [node.address for node in nodes if not node.is_loopback]
    if open_to and takes_anyone():
        raise FleetError(
            f"the cluster at {open_to[0]} has no authentication: who reaches it can run any code"
            " there; expected one started with RAY_AUTH_MODE=token on each node"
        )


def check_room(nodes: Sequence[RayNode], engines: int, gpus: int) -> None:
    """Raise FleetError unless so many engines of so many GPUs each fit on these nodes. An engine's
    GPUs are those of one node."""
    if gpus == 0:
        return
    if gpus < 0:
        raise FleetError(f"--gpus: {gpus}; expected 0 or more")
    most = max((node.gpus for node in nodes), default=0)
    if most == 0:
        raise FleetError(
            f"--gpus {gpus}: no node of the cluster has a GPU; expected nodes with GPUs, or --gpus"
            " 0 for engines on processors"
        )
    if gpus > most:
        raise FleetError(
            f"--gpus {gpus}: the largest node has {most}, and an engine's GPUs are of one node;"
            f" expected at most {most}"
        )
    room = sum(node.gpus // gpus for node in nodes)
    if engines > room:
        raise FleetError(
            f"{engines} engines of {gpus} GPUs each: the cluster's nodes have"
            f" {', '.join(str(node.gpus) for node in nodes)}; expected at most {room}, or more"
            " nodes"
        )


def parse_ports(text: str) -> tuple[int, int]:
    """Return the first and the last port of FIRST-LAST, or of one port. Raises FleetError."""
    first, dash, last = text.partition("-")
    ends = first, last if dash else first
    if all(end.isascii() and end.isdigit() and len(end) <= 5 for end in ends):
        low, high = map(int, ends)
        if 0 < low <= high <= 65_535:
            return low, high
    raise FleetError(f"--ports: {text[:40]!r}; expected FIRST-LAST, such as 7443-7450")
