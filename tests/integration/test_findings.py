"""Findings: each planted cause is named, in every dialect, and clean traffic has none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from engine.model_store import ModelCard
from gateway.caching.namespaces import owner_of
from gateway.retention_classes import CacheProfile, CachingConfig, RetentionClass
from tenancy.accounts.keys import change_key, find_key
from tenancy.accounts.tenants import list_tenants
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.reuse.miss_causes import OF_SUMS
from tenancy.types import wall_ms
from tests.actors import TESTER
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

Dialect = Literal["chat", "responses", "anthropic", "gemini"]
DIALECTS: tuple[Dialect, ...] = ("chat", "responses", "anthropic", "gemini")
CARD = RateCard("std", input=300_000, output=600_000, cache_read=30_000, cache_write={"*": 375_000})

HANDBOOK = (
    "You answer questions of employees about leave, travel and pay. Be short and polite, and name"
    " the paragraph of the handbook that the answer is from. Refuse to talk about anything else. "
)
SUPPORT = (
    "As support agent of a bicycle shop, find out which part broke, whether it is under guarantee,"
    " and when the customer can come by. Never promise a price before the mechanic has looked. "
)
QUESTIONS = (
    "How many days of leave are left?",
    "Who pays for the train?",
    "May I carry days over to next year?",
    "Which form is needed for a trip abroad?",
    "When does pay arrive in December?",
    "What happens if I fall ill on holiday?",
    "Is parking free for visitors?",
    "Can two people share one laptop?",
)
ANSWERS = (
    "Ask the office for the number of days; paragraph four of the handbook has the rules for it.",
    "The company pays for second class; paragraph nine says how to claim the money afterwards.",
    "Five days may be carried over until the end of March, as paragraph five explains in detail.",
    "Form twelve, signed by your manager at least two weeks before the journey; see paragraph ten.",
    "On the fifteenth, since banks close late in the month; paragraph two names all other dates.",
    "Days of illness with a certificate do not count as leave; paragraph six has the conditions.",
)


def tool(name: str, description: str) -> dict[str, Any]:
    """Return a tool in the form of chat completions' `function`."""
    schema = {"type": "object", "properties": {"day": {"type": "string"}}}
    return {"name": name, "description": description, "parameters": schema}


TOOLS = (
    tool("find_leave", "Return how many days of leave an employee has left."),
    tool("book_train", "Book a seat in a train and return its number."),
    tool("open_ticket", "Open a ticket for the office and return its id."),
)


class Turns(msgspec.Struct, frozen=True):
    """One request. `turns` alternate between user and assistant. `mark`: a breakpoint's class, at
    the end of the system text and of the last message; only Anthropic's dialect has it here."""

    turns: tuple[str, ...]
    system: str = HANDBOOK
    tools: tuple[dict[str, Any], ...] = ()
    mark: str = ""


