"""A completion crosses few files, so that a reader can follow a request's path."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from engine.config import EngineConfig
from tests.unit.gateway.gateway_fixture import GatewayFixture

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("gateway", "engine", "tenancy", "kernels"))
GATEWAY_FILES_MAX = 55
ALL_FILES_MAX = 96
BEHIND_A_SOCKET = ("engine", "ledger")
"""Threads of the fixture that are processes of their own under `trunkline serve`."""
ENGINES_OWN = "engine/server/"
"""The engine's loop, which shares the test's thread."""


class CallRecorder:
    """Records which product files run a function, by the thread that runs it."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}

    def install(self) -> None:
        """Record this thread, and every thread started from now on."""
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def remove(self) -> None:
        """Stop recording."""
        threading.setprofile(None)
        sys.setprofile(None)

    def crossed(self, *without: str) -> list[str]:
        """Return files by path from the root, without those that only these threads ran."""
        files = {
            file for name, found in self.files.items() if name not in without for file in found
        }
        return sorted(Path(file).relative_to(ROOT).as_posix() for file in files)

    def _record(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PRODUCT):
            self.files.setdefault(threading.current_thread().name, set()).add(file)


@pytest.fixture
def recorder() -> Iterator[CallRecorder]:
    recorder = CallRecorder()
    recorder.install()
    yield recorder
    recorder.remove()


@pytest.mark.usefixtures("no_periodic_tasks")
async def test_a_completion_crosses_fewer_than_60_files_of_the_gateways_process(
    recorder: CallRecorder, unopened_gateway: GatewayFixture
) -> None:
    """With engine and ledger, which run elsewhere, it crosses no more files than last time."""
    gateway = unopened_gateway
    gateway.engine_config = EngineConfig(heartbeat_s=3_600.0)
    await gateway.open()
    await gateway.ask(body=gateway.chat())
    recorder.files.clear()

    status, _, _ = await gateway.ask(body=gateway.chat())
    own = [f for f in recorder.crossed(*BEHIND_A_SOCKET) if not f.startswith(ENGINES_OWN)]
    every = recorder.crossed()
    await gateway.close()

    assert status == 200
    assert len(own) <= GATEWAY_FILES_MAX, own
    assert len(every) <= ALL_FILES_MAX, every
