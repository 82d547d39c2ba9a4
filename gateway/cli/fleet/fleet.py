"""`trunkline fleet`: certificates of a fleet, and its engines on a Ray cluster."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from engine.api import EngineRole
from engine.signals import handle_signals
from gateway.cli.addresses import ask_admin
from gateway.cli.arguments import add_actions
from gateway.cli.result import (
    CommandCall,
    CommandError,
    CommandResult,
    Entry,
    Table,
    table_result,
    table_text,
)
from gateway.config import Config, parse_address
from gateway.config.fleet import is_fleet_name
from gateway.fleet.errors import FleetError
from gateway.fleet.replica_file import ReplicaFile, follow_cluster, lookout_command
from gateway.fleet.seats import (
    KeeperReport,
    Seat,
    check_authentication,
    check_room,
    parse_ports,
    seat_names,
)
from gateway.fleet.wanted import GatewayCounts, count_wanted, read_counts, wanted_text
from gateway.observability.logging import LogLines
from tenancy.types import wall_ms

if TYPE_CHECKING:
    from gateway.fleet.ray_keeper import RayCluster

EXTRA = "cryptography is not installed; install trunkline[fleet]"
NUMBERS = ("seconds", "wait", "fill", "displaced", "decode", "tokens there", "below")
RAY_EXTRA = "ray is not installed; install trunkline[ray]"
SCRAPE_S = 10.0


def _add_actions(command: argparse.ArgumentParser) -> None:
    texts = {
        "init": "Make an authority, and certificates of 90 days for engines and gateways.",
        "up": "Have Ray keep engines: starts what lacks, changes nothing else.",
        "status": "Show the keepers that Ray has.",
        "down": "Let engines finish their requests, and end them and their keepers.",
        "watch": "Keep a gateway's replicas_file up to date.",
        "wanted": "Say how many engines the load of the last minutes asks for.",
        "explain": "Say why a request went to its engine: predicted seconds, by engine and term.",
        "forget": "Have no erasure wait for an engine that never comes back, with its disk.",
    }
    actions = add_actions(command, texts)
    init, up = actions["init"], actions["up"]
    text = "one of the last 1,000 requests of its model"
    actions["explain"].add_argument("request_id", metavar="ID", help=text)
    actions["forget"].add_argument("name", help="engine whose disk is destroyed")
    init.add_argument(
        "--dir", type=Path, metavar="DIR", help="default: fleet in the data directory"
    )
    init.add_argument("--engines", default="e0,e1", metavar="NAMES", help="default: e0,e1")
    init.add_argument("--gateways", default="g0", metavar="NAMES", help="default: g0")
    for action in ("up", "status", "down", "watch", "wanted"):
        text = "HOST:PORT of the cluster's head (default: RAY_ADDRESS, or this machine's)"
        actions[action].add_argument("--address", default="auto", metavar="HOST:PORT", help=text)
    for action in ("up", "wanted"):
        text = "GPUs of each engine (default: 1; 0: on the processor)"
        actions[action].add_argument("--gpus", type=int, default=1, metavar="G", help=text)
    up.add_argument("model", nargs="?", help="default: model.name in the host's configuration")
    which = up.add_mutually_exclusive_group(required=True)
    which.add_argument("--replicas", type=int, default=0, metavar="N", help="engines e0 to eN-1")
    which.add_argument("--names", default="", metavar="NAMES", help="engines of these names")
    text = "data directory on each engine's host (default: this one's)"
    up.add_argument("--host-data", metavar="DIR", help=text)
    text = "configuration on each engine's host (default: none)"
    up.add_argument("--host-config", default="", metavar="FILE", help=text)
    text = "folder on each engine's host with engine-NAME (default: fleet in its data directory)"
    up.add_argument("--tls", default="", metavar="DIR", help=text)
    text = "that an engine may listen on (default: 7443-7506)"
    up.add_argument("--ports", default="7443-7506", metavar="FIRST-LAST", help=text)
    text = "what gateways use them for (default: engine.role on their hosts)"
    up.add_argument("--role", choices=get_args(EngineRole), help=text)
    actions["down"].add_argument("name", nargs="?", help="one engine (default: all)")
    watch, wanted = actions["watch"], actions["wanted"]
    watch.add_argument("--file", type=Path, required=True, metavar="FILE", help="replicas_file")
    text = "a gateway's admin listener (default: admin.listen)"
    wanted.add_argument("--gateway", default="", metavar="HOST:PORT", help=text)
    text = "seconds to measure (default: 300)"
    wanted.add_argument("--over", type=float, default=300.0, metavar="S", help=text)
    text = "longest wait for the first step of nine in ten requests (default: 0.5)"
    wanted.add_argument("--wait", type=float, default=0.5, metavar="S", help=text)
    text = "requests that an engine runs at once (default: engine.sequences_max)"
    wanted.add_argument("--rows", type=int, metavar="N", help=text)
    wanted.add_argument("--apply", action="store_true", help="have Ray's autoscaler make room")


def _run(call: CommandCall) -> CommandResult:
    """Run one action. Raises CommandError."""
    try:
        return _ACTIONS[call.options.action](call)
    except FleetError as error:
        raise CommandError(str(error)) from error


def explain(config: Config, request_id: str) -> CommandResult:
    """Return why a request went to its engine, as the running server says. Raises CommandError."""
    path = f"/admin/v1/fleet/choices/{quote(request_id, safe='')}"
    found = ask_admin(config, path)
    rows: list[dict[str, object]] = [
        {
            "engine": cost["replica"],
            "seconds": f"{cost['total_s']:.3f}",
            "wait": f"{cost['wait_s']:.3f}",
            "fill": f"{cost['fill_s']:.3f}",
            "displaced": f"{cost['displaced_s']:.3f}",
            "decode": f"{cost['decode_s']:.3f}",
            "tokens there": cost["device_tokens"],
            "below": cost["below_tokens"],
            "fetched": f"{cost['peer_tokens']} from {cost['peer']}" if cost["peer"] else "",
        }
        for cost in found["costs"]
    ]
    text = f"{request_id} of {found['model']} went to {found['replica']} ({found['policy']})\n"
    text += table_text(rows, right=tuple(NUMBERS))
    if pair := found.get("pair"):
        text += (
            f"\nits prompt was computed at {pair['prompt_at']}: {pair['prompt_s']:.3f} s, fetched"
            f" {pair['fetch_s']:.3f}, begun {pair['start_s']:.3f}, answered {pair['decode_s']:.3f}"
        )
    for name, why in found["refused"].items():
        text += f"\n{name}: {why}"
    return CommandResult(text, found)


def forget(config: Config, name: str) -> CommandResult:
    """Have the running server forget an engine. Raises CommandError."""
    path = f"/admin/v1/fleet/engines/{quote(name, safe='')}"
    found = ask_admin(config, path, "DELETE")
    text = f"{name} is forgotten: {found['receipts']} receipts waited for it"
    return CommandResult(text, found)


def _init(call: CommandCall) -> CommandResult:
    """Make certificates; an authority that exists stays. Raises CommandError."""
    options = call.options
    holders = [
        f"{role}/{name.strip()}"
        for role, names in (("engine", options.engines), ("gateway", options.gateways))
        for name in names.split(",")
        if name.strip()
    ]
    for holder in holders:
        if not is_fleet_name(holder.partition("/")[2]):
            raise CommandError(f"{holder}: expected a name of letters, digits, dots and hyphens")
    try:
        from gateway.engines.elsewhere.certificates import make_certificates
    except ImportError as error:
        raise CommandError(EXTRA) from error
    folder = options.dir or call.config.data / "fleet"
    try:
        made = make_certificates(folder, holders)
    except (OSError, ValueError) as error:
        raise CommandError(f"{folder}: {error}") from error
    lines = [
        f"{one}: copy it to the host of {holder}" for one, holder in zip(made, holders, strict=True)
    ]
    text = "\n".join([*lines, f"{folder} has the authority's key: keep it here"])
    return CommandResult(text, {"folders": [str(one) for one in made]})


@contextmanager
def _connected(call: CommandCall) -> Iterator[RayCluster]:
    """Yield a connection to the cluster. Raises CommandError and FleetError."""
    try:
        from gateway.fleet.ray_keeper import RayCluster
    except ImportError as error:
        raise CommandError(RAY_EXTRA) from error
    with closing(RayCluster(call.options.address)) as cluster:
        yield cluster


def _up(call: CommandCall) -> CommandResult:
    options = call.options
    names = seat_names(options.replicas, options.names)
    seat = Seat(
        name="",
        data_dir=str(Path(options.host_data or call.config.data).absolute()),
        config_file=_host_path(options.host_config, "--host-config"),
        tls=_host_path(options.tls, "--tls"),
        model=options.model or "",
        ports=parse_ports(options.ports),
        role=options.role,
    )
    with _connected(call) as cluster:
        nodes = cluster.nodes()
        check_authentication(nodes, cluster.takes_anyone)
        check_room(nodes, len(names), options.gpus)
        there = set(cluster.names())
        for name in names:
            if name not in there:
                cluster.start(replace(seat, name=name), options.gpus)
    lines = [f"{one}: {'is there' if one in there else 'asked for'}" for one in names]
    data = [{"name": one, "was_there": one in there} for one in names]
    return CommandResult("\n".join(lines), data)


def _host_path(text: str, option: str) -> str:
    """Return a path on the engines' hosts. Raises CommandError for a relative one."""
    if text and not Path(text).is_absolute():
        raise CommandError(f"{option}: {text}; expected an absolute path on each engine's host")
    return text


