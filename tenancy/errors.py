"""Errors of tenancy, one tree under `TenancyError`. No message contains a key.

The gateway maps the classes and codes to HTTP statuses in `gateway.http.error_mapping`; the command
line prints the message.
"""


class TenancyError(Exception):
    """Base class of all errors here. `code` is stable, `message` is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class KeyRefused(TenancyError):
    """A key does not authenticate or lacks a scope.

    Codes: `key_unknown`, `key_revoked`, `key_expired`, `tenant_suspended`, `scope_missing`.
    `key_id`, `tenant_id`: of a key that was valid once; 0 for any other.
    """

    def __init__(self, code: str, message: str, key_id: int = 0, tenant_id: int = 0) -> None:
        super().__init__(code, message)
        self.key_id = key_id
        self.tenant_id = tenant_id


class BadName(TenancyError):
    """A name, a setting or a reference to an account is invalid, taken or unknown."""


class StoreError(TenancyError):
    """The database cannot be opened, read or written, has a newer schema, or is not a ledger."""


class ConstraintBroken(StoreError):
    """A change violates a constraint of the schema. Nothing was changed."""


class StoreBusy(StoreError):
    """The database is locked or full. Nothing was changed; a later attempt may succeed."""


class TryAgain(StoreBusy):
    """The connection to the database broke, or a transaction conflicted with another.

    Nothing was changed; an immediate retry may succeed.
    """


class LedgerUnavailable(TenancyError):
    """An entry or a hold is not durable. The caller must not answer the request."""


class LimitExceeded(TenancyError):
    """A rate limit or a concurrency limit of a tenant or a key.

    `code` names the limit as a field of `types.Limits`, or is `request_exceeds_limit` for a request
    that can never fit. `retry_after_s`: when a retry will be admitted; None means never. `reset_s`:
    time until the whole limit is free again.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after_s: float | None,
        limit: int,
        remaining: int,
        reset_s: float,
    ) -> None:
        super().__init__(code, message)
        self.retry_after_s = retry_after_s
        self.limit = limit
        self.remaining = remaining
        self.reset_s = reset_s


class IdempotencyConflict(TenancyError):
    """A request may not use the Idempotency-Key that it came with.

    Codes: `idempotency_in_flight`, `idempotency_key_reused` (another request used the key),
    `idempotency_result_gone` (the response was too large to store) and `idempotency_room_full`.
    """


class BadPrice(TenancyError):
    """A rate card, a budget or an adjustment is invalid; the message says why."""


class CloseRefused(TenancyError):
    """A day cannot be closed, or is closed already."""


class BudgetExceeded(TenancyError):
    """The maximum cost of a request does not fit a budget. The code is `budget_exceeded`.

    `scope`: "tenant" or "key". `resets_ms`: the end of the budget's window. `retry_after_s`: time
    until then, or None if the request by itself exceeds the budget. Sums are in pico-dollars:
    `spent` in the window, and `reserved` for requests that still run.
    """

    def __init__(
        self,
        *,
        scope: str,
        window: str,
        hard: int,
        spent: int,
        reserved: int,
        resets_ms: int,
        retry_after_s: float | None,
    ) -> None:
        if retry_after_s is None:
            message = (
                f"This request could cost more than the whole budget of this {scope} for a"
                f" {window}; expected a shorter prompt or a smaller maximum output."
            )
        else:
            message = (
                f"The remaining budget of this {scope} for the {window} does not cover this"
                f" request; reduce the maximum output or retry in the next {window} (UTC)."
            )
        super().__init__("budget_exceeded", message)
        self.scope = scope
        self.window = window
        self.hard_pico = hard
        self.spent_pico = spent
        self.reserved_pico = reserved
        self.resets_ms = resets_ms
        self.retry_after_s = retry_after_s
