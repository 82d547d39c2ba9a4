"""The day that chat templates get: its settings, and what asks the clock.

Many templates write today's date at the beginning of a prompt. They get only the day, so that a
prompt's beginning changes at midnight and at no other time. `gateway.config` reads the settings,
`gateway.prompt.template` asks for the day.
"""

from __future__ import annotations

from datetime import date, datetime
from zoneinfo import ZoneInfo

from msgspec import Struct

from tenancy.types import WallClock, wall_ms

TODAY = "today"


class TemplatesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What chat templates get of the day."""

    date: str = TODAY
    """"today", or always this one, such as "2026-11-28"."""
    time_zone: str = ""
    """Whose midnight begins a day, such as "Europe/Paris"; empty: the machine's."""

    def __post_init__(self) -> None:
        """Check both: a ValueError here is one of the decoder."""
        calendar_of(self)


class Calendar(Struct, frozen=True):
    """What day it is."""

    fixed: date | None = None
    """Always this one; None: today."""
    time_zone: ZoneInfo | None = None
    """Whose midnight begins a day; None: the machine's."""
    wall: WallClock = wall_ms

    def today(self) -> date:
        """Return the day."""
        return self.fixed or datetime.fromtimestamp(self.wall() / 1_000, self.time_zone).date()


def calendar_of(settings: TemplatesConfig, wall: WallClock = wall_ms) -> Calendar:
    """Return the calendar of these settings. Raises ValueError, which begins with the setting's
    name."""
    fixed = zone = None
    if settings.date != TODAY:
        try:
            fixed = date.fromisoformat(settings.date)
        except ValueError:
            message = f"date: {settings.date[:80]!r}; expected 'today', or a day such as 2026-11-28"
            raise ValueError(message) from None
    if settings.time_zone:
        try:
            zone = ZoneInfo(settings.time_zone)
        except (KeyError, ValueError, OSError):
            message = (
                f"time_zone: {settings.time_zone[:80]!r} is not known here; expected a name such as"
                " 'Europe/Paris', or '' for the machine's"
            )
            raise ValueError(message) from None
    return Calendar(fixed, zone, wall)
