"""The device pool's formats beside each other: attention alone, whole steps, and tokens a GiB.

    python -m tests.bench.kv_pool [--rounds 9] [--layers 10] [--threads 2]
        [--heads 9 --kv-heads 3 --head-dim 64]

Sixteen sequences of 1,100 tokens of their own decode a token each, in one run, the formats in turn:
`float32`, `bfloat16`, `int8`. *Attention*: the C kernel over every layer, bundle and KV head on one
thread, in that thread's processor time a layer. *Prompt*: the same for 256 tokens behind 1,024.
*Step*: the whole model of so many layers with random weights, all threads, by the wall clock.
Random KV; speed does not depend on it. Medians and spread over the rounds, as ratios to bfloat16.
Takes about 20 s and 1 GB.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from msgspec.structs import replace

from engine.attention.batch import make_batch
from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import attention_spec
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture, Rope
from engine.models.cpu_decoder import c_place, load_kernels
from engine.plan import Row, StepPlan
from kernels.cpu import build as cpu
from tests.bench.bench_step import CpuSteps
from tests.bench.models import BLOCK, SMOLLM2_135M, random_kv, with_layers
from tests.bench.results import spread

SEQUENCES, LENGTH = 16, 1100
BEHIND, PROMPT = 1024, 256
EACH = -(-(LENGTH + 1) // BLOCK)
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
CPU = torch.device("cpu")

DECODING = StepPlan(
    0,
    tuple(
        Row(i, LENGTH, 1, list(range(i * EACH, (i + 1) * EACH)), 0, [5], (i,))
        for i in range(SEQUENCES)
    ),
)
PREFILL = StepPlan(
    0, (Row(0, BEHIND, PROMPT, list(range(-(-(BEHIND + PROMPT) // BLOCK))), 0, [5] * PROMPT, (0,)),)
)


class Attention:
    """The C kernel over one pool, without a model."""

    def __init__(self, library: ctypes.CDLL, shape: Architecture, kv: KvStorage, kind: int) -> None:
        self._c, self._shape = library, shape
        self._layers = (cpu.CLayer * len(shape.layers))(
            *(cpu.CLayer(kv_row=row) for row in range(len(shape.layers)))
        )
        self._model = cpu.CModel(
            heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, kv_kind=kind,
            kv_rows=len(shape.layers), scale=shape.head_dim**-0.5, layer=self._layers,
            kv=kv.data.data_ptr(),
        )  # fmt: skip
        self._kv = kv

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds of processor time of a layer's attention."""
        shape, spec = self._shape, attention_spec(self._shape)
        backend = CpuAttention(spec)
        backend.begin(plan, make_batch(plan, BLOCK, lambda _: 0))
        assert backend.work is not None
        work, place = backend.work, backend.work.places[0]
        qkv = torch.randn(work.tokens, spec.qkv_width)
        out = torch.empty(work.tokens, spec.query_width)
        step = cpu.CWork(
            tokens=work.tokens, bundles=len(place.bundles), positions=work.positions.data_ptr(),
            place=ctypes.pointer(c_place(place)), qkv=qkv.data_ptr(), attended=out.data_ptr(),
        )  # fmt: skip
        model, given = ctypes.byref(self._model), ctypes.byref(step)
        started_s = time.thread_time()
        for layer in range(len(shape.layers)):
            for bundle in range(len(place.bundles)):
                for head in range(shape.kv_heads):
                    self._c.attend(model, given, layer, bundle, head)
        return (time.thread_time() - started_s) / len(shape.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    shape = replace(
        with_layers(SMOLLM2_135M, chosen.layers), heads=chosen.heads, kv_heads=chosen.kv_heads,
        head_dim=chosen.head_dim, vocab=8192, ropes={"full": Rope(1e5, chosen.head_dim)},
    )  # fmt: skip
    library = cpu.compile_library()
    assert library is not None, "no C compiler"
    c = ctypes.CDLL(str(library))
    kinds = {torch.float32: cpu.WIDE, torch.bfloat16: cpu.DOT, torch.int8: cpu.BYTES}
    probe = load_kernels(with_layers(shape, 1), 1)
    assert probe is not None
    kinds[torch.bfloat16] = probe.bf16_kind
    probe.close()
    blocks = SEQUENCES * EACH + BLOCK
    pools = {
        dtype: random_kv(kv_format(shape, dtype, BLOCK, "panels"), blocks, CPU) for dtype in DTYPES
    }
    contenders: dict[str, dict[torch.dtype, Callable[[], float]]] = {
        "attention": {}, "prompt": {}, "step": {},
    }  # fmt: skip
    for dtype, kv in pools.items():
        kernel = Attention(c, shape, kv, kinds[dtype])
        contenders["attention"][dtype] = partial(kernel.seconds, DECODING)
        contenders["prompt"][dtype] = partial(kernel.seconds, PREFILL)
        steps = CpuSteps(shape, kv, load_kernels(shape, chosen.threads))
        contenders["step"][dtype] = partial(steps.seconds, (DECODING,))
    for kv in pools.values():
        tokens = 2**30 // kv.format.block_bytes * BLOCK
        print(f"{kv.format.name}: {kv.format.block_bytes:,} B a block, {tokens:,} tokens a GiB")
    for what, by_dtype in contenders.items():
        times: dict[torch.dtype, list[float]] = {dtype: [] for dtype in DTYPES}
        for _ in range(chosen.rounds):
            for dtype, seconds in by_dtype.items():
                times[dtype].append(seconds())
        base = times[torch.bfloat16]
        for dtype, found in times.items():
            ratios = [b / t for b, t in zip(base, found, strict=True)]
            print(
                f"{what:10} {str(dtype).removeprefix('torch.'):9}"
                f" {statistics.median(found) * 1e3:8.3f} ms, {statistics.median(ratios):.2f} times"
                f" bf16's speed {spread(ratios, '.2f')}"
            )


if __name__ == "__main__":
    main()
