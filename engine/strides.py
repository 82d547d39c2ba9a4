"""Digests of prefixes: one for every 128 tokens, each over the one before it.

Engine and gateway compute them alike: the engine says which prefixes it has, the gateway looks up
those of a prompt. A digest routes; it never proves that tokens are equal.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import Struct

from engine.api import Namespace

STRIDE_TOKENS = 128
DIGEST_BYTES = 16


class PrefixChanges(Struct, frozen=True, tag="prefix_changes", forbid_unknown_fields=True):
    """The strides behind which a request can resume that came and went since this was last told, on
    the device and below it: digests one after another. A level's `removed` go before its `added`.
    """

    is_first: bool = False
    """Nothing that was told before counts any more."""
    device_added: bytes = b""
    device_removed: bytes = b""
    below_added: bytes = b""
    below_removed: bytes = b""


def stride_key(namespace: Namespace) -> bytes:
    """Return the key of a namespace's digests: equal tokens under another one give others."""
    return blake2b(namespace, digest_size=32).digest()


def chain_strides(
    key: bytes, before: bytes, tokens: Sequence[int], stride_tokens: int = STRIDE_TOKENS
) -> list[bytes]:
    """Return the digest of every whole stride of `tokens`, which follow the stride of digest
    `before` (empty at the beginning of a prompt). O(tokens), about 1 µs a stride.
    """
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    size = packed.itemsize * stride_tokens
    keyed = blake2b(key=key, digest_size=DIGEST_BYTES)
    digests: list[bytes] = []
    for start in range(0, len(tokens) // stride_tokens * size, size):
        one = keyed.copy()
        one.update(before + data[start : start + size])
        before = one.digest()
        digests.append(before)
    return digests


def stride_digests(namespace: Namespace, tokens: Sequence[int]) -> list[bytes]:
    """Return the digest of every whole stride of a prompt. Cost: as `chain_strides`."""
    return chain_strides(stride_key(namespace), b"", tokens)
