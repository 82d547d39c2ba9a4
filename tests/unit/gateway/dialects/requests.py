"""The smallest request of each dialect, for tests that add fields to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from gateway.dialects.anthropic import messages
from gateway.dialects.canonical import Call, Delta, Reply, RequestMetadata
from gateway.dialects.gemini import generate_content
from gateway.dialects.openai import chat, completions
from gateway.dialects.openai.responses import dialect as responses
from gateway.dialects.protocol import Dialect
from gateway.dialects.tolerance import Mode
from gateway.errors import Refusal
from tests.golden.transcripts import REPLY, refusal_of, streamed

HI: dict[str, Any] = {"role": "user", "content": "hi"}


class Endpoint(Struct, frozen=True):
    """An endpoint's dialect, and the fewest fields that it needs to answer "hi"."""

    dialect: Dialect
    smallest: dict[str, Any]
    model: str = ""
    action: str = ""
    version: str = ""

    def parse(self, mode: Mode = "standard", /, **fields: Any) -> Call:
        """Return the call of the smallest request with more fields."""
        return self.parse_body(json.dumps({**self.smallest, **fields}).encode(), mode)

    def parse_body(self, body: bytes, mode: Mode = "standard") -> Call:
        """Return the call of a body."""
        metadata = RequestMetadata(self.model, self.action, self.version, tolerance=mode)
        return self.dialect.parse(body, metadata)

    def streamed(self, call: Call, deltas: Sequence[Delta], reply: Reply = REPLY) -> bytes:
        """Return the complete stream of an answer."""
        return streamed(self.dialect.encoder(call, reply), deltas)

    def unary(self, call: Call, deltas: Sequence[Delta], reply: Reply = REPLY) -> Any:
        """Return the unary answer of the same deltas."""
        return json.loads(self.dialect.encoder(call, reply).unary(deltas))

    def refused(self, mode: Mode = "standard", /, **fields: Any) -> Refusal:
        """Return the refusal of the smallest request with more fields."""
        return refusal_of(self.parse, mode, **fields)


CHAT = Endpoint(chat.DIALECT, {"model": "m", "messages": [HI]})
COMPLETIONS = Endpoint(completions.DIALECT, {"model": "m", "prompt": "hi"})
RESPONSES = Endpoint(responses.DIALECT, {"model": "m", "input": "hi"})
MESSAGES = Endpoint(messages.DIALECT, {"model": "m", "max_tokens": 9, "messages": [HI]})
GEMINI = Endpoint(
    generate_content.DIALECT,
    {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    "m",
    "generateContent",
)
ENDPOINTS = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "gemini": GEMINI,
}
