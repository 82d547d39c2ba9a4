"""Load or compute: a cost model with measured constants decides how much of a prefix is loaded.

A packed copy has fewer bytes to fetch and is dearer to unpack, so each format has a pace.

Loading `n` blocks takes a fixed time, the queue before it, and `n` times the measured seconds of a
block; computing them takes what `StepCost` predicts. The longest prefix is taken whose load is not
predicted to take longer than computing it. What a finished load lost against computing is counted,
and a level whose loads keep losing is left alone for a while. Pure: it reads no clock and moves
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from engine.api import LevelName

NotLoaded = Literal["slower", "short", "paused", "no_room", "late", "failed", "damaged"]
"""Why a prompt was not loaded as far as a level had it: computing was predicted to be faster; less
than the shortest load; the level's loads had lost time; no blocks or slots; not before the
deadline; a move that failed; bytes that were not those that were written."""
SMOOTHING: Final = 0.1
"""The weight of the latest measurement."""
CHOICES: Final = 16
"""Lengths that are compared for one prefix."""
JUDGED_LOADS: Final = 32
"""Loads by whose sum a level is judged."""
PAUSE_S: Final = 60.0
"""Seconds for which a level is left alone whose loads lost more than they won."""
TRIAL_S: Final = 1.0
"""Seconds between two trials after that."""
TRIALS_WON: Final = 3
"""Trials in a row that must win before the level serves as before."""
FIRST_BYTES_PER_S: Final[dict[LevelName, float]] = {
    "host": 4e9, "disk": 0.5e9, "remote": 0.1e9, "peer": 0.3e9,
}  # fmt: skip
"""Rates until they are measured, where nothing better is known: see `first_paces`."""
DISK_PART: Final = 4
"""A disk is expected to have this part of the transfer engine's rate until it is measured."""
FIXED_S: Final = 0.001
"""Seconds that any load takes: it is noticed between two steps."""


class LevelPace:
    """The measured pace of one level, and whether its loads are worth it.

    `block_s`: seconds that reading a block takes, by format. `queued`: blocks that are being read,
    by format. `regret_s`: time lost by loads that took longer than computing would have.
    """

    def __init__(
        self,
        name: LevelName,
        slot_bytes: Sequence[int],
        parallel: int = 1,
        bytes_per_s: float = 0.0,
    ) -> None:
        """`slot_bytes`: of each format, the device's own first; `parallel`: blocks that are read
        side by side; `bytes_per_s`: the rate until it is measured, 0 for the level's usual one."""
        self.name = name
        # Until it is measured, unpacking counts as much as writing the block that it fills.
        first = [max(slot_bytes)] * len(slot_bytes) if name == "host" else slot_bytes
        rate = bytes_per_s or FIRST_BYTES_PER_S[name]
        self.block_s = [size / rate for size in first]
        self.queued = [0] * len(slot_bytes)
        self.regret_s = 0.0
        self._slot_bytes = tuple(slot_bytes)
        self._parallel = parallel
        self._latest = 0
        self._won_s: deque[float] = deque(maxlen=JUDGED_LOADS)
        self._paused_until_s: float | None = None
        self._trials_won = 0

    @property
    def bytes_per_s(self) -> float:
        """Return the rate at which the level is read, in the format that was read last."""
        return self._slot_bytes[self._latest] / self.block_s[self._latest]

    def record_block(self, seconds: float, form: int = 0) -> None:
        """Record that reading one block of a format took `seconds`, beside others."""
        if seconds > 0:
            self._latest = form
            self.block_s[form] += SMOOTHING * (seconds / self._parallel - self.block_s[form])

    def seconds(self, blocks: int, form: int = 0) -> float:
        """Return the predicted seconds until `blocks` more of a format have been read."""
        if not blocks:
            return 0.0
        queued = sum(n * one for n, one in zip(self.queued, self.block_s, strict=True))
        return queued + blocks * self.block_s[form]

    def is_open(self, now_s: float) -> bool:
        """Return whether loads from this level may begin now."""
        return self._paused_until_s is None or now_s >= self._paused_until_s

    def record_load(self, took_s: float, compute_s: float, now_s: float) -> None:
        """Judge a finished load: it took `took_s`, computing would have taken `compute_s`."""
        self.regret_s += max(0.0, took_s - compute_s)
        if self._paused_until_s is not None:
            self._trials_won = self._trials_won + 1 if took_s <= compute_s else 0
            self._paused_until_s = now_s + TRIAL_S
            if self._trials_won >= TRIALS_WON:
                self._paused_until_s = None
                self._won_s.clear()
            return
        self._won_s.append(compute_s - took_s)
        if len(self._won_s) == JUDGED_LOADS and sum(self._won_s) < 0:
            self._paused_until_s, self._trials_won = now_s + PAUSE_S, 0