def body_of(dialect: Dialect, model: str, asked: Turns) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request."""
    roles = list(zip(cycle(("user", "assistant")), asked.turns, strict=False))
    match dialect:
        case "chat":
            messages = [{"role": role, "content": text} for role, text in roles]
            if asked.system:
                messages.insert(0, {"role": "system", "content": asked.system})
            body: dict[str, Any] = {"messages": messages, "max_tokens": 2}
            if asked.tools:
                body["tools"] = [{"type": "function", "function": one} for one in asked.tools]
            return "/v1/chat/completions", {"model": model, **body}
        case "responses":
            items = [{"role": role, "content": text} for role, text in roles]
            body = {"instructions": asked.system, "input": items, "max_output_tokens": 16}
            if asked.tools:
                body["tools"] = [{"type": "function", **one} for one in asked.tools]
            return "/v1/responses", {"model": model, "store": False, **body}
        case "anthropic":
            return "/v1/messages", {"model": model, **_anthropic(asked, roles)}
        case "gemini":
            names = {"user": "user", "assistant": "model"}
            contents = [{"role": names[role], "parts": [{"text": text}]} for role, text in roles]
            body = {"contents": contents, "generationConfig": {"maxOutputTokens": 2}}
            if asked.system:
                body["systemInstruction"] = {"parts": [{"text": asked.system}]}
            if asked.tools:
                body["tools"] = [{"functionDeclarations": list(asked.tools)}]
            return f"/v1beta/models/{model}:generateContent", body


def _anthropic(asked: Turns, roles: Sequence[tuple[str, str]]) -> dict[str, Any]:
    control = {"cache_control": {"type": "ephemeral", "ttl": asked.mark}} if asked.mark else {}
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in roles]
    messages[-1]["content"] = [{"type": "text", "text": roles[-1][1], **control}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 2}
    if asked.system:
        body["system"] = [{"type": "text", "text": asked.system, **control}]
    if asked.tools:
        body["tools"] = [
            {
                "name": one["name"],
                "description": one["description"],
                "input_schema": one["parameters"],
            }
            for one in asked.tools
        ]
    return body


OF_SEVERAL = {*OF_SUMS, "model_changed", "template_changed"}
"""Causes that a request alone does not show."""


class Findings:
    """A client that sends traffic and asks for findings."""

    def __init__(self, gateway: GatewayFixture) -> None:
        self.gateway = gateway
        self.admin = AdminClient(gateway)

    async def send(self, dialect: Dialect, requests: Iterable[Turns], who: str = "ada") -> None:
        """Send requests one after the other."""
        for asked in requests:
            path, body = body_of(dialect, self.gateway.model, asked)
            status, answer, _ = await self.gateway.ask(path, body, who=who)
            assert status == 200, answer

    async def read(self, query: str = "") -> list[dict[str, Any]]:
        """Return all findings. Each request that one names as an example has its cause."""
        status, found = await self.admin.ask("GET", f"/admin/v1/findings{query}")
        assert status == 200, found
        for one in found["findings"]:
            if one["legitimate"] or one["cause"] in OF_SEVERAL:
                continue
            for request_id in one["example_request_ids"]:
                status, request = await self.admin.ask("GET", f"/admin/v1/requests/{request_id}")
                assert (status, request["cause"]) == (200, one["cause"]), request
        return list(found["findings"])

    async def faults(self) -> list[str]:
        """Return the causes of the findings that are not legitimate, dearest first."""
        return [one["cause"] for one in await self.read() if not one["legitimate"]]


@pytest.fixture
def unopened_gateway(card: ModelCard, tmp_path: Path) -> Iterator[GatewayFixture]:
    """A gateway with prices and room for conversations."""
    fixture = _make(card, tmp_path)
    yield fixture
    fixture.discard()


@pytest.fixture
async def findings(gateway: GatewayFixture) -> Findings:
    return Findings(gateway)


# --- planted causes, by dialect -------------------------------------------------------------------


def volatile_system() -> list[Turns]:
    """A time at the beginning of the system text."""
    return [
        Turns((question,), f"Now: 2026-11-22 10:31:{n:02}. {HANDBOOK}")
        for n, question in enumerate(QUESTIONS)
    ]


def volatile_middle() -> list[Turns]:
    """An employee's number between two stable texts."""
    return [
        Turns((question,), f"{SUPPORT}The employee's number is {7919 * n + 13}. {HANDBOOK}")
        for n, question in enumerate(QUESTIONS)
    ]


def reordered_tools() -> list[Turns]:
    """The same tools, each time in another order."""
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1)]
    return [
        Turns((question,), tools=tuple(TOOLS[place] for place in order))
        for order, question in zip(orders, QUESTIONS, strict=False)
    ]


def changed_tools() -> list[Turns]:
    """A date in the first tool's description."""
    return [
        Turns((question,), tools=(tool("today", f"It is November {n + 10}."), *TOOLS))
        for n, question in enumerate(QUESTIONS)
    ]


def edited_history() -> list[Turns]:
    """The first message gets another number with every turn of a conversation."""
    turns: list[str] = []
    found = []
    for n, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=False)):
        turns.append(question)
        found.append(Turns((f"[{n * 37} messages unread] {turns[0]}", *turns[1:])))
        turns.append(answer)
    return found


