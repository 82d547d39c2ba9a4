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
    """The database cannot be opened, is newer than this program, or is not ours."""


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
