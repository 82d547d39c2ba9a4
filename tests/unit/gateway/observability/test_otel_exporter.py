"""Spans as a collector receives them: real requests and a real exporter, over loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway.app import open_tracer
from gateway.config import Config, ConfigError, TracingConfig
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.gateway.observability.otlp_collector import OtlpCollector

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the same")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from gateway.observability import otel_exporter
from gateway.observability.otel_exporter import SpanTracer, traces_url

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a prompt that no one else may read"
HI = [{"role": "user", "content": "hi"}]


class Collector(OtlpCollector):
    """Reads the spans that it was sent."""

    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    def spans(self) -> list[Any]:
        """Return all received spans, oldest first."""
        return [
            span
            for request in self.requests()
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    one = Collector()
    async with one.listen("/v1/traces"):
        yield one


@pytest.fixture
async def traced(
    unopened_gateway: GatewayFixture, collector: Collector
) -> AsyncIterator[GatewayFixture]:
    """A gateway whose spans go to the collector."""
    set_tracing(unopened_gateway, endpoint=collector.url)
    await unopened_gateway.open()
    yield unopened_gateway
    await unopened_gateway.close()


def set_tracing(gateway: GatewayFixture, **settings: Any) -> None:
    tracing = TracingConfig(**settings)
    gateway.config = msgspec.structs.replace(gateway.config, tracing=tracing)


async def flush(gateway: GatewayFixture) -> None:
    """Send queued spans."""
    await gateway.quiet()
    tracer = gateway.gateway.context.tracer
    assert isinstance(tracer, SpanTracer)
    await asyncio.to_thread(tracer.flush)


def facts(span: Any) -> dict[str, Any]:
    """Return a span's attributes as plain values."""
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if "array" in kind else value
    return found


def logged(gateway: GatewayFixture, event: str) -> list[dict[str, object]]:
    return [line for line in gateway.lines if line["event"] == event]