def shortened_history() -> list[Turns]:
    """Only the latest five messages of a conversation are sent."""
    turns: list[str] = []
    found = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=False):
        turns.append(question)
        found.append(Turns(tuple(turns[-5:])))
        turns.append(answer)
    return found


def volatile_prompt() -> list[Turns]:
    """A counter before a long text, in the only message."""
    return [Turns((f"Ticket {n * 977}. {SUPPORT} Summarize.",), "") for n in range(8)]


PLANTED: dict[str, tuple[Callable[[], list[Turns]], str]] = {
    "volatile system": (volatile_system, "system_changes"),
    "volatile middle": (volatile_middle, "system_changes"),
    "reordered tools": (reordered_tools, "tools_reordered"),
    "changed tools": (changed_tools, "tools_changed"),
    "edited history": (edited_history, "history_edited"),
    "shortened history": (shortened_history, "history_edited"),
    "volatile prompt": (volatile_prompt, "prompt_changes"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_planted_change_is_named_without_breakpoints(
    findings: Findings, dialect: Dialect, name: str
) -> None:
    plant, cause = PLANTED[name]
    requests = plant()
    await findings.send(dialect, requests)

    found = await findings.read()
    faults = [one for one in found if not one["legitimate"] and one["cause"] != "unmarked"]
    assert [one["cause"] for one in faults] == [cause]
    assert 3 <= faults[0]["requests"] < faults[0]["of_requests"] == len(requests)
    assert float(faults[0]["cost_usd"]) > 0
    assert float(faults[0]["saving_usd_month"]) > float(faults[0]["cost_usd"])


@pytest.mark.parametrize("name", PLANTED)
async def test_planted_change_is_named_with_breakpoints(findings: Findings, name: str) -> None:
    plant, cause = PLANTED[name]
    marked = [msgspec.structs.replace(one, mark="5m") for one in plant()]
    await findings.send("anthropic", marked)

    assert await findings.faults() == [cause]


@pytest.mark.parametrize(
    ("plant", "where"),
    [(volatile_system, "near its beginning"), (volatile_middle, "in the middle")],
)
async def test_sentence_says_where_the_system_text_changes(
    findings: Findings, plant: Callable[[], list[Turns]], where: str
) -> None:
    await findings.send("chat", plant())

    found = (await findings.read())[0]
    assert found["sentence"].startswith(f"ada: the system message changes {where} in 7 of 8")
    assert "a short value" in found["sentence"]
    assert "messages[0].content" in found["advice"]


# --- causes that the cache or the operator has ---------------------------------------------------


def plain(mark: str = "") -> list[Turns]:
    """Eight questions behind one system text."""
    return [Turns((question,), HANDBOOK, mark=mark) for question in (*QUESTIONS, *ANSWERS)[:8]]


@pytest.mark.parametrize("is_one_key", [False, True])
@pytest.mark.parametrize("field", ["cache_salt", "prompt_cache_key"])
async def test_a_cache_key_that_changes_is_named(
    findings: Findings, field: str, *, is_one_key: bool
) -> None:
    """A key of each request's own shares nothing; one key for all is no finding."""
    gateway = findings.gateway
    context = gateway.gateway.context
    key_id = str(find_key(context.store, gateway.keys["ada"]).key_id)
    change_key(context.store, key_id, cache_key="namespace", by=TESTER)
    context.authenticator.refresh_now()
    for number, question in enumerate(QUESTIONS):
        _, body = body_of("chat", gateway.model, Turns((question,)))
        key = "one" if is_one_key else f"request {number}"
        status, _, _ = await gateway.ask(body={**body, field: key})
        assert status == 200
    faults = [one for one in await findings.read() if not one["legitimate"]]

    assert [one["cause"] for one in faults] == ([] if is_one_key else ["cache_key_changes"])
    for one in faults:
        assert (one["requests"], one["of_requests"]) == (7, 8)
        assert "caching.cache_key" in one["advice"]


async def test_a_cache_key_of_each_session_separates_nothing(findings: Findings) -> None:
    """Coding agents send their session's id; the second session reads the first one's prompt."""
    gateway = findings.gateway
    _, body = body_of("chat", gateway.model, Turns((QUESTIONS[0],)))
    answers = [
        await gateway.ask(body={**body, "prompt_cache_key": session}) for session in ("one", "two")
    ]
    usage = answers[1][1]["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * usage["prompt_tokens"]


async def test_requests_for_a_model_that_is_not_served_are_named(findings: Findings) -> None:
    """A refusal costs nothing, and the tenant gets no answer."""
    for question in QUESTIONS[:4]:
        path, body = body_of("chat", "gpt-4o", Turns((question,)))
        status, _, _ = await findings.gateway.ask(path, body)
        assert status == 404

    (found,) = await findings.read()
    assert (found["cause"], found["place"], found["requests"]) == ("not_served", "gpt-4o", 4)
    assert "alias" in found["advice"]


async def test_order_of_keys_in_tools_is_no_change_of_the_tools(findings: Findings) -> None:
    """A schema that is built from unordered maps: the same tools, in other tokens."""
    chance = random.Random(5)

    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            names = chance.sample(list(value), len(value))
            return {name: shuffled(value[name]) for name in names}
        return value

    await findings.send(
        "chat", [Turns((question,), tools=shuffled_tools(shuffled)) for question in QUESTIONS]
    )

    assert await findings.faults() == ["tools_reordered"]


def shuffled_tools(shuffled: Callable[[Any], Any]) -> tuple[dict[str, Any], ...]:
    properties = {name: {"type": "string", "description": name} for name in ("day", "to", "seat")}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return tuple({**one, "parameters": shuffled(parameters)} for one in TOOLS)


async def test_repeated_prompts_without_breakpoints_are_named(findings: Findings) -> None:
    """Anthropic's dialect reads nothing then, by its contract, though the tokens are cached."""
    await findings.send("anthropic", plain())

    found = (await findings.read())[0]
    assert (found["cause"], found["requests"], found["of_requests"]) == ("unmarked", 7, 8)
    assert "cache_control" in found["advice"]


async def test_expired_prefixes_are_named_with_the_class_that_pays(
    card: ModelCard, tmp_path: Path
) -> None:
    """A class that ends at once: every return finds it expired."""
    short = RetentionClass(0.001, 0.001, "request_start")
    async with opened(card, tmp_path, CachingConfig(classes={"5m": short})) as findings:
        await findings.send("anthropic", plain(mark="5m"))
        found = (await findings.read())[0]

    assert (found["cause"], found["place"], found["requests"]) == ("expired", "5m", 7)
    assert found["advice"] == "Use the retention class 1h: it would have paid."


async def test_prefixes_below_the_minimum_are_named(card: ModelCard, tmp_path: Path) -> None:
    profiles = {"anthropic": CacheProfile("written", 600), "openai": CacheProfile("longest", 600)}
    async with opened(card, tmp_path, CachingConfig(profiles=profiles)) as findings:
        await findings.send("anthropic", plain(mark="5m"))
        await findings.send("chat", plain(), who="bob")
        found = {one["tenant"]: one for one in await findings.read() if not one["legitimate"]}

    assert {name: one["cause"] for name, one in found.items()} == {
        "ada": "below_minimum",
        "bob": "below_minimum",
    }
    assert "of 600 tokens" in found["bob"]["sentence"]


@pytest.mark.parametrize("mark", ["", "5m"])
async def test_evictions_by_another_tenant_are_named_to_operators_alone(
    card: ModelCard, tmp_path: Path, mark: str
) -> None:
    """bob's long prompts push out ada's prefix between two of her requests."""
    async with opened(card, tmp_path, CachingConfig(classes={"5m": UNPROMISED})) as findings:
        gateway = findings.gateway
        for number in range(5):
            asked = Turns((QUESTIONS[number],), 3 * HANDBOOK, mark=mark)
            await findings.send("anthropic" if mark else "chat", [asked])
            await push_out(findings, number)
            await gateway.quiet()
        found = [one for one in await findings.read("?tenant=ada") if not one["legitimate"]]
        status, own, _ = await gateway.ask("/v1/findings", method="GET")

    assert [one["cause"] for one in found] == ["evicted"]
    assert "evicted for bob in 4 of 5 requests" in found[0]["sentence"]
    assert "Set a floor of" in found[0]["advice"]
    assert status == 200
    assert "bob" not in msgspec.json.encode(own).decode()
    assert [one["cause"] for one in own["findings"] if not one["legitimate"]] == ["evicted"]


UNPROMISED = RetentionClass(0, 300, "request_start")
"""A class whose blocks may be evicted."""


async def push_out(findings: Findings, number: int, loser: str = "ada") -> None:
    """Fill the pool with two prompts of another tenant that run at once, and wait until a heartbeat
    has told what they evicted of the loser: not what was evicted for the loser before."""
    gateway = findings.gateway
    tenants = list_tenants(gateway.store)
    lost_by = next(one.tenant_id for one in tenants if one.name == loser)

    def evicted() -> int:
        found = gateway.engine.cache_events.evictions_by_taker()
        return sum(blocks for (whose, _), blocks in found.items() if owner_of(whose) == lost_by)

    before = evicted()
    running = gateway.gateway.context.running
    gateway.runner.hold_after(0)
    texts = [f"{letter}{number}" * 980 for letter in "ab"]
    sent = asyncio.gather(*(findings.send("chat", [Turns((text,), "")], "bob") for text in texts))
    await gateway.until(lambda: sum(running.values()) == len(texts))
    gateway.runner.release()
    await sent
    await gateway.until(lambda: evicted() > before)


@asynccontextmanager
async def opened(
    card: ModelCard,
    folder: Path,
    caching: CachingConfig | None = None,
    *,
    epoch: str = "1",
) -> AsyncIterator[Findings]:
    """Open a gateway over the folder's database."""
    gateway = await asyncio.to_thread(_make, card, folder)
    if caching is not None:
        gateway.config = msgspec.structs.replace(gateway.config, caching=caching)
    gateway.epoch = epoch
    await gateway.open()
    try:
        yield await asyncio.to_thread(Findings, gateway)
    finally:
        await gateway.close()
        await asyncio.to_thread(gateway.discard)


def _make(card: ModelCard, folder: Path) -> GatewayFixture:
    gateway = GatewayFixture(card, folder)
    gateway.context_tokens = 2_048
    if not gateway.store.query("select 1 from rate_cards"):
        add_card(gateway.store, wall_ms, CARD)
    return gateway


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("changed", ["model", "template"])
async def test_change_of_model_or_template_is_named(
    card: ModelCard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: Dialect,
    changed: str,
) -> None:
    """By the next gateway over the same database; a restart with the same ones is none."""
    async with opened(card, tmp_path) as first:
        await first.send(dialect, plain())
    async with opened(card, tmp_path, epoch="2") as same:
        await same.send(dialect, plain())
        assert "changed" not in " ".join(await same.faults())
    if changed == "template":
        card = msgspec.structs.replace(card, template_digest="another")
    async with opened(card, tmp_path, epoch="3") as second:
        if changed == "model":
            info = second.gateway.engine.info
            assert info is not None
            info = msgspec.structs.replace(info, model_digest="another")
            monkeypatch.setattr(second.gateway.engine, "info", info)
        await second.send(dialect, plain())
        found = [cause for cause in await second.faults() if cause != "unmarked"]

    assert found == [f"{changed}_changed"]


# --- clean traffic --------------------------------------------------------------------------------


def conversations() -> list[Turns]:
    """Three conversations whose turns alternate."""
    openings = (QUESTIONS[0:], QUESTIONS[1:], QUESTIONS[2:])
    return [
        Turns(
            tuple(
                text
                for pair in zip(questions[: n + 1], (*ANSWERS[:n], ""), strict=True)
                for text in pair
                if text
            )
        )
        for n in range(5)
        for questions in openings
    ]


def two_applications() -> list[Turns]:
    """Two system texts in turns."""
    return [
        Turns((question,), text, mark=mark)
        for question in QUESTIONS
        for text, mark in ((HANDBOOK, ""), (SUPPORT, ""))
    ]


def with_tools() -> list[Turns]:
    return [Turns((question,), tools=TOOLS) for question in QUESTIONS]


def documents() -> list[Turns]:
    """Each question with the paragraphs that belong to it, behind the system text."""
    return [
        Turns((f"{answer} {ANSWERS[(n * 5 + 2) % len(ANSWERS)]} {QUESTIONS[n]}",))
        for n, answer in enumerate(ANSWERS)
    ]


def regenerated() -> list[Turns]:
    """The last question is put in other words, again and again."""
    start = (QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1])
    return [Turns((*start, question)) for question in QUESTIONS]


CLEAN: dict[str, Callable[[], list[Turns]]] = {
    "questions": plain,
    "conversations": conversations,
    "two applications": two_applications,
    "tools": with_tools,
    "documents": documents,
    "regenerated": regenerated,
    "short prompts": lambda: [Turns((question,), "") for question in QUESTIONS],
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_clean_traffic_has_no_finding(
    findings: Findings, dialect: Dialect, name: str
) -> None:
    mark = "5m" if dialect == "anthropic" else ""
    requests = [msgspec.structs.replace(one, mark=mark) for one in CLEAN[name]()]
    await findings.send(dialect, requests)

    assert [one["sentence"] for one in await findings.read() if not one["legitimate"]] == []


async def test_new_conversations_are_legitimate_and_last(findings: Findings) -> None:
    await findings.send("chat", volatile_system())
    await findings.send("chat", plain())

    found = await findings.read()
    assert [(one["cause"], one["legitimate"]) for one in found] == [
        ("system_changes", False),
        ("new_conversation", True),
    ]
    assert found[-1]["saving_usd_month"] == "0.00"


# --- the API --------------------------------------------------------------------------------------


async def test_findings_survive_a_restart(card: ModelCard, tmp_path: Path) -> None:
    """The same causes with the same ids and counts."""
    async with opened(card, tmp_path) as first:
        await first.send("chat", volatile_system())
        before = await first.read()
    async with opened(card, tmp_path) as second:
        after = await second.read()

    assert before
    assert after == before


async def test_tenant_sees_its_own_findings_alone(findings: Findings) -> None:
    await findings.send("chat", volatile_system(), who="ada")
    gateway = findings.gateway
    status, own, _ = await gateway.ask("/v1/findings", method="GET", who="bob")
    other, _, _ = await gateway.ask("/v1/findings?tenant=ada", method="GET", who="bob")
    _, ada, _ = await gateway.ask("/v1/findings?tenant=ada", method="GET", who="ada")

    assert (status, own["findings"], other) == (200, [], 404)
    assert ada["findings"] == await findings.read("?tenant=ada")
    assert await findings.read("?tenant=bob") == []


async def test_window_is_that_of_the_query(findings: Findings) -> None:
    await findings.send("chat", volatile_system())

    assert await findings.read("?since=2001-01-01&until=2001-01-02") == []
    status, answer = await findings.admin.ask("GET", "/admin/v1/findings?since=yesterday")
    assert (status, answer["error"]["param"]) == (400, "since")
    unknown, _ = await findings.admin.ask("GET", "/admin/v1/findings?tenant=zoe")
    assert unknown == 404


async def test_no_text_of_a_prompt_is_stored(findings: Findings) -> None:
    """Neither in the rows nor in the answer."""
    await findings.send("chat", volatile_system())
    shown = msgspec.json.encode(await findings.read()).decode()
    rows = repr(findings.gateway.store.query("select * from findings"))

    for word in ("10:31", "handbook", "polite", *(question[:12] for question in QUESTIONS)):
        assert word not in shown
        assert word not in rows
