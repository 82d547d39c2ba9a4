"""Refusals: the gateway's error type, turned into a response in one place, by dialect.

    Refusal(kind, code, message, param, retry_after_s, size)

`kind` is the dialect-independent class that every dialect maps to its own status and type. `code`
is stable and specific (`context_length_exceeded`, `unknown_parameter`, `model_not_found`…).
`message` names the limit and the value that was sent. `param` is the path of the offending field
("messages[0].content"). `size`: the tokens of a request that is too long, and the most allowed;
each dialect puts them before the message in the words that its clients look for. Messages never
contain keys, prompts or internal names.
"""

from __future__ import annotations

import traceback
from enum import Enum


class Kind(Enum):
    """The class of a refusal."""

    BAD = 400
    AUTH = 401
    PERMISSION = 403
    NOT_FOUND = 404
    METHOD = 405
    TIMEOUT = 408
    CONFLICT = 409
    TOO_BIG = 413
    MEDIA = 415
    EXPECTATION = 417
    UPGRADE = 426
    RATE = 429
    QUOTA = 4290  # 429, as RATE: a spent budget
    INTERNAL = 500
    BUSY = 503
    DEADLINE = 504

    @property
    def status(self) -> int:
        """The HTTP status, where a dialect has none of its own."""
        return 429 if self is Kind.QUOTA else self.value


TOO_LONG = "context_length_exceeded"
"""Code of a request that is longer than the model's context or the cache memory."""


class Refusal(Exception):
    """A request is refused with this error. Raised anywhere above the engine."""

    def __init__(
        self,
        kind: Kind,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.size = size


def error_location(error: BaseException) -> dict[str, object]:
    """Return an unexpected error's type and its last six frames, for the log.

    The error's message is left out: it may quote a client's prompt.
    """
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return {
        "error": type(error).__name__,
        "frames": [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames],
    }
