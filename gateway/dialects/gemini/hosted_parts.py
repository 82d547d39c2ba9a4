"""Parts of tools that Google's servers ran, and inline data that is a text, as a history.

Clients send the answers of other servers back as they came. What such a tool did becomes a call of
a function with its response. `gemini.prompt` calls it.
"""

from __future__ import annotations

import binascii

from gateway.dialects.gemini import wire

CODE_EXECUTION = "code_execution"
_OK = (None, "", "OUTCOME_UNSPECIFIED", "OUTCOME_OK", 0, 1)
"""Outcomes of code that did not fail; numbers are the enum's."""
_URL_SAFE = str.maketrans("-_", "+/")


def plain_part(part: wire.Part) -> wire.Part:
    """Return the part as a text, a call or a response; others stay as they are. O(characters)."""
    if (code := part.executable_code) is not None:
        call = wire.FunctionCall(CODE_EXECUTION, {"code": code.code}, code.id)
        return wire.Part(function_call=call)
    if (result := part.code_execution_result) is not None:
        said = "output" if result.outcome in _OK else "error"
        response = wire.FunctionResponse(CODE_EXECUTION, {said: result.output}, result.id)
        return wire.Part(function_response=response)
    if (used := part.tool_call) is not None:
        return wire.Part(function_call=wire.FunctionCall(used.function, used.args, used.id))
    if (found := part.tool_response) is not None:
        response = wire.FunctionResponse(found.function, found.response, found.id)
        return wire.Part(function_response=response)
    if (blob := part.inline_data) is not None and (text := _text_of(blob)) is not None:
        return wire.Part(text=text)
    return part


def _text_of(blob: wire.Blob) -> str | None:
    """Return the text that inline data is; None if it is none."""
    if not blob.mime_type.lower().startswith("text/"):
        return None
    data = blob.data.translate(_URL_SAFE).rstrip("=")
    try:
        return binascii.a2b_base64(data + "=" * (-len(data) % 4), strict_mode=True).decode()
    except (binascii.Error, ValueError):
        return None
