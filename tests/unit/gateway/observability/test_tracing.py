"""Trace attributes: the conventions' names, true counts, nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from gateway.dialects.canonical import UsageRecord
from gateway.dialects.families import ENDPOINTS, embeddings
from gateway.dialects.protocol import ErrorShape
from gateway.observability.tracing import CompletedRequest
from tests.tables import each_row

ROOT = Path(__file__).parents[4]
ASKED = CompletedRequest(
    operation="chat", route="/v1/messages", ended_ms=5_000, total_s=2.0, request_id="r1"
)
ANSWERED = msgspec.structs.replace(
    ASKED, status=200, model="m", response_id="msg_r1", tenant_id=7,
    usage=UsageRecord(100, {"5m": 48}, {"5m": 32}, 20, out=9, physical_cached=64),
    finish_reasons=("stop", "length"), submitted_s=0.25, first_token_s=0.5, settled_s=1.5,
)  # fmt: skip


def test_attributes_have_the_conventions_names() -> None:
    """Backends read usage and latency by these names and no others."""
    assert ANSWERED.attributes() == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "trunkline",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.response.id": "msg_r1",
        "gen_ai.response.model": "m",
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.cache_write.input_tokens": 32,
        "gen_ai.usage.cache_read.input_tokens": 48,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 9,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/messages",
        "trunkline.cached_tokens": 64,
        "trunkline.ending": "done",
        "trunkline.request_id": "r1",
        "trunkline.tenant_id": 7,
    }


def test_request_that_never_ran_has_no_usage() -> None:
    """A zero would distort averages."""
    refused = msgspec.structs.replace(ASKED, status=429, ending="refused", error="rate_limited")

    assert not [name for name in refused.attributes() if "usage" in name or "response.id" in name]
    assert refused.attributes()["error.type"] == "rate_limited"
    assert refused.events() == []


def test_a_stored_responses_id_is_in_no_span() -> None:
    """With a key of the tenant it leads to prompt and answer, which a collector must not read."""
    stored = msgspec.structs.replace(ANSWERED, response_id="resp_s9")

    assert "resp_s9" not in str(stored.attributes())
    assert stored.attributes()["trunkline.request_id"] == "r1"


def test_events_are_the_stages_reached() -> None:
    """Admission, the first token and the ledger."""
    assert ANSWERED.events() == [("submitted", 0.25), ("first_token", 0.5), ("settled", 1.5)]
    assert msgspec.structs.replace(ANSWERED, first_token_s=None).events() == [
        ("submitted", 0.25),
        ("settled", 1.5),
    ]


@each_row(
    ("status", "ending", "is_failure"),
    [
        (200, "done", False),
        (200, "failed", True),
        (400, "refused", False),
        (503, "refused", True),
        (0, "cancelled", False),
    ],
)
def test_only_server_failures_are_errors(status: int, ending: str, is_failure: bool) -> None:
    """An alert on failed spans must not fire for clients' errors."""
    answered = msgspec.structs.replace(ASKED, status=status, ending=ending)

    assert answered.is_failure is is_failure


def test_operation_name_depends_on_the_dialect() -> None:
    """The conventions know these kinds."""
    shapes: list[ErrorShape] = [*(one.dialect for one in ENDPOINTS), embeddings.SHAPE]

    assert {shape.name: shape.operation for shape in shapes} == {
        "anthropic": "chat",
        "openai_chat": "chat",
        "openai_responses": "chat",
        "openai_completions": "text_completion",
        "openai_embeddings": "embeddings",
        "gemini": "generate_content",
    }


def test_does_not_import_opentelemetry_while_tracing_is_off() -> None:
    """No thread, no memory, and no environment variables read by the SDK."""
    program = (
        "import sys, gateway.app, gateway.__main__; from gateway.config import Config;"
        "assert gateway.app.open_tracer(Config(), lambda event, facts: None) is None;"
        "sys.exit(any(name.partition('.')[0] == 'opentelemetry' for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
