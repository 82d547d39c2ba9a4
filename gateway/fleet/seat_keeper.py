"""A keeper in a process that another program starts: it reads its host, and keeps one engine.

It runs in a thread of its own, and is asked for its state from others. What its host lacks (a
certificate, a model, a free port) is its reason, and is looked for again: an operator mends it in
place.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from engine.client.tls_files import check_certificate
from engine.errors import EngineError
from gateway.config import Config, ConfigError, load_config
from gateway.config.fleet import ReplicaAddress
from gateway.engines.keeper import ListeningSocket
from gateway.engines.model_files import prepare_draft_model, prepared_model
from gateway.fleet.errors import FleetError
from gateway.fleet.keeping import KeptEngine, keep_engine, open_listener
from gateway.fleet.seats import KeeperReport, KeeperState, Seat
from gateway.http.descriptors import raise_descriptor_limit
from gateway.levels.placement import check_levels, configured_dir, lock_disks
from gateway.observability.logging import LogLines
from tenancy.types import wall_ms

AGAIN_S: Final = 5.0
"""Seconds until a host that lacks something is looked at again."""


class SeatKeeper:
    """Keeps the engine of a seat from its construction on, until `leave`."""

    def __init__(self, seat: Seat, host: str, clock: Callable[[], float]) -> None:
        """`host`: this host's address, at which gateways reach it. `clock`: monotonic seconds."""
        self._seat, self._host, self._clock = seat, host, clock
        self._kept = KeptEngine(clock)
        self._address = ""
        self._reason = ""
        self._has_ended = False
        self._is_leaving = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        """Belongs to the loop, as long as that runs."""
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def report(self) -> KeeperReport:
        """Return how it is now. Any thread."""
        engine, info = self._kept.engine, None
        if engine is not None:
            info = engine.info
        return KeeperReport(
            name=self._seat.name,
            state=self._state(),
            address=self._address,
            epoch="" if info is None else info.epoch,
            age_s=0.0 if info is None else round(self._clock() - self._kept.since_s, 1),
            pid=os.getpid(),
            reason=self._reason,
        )

    def leave(self) -> None:
        """Let the engine finish its requests, within `engine.drain_timeout_s`, and end it. Blocks
        until then. Any thread."""
        self._is_leaving.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(stop.set)
        self._thread.join()

    def _state(self) -> KeeperState:
        if self._has_ended:
            return "ended"
        if self._reason:
            return "failed"
        if self._kept.is_draining:
            return "draining"
        return "starting" if self._kept.engine is None else "ready"

    # -- in its thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep_on()
        finally:
            if not self._is_leaving.is_set():
                traceback.print_exc()
                os._exit(1)  # an error of ours: who started this process starts the next one
        self._has_ended = True

    def _keep_on(self) -> None:
        with closing(LogLines(sys.stderr.fileno(), wall_ms)) as log:
            raise_descriptor_limit()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core has prompts
            while not self._is_leaving.is_set():
                try:
                    self._keep(log)
                except (ConfigError, EngineError, FleetError, OSError) as error:
                    self._address = ""
                    if self._reason != str(error):
                        log("keeper_failed", {"name": self._seat.name, "reason": str(error)})
                    self._reason = str(error)
                    self._is_leaving.wait(AGAIN_S)

    def _keep(self, log: LogLines) -> None:
        """Read the host, and keep an engine until `leave`. Raises ConfigError, EngineError,
        FleetError and OSError."""
        seat = self._seat
        config = seat_config(seat)
        config.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        levels = [config.engine_of(config.served_models()[0]).levels]
        check_levels(config, levels)
        tls = Path(seat.tls or config.data / "fleet") / f"engine-{seat.name}"
        check_certificate(tls, f"engine/{seat.name}")
        with ExitStack() as opened:
            lock_disks(config, levels, opened)
            source = config.served_models()[0].source
            files = (
                config.models_dir,
                lambda line: log("model", {"text": line}),
                lambda done, total: None,
            )
            card = prepared_model(source, *files)
            prepare_draft_model(config.engine_of(config.served_models()[0]), card, *files)
            end = opened.enter_context(closing(self._listen()))
            port: int = end.getsockname()[1]
            self._address = str(ReplicaAddress("", self._host, port)).removeprefix("=")
            self._reason = ""
            listening = ListeningSocket(end.fileno(), seat.name, tls.absolute())
            asyncio.run(self._keep_engine(config, Path(card.folder), listening, log))

    def _listen(self) -> socket.socket:
        """Return a socket on the first port that is free. Raises FleetError and OSError."""
        first, last = self._seat.ports
        for port in range(first, last + 1):
            try:
                return open_listener(self._host, port)
            except OSError as error:
                if port == last:
                    why = os.strerror(error.errno or 0)
                    raise FleetError(
                        f"no port of {first}-{last} at {self._host} can be listened on: {why};"
                        " expected a free one"
                    ) from error
        raise AssertionError("a seat has a port")

    async def _keep_engine(
        self, config: Config, model: Path, listening: ListeningSocket, log: LogLines
    ) -> None:
        self._stop = stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._is_leaving.is_set():
            return
        try:
            await keep_engine(config, model, listening, self._kept, stop, log)
        finally:
            self._loop = None


def seat_config(seat: Seat) -> Config:
    """Return the host's settings for a seat: its engine has a folder of its own below that of the
    disk level, since several engines may share a host. Raises ConfigError."""
    flags: dict[str, object] = {"data_dir": seat.data_dir}
    if seat.model:
        flags["model.name"] = seat.model
    if seat.role is not None:
        flags["engine.role"] = seat.role
    file = Path(seat.config_file) if seat.config_file else None
    config, _ = load_config(file, os.environ, flags)
    own = configured_dir(config).absolute() / seat.name
    levels = replace(config.engine.levels, dir=str(own))
    return replace(config, engine=replace(config.engine, levels=levels))
