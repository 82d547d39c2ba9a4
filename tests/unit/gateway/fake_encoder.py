"""A `TextEncoder` without a model: vectors made of token ids, and texts that can be held back."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence

from engine.encoder.protocol import unpack_ids

DIMENSIONS = 32


def fake_vector(token_ids: Sequence[int]) -> list[float]:
    """Return the vector of a text: another one for each text, of length 1, in float32."""
    turn = sum((place + 1) * token for place, token in enumerate(token_ids)) + len(token_ids)
    found = [math.sin(turn * (number + 1)) for number in range(DIMENSIONS)]
    length = math.sqrt(sum(one * one for one in found))
    return array("f", [one / length for one in found]).tolist()


class FakeEncoder:
    """Answers at once, or when it is released. `seen`: (tenant, texts) of each call."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[list[int]]]] = []
        self.error: Exception | None = None
        self.is_ready, self.restarts, self.waiting_tokens, self.batches = True, 0, 0, 0
        self.is_closed = False
        self._go = asyncio.Event()
        self._go.set()

    def hold(self) -> None:
        """Answer no text until `release`."""
        self._go.clear()

    def release(self) -> None:
        """Answer."""
        self._go.set()

    async def encode(self, tenant_id: int, texts: Sequence[bytes]) -> list[bytes]:
        """See `TextEncoder`."""
        ids = [unpack_ids(text).tolist() for text in texts]
        self.seen.append((tenant_id, ids))
        await self._go.wait()
        if self.error is not None:
            raise self.error
        self.batches += 1
        return [array("f", fake_vector(one)).tobytes() for one in ids]

    async def close(self) -> None:
        """See `TextEncoder`."""
        self.is_closed = True
        self.release()
