"""Blocks of another process's pool come over as they are; what is out of reach is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from engine.kv.near_pools import PoolHandle, near_pools
from engine.kv.storage import KvShards, KvStorage
from engine.moves import NearPools
from tests.unit.engine.kv.transfer_rig import storage

BLOCKS = 6
OTHER = """
import sys
from engine.kv.near_pools import near_pools
from tests.unit.engine.kv.transfer_rig import storage

kv = storage({blocks}, "{device}")
for block in range({blocks}):
    kv.data[block] = block + 1
pools = near_pools(kv)
print(pools.handle.hex(), pools.domain, sep=",", flush=True)
sys.stdin.read()
"""

device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])]
)


def pools_of(kv: KvStorage) -> NearPools:
    pools = near_pools(kv)
    assert pools is not None
    return pools


@contextmanager
def other_pool(device: str) -> Iterator[tuple[bytes, str, subprocess.Popen[str]]]:
    """Another process with a pool, whose block n has values n + 1: its handle and its domain."""
    program = OTHER.format(blocks=BLOCKS, device=device)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        handle, _, domain = process.stdout.readline().strip().partition(",")
        yield bytes.fromhex(handle), domain, process


@device
def test_blocks_of_another_process_come_where_they_are_wanted(device: str) -> None:
    """Others stay as they were; the domain says that the two can do this."""
    kv = storage(BLOCKS, device)
    pools = pools_of(kv)
    with other_pool(device) as (handle, domain, _):
        assert domain == pools.domain
        pools.read(handle, [5, 0, 3], [0, 2, 4])
        pools.read(handle, [1], [5])
        pools.close()
        pools.read(handle, [2], [1])
    first = [float(kv.data[block].float().mean()) for block in range(BLOCKS)]
    assert first == [6, 3, 1, 0, 4, 2]
    assert all(bool((kv.data[block] == kv.data[block].flatten()[0]).all()) for block in range(6))


def test_a_pool_whose_engine_has_ended_is_out_of_reach() -> None:
    """Another process may have its number by then: its file is not taken for the pool."""
    kv = storage(BLOCKS)
    with other_pool("cpu") as (handle, _, process):
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        with pytest.raises(OSError, match="No such file"):
            pools_of(kv).read(handle, [0], [0])
    mine = msgspec.msgpack.decode(pools_of(kv).handle, type=PoolHandle)
    stale = msgspec.structs.replace(mine, inode=mine.inode + 1)
    with pytest.raises(OSError, match="has ended"):
        pools_of(kv).read(msgspec.msgpack.encode(stale), [0], [0])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [([BLOCKS], [0]), ([0], [BLOCKS]), ([-1], [0]), ([0, 1], [0]), ([], [])],
)
def test_blocks_that_are_not_there_are_refused(theirs: list[int], ours: list[int]) -> None:
    """A wrong number would read, or write, what lies beside the pool."""
    pools = pools_of(storage(BLOCKS))
    with pytest.raises(ValueError, match="expected"):
        pools.read(pools.handle, theirs, ours)


def test_a_handle_that_is_none_is_refused() -> None:
    """It comes from another process; so does one of blocks of another size."""
    pools = pools_of(storage(BLOCKS))
    own = msgspec.msgpack.decode(pools.handle, type=PoolHandle)
    larger = msgspec.structs.replace(own, block_bytes=2 * own.block_bytes)
    for handle in (b"", b"\xc1", msgspec.msgpack.encode(larger)):
        with pytest.raises(ValueError, match=r"expected|[Ii]nput|MessagePack"):
            pools.read(handle, [0], [0])


def test_pools_of_lanes_cannot_be_read() -> None:
    """A block has a part on each device."""
    kv = storage(BLOCKS)
    assert near_pools(KvShards(kv.format, [kv, storage(BLOCKS)])) is None


def test_a_pool_is_in_a_file_that_nobody_can_cut() -> None:
    """A shorter one would end each process that reads it."""
    kv = storage(BLOCKS)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(kv.memory_fd, 0)
    assert torch.count_nonzero(kv.data) == 0