def _status(call: CommandCall) -> CommandResult:
    with _connected(call) as cluster:
        reports = cluster.reports(cluster.names())
    for node, seconds in sorted(_short_lived(reports).items()):
        call.warn(
            f"{node}: its engines end {seconds:g} s after the cluster's head; to outlive it, set"
            " RAY_gcs_rpc_server_reconnect_timeout_s for ray start there"
        )
    shown: Table = [
        {
            "name": one.name,
            "state": one.state,
            "node": one.node,
            "address": one.address,
            "age": f"{one.age_s:.0f} s" if one.epoch else "",
            "reason": one.reason,
        }
        for one in reports
    ]
    rows = [msgspec.to_builtins(one) for one in reports]
    return table_result(rows, shown=shown, right=("age",), none="no keepers")


def _short_lived(reports: list[KeeperReport]) -> dict[str, float]:
    """Return the hosts that end a minute after the head of their cluster, and the seconds."""
    return {
        one.node: one.head_loss_s
        for one in reports
        if one.head_loss_s is not None and one.head_loss_s <= 60.0
    }


def _down(call: CommandCall) -> CommandResult:
    name = call.options.name
    with _connected(call) as cluster:
        there = cluster.names()
        if name is not None and name not in there:
            expected = ", ".join(there) or "no names: there are no keepers"
            raise CommandError(f"{name}: no such keeper; expected one of {expected}")
        ended = there if name is None else [name]
        for one in ended:
            cluster.end(one)
    return CommandResult("\n".join(f"{one}: ended" for one in ended) or "no keepers", ended)


