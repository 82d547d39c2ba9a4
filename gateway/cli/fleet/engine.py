"""`trunkline engine`: the keeper of an engine that gateways reach over the network.

`serve` starts and watches the engine; it knows no request. `drain` and `undrain` leave a mark in
the data directory, which the keeper follows: a drained engine stays down over restarts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import get_args

from engine.api import EngineRole
from engine.client.tls_files import check_certificate
from engine.signals import handle_signals
from gateway.cli.addresses import check_address
from gateway.cli.arguments import add_actions
from gateway.cli.database import prepare_data_dir
from gateway.cli.result import CommandCall, CommandError, CommandResult, Entry
from gateway.config import Config, format_address, parse_address
from gateway.config.fleet import NAME_RULE, is_fleet_name
from gateway.engines.keeper import ListeningSocket
from gateway.engines.model_files import prepare_draft_model, prepared_model
from gateway.fleet.keeping import KeptEngine, drain_mark, keep_engine, open_listener, serves_mark
from gateway.http.descriptors import raise_descriptor_limit
from gateway.levels.placement import check_levels, lock_disks
from gateway.observability.logging import LogLines
from tenancy.types import wall_ms


def _add_actions(command: argparse.ArgumentParser) -> None:
    texts = {
        "serve": "Keep an engine running, for gateways elsewhere.",
        "drain": "Let an engine finish its requests; it stays down until undrain.",
        "undrain": "Start a drained engine again.",
    }
    actions = add_actions(command, texts)
    serve = actions["serve"]
    serve.add_argument("model", nargs="?", help="model to serve (default: model.name)")
    serve.add_argument("--name", required=True, help="as its certificate names it: engine/NAME")
    serve.add_argument("--listen", required=True, metavar="HOST:PORT", help="for gateways")
    text = "its certificate (default: fleet/engine-NAME in the data directory)"
    serve.add_argument("--tls", type=Path, metavar="DIR", help=text)
    serve.add_argument("--device", choices=("auto", "cpu", "cuda"))
    text = "what gateways use it for (default: engine.role)"
    serve.add_argument("--role", choices=get_args(EngineRole), help=text)
    for action in ("drain", "undrain"):
        actions[action].add_argument("name", help="the name of an engine kept on this host")


def _run(call: CommandCall) -> CommandResult:
    """Run one action. Raises CommandError, ConfigError, ModelError and TlsError."""
    name, config = call.options.name, call.config
    if not is_fleet_name(name):
        raise CommandError(f"the name {name[:80]!r}; expected {NAME_RULE}")
    if call.options.action == "serve":
        _serve(call)
        return CommandResult("", None)
    mark = drain_mark(config, name)
    try:
        if call.options.action == "drain":
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
            text = f"{name} drains, and stays down until undrain"
            if not serves_mark(config, name).exists():
                text = f"{name} serves nowhere in {config.data}; there it stays down until undrain"
            return CommandResult(text, {"name": name})
        mark.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{mark}: {error.strerror}") from error
    return CommandResult(f"{name} serves again", {"name": name})


def _serve(call: CommandCall) -> None:
    """Keep an engine until a signal."""
    config, options = call.config, call.options
    check_address(options.listen, "--listen")
    prepare_data_dir(config)
    levels = [config.engine_of(config.served_models()[0]).levels]
    check_levels(config, levels)
    tls = (options.tls or config.data / "fleet" / f"engine-{options.name}").absolute()
    check_certificate(tls, f"engine/{options.name}")  # gateways alone would see it later
    with ExitStack() as opened:
        lock_disks(config, levels, opened)
        source = config.served_models()[0].source
        files = config.models_dir, call.say, partial(call.show, "model")
        card = prepared_model(source, *files)
        prepare_draft_model(config.engine_of(config.served_models()[0]), card, *files)
        host, port = parse_address(options.listen, "--listen")
        try:
            end = opened.enter_context(closing(open_listener(host, port)))
        except OSError as error:
            address = format_address(host, port)
            raise CommandError(f"--listen: {address}: {error.strerror}") from error
        listening = ListeningSocket(end.fileno(), options.name, tls)
        call.say(f"engine {options.name} of {card.name} at {options.listen}; certificate: {tls}")
        asyncio.run(_keep(config, Path(card.folder), listening))


async def _keep(config: Config, model: Path, listening: ListeningSocket) -> None:
    """Keep an engine until SIGTERM or SIGINT, which let it finish its requests; a second one ends
    it at once. SIGHUP is nothing to it: certificates are read for each connection."""
    log = LogLines(sys.stderr.fileno(), wall_ms)
    raise_descriptor_limit()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core has prompts
    stop = asyncio.Event()

    def end() -> None:
        if stop.is_set():
            log("stop_forced", {})
            log.close()
            os._exit(1)
        stop.set()

    handlers = {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: lambda: None}
    with closing(log), handle_signals(handlers):
        await keep_engine(config, model, listening, KeptEngine(time.monotonic), stop, log)


COMMANDS: Mapping[str, Entry] = {"engine": Entry(_add_actions, _run)}
