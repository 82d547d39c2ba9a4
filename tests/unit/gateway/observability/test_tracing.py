"""What a trace says of a request: the conventions' names, true counts, nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gateway.observability.tracing import CompletedRequest, operation_of

ROOT = Path(__file__).parents[4]
ASKED = CompletedRequest(
    operation="chat", route="/v1/messages", ended_ms=5_000, total_s=2.0, request_id="r1"
)
ANSWERED = msgspec.structs.replace(
    ASKED, status=200, model="m", response_id="msg_r1", tenant_id=7, prompt_tokens=100,
    cached_tokens=64, cache_read_tokens=48, cache_write_tokens=32, output_tokens=9,
    finish_reasons=("stop", "length"), submitted_s=0.25, first_token_s=0.5, settled_s=1.5,
)  # fmt: skip


def test_an_answers_attributes_have_the_conventions_names() -> None:
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


def test_what_never_ran_has_no_counts() -> None:
    """A zero would be averaged into somebody's usage."""
    refused = msgspec.structs.replace(ASKED, status=429, ending="refused", error="rate_limited")

    assert not [name for name in refused.attributes() if "usage" in name or "response.id" in name]
    assert refused.attributes()["error.type"] == "rate_limited"
    assert refused.events() == []


def test_events_are_what_was_reached() -> None:
    """Admission, the first token and the ledger: where the time went."""
    assert ANSWERED.events() == [("submitted", 0.25), ("first_token", 0.5), ("settled", 1.5)]
    assert msgspec.structs.replace(ANSWERED, first_token_s=None).events() == [
        ("submitted", 0.25),
        ("settled", 1.5),
    ]


@pytest.mark.parametrize(
    ("status", "ending", "is_failure"),
    [
        (200, "done", False),
        (200, "failed", True),
        (400, "refused", False),
        (503, "refused", True),
        (0, "cancelled", False),
    ],
)
def test_only_our_failures_are_errors(status: int, ending: str, is_failure: bool) -> None:
    """An alert on failed spans must not ring for what clients do wrong."""
    answered = msgspec.structs.replace(ASKED, status=status, ending=ending)

    assert answered.is_failure is is_failure


def test_an_operation_is_named_by_dialect() -> None:
    """Three kinds of answers are known to the conventions."""
    names = ("anthropic", "openai_chat", "openai_responses", "openai_completions", "gemini")

    assert [operation_of(name) for name in names] == [
        "chat", "chat", "chat", "text_completion", "generate_content",
    ]  # fmt: skip


def test_with_tracing_off_nothing_of_opentelemetry_is_imported() -> None:
    """Off means off: no thread, no memory, no environment read by somebody else's code."""
    program = (
        "import sys, gateway.app, gateway.__main__; from gateway.config import Config;"
        "assert gateway.app.open_tracer(Config(), lambda event, facts: None) is None;"
        "sys.exit(any(name.partition('.')[0] == 'opentelemetry' for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
