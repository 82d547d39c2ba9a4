"""Errors as refusals for clients and as log fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from aiohttp import web

from engine.errors import EngineError, EngineUnavailable, RequestRefused
from engine.model_store import ModelCard
from gateway.errors import Kind, Refusal, error_location
from gateway.http.error_mapping import engine_refusal, refusal_of
from gateway.http.route_table import PathNotFound
from tenancy.errors import LedgerUnavailable
from tests.crash.power_cut import Disk, disk_of
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture


@each_row(
    ("error", "kind"),
    [
        (Refusal(Kind.QUOTA, "q", "m"), Kind.QUOTA),
        (msgspec.ValidationError("x"), Kind.BAD),
        (msgspec.DecodeError("x"), Kind.BAD),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), Kind.BAD),
        (RecursionError(), Kind.BAD),
        (MemoryError(), Kind.BUSY),
        (EngineUnavailable("not_ready", "m", 2.0), Kind.BUSY),
        (RequestRefused("context_exceeded", "m"), Kind.BAD),
        (RequestRefused("poison_request", "m"), Kind.INTERNAL),
        (LedgerUnavailable("not_durable", "m"), Kind.BUSY),
        (web.HTTPNotFound(), Kind.NOT_FOUND),
        (web.HTTPMethodNotAllowed("GET", ["POST"]), Kind.METHOD),
        (web.HTTPRequestEntityTooLarge(1, 2), Kind.TOO_BIG),
    ],
)
def test_known_errors_map_to_a_kind(error: Exception, kind: Kind) -> None:
    """RecursionError and UnicodeDecodeError are not msgspec errors; unmapped they give 500."""
    refusal = refusal_of(error)

    assert refusal is not None
    assert refusal.kind is kind


@each_row(
    ("path", "word"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/images/generations", "images"),
        ("/v1/audio/speech", "audio"),
        ("/v1/files", "files"),
        ("/upload/v1beta/files", "files"),
        ("/v1alpha/tunedModels", "training"),
        ("/v1/messages/batches/x/results", "batches"),
        ("/v1/chat/completions/id/messages", "stored"),
        ("/metrics", "admin.listen"),
        ("/v1/tokenize", "without /v1"),
        ("/v1/rerank", "ranking"),
        ("/admin/v1/tenants", "admin.listen"),
        ("/api/chat", "ollama"),
        ("/v1/fine_tuning/jobs", "training"),
        ("/v1/moderations", "moderation"),
        ("/v1/vector_stores", "files"),
        ("/v1/nothing", None),
        ("/v1/messages", None),
        ("/", None),
    ],
)
def test_unsupported_endpoint_of_a_hosted_api_is_named(path: str, word: str | None) -> None:
    """A plain 404 would suggest a wrong URL."""
    refusal = refusal_of(web.HTTPNotFound(), "POST", path)

    assert refusal is not None
    assert refusal.code == ("not_served" if word else "not_found")
    assert word is None or word in refusal.message.lower()


@each_row(
    ("method", "path", "code"),
    [
        ("GET", "/v1/chat/completions", "method_not_allowed"),
        ("GET", "/v1/responses", "method_not_allowed"),
        ("POST", "/v1/responses/compact", "not_served"),
        ("DELETE", "/v1/models/m", "not_served"),
        ("PUT", "/v1/chat/completions", "method_not_allowed"),
        ("GET", "/v1/messages", "method_not_allowed"),
        ("POST", "/v1/models/m", "method_not_allowed"),
    ],
)
def test_hosted_endpoint_at_a_path_with_another_method_is_named(
    method: str, path: str, code: str
) -> None:
    """A method that no hosted API has there is a 405; one that it has is a 404 with its reason."""
    refusal = refusal_of(web.HTTPMethodNotAllowed(method, ["POST"]), method, path)

    assert refusal is not None
    assert refusal.code == code
    assert code == "not_served" or "expected POST" in refusal.message


def test_path_of_a_wrong_base_url_names_the_right_one() -> None:
    """What is wrong is the client's base URL, not the endpoint."""
    refusal = refusal_of(PathNotFound("/v1/messages"), "POST", "/v1/v1/messages")

    assert refusal is not None
    assert (refusal.kind, refusal.code) == (Kind.NOT_FOUND, "not_found")
    assert "expected '/v1/messages'" in refusal.message


@pytest.mark.parametrize(
    ("close", "path", "told"),
    [
        ("/v1/messages", "/v1/message", "'/v1/message'; expected '/v1/messages'."),
        ("", "/nothing", "'/nothing'; expected one of GET /openapi.json."),
        ("/v1/models", "/v1/rerank", "Ranking is not supported"),
    ],
)
def test_path_that_is_not_found_names_the_nearest(close: str, path: str, told: str) -> None:
    """An endpoint of other servers has its own reason, whatever its name is near to."""
    refusal = refusal_of(PathNotFound("", close), "POST", path)

    assert refusal is not None
    assert refusal.kind is Kind.NOT_FOUND
    assert told in refusal.message


