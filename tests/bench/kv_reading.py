"""Reads a text through the engine's own steps, beside itself with packed KV.

`Reader` runs a model as `engine.runner` runs it: step plans, block tables, the CPU's kernels. A
text is read by several *variants* at once, each in blocks of its own; a variant packs and unpacks
each of its blocks when it is full, so that later tokens read what a level below the device would
have brought back. A token's own block is exact. `BesideInt8` adds a pool whose every value is
rounded when it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from engine.attention.batch import make_batch
from engine.config import EngineConfig
from engine.kv.packing import StoragePacker
from engine.model_store import ModelCard
from engine.plan import Row, StepPlan
from engine.runner.cpu_runner import CpuRunner, build_runner
from kernels.cpu.build import compile_library

BLOCK = 16
INT8_POOL = "int8 pool"
"""The variant that an int8 pool computes."""


class Reader:
    """A model on the CPU with room for `variants` texts of `context` tokens."""

    def __init__(
        self,
        card: ModelCard,
        context: int,
        variants: int,
        threads: int = 0,
        kv_dtype: Literal["auto", "int8"] = "auto",
    ) -> None:
        """Raises ModelError. `threads` 0: one a core. `kv_dtype`: of the pool."""
        self.card, self.context = card, context
        self._blocks_each = -(-context // BLOCK)
        config = EngineConfig(
            device="cpu",
            kv_blocks=variants * self._blocks_each,
            context_tokens_max=context,
            threads=threads,
            kv_dtype=kv_dtype,
        )
        runner = build_runner(card, config).runner
        assert isinstance(runner, CpuRunner)
        self._runner = runner
        self.kv = runner.kv
        self._library = compile_library()

    def packer(self, name: str) -> StoragePacker:
        """Return the packer of a format over this reader's blocks. Raises ValueError."""
        return StoragePacker(self.kv, name, self._library)

    def read(
        self, token_ids: Sequence[int], formats: Sequence[str], chunk: int = BLOCK
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (position, logits [variants, n, vocab] fp32) of consecutive runs of tokens.

        `formats`: each variant's packed format, or "" for exact. `chunk`: tokens of a step; other
        sizes than a block's are for exact variants alone.
        """
        packers = [self.packer(name) if name else None for name in formats]
        assert chunk == BLOCK or not any(packers), "blocks are packed at the end of a step"
        for start in range(0, len(token_ids), chunk):
            tokens = tuple(token_ids[start : start + chunk])
            logits = self._step(tokens, start, len(formats))
            if len(tokens) == BLOCK:
                for variant, packer in enumerate(packers):
                    if packer is not None:
                        self._repack(packer, variant * self._blocks_each + start // BLOCK)
            yield start, logits

    def _step(self, tokens: tuple[int, ...], start: int, variants: int) -> torch.Tensor:
        rows = tuple(
            Row(
                variant, start, len(tokens),
                range(variant * self._blocks_each, (variant + 1) * self._blocks_each), 0, tokens,
            )
            for variant in range(variants)
        )  # fmt: skip
        plan = StepPlan(step=0, rows=rows)
        runner = self._runner
        with torch.inference_mode():
            batch = make_batch(plan, BLOCK, lambda _: 0)
            runner.attention.begin(plan, batch)
            hidden = runner.model.forward(batch.token_ids, runner.attention)
            return runner.model.logits(hidden).float().view(variants, len(tokens), -1)

    def _repack(self, packer: StoragePacker, block: int) -> None:
        packed = np.empty(packer.block_bytes, np.uint8)
        packer.pack(block, packed)
        packer.unpack(packed, block)


class BesideInt8:
    """A `Reader` and the same model over an int8 pool, which is the variant `INT8_POOL`."""

    def __init__(self, reader: Reader, threads: int = 0) -> None:
        """Raises ModelError."""
        self._reader = reader
        self.int8 = Reader(reader.card, reader.context, 1, threads, "int8")

    def read(
        self, token_ids: Sequence[int], formats: Sequence[str]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See `Reader.read`."""
        others = [name for name in formats if name != INT8_POOL]
        if INT8_POOL not in formats:
            yield from self._reader.read(token_ids, formats)
            return
        pool = self.int8.read(token_ids, [""])
        for (start, logits), (_, own) in zip(
            self._reader.read(token_ids, others), pool, strict=True
        ):
            rest = iter(logits)
            yield (
                start,
                torch.stack([own[0] if name == INT8_POOL else next(rest) for name in formats]),
            )
