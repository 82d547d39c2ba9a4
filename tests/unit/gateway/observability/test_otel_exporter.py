"""Spans as a collector gets them: real requests, a real exporter, loopback in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gateway.app import open_tracer
from gateway.config import Config, ConfigError, TracingConfig
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the same")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from gateway.observability import otel_exporter
from gateway.observability.otel_exporter import SpanTracer, traces_url

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a prompt that nobody else may read"


class Collector:
    """Takes OTLP over HTTP. `status`: what it answers, once it `is_answering`."""

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[bytes] = []
        self.url = ""
        self.is_answering = asyncio.Event()
        self.is_answering.set()

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        await self.is_answering.wait()
        if self.status == 200:
            self.bodies.append(body)
        return web.Response(status=self.status)

    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    def spans(self) -> list[Any]:
        """Everything that came, oldest first."""
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
    app = web.Application()
    app.router.add_post("/v1/traces", one.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    one.url = f"http://{host}:{port}"
    yield one
    await runner.cleanup()


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
    """Send what waits."""
    await gateway.quiet()
    tracer = gateway.gateway.context.tracer
    assert isinstance(tracer, SpanTracer)
    await asyncio.to_thread(tracer.flush)


def facts(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if "array" in kind else value
    return found


def logged(gateway: GatewayFixture, event: str) -> list[dict[str, object]]:
    return [line for line in gateway.lines if line["event"] == event]


async def test_an_answer_is_one_span_with_its_usage(
    traced: GatewayFixture, collector: Collector
) -> None:
    """What the client was told, the log says and the ledger holds is what the trace says."""
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


async def test_a_spans_events_are_in_order_within_it(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Admission, first token, ledger: times that lie outside the span would be worth nothing."""
    await traced.stream(traced.chat())
    await flush(traced)
    (span,) = collector.spans()
    times = [span.start_time_unix_nano, *(e.time_unix_nano for e in span.events)]
    times.append(span.end_time_unix_nano)

    assert [event.name for event in span.events] == ["submitted", "first_token", "settled"]
    assert times == sorted(times)
    assert facts(span)["gen_ai.request.stream"] is True
    assert facts(span)["gen_ai.response.finish_reasons"] == ["length"]


async def test_cached_tokens_are_counted_as_the_log_counts_them(
    traced: GatewayFixture, collector: Collector
) -> None:
    """The second turn's hit is the reason why anybody looks at these traces."""
    for _ in range(2):
        await traced.ask(body=traced.chat("x" * 200))
    await flush(traced)
    first, second = map(facts, collector.spans())
    lines = logged(traced, "request")

    assert first["trunkline.cached_tokens"] == 0
    assert second["trunkline.cached_tokens"] == lines[1]["cached_tokens"]
    assert second["trunkline.cached_tokens"] > 0


async def test_neither_prompts_nor_outputs_nor_keys_are_sent(
    traced: GatewayFixture, collector: Collector
) -> None:
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


