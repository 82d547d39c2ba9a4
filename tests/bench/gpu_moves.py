"""How fast a GPU's transfer engine moves blocks, and what steps beside it lose.

    python -m tests.bench.gpu_moves [--only moves,packed,steps] [--json FILE] [--layers 32]
    python -m tests.bench.gpu_moves --lanes 2 --only moves,packed

Scattered blocks of Llama-3.1-8B's shape (2 MiB) to host memory, back, and both at once, by how many
are submitted together; digests included. Packed: GB/s of packed bytes, and of the pool's. Steps:
W1's decoding steps (`tests.bench.gpu_workloads`) without and with both directions full, in turns;
then beside offloads to memory that is used for the first time, and so pinned. Random values. With
`--lanes`, so many GPUs share each block.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from engine.kv.copy_device import CudaDevice
from engine.kv.device_packing import gpu_packers_of
from engine.kv.device_transfer import DeviceTransferEngine
from engine.kv.format import kv_format
from engine.kv.storage import KvShards
from engine.moves import Move, Moved, SlotLayout
from engine.server.server import SWITCH_INTERVAL_S
from engine.storage.memory.arena import HostArena
from tests.bench.gpu_workloads import WORKLOADS, Bench
from tests.bench.models import BLOCK, LLAMA_8B, random_kv, with_layers
from tests.bench.results import Results, print_line

BLOCKS = 2048
BATCHES = (1, 4, 16, 64, 256, 512)
REPEATS = 5
FULL_BLOCKS = 256
"""Moves of a direction under way while both directions are kept full."""
PAUSE_S = 0.001


class Rig:
    """Blocks of noise on the device, host memory for as many, and what moves between them."""

    def __init__(self, blocks: int = BLOCKS, lanes: int = 1) -> None:
        devices = [torch.device("cuda", lane) for lane in range(lanes)]
        form = kv_format(LLAMA_8B, torch.bfloat16, BLOCK, lanes=lanes)
        self.kv = KvShards(form, [random_kv(form.shard, blocks, device) for device in devices])
        self.block_bytes = form.block_bytes
        self.arena = HostArena.create(SlotLayout.uniform(blocks, form.block_bytes))
        self.left = 0
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.failed: list[str] = []
        self.packers = gpu_packers_of(self.kv, ("int8c", "int4c"))
        self.engine = DeviceTransferEngine(
            self.kv,
            self.arena,
            [CudaDevice(device) for device in devices],
            packers=self.packers,
            on_moved=self.count,
            on_error=lambda move, error: self.failed.append(f"{move.kind}: {error}"),
        )
        self.ids = count(1)
        self.chance = random.Random(1)

    def moves(
        self, kind: Any, number: int, name: str = "", part: tuple[int, int] = (0, BLOCKS)
    ) -> list[Move]:
        """Return moves of scattered blocks to scattered slots of a part of both."""
        blocks = self.chance.sample(range(*part), number)
        slots = self.chance.sample(range(*part), number)
        return [
            Move(next(self.ids), kind, block, slot, format=name)
            for block, slot in zip(blocks, slots, strict=True)
        ]

    def run(self, moves: Sequence[Move]) -> tuple[float, list[Moved]]:
        """Submit moves; return the seconds until all have ended, and their outcomes."""
        self.ended.clear()
        self.left = len(moves)
        started_s = time.perf_counter()
        self.engine.submit(moves)
        self.ended.wait()
        seconds = time.perf_counter() - started_s
        moved = self.engine.poll()
        assert all(one.is_done for one in moved), self.failed[:3]
        return seconds, moved

    @contextmanager
    def both_full(self) -> Iterator[dict[str, int]]:
        """Keep both directions full beside the body; yield the moves that ended, by kind."""
        ended = {"offload": 0, "load": 0}
        under_way: dict[int, str] = {}
        is_over = threading.Event()
        halves = {"offload": (0, BLOCKS // 2), "load": (BLOCKS // 2, BLOCKS)}

        def feed() -> None:
            while not is_over.wait(PAUSE_S) or under_way:
                for moved in self.engine.poll():
                    ended[under_way.pop(moved.move_id)] += 1
                for kind, part in halves.items():
                    missing = FULL_BLOCKS - sum(one == kind for one in under_way.values())
                    if not is_over.is_set() and missing >= FULL_BLOCKS // 4:
                        moves = self.moves(kind, missing, part=part)
                        under_way.update((move.move_id, kind) for move in moves)
                        self.engine.submit(moves)

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            yield ended
        finally:
            is_over.set()
            feeder.join()

    def count(self) -> None:
        """Count a move that has ended. A waiter that each of them woke would take the GIL from
        those that move."""
        with self.lock:
            self.left -= 1
            if self.left == 0:
                self.ended.set()

    def close(self) -> None:
        """Release the memory."""
        self.engine.close()
        self.arena.close()


def rate(size: int, seconds: Sequence[float]) -> dict[str, float]:
    """Return GB/s: the median, and the spread."""
    found = sorted(size / one / 1e9 for one in seconds)
    return {
        "median": round(statistics.median(found), 1),
        "least": round(found[0], 1),
        "most": round(found[-1], 1),
    }


def measure_moves(rig: Rig) -> Iterator[dict[str, Any]]:
    """Move blocks as they are, by direction and by how many are submitted at once."""
    first_s, _ = rig.run(rig.moves("offload", 512))
    yield {"part": "first use", "blocks": 512, **rate(512 * rig.block_bytes, [first_s])}
    for _ in range(4):
        rig.run(rig.moves("offload", 512))
    for kind in ("offload", "load"):
        for number in BATCHES:
            seconds = [rig.run(rig.moves(kind, number))[0] for _ in range(REPEATS)]
            yield {"part": kind, "blocks": number, **rate(number * rig.block_bytes, seconds)}
    half = BLOCKS // 2
    seconds = []
    for _ in range(REPEATS):
        both = zip(
            rig.moves("offload", 256, part=(0, half)),
            rig.moves("load", 256, part=(half, BLOCKS)),
            strict=True,
        )
        seconds.append(rig.run([move for pair in both for move in pair])[0])
    yield {"part": "both", "blocks": 512, **rate(512 * rig.block_bytes, seconds)}
    moves = rig.moves("offload", 256)
    checks = {one.move_id: one.check for one in rig.run(moves)[1]}
    seconds = []
    for _ in range(REPEATS):
        back = [
            replace(one, move_id=next(rig.ids), kind="load", check=checks[one.move_id])
            for one in moves
        ]
        seconds.append(rig.run(back)[0])
    yield {"part": "load, verified", "blocks": 256, **rate(256 * rig.block_bytes, seconds)}


def measure_packed(rig: Rig) -> Iterator[dict[str, Any]]:
    """Pack and unpack, 256 blocks at once."""
    number = 256
    for name, packer in rig.packers.items():
        for kind in ("offload", "load"):
            began_s = time.perf_counter()
            rig.run(rig.moves("offload", BLOCKS // 8, name, part=(0, BLOCKS // 8)))
            first_s = time.perf_counter() - began_s
            part = (0, BLOCKS // 8)
            runs = [rig.run(rig.moves(kind, number, name, part))[0] for _ in range(REPEATS)]
            yield {
                "part": f"{kind} {name}",
                "blocks": number,
                "packed": rate(number * len(rig.kv.shards) * packer.block_bytes, runs),
                "of the pool": rate(number * rig.block_bytes, runs),
                "first_s": round(first_s, 2),
            }


def measure_steps(rig: Rig, layers: int) -> Iterator[dict[str, Any]]:
    """Run W1's decoding steps without and with moves beside them, in turns."""
    bench = Bench(with_layers(LLAMA_8B, layers), 4096)
    prompts = WORKLOADS[0].prompts(1)
    bench.run(prompts, b"W1")
    steps: dict[str, list[float]] = {"alone": [], "beside": []}
    ended = {"offload": 0, "load": 0}
    wall_s = 0.0
    for _ in range(3):
        steps["alone"].append(bench.run(prompts, b"W1")["step_ms"])
        with rig.both_full() as found:
            began_s = time.perf_counter()
            steps["beside"].append(bench.run(prompts, b"W1")["step_ms"])
            wall_s += time.perf_counter() - began_s
        for kind, number in found.items():
            ended[kind] += number
    ratios = [beside / alone for alone, beside in zip(*steps.values(), strict=True)]
    yield {
        "part": "W1's step beside both directions",
        "step_ms": steps,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
        "gb_s": {k: round(n * rig.block_bytes / wall_s / 1e9, 1) for k, n in ended.items()},
    }
    yield from _steps_beside_pinning(bench, prompts)


