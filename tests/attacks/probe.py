"""A quiet tenant and a health check, measured by a process of its own.

`Probe.observe` runs this module as a program: it streams small chats one after another, and on a
second connection asks /healthz every few milliseconds. The longest answer of /healthz is the
longest pause of the gateway's event loop. The time in which the loop's thread, or the probe's own,
was ready and waited for a processor is taken off: other programs on the machine take it.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tests.attacks.attacked_server import ANSWER_S, AttackedServer

HEALTH_INTERVAL_S = 0.005
"""Between two health checks."""
CHAT_INTERVAL_S = 0.01
"""Between two chats of the quiet tenant."""
REFUSED_PAUSE_S = 0.05
"""After a refusal, before the next chat."""
NOISE_S = 0.025
"""A pause or a first token as fast as this is never a fault: the machine itself is not faster."""


class Observed(Struct, frozen=True):
    """What the quiet tenant and the health check saw.

    `first_token_s`: seconds to the first token of each complete answer, ascending. `pauses_s`:
    seconds that each health check took, without the machine's, ascending. `endings`: answers by
    their status, `cut` for a stream without its end, or the name of the error. `prompt_tokens` and
    `cached_tokens`: of all complete answers.
    """

    first_token_s: tuple[float, ...]
    pauses_s: tuple[float, ...]
    endings: dict[str, int]
    prompt_tokens: int
    cached_tokens: int

    @property
    def refused(self) -> int:
        """The number of chats without a complete answer."""
        return sum(count for ending, count in self.endings.items() if ending != "200")

    @property
    def hit_ratio(self) -> float:
        """The share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def longest_pause_s(self) -> float:
        """The longest health check, in seconds."""
        return self.pauses_s[-1]

    def __str__(self) -> str:
        first, pauses = self.first_token_s or (float("nan"),), self.pauses_s
        return (
            f"{self.endings} first token p50 {quantile(first, 0.5) * 1e3:.0f} ms"
            f" p99 {quantile(first, 0.99) * 1e3:.0f} ms, hit ratio {self.hit_ratio:.3f}, pause"
            f" p99 {quantile(pauses, 0.99) * 1e3:.0f} ms longest {pauses[-1] * 1e3:.0f} ms"
        )


def quantile(ascending: Iterable[float], part: float) -> float:
    """Return the value below which this part of the values lies."""
    values = list(ascending)
    return values[min(len(values) - 1, int(part * len(values)))]


def check_undisturbed(
    alone: Observed,
    beside: Observed,
    *,
    first_token_times: float = 4.0,
    hit_points: float = 0.01,
    pause_s: float | None = 0.05,
) -> None:
    """Assert that the quiet tenant is served beside an attack as it is served alone.

    No refusal; the 90th percentile of the first token at most `first_token_times` that of the same
    run alone (of fifty chats the 99th is the slowest one, which a busy machine makes); the hit
    ratio within `hit_points`; no pause of the loop longer than `pause_s`, or than twice the longest
    one alone on a slow machine. `pause_s` None: pauses are not asserted. Writes what was seen.
    """
    sys.stdout.write(f"alone:  {alone}\nbeside: {beside}\n")
    assert alone.refused == 0, alone
    assert beside.refused == 0, beside
    bound_s = max(NOISE_S, quantile(alone.first_token_s, 0.9)) * first_token_times
    assert quantile(beside.first_token_s, 0.9) <= bound_s, (str(alone), str(beside))
    assert beside.hit_ratio >= alone.hit_ratio - hit_points, (str(alone), str(beside))
    if pause_s is not None:
        allowed_s = max(pause_s, 2 * alone.longest_pause_s)
        assert beside.longest_pause_s <= allowed_s, (str(alone), str(beside))


