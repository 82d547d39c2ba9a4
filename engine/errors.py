"""The engine's refusals and failures.

    EngineError
    ├── RequestRefused       the request can never run here; the caller's mistake (see `code`)
    ├── EngineUnavailable    no engine, or it is starting, draining, full or dead: try again
    ├── ModelError           a model cannot be found, read, verified or supported
    └── InvariantViolation   a defect of the engine: it stops rather than continue wrongly

`code` is stable and callers switch on it; the message is for people. Stable codes: prompt_empty,
token_out_of_range, context_exceeded, kv_exceeded, queue_full, duplicate_request, poison_request,
timeout, engine_died, engine_unavailable, draining, not_ready, step_failed, nan_logits, not_found,
unsupported, corrupt, digest_mismatch, unreachable, storage, grammar_invalid, grammar_too_big,
grammar_unsupported, grammar_dead_end, attention_not_allowed, attention_not_available,
attention_invalid, attention_with_prompt_logprobs, kv_promised, answer_lost, invariant.
"""

DIED_MESSAGE = "The engine stopped while it worked on this request."
DRAINING_MESSAGE = "The engine is shutting down."
DUPLICATE_MESSAGE = "A request with this id is running already."


class EngineError(Exception):
    """The base of all engine errors. `code` is stable, `message` is for people; neither carries
    prompts or keys.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class RequestRefused(EngineError):
    """The request can never run on this engine as it is."""


class EngineUnavailable(EngineError):
    """The request is valid but cannot run now. `retry_after_s`: an estimate from queue or
    restart.
    """

    def __init__(self, code: str, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(code, message)
        self.retry_after_s = retry_after_s


class ModelError(EngineError):
    """A model cannot be found, read, verified or supported; the message says what is expected."""


class InvariantViolation(EngineError):
    """A structure violates its rules. The engine stops and is restarted."""

    def __init__(self, message: str) -> None:
        super().__init__("invariant", message)
