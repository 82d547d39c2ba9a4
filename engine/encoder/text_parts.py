"""A batch of texts in parts, each encoded by a thread of its own.

    texts, sorted by length ── parts of like many tokens ── a thread each ── vectors in order

Torch's own threads meet at the end of each operation, some hundred times a batch; where other
programs use a core, all wait for the thread that lost it. Parts meet once. It knows no process;
`process` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.encoder.bert import BertEncoder

LONE_TOKENS = 64
"""Tokens from which a single text takes torch's threads; a shorter one only waits for them."""


class EncoderThreads:
    """An encoder and the threads that it computes with. Not thread-safe: it sets torch's own number
    of threads."""

    def __init__(self, encoder: BertEncoder, threads: int) -> None:
        """`threads`: 1 or more."""
        self.encoder = encoder
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "encode") if threads > 1 else None

    def encode(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the vectors of texts; see `BertEncoder.encode`."""
        parts = text_parts([len(text) for text in texts], self._threads)
        if self._pool is None or len(parts) == 1:
            is_long = len(texts[0]) >= LONE_TOKENS
            torch.set_num_threads(self._threads if is_long else 1)
            return self.encoder.encode(texts)
        torch.set_num_threads(1)
        chosen = [[texts[number] for number in part] for part in parts]
        vectors = torch.empty(len(texts), self.encoder.card.dimensions)
        for part, found in zip(parts, self._pool.map(self.encoder.encode, chosen), strict=True):
            vectors[torch.tensor(part)] = found
        return vectors

    def close(self) -> None:
        """End the threads. Safe to repeat."""
        if self._pool is not None:
            self._pool.shutdown()


def text_parts(lengths: Sequence[int], parts_max: int) -> list[list[int]]:
    """Return the numbers of texts in at most so many parts, none of them empty, each of texts that
    are near in length. A part ends at the text with which it has its share of the tokens that are
    left. O(texts * log(texts))."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    parts: list[list[int]] = [[]]
    left, tokens = sum(lengths), 0
    for number in order:
        share = left / (parts_max - len(parts) + 1)
        if parts[-1] and len(parts) < parts_max and tokens + lengths[number] / 2 > share:
            left -= tokens
            tokens = 0
            parts.append([])
        parts[-1].append(number)
        tokens += lengths[number]
    return parts