class Probe:
    """A quiet tenant of a server."""

    def __init__(
        self, server: AttackedServer, key: str, text: str = "hello there, how are you"
    ) -> None:
        """`text`: what the tenant sends each time; after the first chat its prefix is cached."""
        self._server = server
        self._key = key
        self._text = text

    def observe(self, chats: int = 50) -> Observed:
        """Send this many chats in another process; return what it saw. Blocks."""
        with self.observing(chats) as running:
            return finished(running)

    def observe_alone(self, chats: int = 50) -> Observed:
        """Observe what the attack is compared with, once the prefix is cached. Blocks."""
        self.observe(2)
        return self.observe(chats)

    @contextmanager
    def observing(self, chats: int = 50) -> Iterator[subprocess.Popen[bytes]]:
        """Start to send chats, and yield the process whose result `finished` waits for."""
        asked = {
            "port": self._server.port,
            "pid": self._server.pid,
            "key": self._key,
            "chats": chats,
            "body": self._server.chat(
                self._text, max_tokens=4, stream=True, stream_options={"include_usage": True}
            ),
        }
        command = [sys.executable, "-m", "tests.attacks.probe"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
            assert running.stdin is not None
            running.stdin.write(json.dumps(asked).encode())
            running.stdin.close()
            try:
                yield running
            finally:
                running.kill()


def finished(running: subprocess.Popen[bytes]) -> Observed:
    """Wait for a probe's process and return what it saw."""
    assert running.stdout is not None
    return msgspec.json.decode(running.stdout.read(), type=Observed)


# --- the program ---------------------------------------------------------------------------------


class _Quiet:
    """The quiet tenant's client and the health check."""

    def __init__(self, port: int, pid: int, key: str, body: object) -> None:
        self._port, self._pid = port, pid
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._body = json.dumps(body).encode()
        self._is_over = threading.Event()
        self.first_token_s: list[float] = []
        self.pauses_s: list[float] = []
        self.endings: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = 0

    def run(self, chats: int) -> Observed:
        """Send the chats while the loop is watched."""
        watch = threading.Thread(target=self._watch)
        watch.start()
        try:
            for _ in range(chats):
                ending = self._chat()
                self.endings[ending] += 1
                self._is_over.wait(CHAT_INTERVAL_S if ending == "200" else REFUSED_PAUSE_S)
        finally:
            self._is_over.set()
            watch.join()
        return Observed(
            tuple(sorted(self.first_token_s)),
            tuple(sorted(self.pauses_s)),
            dict(self.endings),
            self.prompt_tokens,
            self.cached_tokens,
        )

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)

    def _chat(self) -> str:
        """Stream one chat on a new connection; return how it ended."""
        usage: dict[str, Any] = {}
        began_s, first_s = time.monotonic(), 0.0
        try:
            with closing(self._connection()) as connection:
                connection.request("POST", "/v1/chat/completions", self._body, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    return f"{response.status} {response.read(300).decode(errors='replace')}"
                while (line := response.readline()) and line != b"data: [DONE]\n":
                    if line.startswith(b"data: {"):
                        first_s = first_s or time.monotonic() - began_s
                        usage = json.loads(line[6:]).get("usage") or usage
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        if not line or not usage:
            return "cut"
        self.first_token_s.append(first_s)
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        return "200"

    def _watch(self) -> None:
        connection = self._connection()
        while not self._is_over.wait(HEALTH_INTERVAL_S):
            began_s, before_s = time.monotonic(), self._processor_wait_s()
            try:
                connection.request("GET", "/healthz")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()  # the next request opens another one
            waited_s = self._processor_wait_s() - before_s
            self.pauses_s.append(max(0.0, time.monotonic() - began_s - waited_s))
        connection.close()

    def _processor_wait_s(self) -> float:
        """Return for how long the gateway's main thread and this one have been ready and waited for
        a processor; 0 where the kernel does not tell."""
        files = Path(f"/proc/{self._pid}/schedstat"), Path("/proc/thread-self/schedstat")
        return sum(int(one.read_text().split()[1]) for one in files if one.exists()) / 1e9


def main() -> None:
    """Read what to do from standard input, and write what was seen to standard output."""
    asked = json.load(sys.stdin)
    seen = _Quiet(asked["port"], asked["pid"], asked["key"], asked["body"]).run(asked["chats"])
    sys.stdout.buffer.write(msgspec.json.encode(seen))


if __name__ == "__main__":
    main()
