"""What the engine's parent tells it over standard input: model, settings and descriptors.

The parent is a gateway that embeds the engine, or the keeper of an engine elsewhere; its Hello has
the role "both" or "keeper".
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from engine.config import EngineConfig
from engine.processes import log_line
from engine.protocol import PROTOCOL_VERSION, Hello
from engine.server.links.gateway_link import GatewayLink


class ListenSettings(Struct, frozen=True):
    """Where gateways reach the engine: an inherited listening socket, under a name."""

    fd: int
    name: str
    tls: Path


class ServerSettings(Struct, frozen=True):
    """The model and the configuration of the parent's Hello."""

    model_dir: str
    config: EngineConfig
    record_fd: int = -1
    host_fds: tuple[int, int] | None = None
    listen: ListenSettings | None = None
    fallen: tuple[str, ...] = ()


async def read_settings(parent: GatewayLink) -> ServerSettings | None:
    """Read the parent's Hello.

    Returns None if the parent left or speaks another protocol: then it has been answered, and the
    process can only exit.
    """
    hello = await parent.read_hello()
    if hello is None or not check_version(parent, hello):
        return None
    if hello.role not in ("both", "keeper"):
        parent.reject("unsupported", f"Unexpected role: {hello.role}; expected both or keeper.")
        return None
    try:
        config = msgspec.convert(hello.config, EngineConfig)
    except msgspec.ValidationError as error:
        log_line("connection_lost", reason=type(error).__name__)
        return None
    listen = None
    if hello.listen_fd >= 0:
        listen = ListenSettings(hello.listen_fd, hello.name, Path(hello.tls))
    descriptors = hello.record_fd, hello.host_fds
    return ServerSettings(hello.model_dir, config, *descriptors, listen, hello.fallen)


def check_version(link: GatewayLink, hello: Hello) -> bool:
    """Return whether a Hello is of this protocol; if not, answer it."""
    if hello.version == PROTOCOL_VERSION:
        return True
    found = f"Unsupported protocol version: {hello.version}"
    link.reject("unsupported", f"{found}; expected {PROTOCOL_VERSION}.")
    return False