@pytest.mark.parametrize("error", [ValueError("secret"), EngineError("invariant", "secret")])
def test_internal_errors_have_no_refusal(error: Exception) -> None:
    """Messages of unexpected errors may quote prompts or internals."""
    assert refusal_of(error) is None


def test_error_location_has_lines_and_no_message() -> None:
    """The message may quote the request."""
    try:
        raise ValueError("the planted prompt")
    except ValueError as error:
        facts = error_location(error)

    assert facts["error"] == "ValueError"
    assert "planted" not in json.dumps(facts)
    assert "at" not in facts, "the log line's time has that name"


@pytest.fixture
def disk() -> Iterator[Disk]:
    """A disk with injectable faults; files opened during the test lie on it."""
    disk = Disk()
    with disk_of(disk):
        yield disk


@pytest.fixture
def unopened_gateway(disk: Disk, card: ModelCard, tmp_path: Path) -> Iterator[GatewayFixture]:
    gateway = GatewayFixture(card, tmp_path)
    yield gateway
    gateway.discard()


@pytest.mark.parametrize("sick", ["wrong_reads", "no_reads", "no_writes", "no_syncs", "full"])
async def test_service_recovers_once_the_disk_recovers(
    gateway: GatewayFixture,
    disk: Disk,
    sick: Literal["wrong_reads", "no_reads", "no_writes", "no_syncs", "full"],
) -> None:
    """Requests during the fault get a retryable 503, and the gateway needs no restart."""
    admin = AdminClient(gateway)

    async def statuses(name: str) -> list[int]:
        """Use every kind of read and write: admin, reports, caches, erasure, idempotency, holds."""
        made, _ = await admin.ask("POST", "/admin/v1/tenants", {"name": name})
        listed, _ = await admin.ask("GET", "/admin/v1/tenants")
        report, _ = await admin.ask("GET", "/admin/v1/usage")
        erased, _ = await admin.ask("POST", "/admin/v1/erase", {"tenant": "ada"})
        own, _, _ = await gateway.ask("/v1/usage", method="GET")
        contents, _, _ = await gateway.ask("/v1beta/cachedContents", method="GET")
        named = {"Idempotency-Key": name}
        chat, _, _ = await gateway.ask(body=gateway.chat(), headers=named)
        again, _, _ = await gateway.ask(body=gateway.chat(), headers=named)
        return [made, listed, report, erased, own, contents, chat, again]

    first = await statuses("eve")
    disk.sick = sick
    while_sick = await statuses("fay")
    disk.sick = ""
    after = await statuses("gus")
    _, made = await admin.ask("POST", "/admin/v1/tenants/gus/keys", {})
    new = {"Authorization": f"Bearer {made['key']}"}
    its, _, _ = await gateway.ask(body=gateway.chat(), who=None, headers=new)

    assert (first, after, its) == ([201, 200, 200, 200, 200, 200, 200, 200],) * 2 + (200,)
    assert {while_sick[0], *while_sick[6:]} == {503}
    assert set(while_sick) <= {200, 503}
    await gateway.check_quiet()


@each_row(
    ("code", "kind", "name"),
    [
        ("context_exceeded", Kind.BAD, "context_length_exceeded"),
        ("kv_exceeded", Kind.BAD, "context_length_exceeded"),
        ("token_out_of_range", Kind.BAD, "invalid_value"),
        ("queue_full", Kind.BUSY, "overloaded"),
        ("timeout", Kind.BUSY, "queue_timeout"),
        ("draining", Kind.BUSY, "shutting_down"),
        ("engine_unavailable", Kind.BUSY, "engine_unavailable"),
        ("nan_logits", Kind.INTERNAL, "internal_error"),
        ("grammar_invalid", Kind.BAD, "invalid_json_schema"),
        ("grammar_too_big", Kind.BAD, "json_schema_too_complex"),
        ("grammar_unsupported", Kind.BAD, "unsupported_value"),
        ("grammar_dead_end", Kind.BAD, "invalid_json_schema"),
        ("kv_promised", Kind.BUSY, "cache_memory_promised"),
        ("an unknown code", Kind.INTERNAL, "internal_error"),
    ],
)
def test_engine_codes_map_to_kind_and_client_code(code: str, kind: Kind, name: str) -> None:
    """A client error is 4xx, an internal error 5xx, and overload has a retry delay."""
    refusal = engine_refusal(code, "why")

    assert (refusal.kind, refusal.code) == (kind, name)
    assert (refusal.retry_after_s is not None) == (kind is Kind.BUSY)


@each_row("code", ["grammar_invalid", "grammar_too_big", "grammar_unsupported", "grammar_dead_end"])
def test_schema_error_names_the_request_field(code: str) -> None:
    """The engine finds the error but does not know the request's fields."""
    assert engine_refusal(code, "why", schema_field="tools[0]").param == "tools[0]"


def test_error_without_schema_cause_names_no_field() -> None:
    """A full queue is not the schema's fault."""
    assert engine_refusal("queue_full", "why", schema_field="tools[0]").param is None