def _steps_beside_pinning(bench: Bench, prompts: list[tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    """Run them beside offloads to memory that nothing has used before."""
    fresh = Rig()
    alone = bench.run(prompts, b"W1")
    is_over = threading.Event()

    def fill() -> None:
        for start in range(0, BLOCKS, 64):
            if not is_over.wait(0.02):
                fresh.run(fresh.moves("offload", 64, part=(start, start + 64)))

    filler = threading.Thread(target=fill)
    filler.start()
    beside = bench.run(prompts, b"W1")
    is_over.set()
    filler.join()
    yield {
        "part": "W1's step beside first uses",
        "step_ms": [alone["step_ms"], beside["step_ms"]],
        "step_ms_p95": [alone["step_ms_p95"], beside["step_ms_p95"]],
        "pinned_mib": fresh.engine.pinned_bytes // 2**20,
    }
    fresh.close()


def main() -> None:
    """Print one JSON line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="moves,packed,steps")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--lanes", type=int, default=1)
    options = parser.parse_args()
    wanted = options.only.split(",")
    results = Results()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the engine's process does
    began_s = time.perf_counter()
    rig = Rig(lanes=options.lanes)
    made_s = round(time.perf_counter() - began_s, 2)
    print_line(f"{torch.cuda.get_device_name()}, {rig.block_bytes:,} bytes a block, {made_s} s")
    parts = {
        "moves": measure_moves(rig),
        "packed": measure_packed(rig),
        "steps": measure_steps(rig, options.layers),
    }
    for name, figures in parts.items():
        if name in wanted:
            for found in figures:
                results.add(found)
    began_s = time.perf_counter()
    pinned = rig.engine.pinned_bytes
    rig.close()
    took_s = round(time.perf_counter() - began_s, 2)
    results.add({"part": "close", "pinned_gib": round(pinned / 2**30, 2), "s": took_s})
    results.write(options.json)


if __name__ == "__main__":
    main()
