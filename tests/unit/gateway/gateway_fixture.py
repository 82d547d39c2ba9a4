"""A gateway for tests: real listeners, ledger, prompts and core over a fake runner.

`ask` sends HTTP as a client does; `raw` sends bytes that no client library would. `check_quiet`
asserts the invariants that hold after every request.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientResponse, ClientSession, ClientTimeout
from blockbuster import BlockBuster, blockbuster_ctx

from engine.api import AttentionWindow, EngineInfo, Grammar, Namespace, Payer
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.grammar import MaskFiller
from engine.grammar.sandbox import SandboxSettings
from engine.model_store import ModelCard
from engine.plan import StepPlan
from engine.server.embedded import LocalEngine
from engine.statistics import Stats
from gateway.app import Gateway
from gateway.background.webhooks import WebhookEndpoint
from gateway.config import Config, LimitsConfig, ServerConfig
from gateway.embeddings.embedder import Embedder
from gateway.engines.replicas import Replicas
from gateway.engines.served_models import FailedModel, ServedModel
from gateway.periodic_task import PeriodicTask
from gateway.prompt import Renderer
from gateway.prompt.template import ChatTemplate
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant, list_tenants
from tenancy.storage.interface import Store
from tenancy.types import WallClock, wall_ms
from tests.fakes import FakeRunner
from tests.models import prepared
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

BLOCKS = 256
CONTEXT = 512
PATIENCE_S = 60.0


class GatedRunner(FakeRunner):
    """A fake runner that can be made to wait before a step."""

    def __init__(self, vocab: int) -> None:
        super().__init__(BLOCKS, 16, vocab_size=vocab)
        self._last_step: float = float("inf")
        self._go = threading.Event()
        self.is_held = False

    def hold_after(self, steps: int) -> None:
        """Run this many more steps, then wait for `release`."""
        self._go.clear()
        self._last_step = self.steps + steps

    def release(self) -> None:
        """Continue."""
        self._last_step = float("inf")
        self._go.set()

    def launch(self, plan: StepPlan) -> None:
        """Wait if held, then launch as `FakeRunner` does."""
        if self.steps >= self._last_step:
            self.is_held = True
            assert self._go.wait(PATIENCE_S), "a test forgot to release the runner"
            self.is_held = False
        super().launch(plan)


class KeptCompiler(GrammarCompiler):
    """A compiler that gateways use one after another: its processes take half a second to start.
    The next gateway finds nothing that the last one compiled."""

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings, time.monotonic)
        self._namespaces: set[Namespace] = set()
        atexit.register(super().close)

    def submit(self, request_id: str, payer: Payer, namespace: Namespace, grammar: Grammar) -> None:
        """As the base does."""
        self._namespaces.add(namespace)
        super().submit(request_id, payer, namespace, grammar)

    def close(self) -> None:
        """Forget what was compiled; the threads and their processes stay."""
        while self._namespaces:
            self.erase(self._namespaces.pop())


_kept_compiler = cache(KeptCompiler)


class GatewayFixture:
    """A gateway, two tenants with a key each, and its log lines."""

    def __init__(self, card: ModelCard, folder: Path, store: Store | None = None) -> None:
        """`store`: by default a new file in the folder."""
        self.card = card
        self.runner = GatedRunner(card.config.vocab)
        self.store = store or new_sqlite(folder / "test.db")
        self.keys: dict[str, str] = {}
        for name in ("ada", "bob"):
            there = [tenant for tenant in list_tenants(self.store) if tenant.name == name]
            tenant = there[0] if there else create_tenant(self.store, wall_ms, name)
            self.keys[name] = create_key(self.store, wall_ms, tenant.tenant_id)
        self.renderer = new_renderer(card)
        self.config = Config(server=ServerConfig(), limits=LimitsConfig())
        self.engine_config = EngineConfig(heartbeat_s=0.05)
        self.lines: list[dict[str, object]] = []
        self.url = self.admin_url = ""
        self.wall: WallClock = wall_ms
        self.clock: Callable[[], float] = time.monotonic
        """Of the gateway and its cores; the cores take it at their start."""
        self.last_answer_ms = 0
        self.context_tokens = CONTEXT
        self.epoch = "1"
        self.endpoints: Sequence[WebhookEndpoint] = ()
        self.more: dict[str, GatedRunner] = {}
        """Set before opening: further models by name, each with a runner of its own."""
        self.engine: LocalEngine
        self.engines: dict[str, LocalEngine] = {}
        """The engine of each model, once open."""
        self.failed: list[FailedModel] = []
        """Set before opening: models that could not be started."""
        self.embeddings: Embedder | None = None
        """Set before opening: the embedding model."""
        self.beside: GatewayFixture | None = None
        """Set before opening: an open gateway, whose engine this one has, too."""
        self.takes_grammars = False
        """Set before opening: answers can be held to schemas, by threads and processes."""
        self.draft_step_s: tuple[float, ...] = ()
        """Set before opening: times of steps with drafts; by default there are none."""
        self._constraints = Constraints()

    @property
    def model(self) -> str:
        return self.card.name

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def set_server(self, **settings: object) -> None:
        """Change [server] before opening."""
        server = msgspec.structs.replace(self.config.server, **settings)
        self.config = msgspec.structs.replace(self.config, server=server)

    def set_limits(self, **settings: object) -> None:
        """Change [limits] before opening."""
        limits = msgspec.structs.replace(self.config.limits, **settings)
        self.config = msgspec.structs.replace(self.config, limits=limits)

    async def open(self) -> None:
        """Start the engine and both listeners."""
        self.engine = (
            await LocalEngine.start(self._make_core, self.engine_config)
            if self.beside is None
            else self.beside.engine.beside()
        )
        self.engines[self.model] = self.engine
        for number, (name, runner) in enumerate(self.more.items(), 2):
            make = partial(self._make_core, runner, f"{self.epoch}.{number}")
            self.engines[name] = await LocalEngine.start(make, self.engine_config)
        aliases = {self.model: self.config.model.aliases}
        models = [
            ServedModel(name, Replicas.of(one), self.renderer, aliases.get(name, ()))
            for name, one in self.engines.items()
        ]
        # In a thread: what it reads at its start may be a round trip away.
        self.gateway = await asyncio.to_thread(
            partial(
                Gateway,
                endpoints=self.endpoints,
                clock=lambda: self.clock(),
                wall=lambda: self.wall(),
                failed=self.failed,
                embeddings=self.embeddings,
            ),
            *(self.config, models, self.store, lambda event, facts: self.log(event, facts)),
        )
        self.url, self.admin_url = await self.gateway.listen(("127.0.0.1", 0), ("127.0.0.1", 0))
        self.session = ClientSession(timeout=ClientTimeout(total=PATIENCE_S))

    async def close(self) -> None:
        """Stop everything; nothing may be left."""
        self.runner.release()
        await self.session.close()
        await self.gateway.close()
        for engine in self.engines.values():
            await engine.close()
        self._constraints.close()
        assert self.gateway.context.work.tasks == set()

    def discard(self) -> None:
        """Close the database."""
        self.store.close()

    def say(self, text: str, *, ends: bool = True) -> None:
        """Set the text that the model answers to every request from now on, or its beginning."""
        ids = self.renderer.tokenizer.encode(text, specials=False)
        self.runner.words = (*ids, *self.renderer.card.stop_token_ids[:1]) if ends else ids

    def _make_core(
        self, runner: GatedRunner | None = None, epoch: str = ""
    ) -> tuple[Core, EngineInfo]:
        if self.takes_grammars:
            assert not self.more, "two engines would take each other's grammars"
            card = self.card
            settings = SandboxSettings(
                str(card.tokenizer_path), card.config.vocab, card.stop_token_ids
            )
            self._constraints = Constraints(_kept_compiler(settings), MaskFiller(1))
        core = Core(
            PrefixCache(blocks=BLOCKS, block_size=16, context_tokens=self.context_tokens),
            runner or self.runner,
            self.engine_config,
            self.clock,
            vocab_size=self.card.config.vocab,
            context_tokens=self.context_tokens,
            constraints=self._constraints,
            draft_step_s=self.draft_step_s,
        )
        info = EngineInfo(
            epoch=epoch or self.epoch,
            model=self.card.name,
            model_digest="digest",
            model_dir=self.card.folder,
            vocab_size=self.card.config.vocab,
            context_tokens=self.context_tokens,
            block_size=16,
            blocks=BLOCKS,
            floor_blocks_max=core.cache.floor_blocks_max,
            kv_bytes_per_block=1,
            kv_format="words",
            device="none",
            pid=0,
            promisable_blocks=core.cache.promisable_blocks,
            attention_policies=self.engine_config.attention_policies,
        )

        def attention_of(sequence_id: int) -> AttentionWindow | None:
            sequence = core.requests.sequence(sequence_id)
            return None if sequence is None else sequence.parent.request.attention

        (runner or self.runner).attention_of = attention_of
        return core, info

    def log(self, event: str, facts: dict[str, object]) -> None:
        self.lines.append({"event": event, **facts})

    # -- as a client --------------------------------------------------------------------------

    def headers(self, who: str = "ada") -> dict[str, str]:
        """Return the headers of a tenant's valid key."""
        return {"Authorization": f"Bearer {self.keys[who]}"}

    def chat(self, text: str = "hello", **more: Any) -> dict[str, Any]:
        """Return a small greedy chat request that always has its full length."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    async def ask(
        self,
        path: str = "/v1/chat/completions",
        body: object = None,
        *,
        who: str | None = "ada",
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, ClientResponse]:
        """Send a request in a later millisecond than the last answer's; return (status, JSON or
        text, response)."""
        await self.next_millisecond()
        sent = {**(self.headers(who) if who else {}), **(headers or {})}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        kept = io.BytesIO(data) if body is not None else None
        async with self.session.request(
            method, self.url + path, data=kept, headers=sent
        ) as response:
            text = await response.text()
            self.last_answer_ms = wall_ms()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response

    async def next_millisecond(self) -> None:
        """Wait for the millisecond after the last answer's: requests of one are listed in any
        order."""
        await self.until(lambda: wall_ms() > self.last_answer_ms)

    async def stream(self, body: dict[str, Any], who: str = "ada") -> list[Any]:
        """Send a streaming chat; return its parsed events, `[DONE]` unchanged."""
        status, text, _ = await self.ask(body={**body, "stream": True}, who=who)
        assert status == 200, text
        return parse_events(text)

    @asynccontextmanager
    async def connection(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Yield a bare socket to the public listener."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def raw(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes; return the answer, or all bytes until the server closes."""
        async with self.connection() as (reader, writer):
            writer.write(data)
            if half_close:
                writer.write_eof()
            return await read_answer(reader)

    def post(self, path: str, body: bytes, *lines: str, who: str = "ada") -> bytes:
        """Return the bytes of a valid POST with further header lines."""
        head = [
            f"POST {path} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {self.keys[who]}",
            "Content-Type: application/json",
            *lines,
        ]
        if not any(line.lower().startswith(("content-length", "transfer")) for line in lines):
            head.append(f"Content-Length: {len(body)}")
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body

    # -- what must hold after each request ----------------------------------------------------

    async def quiet(self) -> Stats:
        """Wait until no request runs; return the engine's stats."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            stats = await self.engine.get_stats()
            busy = stats.running + stats.waiting + len(self.gateway.context.running)
            if not busy and not self.gateway.context.work.tasks:
                return stats
            assert time.monotonic() < deadline, f"still busy: {stats}"

    async def check_quiet(self) -> None:
        """Assert that no block is pinned, no hold open, and no key in the log, and that it is
        ready."""
        stats = await self.quiet()
        assert stats.pinned_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == stats.blocks
        assert self.store.query("select count(*) from holds") == [(0,)]
        assert self.gateway.context.is_ready()
        logged = json.dumps(self.lines)
        assert not any(key in logged for key in self.keys.values())

    def entries(self) -> list[tuple[str, int, int, int]]:
        """Return (ending, prompt, cached, output) of the ledger, oldest first."""
        return [
            (row[0], row[1], row[2], row[3])
            for row in self.store.query(
                "select ending, prompt_tokens, physical_cached_tokens, output_tokens from ledger"
                " order by entry_id"
            )
        ]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Run the event loop until the condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0)


_compiled_template = cache(ChatTemplate)
"""A template has no state of its own: renderers share it."""


def new_renderer(card: ModelCard) -> Renderer:
    """Return a renderer with caches of its own, whose tokenizer knows few words beforehand: that
    takes 2 ms, not 40. Tests of how long a word takes make their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.prompt.renderer.ChatTemplate", _compiled_template)
        patch.setattr("gateway.prompt.tokenizer.LIBRARY_CACHE_WORDS", 100)
        return Renderer(card)


