"""The operations of the public listener: what clients with a tenant's key can ask."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.api.openapi import answers
from gateway.api.openapi.history_answers import TenantStateAnswer
from gateway.api.openapi.operation import JSON, SSE, Family, Operation
from gateway.api.quote import QuoteBody
from gateway.caching.attention import ATTENTION_HEADER
from gateway.dialects.anthropic import wire as anthropic
from gateway.dialects.gemini import wire as gemini
from gateway.dialects.openai import conversations
from gateway.dialects.openai.chat import ChatBody
from gateway.dialects.openai.completions import CompletionBody
from gateway.dialects.openai.embeddings import EmbeddingBody
from gateway.dialects.openai.responses import ResponsesBody
from gateway.dialects.openai.tokenizer import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfoAnswer,
)
from gateway.levels.fidelity import FIDELITY_HEADER

BOTH = (JSON, SSE)
"""The content types of an answer, whole or streamed."""
V1 = ("/v1", "")
"""OpenAI's paths exist with and without /v1."""
HEADERS = (FIDELITY_HEADER, ATTENTION_HEADER)
"""What a request that generates, and its quote, may say of its KV."""
GEMINI = "/{version:v1|v1beta}"
PAGE = ("pageSize", "page_size", "pageToken", "page_token")


def operations() -> tuple[Operation, ...]:
    """Return the operations of the public listener."""
    dialects = (*_openai(), *_tokenizer(), *_stored(), *_anthropic(), *_gemini(), *_models())
    return (*dialects, *_conversations(), *_own(), *open_operations())


def _openai() -> Iterator[Operation]:
    for base in V1:
        for path, text, body in (
            ("/chat/completions", "Answer a chat.", ChatBody),
            ("/completions", "Complete a text.", CompletionBody),
            ("/responses", "Answer, and store the response.", ResponsesBody),
        ):
            yield _post(base + path, text, body, "openai", BOTH)
        yield _post(base + "/embeddings", "Embed texts.", EmbeddingBody, "openai")
        text = "Count the tokens of a request to /responses."
        yield _post(base + "/responses/input_tokens", text, ResponsesBody, "openai")


def _tokenizer() -> Iterator[Operation]:
    yield Operation(
        "POST", "/tokenize", "inference", "Show the token ids of a text or a chat, as vLLM does.",
        TokenizeBody, TokenizeAnswer, family="openai",
    )  # fmt: skip
    yield Operation(
        "POST", "/detokenize", "inference", "Show the text of token ids, as vLLM does.",
        DetokenizeBody, DetokenizeAnswer, family="openai",
    )  # fmt: skip
    yield Operation(
        "GET", "/tokenizer_info", "inference", "Show a tokenizer's settings, as vLLM does.",
        answer=TokenizerInfoAnswer, query=("model",), family="openai",
    )  # fmt: skip


def _stored() -> Iterator[Operation]:
    page = ("limit", "order", "after")
    for base in V1:
        one = base + "/responses/{id}"
        yield _ask("GET", one, "Show a stored response.", "openai", ("stream",))
        yield _ask("DELETE", one, "Delete a stored response.", "openai")
        yield _ask("POST", f"{one}/cancel", "Refused: no response runs in background.", "openai")
        yield _ask(
            "GET", f"{one}/input_items", "List the input items of a response.", "openai", page
        )


def _conversations() -> Iterator[Operation]:
    page = ("limit", "order", "after")
    for base in V1:
        many, one = base + "/conversations", base + "/conversations/{id}"
        items, item = f"{one}/items", one + "/items/{item}"
        yield _post(many, "Create a conversation.", conversations.CreateBody, "openai")
        yield _ask("GET", one, "Show a conversation.", "openai")
        yield _post(one, "Change a conversation's metadata.", conversations.UpdateBody, "openai")
        yield _ask("DELETE", one, "Delete a conversation and its items.", "openai")
        yield _post(items, "Append items.", conversations.ItemsBody, "openai")
        yield _ask("GET", items, "List the items of a conversation.", "openai", page)
        yield _ask("GET", item, "Show an item.", "openai")
        yield _ask("DELETE", item, "Delete an item.", "openai")


