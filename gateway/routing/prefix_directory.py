"""Which replica has which prefix: an index of stride digests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from engine.strides import DIGEST_BYTES, STRIDE_TOKENS

MAX_REPLICAS = 64
SENT_COUNTS_S = 30.0
"""For so long a prefix that was just sent to a replica counts as present there."""

_ALL = (1 << MAX_REPLICAS) - 1

Level = Literal["device", "below"]


class Found(Struct, frozen=True, gc=False, array_like=True):
    """Tokens after which a prompt can resume: `device` on the device, `below` more below it."""

    device: int = 0
    below: int = 0


class _Sent(Struct):
    replica: int
    digests: Sequence[bytes]
    ends_at_s: float


class PrefixDirectory:
    """An index from a digest to the replicas, by number, that can resume at its end. One int has
    both masks: bits 0 to 63 are the device's, 64 to 127 those below it.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._sent: dict[str, _Sent] = {}
        self._sent_counts: dict[bytes, Counter[int]] = {}
        self._sent_order: deque[tuple[float, str]] = deque()

    def __len__(self) -> int:
        """Return how many digests some replica has."""
        return len(self._masks)

    def change(self, replica: int, level: Level, added: bytes, removed: bytes) -> None:
        """Apply changes that a replica told: digests packed one after another. What was removed
        goes first. ValueError if a length is no multiple of 16.
        """
        for packed in (added, removed):
            if len(packed) % DIGEST_BYTES:
                raise ValueError(f"{len(packed)} bytes of digests; a multiple of 16 is needed")
        bit = 1 << (replica + (MAX_REPLICAS if level == "below" else 0))
        masks = self._masks
        for start in range(0, len(removed), DIGEST_BYTES):
            digest = removed[start : start + DIGEST_BYTES]
            mask = masks.get(digest, 0) & ~bit
            if mask:
                masks[digest] = mask
            else:
                masks.pop(digest, None)
        for start in range(0, len(added), DIGEST_BYTES):
            digest = added[start : start + DIGEST_BYTES]
            masks[digest] = masks.get(digest, 0) | bit

    def clear(self, replica: int) -> None:
        """Forget all of a replica, before the whole tree of a new life or a new connection."""
        keep = ~((1 << replica) | (1 << (replica + MAX_REPLICAS)))
        self._masks = {digest: mask & keep for digest, mask in self._masks.items() if mask & keep}
        for request_id in [name for name, sent in self._sent.items() if sent.replica == replica]:
            self.end_sent(request_id)

    def add_sent(
        self, request_id: str, replica: int, digests: Sequence[bytes], now_s: float
    ) -> None:
        """Count a prompt's strides as present on `replica` for 30 s or until `end_sent`. The same
        id again takes the place of the earlier one.
        """
        self.end_sent(request_id)
        self.expire_sent(now_s)
        self._sent[request_id] = _Sent(replica, digests, now_s + SENT_COUNTS_S)
        self._sent_order.append((now_s + SENT_COUNTS_S, request_id))
        for digest in digests:
            self._sent_counts.setdefault(digest, Counter())[replica] += 1

    def end_sent(self, request_id: str) -> None:
        """Stop counting what a request sent: it has started, or it has ended."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        for digest in sent.digests:
            counts = self._sent_counts[digest]
            counts[sent.replica] -= 1
            if not counts[sent.replica]:
                del counts[sent.replica]
            if not counts:
                del self._sent_counts[digest]

    def expire_sent(self, now_s: float) -> None:
        """End what was sent 30 s ago or earlier."""
        while self._sent_order and self._sent_order[0][0] <= now_s:
            _, request_id = self._sent_order.popleft()
            sent = self._sent.get(request_id)
            if sent is not None and sent.ends_at_s <= now_s:
                self.end_sent(request_id)

    def find(self, digests: Sequence[bytes], replicas: int) -> dict[int, Found]:
        """Return what each replica of the mask `replicas` has, by number; those with nothing are
        left out. Walks from the deepest stride, since with window groups a deeper point may be
        resumed where a shallower one may not.
        """
        on_device: dict[int, int] = {}
        anywhere: dict[int, int] = {}
        open_device = open_any = replicas & _ALL
        for index in range(len(digests) - 1, -1, -1):
            if not open_device:
                break
            digest = digests[index]
            mask = self._masks.get(digest, 0)
            device = mask & _ALL
            for number in self._sent_counts.get(digest, ()):
                device |= 1 << number
            tokens = (index + 1) * STRIDE_TOKENS
            new = (device | mask >> MAX_REPLICAS) & open_any
            open_any &= ~new
            _note(anywhere, new, tokens)
            new = device & open_device
            open_device &= ~new
            _note(on_device, new, tokens)
        found = {}
        for number, tokens in anywhere.items():
            device = on_device.get(number, 0)
            found[number] = Found(device, tokens - device)
        return found


def _note(depths: dict[int, int], mask: int, tokens: int) -> None:
    while mask:
        lowest = mask & -mask
        depths[lowest.bit_length() - 1] = tokens
        mask ^= lowest
