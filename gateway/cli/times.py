"""Times and durations of the command line: `2026-11-21`, `2026-11-21T10:00:00Z`, `7d`."""

from __future__ import annotations

from datetime import UTC, datetime

from gateway.cli.arguments import UsageError
from tenancy.errors import BadName

UNITS_MS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
TIME_HELP = "UTC day, instant or time ago: 2026-11-21, 2026-11-21T10:00:00Z, 7d"


def parse_time(text: str | None, what: str, now_ms: int) -> int | None:
    """Return milliseconds since the epoch of a UTC day, of an instant, or of a time ago.

    `what`: the option, for the error. Raises UsageError.
    """
    if text is None:
        return None
    ago_ms = _duration_ms(text)
    if ago_ms is not None:
        return max(0, now_ms - ago_ms)
    try:
        at = datetime.fromisoformat(text)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        at_ms = round(at.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        hint = "expected 2026-11-21, 2026-11-21T10:00:00Z or a time ago, such as 7d or 12h"
        raise UsageError(f"{what}: invalid time {text[:40]!r}: {hint}") from error
    return max(0, at_ms)


def parse_period(
    since: str | None, until: str | None, now_ms: int
) -> tuple[int | None, int | None]:
    """Return the instants of `--since` and `--until`. Raises UsageError."""
    since_ms = parse_time(since, "--since", now_ms)
    until_ms = parse_time(until, "--until", now_ms)
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        raise UsageError("--since must be before --until")
    return since_ms, until_ms


def parse_duration(text: str, what: str) -> int:
    """Return the milliseconds of `30m`, `12h`, `90d` or `2w`. Raises BadName."""
    found = _duration_ms(text)
    if not found:
        raise BadName("bad_time", f"{what}: invalid time {text!r}: expected 30m, 12h or 90d")
    return found


def show_minute(at_ms: object) -> str | None:
    """Return an instant to the minute, in UTC; None for no instant."""
    if not isinstance(at_ms, int):
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def show_second(at_ms: int) -> str:
    """Return an instant to the second, in UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _duration_ms(text: str) -> int | None:
    number, unit = text[:-1], text[-1:]
    is_number = number.isascii() and number.isdigit() and len(number) <= 6
    return int(number) * UNITS_MS[unit] if is_number and unit in UNITS_MS else None
