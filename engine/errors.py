"""The engine's refusals and failures.

    EngineError
    ├── RequestRefused       the request can never run here; the caller's mistake (code says which)
    ├── EngineUnavailable    no engine, or it is starting, draining, full or dead: try again
    ├── ModelError           a model cannot be found, read, verified or supported
    └── InvariantViolation   our mistake: stop rather than go on wrong

`code` is stable and is what callers switch on; the message is for people. Stable codes:
prompt_empty, token_out_of_range, context_exceeded, kv_exceeded, queue_full, duplicate_request,
poison_request, timeout, engine_died, draining, not_ready, step_failed, nan_logits, not_found,
unsupported, corrupt, digest_mismatch, unreachable, storage, grammar_invalid, grammar_too_big,
grammar_unsupported, grammar_dead_end, kv_promised.
"""


class EngineError(Exception):
    """Base of all. `code` is stable, `message` for people; neither carries prompts or keys."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class RequestRefused(EngineError):
    """The request can never run on this engine as it is."""


class EngineUnavailable(EngineError):
    """Nothing wrong with the request. `retry_after_s` is a guess from the queue or the restart."""

    def __init__(self, code: str, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(code, message)
        self.retry_after_s = retry_after_s


class ModelError(EngineError):
    """A model cannot be found, read, verified or supported; says what would be right."""


class InvariantViolation(EngineError):
    """A structure is not what its rules say. The engine stops and is restarted."""

    def __init__(self, message: str) -> None:
        super().__init__("invariant", message)
