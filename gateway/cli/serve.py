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

from engine.encoder.card import EncoderCard, prepare_encoder
from engine.errors import ModelError
from engine.model_store import CATALOGUE, DEFAULT_MODEL, ModelCard, prepare, pull, resolve
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
from gateway.config import Config, ConfigError
from gateway.config_file import ConfigSource, describe
from gateway.engines.memory import lacking_memory
from gateway.engines.supervisors import supervise_engines
from gateway.http.descriptors import raise_descriptor_limit
from gateway.levels.placement import ServerLock, check_levels, levels_dir
from gateway.observability.logging import LogLines
from tenancy.storage.interface import Store
from tenancy.types import wall_ms

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


def run(config: Config, say: Say, progress: Progress, source: ConfigSource) -> None:
    """Serve until a signal. Fetches missing built-in models.

    `source`: of the settings, for a reload. Raises, before a model is fetched, CommandError for an
    address or a data directory that cannot be used, ConfigError for levels that this machine cannot
    have, and StoreError for an unusable database; and CommandError for several models that do not
    fit into memory together, before one is loaded.
    """
    check_address(config.server.listen, "server.listen")
    check_address(config.admin.listen, "admin.listen")
    changed_mode = prepare_data_dir(config)
    check_levels(config)
    with ExitStack() as opened:
        if config.engine.levels.disk_gib:
            opened.callback(ServerLock(levels_dir(config)).close)
        store = opened.enter_context(closing(connect(config)))
        store.keep_room()
        if changed_mode:
            say(changed_mode)
        cards = prepared_models(config, say, progress)
        encoder = prepared_encoder(config, say, progress)
        if lack := lacking_memory(config):
            raise CommandError(lack)
        key = create_first_keys(config, store)

        def announce(urls: list[str], states: Mapping[str, str]) -> None:
            for line in banner(states, urls, config, key, source.file):
                say(line)

        asyncio.run(serve(config, cards, store, announce, source, encoder))


async def serve(
    config: Config,
    cards: Sequence[ModelCard | ModelError],
    store: Store,
    announce: Callable[[list[str], Mapping[str, str]], None],
    source: ConfigSource,
    encoder: EncoderCard | None = None,
) -> None:
    """Start the engines, which are the slowest part to be ready, and import the gateway meanwhile.

    Then it runs; see `gateway.app.serve`. The first SIGTERM or SIGINT drains, a second one exits at
    once, and SIGHUP reloads the configuration: from before the first child process on.
    """
    log = LogLines(sys.stderr.fileno(), wall_ms)
    raise_descriptor_limit()
    # A core has keys and prompts. Inherited by the engines and all other children.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stop, hangup = asyncio.Event(), asyncio.Event()

    def end() -> None:
        if stop.is_set():
            log("stop_forced", {})
            log.close()
            os._exit(1)
        stop.set()

    handlers = {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: hangup.set}
    with closing(log), handle_signals(handlers):
        supervisors = supervise_engines(config, cards, log)
        try:
            for supervisor in supervisors:
                supervisor.start()
            gc.disable()  # until `gateway.gc_tuning.freeze_heap`: what is made until then stays
            await asyncio.to_thread(import_module, "gateway.app")
            from gateway import app

            parts = cards, store, supervisors, log
            await app.serve(config, *parts, announce, source, encoder, stop, hangup)
        finally:
            await asyncio.gather(*(supervisor.close() for supervisor in supervisors))


def banner(
    states: Mapping[str, str],
    urls: list[str],
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
    """Prepare all models that are served, in their order; see `prepared_model`. A fault of another
    model than the default one is returned in its place: the others serve on."""
    models = config.models_dir
    default, *others = config.served_models()
    found: list[ModelCard | ModelError] = [prepared_model(default.source, models, say, progress)]
    for one in others:
        try:
            found.append(prepared_model(one.source, models, say, progress))
        except ModelError as error:
            found.append(error)
    return found


def prepared_model(name: str, models: Path, say: Say, progress: Progress) -> ModelCard:
    """Resolve a model, fetch a missing built-in one, and prepare it. Raises ModelError, and
    ConfigError for an embedding model."""
    if name in CATALOGUE and CATALOGUE[name].is_encoder:
        message = (
            f"{name} is an embedding model; expected a chat model, or this one as embeddings.model"
        )
        raise ConfigError(message)
    source = _found_model(name, models, say, progress)
    return prepare(_short_name(name, source), source, models, _check_template)


def _check_template(source: str) -> None:
    """Compile a chat template. Raises ValueError."""
    from gateway.prompt.template import ChatTemplate  # for the first start of a model alone

    ChatTemplate(source)


def prepared_encoder(config: Config, say: Say, progress: Progress) -> EncoderCard | None:
    """Do the same for the embedding model; None if there is none. Raises ModelError, and
    ConfigError for a chat model."""
    name, models = config.embeddings.model, config.models_dir
    if not name:
        return None
    if name in CATALOGUE and not CATALOGUE[name].is_encoder:
        message = f"embeddings.model: {name} is a chat model; expected an embedding model"
        raise ConfigError(message)
    source = _found_model(name, models, say, progress)
    return prepare_encoder(_short_name(name, source), source, models)


def _short_name(name: str, source: Path) -> str:
    if name in CATALOGUE:
        return name
    return source.stem if source.is_file() else source.name


def _found_model(name: str, models: Path, say: Say, progress: Progress) -> Path:
    """Return the file or folder of a model; fetches a missing built-in one."""
    try:
        return resolve(name, models)
    except ModelError as error:
        if error.code != "not_found" or name not in CATALOGUE:
            raise
        say(f"fetching {name}")
        return pull(name, models, progress)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"model to serve (default: {DEFAULT_MODEL})")
    parser.add_argument("--listen", metavar="HOST:PORT", help="public listener")
    parser.add_argument("--admin-listen", metavar="HOST:PORT", help="admin listener")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))


def _serve(call: CommandCall) -> CommandResult:
    """Serve until SIGTERM or SIGINT.

    Until the event loop handles them, both interrupt the preparation, such as a download. Without a
    handler, process 1 of a container would ignore SIGTERM.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        run(call.config, call.say, partial(call.show, "model"), call.source)
    return CommandResult("", None)


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"default: {DEFAULT_MODEL}")
    parser.add_argument("--verify", action="store_true", help="hash files that exist")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no path")


def _pull(call: CommandCall) -> CommandResult:
    """Fetch the models, or check that they are here. Raises ModelError."""
    names = list(dict.fromkeys(one.source for one in call.config.served_models()))
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
