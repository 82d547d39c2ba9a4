"""The replay of traces: its counts add up, and levels save what they should."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.moves import Move
from tests.bench.replay import BlockMemory, ReplayedBytes, Speeds, replay, synthetic_trace

FAST = Speeds(compute_s=1.0, host_s=0.001, disk_s=0.002)
SLOW = Speeds(compute_s=0.001, host_s=0.1, disk_s=0.2)


def found(counts: ReplayedBytes) -> int:
    """Return the blocks that were not computed."""
    return counts.device + counts.host + counts.disk


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_each_level_finds_more(policy: str) -> None:
    """Counts of a seeded trace; every token is found or computed, once."""
    trace = synthetic_trace()
    off, host, disk = (replay(trace, name, policy, FAST) for name in ("off", "host", "host+disk"))

    for counts in (off, host, disk):
        assert found(counts) + counts.computed == counts.prompt == off.prompt
    assert found(off) < found(host) <= found(disk)
    assert (off.host, off.disk, host.disk) == (0, 0, 0)
    assert off.again > 2 * disk.again
    assert host.moved["host-device"] == host.host
    assert disk.moved["disk-host"] == disk.disk > 0


def test_nothing_is_loaded_where_computing_is_faster() -> None:
    """The engine's own choice decides, once it has measured its first loads."""
    off, host = (replay(synthetic_trace(), name, "lru", SLOW) for name in ("off", "host"))

    assert host.host < 0.01 * host.prompt
    assert abs(host.again - off.again) <= 2 * host.host


def test_a_load_of_another_prefix_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are numbers of blocks: a wrong slot cannot pass."""
    right = BlockMemory.submit

    def wrong(self: BlockMemory, moves: Sequence[Move]) -> None:
        self.host = self.host[1:] + self.host[:1]
        right(self, moves)

    monkeypatch.setattr(BlockMemory, "submit", wrong)

    with pytest.raises(AssertionError, match="another prefix"):
        replay(synthetic_trace(), "host", "lru", FAST)