def parse_events(text: str) -> list[Any]:
    """Return the data of server-sent events, without comments."""
    found: list[Any] = []
    for event in text.split("\n\n"):
        for line in event.split("\n"):
            if line.startswith("data: "):
                data = line[6:]
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


def head(line: str, *headers: str, host: str | None = "127.0.0.1") -> bytes:
    """Return the bytes of a request without a body."""
    lines = [line, *([f"Host: {host}"] if host is not None else []), *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Read one HTTP response: head and announced body, or all bytes until the end."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            return error.partial
        except ConnectionError:
            return b""
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return head + await reader.readexactly(int(line.partition(b":")[2]))
        return head + await reader.read()


async def read_late_answer(reader: asyncio.StreamReader, forward: Callable[[float], None]) -> bytes:
    """Read as `read_answer` does, while a second passes in each turn of the loop."""
    reading = asyncio.create_task(read_answer(reader))
    while not reading.done():
        forward(1.0)
        await asyncio.sleep(0)
    return await reading


def status_of(answer: bytes) -> int:
    """Return the HTTP status; 0 if the connection was closed without a response."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


# --- fixtures, imported by conftest.py of folders that need a gateway -----------------------------


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> Iterator[BlockBuster]:
    """Fail the test when code blocks the event loop."""
    with blockbuster_ctx() as guard:
        yield guard


@pytest.fixture(autouse=True)
def at_noon(noon: None) -> None:
    """All that a test books lies in one minute."""


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Prepare a tiny model with a byte-level tokenizer and a chat template without tools."""
    return prepared(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def renderer(card: ModelCard) -> Renderer:
    """The tiny model's renderer: token 3 + b is the byte b; its template, ChatML, has no tools."""
    return new_renderer(card)


@pytest.fixture
def unopened_gateway(card: ModelCard, tmp_path: Path) -> Iterator[GatewayFixture]:
    """Yield a gateway that is not open; test files override this fixture to configure it."""
    fixture = GatewayFixture(card, tmp_path)
    yield fixture
    fixture.discard()


@pytest.fixture
async def gateway(unopened_gateway: GatewayFixture) -> AsyncIterator[GatewayFixture]:
    """Yield an open gateway with default settings."""
    await unopened_gateway.open()
    yield unopened_gateway
    await unopened_gateway.close()


@pytest.fixture
def no_periodic_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task of a gateway that opens later runs by itself, however slow the machine. For
    `usefixtures`, which pytest sets up before the arguments of a test."""
    monkeypatch.setattr(PeriodicTask, "start", lambda _: None)


@pytest.fixture
def room_for_turns(unopened_gateway: GatewayFixture) -> None:
    """Give the gateway, before it opens, a context with room for tools or several turns."""
    unopened_gateway.context_tokens = 2_048


@pytest.fixture
def room_for_tools(unopened_gateway: GatewayFixture, room_for_turns: None) -> None:
    """As `room_for_turns`; and the gateway holds answers to schemas."""
    unopened_gateway.takes_grammars = True


@pytest.fixture
def room_for_all(unopened_gateway: GatewayFixture) -> None:
    """Make the model's context, before the gateway opens, as long as the whole pool."""
    unopened_gateway.context_tokens = BLOCKS * 16