def _anthropic() -> Iterator[Operation]:
    text = "Answer messages."
    yield _post("/v1/messages", text, anthropic.Body, "anthropic", BOTH)
    text = "Count the tokens of a request to /v1/messages."
    yield _post("/v1/messages/count_tokens", text, anthropic.Body, "anthropic")


def _gemini() -> Iterator[Operation]:
    path, text = GEMINI + "/models/{target:.+}", "Answer (`MODEL:generateContent` and its streams)."
    yield Operation(
        "POST", path, "inference", text, gemini.GenerateBody, None, ("alt",), 200, "gemini", BOTH,
        HEADERS,
    )  # fmt: skip
    many, one = GEMINI + "/cachedContents", GEMINI + "/cachedContents/{name}"
    yield _post(many, "Compute and keep a prefix.", gemini.CachedBody, "gemini")
    yield _ask("GET", many, "List cached contents.", "gemini", PAGE)
    yield _ask("GET", one, "Show a cached content.", "gemini")
    yield Operation(
        "PATCH",
        one,
        "inference",
        "Change a cached content's expiry.",
        gemini.CachedBody,
        query=("updateMask", "update_mask"),
        family="gemini",
    )
    yield _ask("DELETE", one, "Delete a cached content and release its blocks.", "gemini")


def _models() -> Iterator[Operation]:
    families: tuple[tuple[str, Family], ...] = (
        ("/v1", "openai"),
        ("", "openai"),
        ("/v1beta", "gemini"),
    )
    for base, family in families:
        yield _ask("GET", f"{base}/models", "List models, in the client's format.", family)
        yield _ask("GET", base + "/models/{name:.+}", "Show a model.", family)


def _own() -> tuple[Operation, ...]:
    report = ("tenant", "since", "until", "group_by", "key_id", "model")
    usage, cached, receipt = answers.UsageAnswer, answers.CacheAnswer, answers.ReceiptAnswer
    found, why = ("tenant", "since", "until"), "Say which prompts the tenant pays for twice."
    path, lease, quote = "/v1/cache", ("lease_id",), answers.QuoteAnswer
    price = "Tell what a request would read from the cache and cost, without running it."
    return (
        Operation("GET", "/v1/usage", "usage", "Report the tenant's usage.", None, usage, report),
        Operation("GET", "/v1/state", "usage", "Show the tenant's state.", None, TenantStateAnswer),
        Operation("GET", "/v1/findings", "usage", why, None, answers.FindingList, found),
        Operation("GET", path, "cache", "Show the workspace's cache.", None, cached),
        Operation("DELETE", path, "cache", "Erase the workspace's cache.", None, receipt, lease),
        Operation("POST", f"{path}/quote", "inference", price, QuoteBody, quote, headers=HEADERS),
    )


def open_operations() -> tuple[Operation, ...]:
    """Return the operations without a key that both listeners have."""
    health = answers.HealthAnswer
    return (
        Operation("GET", "/healthz", "open", "Say that the process is up.", None, health),
        Operation(
            "GET", "/health", "open", "Say that the process is up, as /healthz does.", None, health
        ),
        Operation("GET", "/readyz", "open", "Say whether requests are taken.", None, health),
        Operation("GET", "/openapi.json", "open", "Show this document."),
    )


def _post(
    path: str, text: str, body: type, family: Family, content: tuple[str, ...] = (JSON,)
) -> Operation:
    headers = HEADERS if content == BOTH else ()
    return Operation(
        "POST", path, "inference", text, body, family=family, content=content, headers=headers
    )


def _ask(
    method: str, path: str, text: str, family: Family, query: tuple[str, ...] = ()
) -> Operation:
    return Operation(method, path, "inference", text, query=query, family=family)