async def test_a_clients_trace_is_gone_on_with(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Its span and ours are one picture."""
    await traced.ask(body=traced.chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    await flush(traced)
    (span,) = collector.spans()

    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


async def test_a_trace_that_a_client_does_not_sample_is_not_sent(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Half a trace helps nobody."""
    await traced.ask(body=traced.chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    await flush(traced)

    assert collector.spans() == []


@pytest.mark.parametrize(
    "header",
    ["", "no", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "0" * 4000, "00-é-ü-01"],
)
async def test_a_broken_traceparent_begins_a_new_trace(
    traced: GatewayFixture, collector: Collector, header: str
) -> None:
    """As the standard says; the answer is the same."""
    status, _, _ = await traced.ask(body=traced.chat(), headers={"traceparent": header})
    await flush(traced)
    (span,) = collector.spans()

    assert status == 200
    assert span.trace_id.hex() != TRACE
    assert span.parent_span_id == b""


@pytest.mark.parametrize(("ratio", "spans"), [(0.0, 0), (1.0, 3)])
async def test_the_ratio_decides_where_no_client_has(
    unopened_gateway: GatewayFixture, collector: Collector, ratio: float, spans: int
) -> None:
    """Zero still follows clients that trace themselves."""
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


async def test_a_refusal_is_a_span_with_its_code(
    traced: GatewayFixture, collector: Collector
) -> None:
    """A client's mistake is named and is no failure of ours."""
    status, _, _ = await traced.ask(body={**traced.chat(), "model": "no such model"})
    await flush(traced)
    (span,) = collector.spans()
    found = facts(span)

    assert (status, found["error.type"]) == (404, "model_not_found")
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert "gen_ai.usage.input_tokens" not in found


async def test_a_client_that_leaves_is_a_span_too(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Its tokens were computed and are counted."""
    traced.runner.hold_after(3)
    body = json.dumps({**traced.chat(), "stream": True}).encode()
    async with traced.connection() as (reader, writer):
        writer.write(traced.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
    await traced.until(lambda: bool(traced.gateway.context.background))  # it has been noticed
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
    ("path", "who", "method"),
    [
        ("/healthz", None, "GET"),
        ("/v1/models", "ada", "GET"),
        ("/v1/chat/completions", None, "POST"),
    ],
)
async def test_what_asks_for_no_answer_is_not_traced(
    traced: GatewayFixture, collector: Collector, path: str, who: str | None, method: str
) -> None:
    """Probes would drown the rest; strangers must not be able to."""
    await traced.ask(path, who=who, method=method)
    await flush(traced)

    assert collector.spans() == []


async def test_counting_tokens_is_not_traced(traced: GatewayFixture, collector: Collector) -> None:
    """Nothing is generated, so the conventions have no name for it."""
    body = {"model": traced.model, "messages": [{"role": "user", "content": "hi"}]}
    status, _, _ = await traced.ask("/v1/messages/count_tokens", body)
    await flush(traced)

    assert status == 200
    assert collector.spans() == []


@pytest.mark.parametrize(
    ("path", "more", "name"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "chat"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
            "chat",
        ),
    ],
)
async def test_every_dialect_is_traced(
    traced: GatewayFixture, collector: Collector, path: str, more: dict[str, Any], name: str
) -> None:
    """One span each, by the conventions' name for it."""
    status, body, _ = await traced.ask(path, {"model": traced.model, **more})
    await flush(traced)
    (span,) = collector.spans()

    assert status == 200, body
    assert facts(span)["gen_ai.operation.name"] == name
    assert facts(span)["gen_ai.response.id"] == body["id"]


async def test_a_server_that_closes_sends_what_is_left(
    unopened_gateway: GatewayFixture, collector: Collector
) -> None:
    """The last requests before an upgrade are those that somebody asks about."""
    set_tracing(unopened_gateway, endpoint=collector.url)
    await unopened_gateway.open()
    await unopened_gateway.ask(body=unopened_gateway.chat())
    await unopened_gateway.close()
    (request,) = collector.requests()
    names = {pair.key: pair.value for pair in request.resource_spans[0].resource.attributes}

    assert len(collector.spans()) == 1
    assert names["service.name"].string_value == "trunkline"
    assert names["service.version"].string_value


async def test_a_failing_collector_costs_spans_and_two_lines(
    traced: GatewayFixture, collector: Collector
) -> None:
    """Answers go on; the log says when it began and when it was over, not every time."""
    collector.status = 400
    for _ in range(3):
        status, _, _ = await traced.ask(body=traced.chat())
        assert status == 200
        await flush(traced)
    collector.status = 200
    await traced.ask(body=traced.chat())
    await flush(traced)

    assert [line["spans"] for line in logged(traced, "tracing_failed")] == [1]
    assert [line["lost_spans"] for line in logged(traced, "tracing_again")] == [3]
    assert len(collector.spans()) == 1


async def test_a_collector_that_is_not_there_delays_no_end(
    unopened_gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM has a deadline, and a trace is worth none of it."""
    monkeypatch.setattr(otel_exporter, "TIMEOUT_S", 0.05)
    set_tracing(unopened_gateway, endpoint="http://127.0.0.1:9")
    await unopened_gateway.open()
    status, _, _ = await unopened_gateway.ask(body=unopened_gateway.chat())
    await unopened_gateway.close()

    assert status == 200
    assert len(logged(unopened_gateway, "tracing_failed")) == 1


async def test_a_collector_that_never_answers_delays_no_end(
    unopened_gateway: GatewayFixture, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for it would wait for ever."""
    monkeypatch.setattr(otel_exporter, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(otel_exporter, "BATCH_SPANS_MAX", 2)
    monkeypatch.setattr(otel_exporter, "DELAY_MS", 10_000_000)
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


def test_traces_go_to_the_path_that_the_standard_names() -> None:
    """A base address, with or without a slash; one that is whole stays."""
    assert traces_url("http://a:4318") == traces_url("http://a:4318/") == "http://a:4318/v1/traces"
    assert traces_url("https://a/otel/v1/traces") == "https://a/otel/v1/traces"


def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found at the start, not with the first request."""
    monkeypatch.setattr("gateway.app.util.find_spec", lambda name: None)
    config = Config(tracing=TracingConfig(endpoint="http://127.0.0.1:4318"))

    with pytest.raises(ConfigError, match=r"install trunkline\[otel\]"):
        open_tracer(config, lambda event, facts: None)
