"""What one tiny answer costs, counted: calls of our functions, turns of the event loop, statements
on the database and files crossed.

`python -m tests.bench.request_cost [BASE]` counts here and at the merge base with BASE (default:
main), prints both, and exits with 1 where a count grew by more than a tenth. Load of the machine
adds a few turns, so of some rounds the smallest counts. tests/integration/test_request_cost.py
holds wide bounds on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import json
import os
import selectors
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import apsw
import pytest

import gateway
from engine.client.client import EngineConnection
from engine.config import EngineConfig
from gateway.http.connection import Connection
from gateway.ledger import deferred_holds
from gateway.periodic_task import PeriodicTask
from tenancy.accounts import authentication
from tests.models import prepared
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture

ROOT = Path(gateway.__file__).parents[1]
OURS = tuple(f"{ROOT / folder}/" for folder in ("engine", "gateway", "kernels", "tenancy"))
TESTS = f"{ROOT / 'tests'}/"
TURN = f"{selectors.DefaultSelector.__name__}.select"
"""Called once in each turn of a loop."""
BEHIND_A_SOCKET = ("engine", "ledger")
"""Threads of the fixture that are processes of their own under `trunkline serve`."""
ENGINES_OWN = f"{ROOT}/engine/server/"
"""The engine's loop, which shares the gateway's thread in the fixture."""
WARMUP, COUNTED = 40, 64
ROUNDS = 3
GROWTH_MAX = 1.1
SPARE = 0.1
"""Added to the bound, for counts near zero."""


def name_of(code: CodeType) -> str:
    """Return the file and qualified name of a function."""
    return f"{code.co_filename}:{code.co_qualname}"


FIRST_BYTES = name_of(Connection.data_received.__code__)
SUBMIT = name_of(EngineConnection.submit.__code__)


class CallRecorder:
    """Counts calls by thread. A resumed coroutine counts as a call."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Count from zero."""
        self.calls: dict[str, Counter[CodeType]] = {}
        self.statements = Counter[str]()
        self.turns = self.before_engine = 0
        self._is_before = False

    def install(self) -> None:
        """Record this thread, and every thread started from now on."""
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def remove(self) -> None:
        """Stop recording."""
        threading.setprofile(None)
        sys.setprofile(None)

    def files(self, *, own: bool = False) -> set[str]:
        """Return the files that were crossed; `own`: by the gateway's process alone."""
        return {
            code.co_filename
            for name, codes in self.calls.items()
            for code in codes
            if not own
            or (name not in BEHIND_A_SOCKET and not code.co_filename.startswith(ENGINES_OWN))
        }

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(OURS):
                self._record_call(code)
            elif code.co_qualname == TURN:
                self.turns += _is_loops_thread()
        elif event == "c_call" and isinstance(
            getattr(argument, "__self__", None), apsw.Connection | apsw.Cursor
        ):
            is_statement = argument.__name__.startswith("execute")
            self.statements[threading.current_thread().name] += is_statement

    def _record_call(self, code: CodeType) -> None:
        thread = threading.current_thread().name
        self.calls.setdefault(thread, Counter())[code] += 1
        if _is_loops_thread():
            name = name_of(code)
            self._is_before = (self._is_before or name == FIRST_BYTES) and name != SUBMIT
            self.before_engine += self._is_before


def _is_loops_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def ask(fixture: GatewayFixture, count: int) -> None:
    """Send this many small chats on one connection. Blocks."""
    connection = http.client.HTTPConnection("127.0.0.1", fixture.port, timeout=PATIENCE_S)
    body = json.dumps(fixture.chat(max_tokens=1)).encode()
    headers = {**fixture.headers(), "Content-Type": "application/json"}
    for _ in range(count):
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
    connection.close()


@contextmanager
def nothing_by_time(fixture: GatewayFixture) -> Iterator[None]:
    """Let nothing in a gateway that opens later run by time: a busy machine would count more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_holds, "DEFER_S", 3_600.0)
        patch.setattr(authentication, "REFRESH_S", 3_600.0)
        patch.setattr(PeriodicTask, "start", lambda _: None)
        fixture.engine_config = EngineConfig(heartbeat_s=3_600.0)
        yield


async def costs_of(fixture: GatewayFixture, recorder: CallRecorder) -> dict[str, float]:
    """Return what an answer of an open gateway costs, by name, on the average of `COUNTED`. The
    recorder was installed before the gateway opened."""
    await asyncio.to_thread(ask, fixture, WARMUP)
    recorder.clear()
    await asyncio.to_thread(ask, fixture, COUNTED)
    loop = threading.main_thread().name
    found = {
        "calls on the loop": sum(recorder.calls[loop].values()),
        "calls before the engine": recorder.before_engine,
        "turns of the loop": recorder.turns,
        "statements on the loop": recorder.statements[loop],
        "statements": sum(recorder.statements.values()),
    }
    return {
        **{name: count / COUNTED for name, count in found.items()},
        "files of the gateway": len(recorder.files(own=True)),
        "files": len(recorder.files()),
    }


async def lines_of(fixture: GatewayFixture, count: int) -> float:
    """Return how many lines of ours run on the loop's thread for an answer, on the average."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith((*OURS, TESTS)):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await asyncio.to_thread(ask, fixture, count)
    finally:
        sys.settrace(before)
    return lines / count


async def _measure() -> dict[str, float]:
    """Return the smallest counts of some rounds."""
    recorder = CallRecorder()
    with TemporaryDirectory() as folder:
        fixture = GatewayFixture(prepared(Path(folder)), Path(folder))
        with nothing_by_time(fixture):
            recorder.install()
            await fixture.open()
            rounds = [await costs_of(fixture, recorder) for _ in range(ROUNDS)]
            recorder.remove()
            await fixture.close()
        fixture.discard()
    return {name: min(one[name] for one in rounds) for name in rounds[0]}


def measured_in(tree: Path) -> dict[str, float]:
    """Return the counts of the product in this tree, taken by this file in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--counts"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return {str(name): float(count) for name, count in json.loads(done.stdout).items()}


def grown(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Return the names of counts that grew by more than a tenth."""
    return [
        name
        for name, count in after.items()
        if count > before.get(name, count) * GROWTH_MAX + SPARE
    ]


def report(before: dict[str, float], after: dict[str, float]) -> str:
    """Return a table of both."""
    larger = grown(before, after)
    lines = [f"{'an answer costs':26}{'base':>9}{'here':>9}"]
    for name, count in after.items():
        remark = "   grew by more than a tenth" if name in larger else ""
        lines.append(f"{name:26}{before.get(name, 0):9.1f}{count:9.1f}{remark}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", help="a branch or commit; by default main")
    parser.add_argument("--counts", action="store_true", help="print the counts here as JSON")
    asked = parser.parse_args(arguments)
    if asked.counts:
        print(json.dumps(asyncio.run(_measure())))
        return 0
    # Not above: the base, in which this file counts too, may not have it.
    from tests.tools.changed_tests import merge_base

    commit = merge_base(asked.base)
    with TemporaryDirectory() as folder:
        asked_for = ["git", "archive", "--format=tar", commit]
        packed = subprocess.run(asked_for, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        before, after = measured_in(Path(folder)), measured_in(ROOT)
    print(f"base: {commit}\n{report(before, after)}")
    return 1 if grown(before, after) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