def first_paces(
    slot_bytes: Sequence[int], disk_threads: int, transfer_bytes_per_s: float
) -> dict[LevelName, LevelPace]:
    """Return the pace of each level before anything was measured. `slot_bytes`: of each format.

    Host memory and disk have the rates that a good machine has beside such a transfer engine: a
    load that is never tried is never measured, and what computes fast would compute for ever. A
    first load that loses time is counted as such.
    """
    return {
        "host": LevelPace("host", slot_bytes, bytes_per_s=transfer_bytes_per_s),
        "disk": LevelPace("disk", slot_bytes, disk_threads, transfer_bytes_per_s / DISK_PART),
        "remote": LevelPace("remote", slot_bytes),
    }


class LoadChoice(NamedTuple):
    """How many blocks to load, what that is predicted to take, and what computing them would;
    `why` not more, None where there are no more."""

    blocks: int
    load_s: float
    compute_s: float
    why: NotLoaded | None = None


def choose_load(
    levels: Sequence[LevelName],
    paces: Mapping[LevelName, LevelPace],
    compute_s: Callable[[int], float],
    blocks_min: Callable[[LevelName], int],
    now_s: float,
    form: int = 0,
) -> LoadChoice:
    """Return the longest prefix of a run of blocks that is worth loading.

    `levels`: where each block lies, in order; `form`: the format of their copies; `paces`: of host
    memory, disk and remote store. `compute_s(n)`: predicted seconds to compute the first n.
    `blocks_min(level)`: the shortest load that touches this level. O(blocks), and about
    `CHOICES` predictions.
    """
    host, disk, remote = paces["host"], paces["disk"], paces["remote"]
    if not host.is_open(now_s):
        return LoadChoice(0, 0.0, 0.0, "paused")
    shut = {name for name, pace in paces.items() if not pace.is_open(now_s)}
    most = min((levels.index(name) for name in shut if name in levels), default=len(levels))
    why: NotLoaded | None = "paused" if most < len(levels) else None
    last, left = most, levels[:most]
    fetched, far = left.count("disk"), left.count("remote")
    for blocks in range(most, 0, -max(1, most // CHOICES)):
        less, last = levels[blocks:last], blocks
        fetched, far = fetched - less.count("disk"), far - less.count("remote")
        if blocks < blocks_min("remote" if far else "disk" if fetched else "host"):
            why = why or "short"
            continue
        # Fetch and load overlap: the slowest of them, and one more block of the other.
        fetch_s = max(disk.seconds(fetched, form), remote.seconds(far, form))
        slowest_s = max(host.seconds(blocks, form), fetch_s)
        load_s = FIXED_S + slowest_s + (host.block_s[form] if fetched or far else 0.0)
        wanted_s = compute_s(blocks)
        if load_s <= wanted_s:
            return LoadChoice(blocks, load_s, wanted_s, why)
        why = "slower"
    return LoadChoice(0, 0.0, 0.0, why)
