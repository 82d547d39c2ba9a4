"""`trunkline serve` and `pull`: prepare data directory, model and store, then run the gateway."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from engine.client.tls_files import check_certificate
from engine.encoder.card import EncoderCard, prepare_encoder
from engine.errors import ModelError
from engine.model_store import CATALOGUE, DEFAULT_MODEL, ModelCard, pull
from engine.signals import handle_signals
from gateway.cli.addresses import check_address
from gateway.cli.database import (
    ADMIN_KEY_FILE,
    KEY_FILE,
    connect,
    create_first_keys,
    prepare_data_dir,
)
from gateway.cli.result import CommandCall, CommandError, CommandResult, Entry
from gateway.config import Config, ConfigError, format_address, parse_address
from gateway.config.config_file import ConfigSource, describe
from gateway.engines.composition import replicas_of_models
from gateway.engines.memory import lacking_memory
from gateway.engines.model_files import (
    Progress,
    Say,
    found_model,
    prepare_draft_model,
    prepared_model,
    short_name,
)
from gateway.http.descriptors import raise_descriptor_limit
from gateway.levels.placement import check_levels, levels_here, lock_disks
from gateway.observability.logging import LogLines
from gateway.processes.child_process import StartLimit
from gateway.processes.member import Announcement, GroupMember
from gateway.processes.process_group import (
    ProcessGroup,
    check_processes,
    member_commands,
    reserve_port,
)
from gateway.shared.gateway_id import name_start, take_gateway_id
from tenancy.storage.interface import Store
from tenancy.types import wall_ms


def run(
    config: Config,
    say: Say,
    progress: Progress,
    source: ConfigSource,
    is_hung_up: Callable[[], bool] = lambda: False,
    process: int | None = None,
) -> bool:
    """Serve until a signal, and return whether all went well. Fetches missing built-in models.

    `source`: of the settings, for a reload. `process`: the number of this one of several processes
    of a gateway. `is_hung_up`: whether a reload was asked for before the event loop ran. Raises,
    before a model is fetched, CommandError for an address or a data directory that cannot be used,
    ConfigError for levels that this machine cannot have and for processes without what they share,
    TlsError for a certificate that engines elsewhere would refuse, and StoreError for an unusable
    database, or one that has a gateway with this one's id; and CommandError for several models that
    do not fit into memory together, before one is loaded.
    """
    check_processes(config)
    if process is None:  # the processes of a gateway share the port
        check_address(config.server.listen, "server.listen")
    check_address(config.admin.listen, "admin.listen")
    changed_mode = prepare_data_dir(config)
    if any(one.is_elsewhere for one in config.served_models()):
        check_certificate(config.fleet_folder, f"gateway/{config.fleet.name}")
    levels = levels_here(config)
    check_levels(config, levels)
    with ExitStack() as opened:
        lock_disks(config, levels, opened)
        store = opened.enter_context(closing(connect(config)))
        start = name_start(take_gateway_id(config.data, store, process=process))
        store.keep_room()
        if changed_mode:
            say(changed_mode)
        cards = prepared_models(config, say, progress)
        encoder = prepared_encoder(config, say, progress)
        if lack := lacking_memory(config):
            raise CommandError(lack)
        key = create_first_keys(config, store)
        shown = partial(banner, config=config, key=key, config_file=source.file)

        def announce(serving: Announcement) -> None:
            for line in shown(serving.states, serving.urls):
                say(line)

        if process is None and config.server.processes > 1:
            return asyncio.run(keep_group(config, sys.argv[1:], announce))
        member = None if process is None else opened.enter_context(closing(GroupMember(process)))
        tell = announce if member is None else member.announce
        parts = cards, store, lambda urls, states: tell(Announcement(urls, states)), source, encoder
        asyncio.run(serve(config, *parts, is_hung_up(), start=start, member=member))
    return True


async def keep_group(
    config: Config, argv: Sequence[str], announce: Callable[[Announcement], None]
) -> bool:
    """Keep several processes of a gateway until SIGTERM or SIGINT, which drain all of them; a
    second one ends them at once, and SIGHUP reloads the configuration of each. Return whether all
    ended well. Raises CommandError if one cannot start.

    `argv`: the arguments of this process, without its name.
    """
    log = LogLines(sys.stderr.fileno(), wall_ms)
    stop = asyncio.Event()
    host, port = parse_address(config.server.listen, "server.listen")
    admin = parse_address(config.admin.listen, "admin.listen")
    with closing(log), closing(reserve_port(host, port)) as reserved:
        address = format_address(host, reserved.getsockname()[1])
        group = ProcessGroup(member_commands(argv, address, admin, config.server.processes), log)

        def end() -> None:
            if stop.is_set():
                log("stop_forced", {})
                group.signal(signal.SIGKILL)
            stop.set()

        hang_up = partial(group.signal, signal.SIGHUP)
        with handle_signals({signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: hang_up}):
            opening = asyncio.create_task(group.open())
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((opening, stopped), return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    opening.result()
                    if (first := group.serving[0]) is not None:
                        announce(first)
                await stopped
            except StartLimit as error:
                raise CommandError(f"{error}; its log is above") from error
            finally:
                opening.cancel()
                stopped.cancel()
                ended_well = await group.close(config.engine.drain_timeout_s)
    return ended_well


async def serve(
    config: Config,
    cards: Sequence[ModelCard | ModelError],
    store: Store,
    announce: Callable[[list[str], Mapping[str, str]], None],
    source: ConfigSource,
    encoder: EncoderCard | None = None,
    is_hung_up: bool = False,
    *,
    start: str,
    member: GroupMember | None = None,
) -> None:
    """Start the engines, which are the slowest part to be ready, and import the gateway meanwhile.

    Then it runs; see `gateway.app.serve`. The first SIGTERM or SIGINT drains, a second one exits at
    once, and SIGHUP reloads the configuration: from before the first child process on. One that
    came earlier (`is_hung_up`) reloads it as soon as the gateway runs. `start`: names this start of
    the gateway. `member`: of a group of processes, which ends this one: only a second order of its
    parent ends it at once.
    """
    log = LogLines(sys.stderr.fileno(), wall_ms)
    raise_descriptor_limit()
    # A core has keys and prompts. Inherited by the engines and all other children.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stop, hangup = asyncio.Event(), asyncio.Event()
    if is_hung_up:
        hangup.set()

    def end() -> None:
        if stop.is_set() and member is None:
            log("stop_forced", {})
            log.close()
            os._exit(1)
        stop.set()

    handlers = {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: hangup.set}
    with closing(log), handle_signals(handlers):
        if member is not None:
            member.follow(stop.set)
        process = None if member is None else member.number
        replicas = replicas_of_models(config, cards, log, start, process)
        try:
            for one in replicas:
                one.start()
            gc.disable()  # until `gateway.gc_tuning.freeze_heap`: what is made until then stays
            await asyncio.to_thread(import_module, "gateway.app")
            from gateway import app

            parts = cards, store, replicas, log
            await app.serve(config, *parts, announce, source, encoder, stop, hangup, start)
        finally:
            await asyncio.gather(*(one.close() for one in replicas))


def banner(
    states: Mapping[str, str],
    urls: Sequence[str],
    config: Config,
    key: str | None,
    config_file: Path | None,
) -> list[str]:
    """Return the lines that say where the server is. `states`: of the models, by name. `urls`: of
    the public and admin listeners.

    `key`: the default tenant's, at the first start. `config_file`: the file that was read.
    """
    public, admin = urls
    shown = [] if key is None else [f"  key of the tenant 'default' (shown once): {key}"]
    models = [n if state == "ready" else f"{n} ({state})" for n, state in states.items()]
    return [
        f"trunkline serves {', '.join(models)} at {public}/v1",
        f"  dashboard:           {admin}/dashboard",
        f"  metrics and health:  {admin}/metrics  {public}/readyz",
        *shown,
        f"  key file:            {config.data / KEY_FILE}",
        f"  administrator's key: {config.data / ADMIN_KEY_FILE}",
        f"  configuration file:  {describe(config_file)}",
    ]


def prepared_models(config: Config, say: Say, progress: Progress) -> list[ModelCard | ModelError]:
    """Prepare all models that are served, in their order, and their draft models; see
    `prepared_model`. A fault of another model than the default one is returned in its place: the
    others serve on."""
    models = config.models_dir
    found: list[ModelCard | ModelError] = []
    for one in config.served_models():
        try:
            card = prepared_model(one.source, models, say, progress)
            if not one.is_elsewhere:
                prepare_draft_model(config.engine_of(one), card, models, say, progress)
            found.append(card)
        except ModelError as error:
            if not found:
                raise
            found.append(error)
    return found


def prepared_encoder(config: Config, say: Say, progress: Progress) -> EncoderCard | None:
    """Do the same for the embedding model; None if there is none. Raises ModelError, and
    ConfigError for a chat model."""
    name, models = config.embeddings.model, config.models_dir
    if not name:
        return None
    if name in CATALOGUE and not CATALOGUE[name].is_encoder:
        message = f"embeddings.model: {name} is a chat model; expected an embedding model"
        raise ConfigError(message)
    source = found_model(name, models, say, progress)
    return prepare_encoder(short_name(name, source), source, models)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"model to serve (default: {DEFAULT_MODEL})")
    parser.add_argument("--listen", metavar="HOST:PORT", help="public listener")
    parser.add_argument("--admin-listen", metavar="HOST:PORT", help="admin listener")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)


def _serve(call: CommandCall) -> CommandResult:
    """Serve until SIGTERM or SIGINT.

    Until the event loop handles them, both interrupt the preparation, such as a download. Without a
    handler, process 1 of a container would ignore SIGTERM. SIGHUP, which would end the process,
    is kept for the event loop.
    """
    hangups: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: hangups.append(number))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        progress = partial(call.show, "model")
        process = call.options.process
        serves = run(call.config, call.say, progress, call.source, lambda: bool(hangups), process)
        return CommandResult("", None, 0 if serves else 1)
    return CommandResult("", None)


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"default: {DEFAULT_MODEL}")
    parser.add_argument("--verify", action="store_true", help="hash files that exist")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no path")


def _pull(call: CommandCall) -> CommandResult:
    """Fetch the models, or check that they are here. Raises ModelError."""
    served = call.config.served_models()
    drafts = [call.config.engine_of(one).drafting_model for one in served if not one.is_elsewhere]
    names = [name for name in dict.fromkeys((*(one.source for one in served), *drafts)) if name]
    paths = {name: str(_pull_one(call, name)) for name in names}
    text = "" if call.options.quiet else "\n".join(paths.values())
    if len(names) == 1:
        return CommandResult(text, {"model": names[0], "path": paths[names[0]]})
    return CommandResult(text, {"models": [{"model": n, "path": p} for n, p in paths.items()]})


def _pull_one(call: CommandCall, name: str) -> Path:
    quiet = call.options.quiet
    progress = (lambda done, total: None) if quiet else partial(call.show, "model")
    if name in CATALOGUE and not quiet:
        model = CATALOGUE[name]
        call.warn(f"{model.about}: {model.size / 1e6:.0f} MB; licence: {model.licence}")
    if name not in CATALOGUE and call.config.models and Path(name).expanduser().exists():
        return Path(name).expanduser()  # a path in [[models]] needs no fetching
    return pull(name, call.config.models_dir, progress, verify=call.options.verify)


COMMANDS: Mapping[str, Entry] = {
    "serve": Entry(_add_serve, _serve),
    "pull": Entry(_add_pull, _pull),
}
