"""The engine process: `python -m engine.server.server`, started by a gateway or a keeper.

Its standard input is a socket, over which it speaks `engine.protocol` with its parent; the first
message names the model. When the socket ends, the parent is gone and the process exits, even while
a step hangs; the kernel kills it with the parent, even while it loads. A keeper's engine also has a
listener for gateways. SIGTERM drains: no new
requests are accepted, running ones may finish; a second SIGTERM ends the process at once. Log lines
are JSON, one per event, on standard error, and contain no prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from engine.api import Drain, EngineInfo
from engine.client.frame_wire import FrameWire
from engine.client.step_record import StepRecord
from engine.core.core import Core
from engine.errors import EngineError
from engine.processes import end_with_parent, log_line
from engine.protocol import (
    Messages,
)
from engine.server.composition import core_of_model
from engine.server.gc_tuning import FrozenHeap
from engine.server.links.gateway_link import GatewayLink, call_in_loop, failure_reason
from engine.server.links.keeper_link import ServerSettings, read_settings
from engine.server.links.listener import EngineListener
from engine.server.service import EngineService
from engine.signals import handle_signals

SWITCH_INTERVAL_S = 0.0005
"""How long the step's thread may run Python while those that copy blocks wait for it, in seconds;
Python's own value is 5 ms. 32,768 tokens from host memory take 195 ms instead of 530 to 600."""
CAUSES_MAX, FRAMES_MAX = 4, 8
"""Errors in a chain, and frames of each, that the log names for a failed step."""


class _DiscardSink:
    """A `ResponseSink` for commands without a reader of replies."""

    def send(self, step: int, messages: Messages) -> None:
        """Discard the messages."""


def log_failed_step(step: int, error: Exception) -> None:
    """Log the error of a step, its causes and where each was raised, innermost frame last.

    Messages are left out: they may quote a prompt.
    """
    causes: list[str] = []
    raised: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(causes) < CAUSES_MAX:
        causes.append(type(cause).__name__)
        frames = traceback.extract_tb(cause.__traceback__)[-FRAMES_MAX:]
        raised += [f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames]
        cause = cause.__cause__ or cause.__context__
    log_line("step_failed", step=step, error=causes[0], causes=causes[1:], frames=raised)


async def run(
    wire: socket.socket, make_core: Callable[[ServerSettings], tuple[Core, EngineInfo]]
) -> int:
    """Serve until drained, stopped, disconnected or broken. Returns the exit status."""
    loop = asyncio.get_running_loop()
    stop, loaded, draining = asyncio.Event(), asyncio.Event(), asyncio.Event()
    listener: EngineListener | None = None

    def on_drain() -> None:
        if listener is not None:
            listener.begin_drain()

    parent = GatewayLink(partial(FrameWire, wire), on_drain)
    settings = await read_settings(parent)
    if settings is None:
        await parent.close()
        return 1

    def on_change() -> None:
        loaded.set()
        if service.stopped.is_set():
            stop.set()

    def on_sigterm() -> None:
        if draining.is_set() or not loaded.is_set():
            stop.set()
            return
        draining.set()
        log_line("draining")
        on_drain()
        service.post(_DiscardSink(), Drain(settings.config.drain_timeout_s))

    service = EngineService(
        lambda: make_core(settings),
        settings.config,
        record=StepRecord(settings.record_fd) if settings.record_fd >= 0 else None,
        on_change=lambda: call_in_loop(loop, on_change),
    )
    # The gateway receives a terminal's interrupt, too, and decides.
    with handle_signals({signal.SIGTERM: on_sigterm, signal.SIGINT: lambda: None}):
        service.start()
        await _wait_any(loaded, stop, parent.ended)
        info, failure = service.info, service.failure
        if info is not None:
            log_line("ready", model=info.model, blocks=info.blocks, pid=os.getpid())
            for level in service.levels_off:
                log_line("level_off", level=level.name, reason=level.reason)
            if settings.listen is not None:
                listener = EngineListener(settings.listen, service, info, settings.fallen)
                listener.open()
            parent.welcome(service, info)
            await _wait_any(stop, parent.ended)
        elif failure is not None:
            log_line("loading_failed", error=type(failure).__name__)
            parent.reject(*failure_reason(failure))
        if parent.ended.is_set() and info is not None:  # before that, a gateway ends failed starts
            log_line("parent_gone")
        if listener is not None:
            await listener.close()
        await parent.close()
    failure = service.failure
    if failure is not None:
        # Messages of other errors may quote a prompt.
        message = failure.message if isinstance(failure, EngineError) else ""
        log_line("engine_failed", error=type(failure).__name__, message=message)
    return 0 if failure is None else 1


async def _wait_any(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def serve_process(make_core: Callable[[ServerSettings], tuple[Core, EngineInfo]]) -> NoReturn:
    """Serve the gateway at the other end of standard input, and end the process.

    Exits without joining the engine's thread, which may be in a step that never ends.
    """

    def make(settings: ServerSettings) -> tuple[Core, EngineInfo]:
        gc.disable()  # collections took a tenth of importing torch, and its objects stay
        made = make_core(settings)
        made[0].on_step_failed = log_failed_step
        FrozenHeap().settle()  # libraries and weights live as long as the process
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.enable()
        return made

    end_with_parent(sys.stdin.fileno())
    wire = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with Path(os.devnull).open() as nothing:
        # The engine's compilers inherit its standard input and must not keep the socket open.
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    status = asyncio.run(run(wire, make))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status)


def main() -> NoReturn:
    """Serve a prepared model folder with the real runner."""
    serve_process(
        lambda settings: core_of_model(
            Path(settings.model_dir), settings.config, settings.host_fds, settings.listen
        )
    )


if __name__ == "__main__":
    main()
