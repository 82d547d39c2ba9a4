"""Where a run of tokens lies below the device: in a slot of host memory, in a record of a store.

A node of the tree has at most one place on each level, and leaves the tree when it has none, on the
device or below. `engine.levels` fills and reads places; the tree knows only whether there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class HostPlace:
    """A slot of host memory that has the bytes of a run."""

    slot: int
    form: int
    """The index of the format of its bytes."""
    has_windows: bool
    """It has the blocks of all KV groups, else of group 0 alone."""
    check: bytes = b""
    """The digest of its bytes, empty where it is not known."""
    is_unverified: bool = False
    """An earlier engine filled it, and its bytes have not been compared with `check` yet."""
    is_storing: bool = False
    """A store reads it."""
    order_key: tuple[float, int] | None = None
    """Its key among the places that may be dropped, None while it may not be."""
    is_kept: bool = False
    """Under `order_key` it was matched before, and is not on probation."""
    noted_s: tuple[float, float] = (math.inf, -math.inf)
    """When the run's limit and its promise end, as the slot table says."""


@dataclass(slots=True, eq=False)
class RecordPlace:
    """A record of the disk, or of the remote store, that has the bytes of a run."""

    record_id: int
    form: int
    """The index of the format of its bytes."""
    has_windows: bool
    """It has the blocks of all KV groups, else of group 0 alone."""
    is_remote: bool = False
    """It was in the remote store alone when it was looked up."""
    kept_until_s: float = -math.inf
    """Until when the disk has said that it keeps the record at least."""
    renew_at_s: float = -math.inf
    """From when on the disk is to be told of a later end."""
    told_windows: Sequence[int] = ()
    """The window groups of whose promises the disk knows."""


Place = HostPlace | RecordPlace
"""A place below the device: each has a `form`, and says whether it `has_windows`."""
