"""Read the header with which a request asks for an attention window, or for none.

Under a window a request's tokens read the first tokens of the sequence, its *sinks*, and the last
ones, and no others. What it computes beyond them is its own: it reads and promises prefixes up to
there. Pure: `gateway.generation.generation` and the quote handler call it with the header's values
before they parse the body, and `prepare` checks what was asked once the model is known. A tenant
may be denied windows, or have one for its requests that ask for nothing: such a default refuses
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec.structs import replace

from engine.api import AttentionWindow, EngineInfo
from gateway.dialects.canonical import Call
from gateway.errors import Kind, Refusal
from tenancy.types import SINK_TOKENS_MAX, WINDOW_TOKENS_MAX, WINDOW_TOKENS_MIN

ATTENTION_HEADER = "X-Trunkline-Attention"
BLOCK_TOKENS: Final = 16
"""Windows and sinks are rounded up to whole blocks."""
SINK_TOKENS_DEFAULT: Final = 16
FULL: Final = "full"
"""The value that asks for no window, also where the tenant has one by default."""
SHOWN_CHARS_MAX: Final = 64
"""Characters of a wrong value that its error repeats."""
EXPECTED = (
    f"expected {FULL}, or window=W;sinks=S with {WINDOW_TOKENS_MIN} to {WINDOW_TOKENS_MAX} tokens"
    f" of window and at most {SINK_TOKENS_MAX} sinks ({SINK_TOKENS_DEFAULT} if it has no sinks=)"
)


def parse_attention(
    values: Sequence[str], setting: str
) -> AttentionWindow | Literal["full"] | None:
    """Return the window that a request's headers ask for, in whole blocks; None without the header.

    `setting`: the tenant's, see `CachePolicy.attention`. Raises Refusal for a value of another
    form, for numbers out of their bounds, for a header that is sent twice, and for any window where
    the tenant may have none.
    """
    if not values:
        return None
    if len(values) > 1:
        raise _refusal("sent twice")
    if values[0] == FULL:
        return FULL
    found = _parse_window(values[0])
    if setting == "never":
        message = (
            f"{ATTENTION_HEADER}: 'window' is not allowed to this tenant; leave the header out, or"
            " let the operator set its attention to 'allowed'."
        )
        raise Refusal(Kind.BAD, "attention_not_allowed", message, param=ATTENTION_HEADER)
    return found


def with_attention(call: Call, asked: AttentionWindow | Literal["full"] | None) -> Call:
    """Return a call with what its header asks for."""
    if isinstance(asked, str):
        return replace(call, asks_full_attention=True)
    return call if asked is None else replace(call, attention=asked)


def with_default(call: Call, setting: str, info: EngineInfo, prompt_tokens: int) -> Call:
    """Return a call that asked for nothing with its tenant's window.

    It stays as it is where its model's engine may not, or cannot, compute that window, and where it
    generates nothing: a prewarm is for others, and computes all of its prompt.
    """
    if call.asks_full_attention or call.operation != "generate":
        return call
    window, logprobs = _parse_window(setting), call.generation.prompt_logprobs
    try:
        check_attention(
            window, info, call.model, prompt_tokens=prompt_tokens, prompt_logprobs=logprobs
        )
    except Refusal:
        return call
    return replace(call, attention=window)


def _parse_window(value: str) -> AttentionWindow:
    given = _numbers(value)
    window, sinks = given.get("window"), given.get("sinks", SINK_TOKENS_DEFAULT)
    if window is None or not WINDOW_TOKENS_MIN <= window <= WINDOW_TOKENS_MAX:
        raise _refusal(repr(value[:SHOWN_CHARS_MAX]))
    if sinks > SINK_TOKENS_MAX:
        raise _refusal(repr(value[:SHOWN_CHARS_MAX]))
    return AttentionWindow(_whole_blocks(window), _whole_blocks(sinks))


def check_attention(
    asked: AttentionWindow,
    info: EngineInfo,
    model: str,
    *,
    prompt_tokens: int,
    prompt_logprobs: int | None,
) -> None:
    """Raise Refusal if a model's engine may not, or cannot, compute a request's window.

    `prompt_tokens`: of the longest prompt. Its logprobs are the model's own only as far as the
    window hides nothing.
    """
    if "window" not in info.attention_policies:
        message = (
            f"{ATTENTION_HEADER}: 'window' is not allowed for {model!r}; leave the header out, or"
            ' let the operator set engine.attention_policies = ["window"].'
        )
        raise Refusal(Kind.BAD, "attention_not_allowed", message, param=ATTENTION_HEADER)
    if info.attention_lacks:
        message = (
            f"{ATTENTION_HEADER}: 'window' is not available from {model!r}: {info.attention_lacks};"
            " leave the header out, or use another model."
        )
        raise Refusal(Kind.BAD, "attention_not_available", message, param=ATTENTION_HEADER)
    own = max(info.kv_windows, default=0)
    if asked.tokens + 1 < own:
        message = (
            f"{ATTENTION_HEADER}: a window of {asked.tokens} tokens; expected at least {own - 1}:"
            f" {model!r} has sliding windows of its own."
        )
        raise Refusal(Kind.BAD, "invalid_value", message, param=ATTENTION_HEADER)
    shared = asked.shared_tokens(info.block_size)
    if prompt_logprobs is not None and prompt_tokens > shared:
        message = (
            f"{ATTENTION_HEADER}: this window hides tokens from position {shared} on, so"
            f" logprobs of a prompt of {prompt_tokens} tokens would not be the model's; leave the"
            " header out, or ask for no logprobs of the prompt."
        )
        raise Refusal(Kind.BAD, "attention_with_prompt_logprobs", message, param=ATTENTION_HEADER)


def findable(token_ids: tuple[int, ...], shared_tokens: int | None) -> tuple[int, ...]:
    """Return the part of a prompt that the cache is asked for: all, or what a window shares and one
    token more, since a last token is always computed."""
    return token_ids if shared_tokens is None else token_ids[: shared_tokens + 1]


def setting_of(window: AttentionWindow) -> str:
    """Return a window in the form of the header, for records and settings."""
    return f"window={window.tokens};sinks={window.sink_tokens}"


def _numbers(value: str) -> Mapping[str, int]:
    """Return the parts of a value by name. Raises Refusal for anything but names and numbers."""
    found: dict[str, int] = {}
    for part in value.split(";"):
        name, _, number = part.partition("=")
        name, number = name.strip(" "), number.strip(" ")
        is_number = number.isascii() and number.isdigit() and len(number) <= len(str(2**31))
        if name not in ("window", "sinks") or name in found or not is_number:
            raise _refusal(repr(value[:SHOWN_CHARS_MAX]))
        found[name] = int(number)
    return found


def _refusal(given: str) -> Refusal:
    message = f"{ATTENTION_HEADER}: {given}; {EXPECTED}."
    return Refusal(Kind.BAD, "invalid_value", message, param=ATTENTION_HEADER)


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
