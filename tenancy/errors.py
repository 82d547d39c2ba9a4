"""Tenancy's refusals. No message carries a key."""


class TenancyError(Exception):
    """Base of all. `code` is stable, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class KeyRefused(TenancyError):
    """No identity: `key_unknown`, `key_revoked`, `key_expired` or `tenant_suspended`."""


class BadName(TenancyError):
    """A tenant's or workspace's name that cannot be, is taken, or does not exist."""


class StoreError(TenancyError):
    """The database cannot be opened, read or written, is newer than this program, or not ours."""


class ConstraintBroken(StoreError):
    """What was asked breaks a rule of the schema. Nothing was changed."""


class StoreBusy(StoreError):
    """Others write, or there is no room. Nothing was changed; the same may work later."""


class TryAgain(StoreBusy):
    """The way to the database broke off, or others were in it. Nothing was changed; the same may
    work at once."""


class LedgerUnavailable(TenancyError):
    """An entry could not be made durable. Nothing was promised; nothing may be answered."""


class LimitExceeded(TenancyError):
    """More than a tenant or a key may ask for now: `code` says which limit, in `types.Limits`'
    words, or `request_exceeds_limit` for what can never fit.

    `retry_after_s`: when it would be taken; None for never. `reset_s`: until the whole limit is
    there again.
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
    """A request cannot have the name that its client gave it: `idempotency_in_flight`,
    `idempotency_key_reused` (for another request), `idempotency_result_gone` (too large to be
    kept) or `idempotency_room_full`."""


class BadPrice(TenancyError):
    """A rate card, a budget or an adjustment that cannot be; the message says why."""


class CloseRefused(TenancyError):
    """A day cannot be closed, or is closed already."""


class BudgetExceeded(TenancyError):
    """The most this request can cost no longer fits a budget: `budget_exceeded`.

    `scope`: whose budget, "tenant" or "key". `resets_ms`: when its window ends, and
    `retry_after_s`: how long that is from now, or None where the request alone is above the budget.
    Sums are pico-dollars: `spent` in the window and `reserved` for what still runs.
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
                f" {window}; only a shorter prompt or a smaller maximum of output could fit."
            )
        else:
            message = (
                f"The budget of this {scope} for the {window} is used up, or too little of it is"
                f" left for this request; a smaller maximum of output may fit, or the next {window}"
                " (UTC) will have it."
            )
        super().__init__("budget_exceeded", message)
        self.scope = scope
        self.window = window
        self.hard_pico = hard
        self.spent_pico = spent
        self.reserved_pico = reserved
        self.resets_ms = resets_ms
        self.retry_after_s = retry_after_s
