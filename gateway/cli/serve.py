"""`trunkline serve`: prepares data directory, model and store, then runs the gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from engine.errors import ModelError
from engine.model_store import CATALOGUE, ModelCard, prepare, pull, resolve
from gateway import app
from gateway.cli.result import CommandError
from gateway.config import Config, parse_address

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


def run(config: Config, say: Say, progress: Progress, read_config: Callable[[], Config]) -> int:
    """Serve until a signal, and return the exit status. Fetches a missing built-in model first.

    `read_config` returns the settings as they are now, for a reload. Raises CommandError for an
    address or a data directory that cannot be used, before a model is fetched or loaded.
    """
    check_address(config.server.listen, "server.listen")
    check_address(config.admin.listen, "admin.listen")
    try:
        app.prepare_data_dir(config)
    except OSError as error:
        raise CommandError(
            f"cannot use the data directory {config.data}: {error.strerror}"
        ) from error
    card = prepared_model(config, say, progress)
    store, key = app.open_store(config)

    def announce(urls: list[str]) -> None:
        public, admin = urls
        say(f"trunkline serves {card.name} at {public}/v1")
        say(f"  metrics and health:  {admin}/metrics  {public}/readyz")
        if key is not None:
            say(f"  key of the tenant 'default' (shown once): {key}")
        say(f"  key file:            {config.data / app.KEY_FILE}")
        say(f"  administrator's key: {config.data / app.ADMIN_KEY_FILE}")

    try:
        return asyncio.run(app.serve(config, card, store, announce, read_config))
    finally:
        store.close()


def prepared_model(config: Config, say: Say, progress: Progress) -> ModelCard:
    """Resolve the model, fetch a missing built-in one, and prepare it. Raises ModelError."""
    name, models = config.model.name, config.models_dir
    try:
        source = resolve(name, models)
    except ModelError as error:
        if error.code != "not_found" or name not in CATALOGUE:
            raise
        say(f"fetching {name}")
        source = pull(name, models, progress)
    short = name if name in CATALOGUE else source.stem if source.is_file() else source.name
    return prepare(short, source, models)


def check_address(address: str, what: str) -> None:
    """Check that an address can be listened on now. Raises CommandError with the reason."""
    host, port = parse_address(address, what)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in places[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CommandError(f"{what}: cannot listen on {address}: {reason}") from error
