"""The operations of the public listener: what clients with a tenant's key can ask."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from gateway.api.openapi import answers
from gateway.api.openapi.history_answers import TenantStateAnswer
from gateway.api.openapi.operation import JSON, SSE, Operation
from gateway.api.quote import QuoteBody
from gateway.caching.attention import ATTENTION_HEADER
from gateway.dialects.families import (
    ENDPOINTS,
    cached_contents,
    conversations,
    embeddings,
    find_family,
    responses,
    tokenizer,
)
from gateway.dialects.protocol import ErrorShape
from gateway.levels.fidelity import FIDELITY_HEADER

BOTH = (JSON, SSE)
"""The content types of an answer, whole or streamed."""
V1 = ("/v1", "")
"""Paths exist with and without /v1."""
HEADERS = (FIDELITY_HEADER, ATTENTION_HEADER)
"""What a request that generates, and its quote, may say of its KV."""
PAGE = ("pageSize", "page_size", "pageToken", "page_token")


def operations() -> tuple[Operation, ...]:
    """Return the operations of the public listener."""
    dialects = (*_generate(), *_tokenizer(), *_stored(), *_contents(), *_models())
    return (*dialects, *_conversations(), *_own(), *open_operations())


def _generate() -> Iterator[Operation]:
    for end in ENDPOINTS:
        kinds = (JSON,) if end.counts else BOTH
        query = () if end.without_sse is None else ("alt",)
        one = _post(end.path, end.summary, end.body, end.dialect, kinds)
        yield replace(one, query=query)
    for base in V1:
        path, text = base + "/embeddings", "Embed texts."
        yield _post(path, text, embeddings.EmbeddingBody, embeddings.SHAPE)


def _tokenizer() -> Iterator[Operation]:
    yield Operation(
        "POST", "/tokenize", "inference", "Show the token ids of a text or a chat, as vLLM does.",
        tokenizer.TokenizeBody, tokenizer.TokenizeAnswer, shape=tokenizer.SHAPE,
    )  # fmt: skip
    yield Operation(
        "POST", "/detokenize", "inference", "Show the text of token ids, as vLLM does.",
        tokenizer.DetokenizeBody, tokenizer.DetokenizeAnswer, shape=tokenizer.SHAPE,
    )  # fmt: skip
    yield Operation(
        "GET", "/tokenizer_info", "inference", "Show a tokenizer's settings, as vLLM does.",
        answer=tokenizer.TokenizerInfoAnswer, query=("model",), shape=tokenizer.SHAPE,
    )  # fmt: skip


def _stored() -> Iterator[Operation]:
    page, shape = ("limit", "order", "after"), responses.DIALECT
    for base in V1:
        one = base + "/responses/{id}"
        yield _ask("GET", one, "Show a stored response.", shape, ("stream",))
        yield _ask("DELETE", one, "Delete a stored response.", shape)
        yield _ask("POST", f"{one}/cancel", "Refused: no response runs in background.", shape)
        yield _ask("GET", f"{one}/input_items", "List the input items of a response.", shape, page)


def _conversations() -> Iterator[Operation]:
    page, shape = ("limit", "order", "after"), responses.DIALECT
    for base in V1:
        many, one = base + "/conversations", base + "/conversations/{id}"
        items, item = f"{one}/items", one + "/items/{item}"
        yield _post(many, "Create a conversation.", conversations.CreateBody, shape)
        yield _ask("GET", one, "Show a conversation.", shape)
        yield _post(one, "Change a conversation's metadata.", conversations.UpdateBody, shape)
        yield _ask("DELETE", one, "Delete a conversation and its items.", shape)
        yield _post(items, "Append items.", conversations.ItemsBody, shape)
        yield _ask("GET", items, "List the items of a conversation.", shape, page)
        yield _ask("GET", item, "Show an item.", shape)
        yield _ask("DELETE", item, "Delete an item.", shape)


def _contents() -> Iterator[Operation]:
    base, shape, body = (
        "/{version:v1|v1beta}/cachedContents",
        cached_contents.SHAPE,
        cached_contents.Body,
    )
    yield _post(base, "Compute and keep a prefix.", body, shape)
    yield _ask("GET", base, "List cached contents.", shape, PAGE)
    one = base + "/{name}"
    yield _ask("GET", one, "Show a cached content.", shape)
    yield Operation(
        "PATCH",
        one,
        "inference",
        "Change a cached content's expiry.",
        body,
        query=("updateMask", "update_mask"),
        shape=shape,
    )
    yield _ask("DELETE", one, "Delete a cached content and release its blocks.", shape)


def _models() -> Iterator[Operation]:
    for base in ("/v1", "", "/v1beta"):
        shape = find_family(f"{base}/", ()).errors
        yield _ask("GET", f"{base}/models", "List models, in the client's format.", shape)
        yield _ask("GET", base + "/models/{name:.+}", "Show a model.", shape)


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
    path: str, text: str, body: type, shape: ErrorShape, content: tuple[str, ...] = (JSON,)
) -> Operation:
    headers = HEADERS if content == BOTH else ()
    return Operation(
        "POST", path, "inference", text, body, shape=shape, content=content, headers=headers
    )


def _ask(
    method: str, path: str, text: str, shape: ErrorShape, query: tuple[str, ...] = ()
) -> Operation:
    return Operation(method, path, "inference", text, query=query, shape=shape)
