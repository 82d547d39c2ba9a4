"""vLLM's tokenizer endpoints: a text or a chat to token ids, ids to a text. Functions are pure.

A chat is read as `/v1/chat/completions` reads it, so its ids are those of the prompt that would
run. `gateway.api.tokenizer` calls it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gateway.dialects.canonical import NO_METADATA, Prompt, RequestMetadata
from gateway.dialects.openai import chat, chat_prompt, tools, wire
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import invalid_field

_NO_MEDIA = "the model reads only text; omit it."
_RULES = wire.FieldRules(
    refused={
        "chat_template": wire.TEMPLATES,
        "chat_template_kwargs": wire.TEMPLATES,
        "mm_processor_kwargs": _NO_MEDIA,
        "media_io_kwargs": _NO_MEDIA,
    },
    switches=frozenset({"chat_template_kwargs"}),
    cleaned={"messages": chat_prompt.clean_history},
)

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """A body of `/tokenize`: a `prompt` or `messages`. Without a `model`, the default one is
    meant.

    `add_special_tokens`: the model's first token is put before the text (by default), or before
    what the template writes (not by default: templates write it themselves).
    """

    model: ModelName | None = None
    prompt: wire.Text | None = None
    messages: (
        Annotated[
            list[chat_prompt.ChatMessage], Meta(min_length=1, max_length=chat_prompt.MESSAGES_MAX)
        ]
        | None
    ) = None
    tools: Annotated[list[chat_prompt.ChatToolField], Meta(max_length=tools.TOOLS_MAX)] | None = (
        None
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """A body of `/detokenize`."""

    tokens: wire.TokenIds
    model: ModelName | None = None


class TokenizeCall(Struct, frozen=True):
    """A request for token ids."""

    model: str | None
    """None for the default one."""
    prompt: Prompt
    add_special_tokens: bool
    return_token_strs: bool
    ignored: tuple[str, ...] = ()
    """Names of the fields without effect."""


class TokenizeAnswer(Struct, frozen=True):
    """The ids of a prompt. `max_model_len`: the model's context, in tokens. `token_strs`: each
    token as the vocabulary spells it."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Struct, frozen=True):
    """The text of token ids, that of special tokens included."""

    prompt: str


class TokenizerInfoAnswer(Struct, frozen=True):
    """What clients read of a tokenizer's configuration, under the names of `transformers`."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str
    eos_token: str | None
    bos_token: str | None
    add_bos_token: bool


SHAPE = wire.OpenAIErrors("openai_tokenizer")
"""The error shape of the tokenizer's endpoints."""


def parse_tokenize(body: bytes, metadata: RequestMetadata = NO_METADATA) -> TokenizeCall:
    """Return the call of a body. O(bytes). Raises Refusal."""
    tolerance = Tolerance(metadata.tolerance)
    fields = wire.decode(body, TokenizeBody, _RULES, tolerance)
    if fields.prompt is not None and fields.messages is not None:
        raise invalid_field("prompt", "messages is set too; expected one of the two.")
    if fields.messages is not None:
        prompt = _chat(fields, fields.messages, tolerance)
    elif fields.prompt is not None:
        prompt = Prompt(text=fields.prompt)
    else:
        problem = "missing; expected prompt, a text, or messages, a chat."
        raise invalid_field("prompt", problem, "missing_required_parameter")
    adds = fields.add_special_tokens
    return TokenizeCall(
        model=fields.model,
        prompt=prompt,
        add_special_tokens=prompt.text is not None if adds is None else adds,
        return_token_strs=bool(fields.return_token_strs),
        ignored=tolerance.ignored,
    )


def _chat(
    fields: TokenizeBody, given: list[chat_prompt.ChatMessage], tolerance: Tolerance
) -> Prompt:
    body = chat.ChatBody(
        model=fields.model or "",
        messages=given,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt,
    )
    prompt, _ = chat.prompt_of(body, tolerance)
    if not fields.continue_final_message:
        return prompt
    if prompt.add_generation_prompt:
        problem = "add_generation_prompt is true too, and by default; expected it to be false."
        raise invalid_field("continue_final_message", problem)
    last = prompt.segments[-1]
    if last.role != "assistant" or last.call is not None:
        problem = "the last message has no text of the assistant to continue; expected one."
        raise invalid_field("continue_final_message", problem)
    return msgspec.structs.replace(prompt, continues=True)


def parse_detokenize(body: bytes, metadata: RequestMetadata = NO_METADATA) -> DetokenizeBody:
    """Return a body's model and token ids. O(bytes). Raises Refusal."""
    return wire.decode(body, DetokenizeBody, wire.FieldRules(), Tolerance(metadata.tolerance))