def _watch(call: CommandCall) -> CommandResult:
    file = ReplicaFile(call.options.file)
    with closing(LogLines(sys.stderr.fileno(), wall_ms)) as log:
        asyncio.run(_follow(lookout_command(call.options.address), file, log))
    return CommandResult("", None)


async def _follow(command: list[str], file: ReplicaFile, log: LogLines) -> None:
    """Follow until SIGTERM or SIGINT."""
    follows = asyncio.ensure_future(follow_cluster(command, file, log))
    stop = dict.fromkeys((signal.SIGTERM, signal.SIGINT), follows.cancel)
    with handle_signals(stop), suppress(asyncio.CancelledError):
        await follows


def _wanted(call: CommandCall) -> CommandResult:
    options = call.options
    if options.over <= 0 or (options.rows is not None and options.rows < 1):
        raise CommandError("--over and --rows: expected more than 0")
    gateway = options.gateway or call.config.admin.listen
    rows = options.rows or call.config.engine.sequences_max
    before, began_s = _scrape(gateway), time.monotonic()
    call.warn(f"measures {gateway} for {options.over:g} s")
    time.sleep(options.over)
    after, ended_s = _scrape(gateway), time.monotonic()
    wanted = count_wanted(before, after, ended_s - began_s, rows, options.wait)
    text = wanted_text(wanted)
    if options.apply:
        with _connected(call) as cluster:
            cluster.request(wanted.engines, options.gpus)
        text += f"\nasked Ray's autoscaler for room for {wanted.engines}"
    return CommandResult(text, msgspec.to_builtins(wanted))


def _scrape(address: str) -> GatewayCounts:
    """Return a gateway's counters. Raises CommandError and FleetError."""
    host, port = parse_address(address, "--gateway")
    connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=SCRAPE_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        page = answer.read().decode()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(
            f"no gateway answers at {address}: {error}; expected its admin listener"
        ) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise CommandError(f"{address} answers {answer.status}; expected its admin listener")
    return read_counts(page)


_ACTIONS: Mapping[str, Callable[[CommandCall], CommandResult]] = {
    "explain": lambda call: explain(call.config, call.options.request_id),
    "forget": lambda call: forget(call.config, call.options.name),
    "init": _init,
    "up": _up,
    "status": _status,
    "down": _down,
    "watch": _watch,
    "wanted": _wanted,
}

COMMANDS: Mapping[str, Entry] = {"fleet": Entry(_add_actions, _run)}