async def test_request_is_one_span_with_its_usage(
    traced: GatewayFixture, collector: Collector
) -> None:
    """The trace, the response, the log and the ledger agree."""
    _, body, response = await traced.ask(body=traced.chat(SECRET))
    await flush(traced)
    (span,) = collector.spans()
    (line,) = logged(traced, "request")
    found = facts(span)

    assert span.name == f"chat {traced.model}"
    assert span.kind == span.SPAN_KIND_SERVER
    assert span.parent_span_id == b""
    assert found["gen_ai.response.id"] == body["id"]
    assert found["gen_ai.usage.input_tokens"] == body["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 8
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["trunkline.request_id"] == response.headers["X-Request-Id"] == line["id"]
    assert found["trunkline.tenant_id"] == line["tenant_id"]
    assert (found["server.address"], found["server.port"]) == ("127.0.0.1", 8080)
    assert found["http.response.status_code"] == 200
    assert "error.type" not in found


async def test_span_events_are_ordered_and_inside_the_span(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Admission, first token, ledger."""
    await traced.stream(traced.chat())
    await flush(traced)
    (span,) = collector.spans()
    times = [span.start_time_unix_nano, *(e.time_unix_nano for e in span.events)]
    times.append(span.end_time_unix_nano)

    assert [event.name for event in span.events] == ["submitted", "first_token", "settled"]
    assert times == sorted(times)
    assert facts(span)["gen_ai.request.stream"] is True
    assert facts(span)["gen_ai.response.finish_reasons"] == ["length"]


async def test_span_has_the_cached_tokens_of_the_log(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Of the second turn's cache hit."""
    for _ in range(2):
        await traced.ask(body=traced.chat("x" * 200))
    await flush(traced)
    first, second = map(facts, collector.spans())
    lines = logged(traced, "request")

    assert first["trunkline.cached_tokens"] == 0
    assert second["trunkline.cached_tokens"] == lines[1]["cached_tokens"]
    assert second["trunkline.cached_tokens"] > 0


async def test_sends_no_prompt_output_or_key(traced: GatewayFixture, collector: Collector) -> None:
    """A collector is a third party."""
    _, body, _ = await traced.ask(
        body=traced.chat(SECRET), headers={"tracestate": f"x={SECRET.replace(' ', '-')}"}
    )
    await traced.ask(body={**traced.chat(SECRET), "model": SECRET})
    await flush(traced)
    sent = b"".join(collector.bodies)

    assert len(collector.spans()) == 2
    assert SECRET.encode() not in sent
    assert SECRET.replace(" ", "-").encode() not in sent
    assert traced.keys["ada"].encode() not in sent
    assert body["choices"][0]["message"]["content"].encode() not in sent


async def test_continues_a_clients_trace(traced: GatewayFixture, collector: Collector) -> None:
    await traced.ask(body=traced.chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    await flush(traced)
    (span,) = collector.spans()

    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


async def test_follows_a_clients_decision_not_to_sample(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Half a trace is useless."""
    await traced.ask(body=traced.chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    await flush(traced)

    assert collector.spans() == []


@pytest.mark.parametrize(
    "header",
    ["", "no", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "0" * 4000, "00-é-ü-01"],
)
async def test_malformed_traceparent_begins_a_new_trace(
    traced: GatewayFixture, collector: Collector, header: str
) -> None:
    """As the standard says; the response is the same."""
    status, _, _ = await traced.ask(body=traced.chat(), headers={"traceparent": header})
    await flush(traced)
    (span,) = collector.spans()

    assert status == 200
    assert span.trace_id.hex() != TRACE
    assert span.parent_span_id == b""


@pytest.mark.parametrize(("ratio", "spans"), [(0.0, 0), (1.0, 3)])
async def test_sample_ratio_applies_to_traces_without_parent(
    unopened_gateway: GatewayFixture, collector: Collector, ratio: float, spans: int
) -> None:
    """A ratio of zero still follows clients that trace."""
    set_tracing(unopened_gateway, endpoint=collector.url, sample_ratio=ratio)
    await unopened_gateway.open()
    for _ in range(3):
        await unopened_gateway.ask(body=unopened_gateway.chat())
    await unopened_gateway.ask(
        body=unopened_gateway.chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}
    )
    await flush(unopened_gateway)
    await unopened_gateway.close()

    assert len(collector.spans()) == spans + 1


async def test_refusal_is_a_span_with_its_error_code(
    traced: GatewayFixture, collector: Collector
) -> None:
    """A client's error is no failure of the server."""
    status, _, _ = await traced.ask(body={**traced.chat(), "model": "no such model"})
    await flush(traced)
    (span,) = collector.spans()
    found = facts(span)

    assert (status, found["error.type"]) == (404, "model_not_found")
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert "gen_ai.usage.input_tokens" not in found


async def test_disconnect_is_a_span_with_usage(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Its tokens were computed and are charged."""
    traced.runner.hold_after(3)
    body = json.dumps({**traced.chat(), "stream": True}).encode()
    async with traced.connection() as (reader, writer):
        writer.write(traced.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
    # the disconnect has been noticed
    await traced.until(lambda: bool(traced.gateway.context.work.tasks))
    traced.runner.release()
    await traced.until(lambda: bool(logged(traced, "request")))
    await flush(traced)
    (span,) = collector.spans()
    found = facts(span)

    assert found["error.type"] == found["trunkline.ending"] == "cancelled"
    assert found["gen_ai.usage.input_tokens"] > 0
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert [event.name for event in span.events] == ["submitted", "settled"]


@pytest.mark.parametrize(
    ("path", "who", "body", "status"),
    [
        ("/healthz", None, None, 200),
        ("/v1/models", "ada", None, 200),
        ("/v1/chat/completions", None, {}, 401),
        ("/v1/messages/count_tokens", "ada", {"messages": HI}, 200),
    ],
    ids=["probe", "model list", "stranger", "token count"],
)
async def test_traces_only_generation_requests(
    traced: GatewayFixture, collector: Collector, path: str, who: str | None, body: Any, status: int
) -> None:
    """Probes would drown the other spans, and unauthenticated clients must not cause any. A count
    generates nothing, and the conventions have no name for it."""
    method = "GET" if body is None else "POST"
    sent = None if body is None else {"model": traced.model, **body}
    answered, _, _ = await traced.ask(path, sent, who=who, method=method)
    await flush(traced)

    assert answered == status
    assert collector.spans() == []


@pytest.mark.parametrize(
    ("path", "more", "name"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "chat"),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}, "chat"),
    ],
)
async def test_traces_every_dialect(
    traced: GatewayFixture, collector: Collector, path: str, more: dict[str, Any], name: str
) -> None:
    """One span each, by the conventions' operation name."""
    status, body, _ = await traced.ask(path, {"model": traced.model, **more})
    await flush(traced)
    (span,) = collector.spans()

    assert status == 200, body
    assert facts(span)["gen_ai.operation.name"] == name
    is_stored = path == "/v1/responses"
    assert facts(span).get("gen_ai.response.id") == (None if is_stored else body["id"])


async def test_shutdown_sends_queued_spans(
    unopened_gateway: GatewayFixture, collector: Collector
) -> None:
    """The last requests before an upgrade matter."""
    set_tracing(unopened_gateway, endpoint=collector.url)
    await unopened_gateway.open()
    await unopened_gateway.ask(body=unopened_gateway.chat())
    await unopened_gateway.close()
    (request,) = collector.requests()
    names = {pair.key: pair.value for pair in request.resource_spans[0].resource.attributes}

    assert len(collector.spans()) == 1
    assert names["service.name"].string_value == "trunkline"
    assert names["service.version"].string_value


async def test_failing_collector_costs_spans_and_two_log_lines(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Requests go on; the log says when it began and when it was over, and not every failure."""
    collector.status = 400
    for _ in range(3):
        status, _, _ = await traced.ask(body=traced.chat())
        assert status == 200
        await flush(traced)
    collector.status = 200
    await traced.ask(body=traced.chat())
    await flush(traced)

    assert [line["spans"] for line in logged(traced, "tracing_failed")] == [1]
    assert [line["lost_spans"] for line in logged(traced, "tracing_recovered")] == [3]
    assert len(collector.spans()) == 1


async def test_missing_collector_does_not_delay_shutdown(
    unopened_gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM has a deadline."""
    monkeypatch.setattr(otel_exporter, "TIMEOUT_S", 0.05)
    set_tracing(unopened_gateway, endpoint="http://127.0.0.1:9")
    await unopened_gateway.open()
    status, _, _ = await unopened_gateway.ask(body=unopened_gateway.chat())
    await unopened_gateway.close()

    assert status == 200
    assert len(logged(unopened_gateway, "tracing_failed")) == 1


async def test_hanging_collector_does_not_delay_shutdown(
    unopened_gateway: GatewayFixture, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel_exporter, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(otel_exporter, "BATCH_SPANS_MAX", 2)
    monkeypatch.setattr(otel_exporter, "EXPORT_DELAY_MS", 10_000_000)
    collector.is_answering.clear()
    set_tracing(unopened_gateway, endpoint=collector.url)
    await unopened_gateway.open()
    for _ in range(3):
        await unopened_gateway.ask(
            body=unopened_gateway.chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}
        )
    await unopened_gateway.close()
    collector.is_answering.set()

    assert len(logged(unopened_gateway, "tracing_failed")) == 1


def test_traces_url_follows_the_standard() -> None:
    """With or without a trailing slash; a full URL stays."""
    assert traces_url("http://a:4318") == traces_url("http://a:4318/") == "http://a:4318/v1/traces"
    assert traces_url("https://a/otel/v1/traces") == "https://a/otel/v1/traces"


def test_missing_extra_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At startup, not with the first request."""
    monkeypatch.setattr("gateway.app.util.find_spec", lambda name: None)
    config = Config(tracing=TracingConfig(endpoint="http://127.0.0.1:4318"))

    with pytest.raises(ConfigError, match=r"install trunkline\[otel\]"):
        open_tracer(config, lambda event, facts: None)
