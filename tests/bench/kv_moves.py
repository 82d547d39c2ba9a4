"""How fast the CPU's transfer engine moves blocks to host memory and back, plain and packed.

    python -m tests.bench.kv_moves [--layers 30 --kv-heads 3 --head-dim 64] [--blocks 64]
        [--repeats 7] [--layout panels]

GB/s of the pool's bytes (bf16), by processor time of the worker's thread, so that other programs
count little: medians and the spread over repeats, and their ratio to a plain copy of the same bytes
in the same run. Offloads include the digest of the slot, loads its check. Random values; one
thread.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from engine.kv.format import KvFormat
from engine.kv.packing import StoragePacker
from engine.kv.storage import KvStorage
from engine.kv.transfer import BlockPacker, CpuTransferEngine
from engine.moves import Move, SlotLayout
from kernels.cpu.build import compile_library
from kernels.reference_kv import PackedName
from tests.bench.models import random_kv
from tests.bench.results import spread

NAMES: tuple[PackedName, ...] = get_args(PackedName)


class HostSlots:
    """Host memory of the bench."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.layout = SlotLayout.uniform(slots, slot_bytes)
        self.memory = bytearray(self.layout.memory_bytes)

    def view(self, slot: int, slot_bytes: int) -> memoryview:
        """Return a slot's bytes."""
        start = self.layout.offset(slot, slot_bytes)
        return memoryview(self.memory)[start : start + slot_bytes]


def storage_of(chosen: argparse.Namespace) -> KvStorage:
    """Return blocks of noise."""
    kv_format = KvFormat(
        chosen.layers, chosen.kv_heads, chosen.head_dim, 16, torch.bfloat16, chosen.layout
    )
    return random_kv(kv_format, chosen.blocks, torch.device("cpu"))


def seconds_of_moves(kv: KvStorage, name: str, library: Path | None) -> Callable[[], list[float]]:
    """Return what offloads and loads all blocks once, and returns processor seconds of each."""
    packer: BlockPacker | None = StoragePacker(kv, name, library) if name else None
    blocks = len(kv.data)
    memory = HostSlots(blocks, kv.format.block_bytes)

    def run() -> list[float]:
        found = []
        checks = [b""] * blocks
        ended = threading.Semaphore(0)
        engine = CpuTransferEngine(
            kv,
            memory,
            packers={name: packer} if packer is not None else None,
            queue_bytes_max=2**40,
            clock=time.thread_time,
            on_moved=ended.release,
        )
        for kind in ("offload", "load"):
            engine.submit([
                Move(block, "offload" if kind == "offload" else "load", block, block,
                     checks[block] if kind == "load" else b"", name)
                for block in range(blocks)
            ])  # fmt: skip
            for _ in range(blocks):
                ended.acquire()
            moved = engine.poll()
            assert all(one.is_done for one in moved)
            checks = [one.check for one in moved]
            found.append(sum(one.seconds for one in moved))
        engine.close()
        return found

    return run


def plain_copy(kv: KvStorage) -> Callable[[], list[float]]:
    """Return what copies all blocks to other memory, and returns its processor seconds."""
    source = kv.data.flatten(1).view(torch.uint8).numpy()
    target = np.zeros_like(source)

    def run() -> list[float]:
        started_s = time.thread_time()
        for block in range(len(source)):
            np.copyto(target[block], source[block])
        return [time.thread_time() - started_s]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layout", choices=["slots", "panels"], default="panels")
    chosen = parser.parse_args()
    kv = storage_of(chosen)
    library = compile_library()
    runs = {"copy": plain_copy(kv)}
    runs |= {name or "plain": seconds_of_moves(kv, name, library) for name in ("", *NAMES)}
    for run in runs.values():
        run()  # touches the memory
    seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
    for _ in range(chosen.repeats):
        for name, run in runs.items():
            seconds[name].append(run())
    gigabytes = kv.data.numel() * kv.data.element_size() / 1e9
    base = statistics.median(one[0] for one in seconds["copy"])
    print(f"{kv.format.block_bytes:,} bytes a block, {chosen.blocks} blocks")
    for name, found in seconds.items():
        for index, part in enumerate(("offload", "load")[: len(found[0])]):
            rates = [gigabytes / one[index] for one in found]
            middle = statistics.median(rates)
            label = name if name == "copy" else f"{name} {part}"
            share = middle * base / gigabytes
            print(f"{label:15} {middle:6.2f} GB/s {spread(rates, '.2f')}, {share:.2f} of a copy")


if __name__ == "__main__":
    main()
