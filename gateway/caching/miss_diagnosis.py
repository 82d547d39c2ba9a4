"""Compare a prompt with that of an earlier response which the client names, by digests.

A fingerprint contains no text: only the digest and token count of every boundary of a prompt, and
the digests of settings that count as part of it. Fingerprints are kept for a limited time by
response id, within a tenant and workspace. `gateway.caching.contract` calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
from msgspec import Struct

from gateway.caching.prefix_index import DIGEST_BYTES, PrefixOrigin
from gateway.dialects.canonical import (
    Boundary,
    Call,
    Cause,
    Diagnosis,
    Prompt,
    Segment,
    Tier,
    Tool,
    path_behind,
)
from gateway.owner_cache import OwnerCache


class RememberedBoundary(Struct, frozen=True, gc=False):
    """The end of a part of an earlier prompt. `digest` covers all tokens up to it."""

    path: str
    tier: Tier
    tokens: int
    digest: bytes


class Fingerprint(Struct, frozen=True):
    """A prompt, reduced to what a comparison needs. `model` and `template`: digests, because names
    may change without a change of meaning."""

    scope: str
    """Its tenant and workspace, with a slash between."""
    model: str
    template: str
    partition: str
    total_tokens: int
    marks: tuple[RememberedBoundary, ...]
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        call: Call,
        boundaries: Sequence[Boundary],
        digests: Mapping[int, bytes],
        total_tokens: int,
        scope: str,
        origin: PrefixOrigin,
    ) -> Fingerprint:
        """Return the fingerprint of a call, its parts in the order in which its template wrote
        them. The ends of all parts have digests. O(boundaries)."""
        marks = tuple(
            RememberedBoundary(b.path, b.tier, b.end, digests[b.end])
            for b in sorted(boundaries, key=lambda b: b.end)
        )
        model, template = origin.model, origin.template
        return cls(scope, model, template, call.partition, total_tokens, marks, call.digests)


class FingerprintIndex:
    """The latest fingerprints, about 200 bytes per boundary. No tenant's requests push out what
    others compare with."""

    def __init__(self, entries_max: int, life_s: float) -> None:
        self._life_s = life_s
        self._kept: OwnerCache[tuple[str, str], tuple[float, Fingerprint]] = OwnerCache(entries_max)
        """By tenant, then by scope and response, with the time until which they are valid."""

    def __len__(self) -> int:
        return self._kept.size

    def remember(self, response_id: str, fingerprint: Fingerprint, now_s: float) -> None:
        """Keep a fingerprint. Cost: as of `OwnerCache`."""
        scope = fingerprint.scope
        entry = now_s + self._life_s, fingerprint
        self._kept.put(_tenant_of(scope), (scope, response_id), entry, 1)

    def find(self, scope: str, response_id: str, now_s: float) -> Fingerprint | None:
        """Return a response's fingerprint, if it belongs to this scope and has not expired."""
        until_s, found = self._kept.get(_tenant_of(scope), (scope, response_id)) or (0.0, None)
        return found if until_s > now_s else None


def _tenant_of(scope: str) -> int:
    return int(scope.partition("/")[0])


def compare_fingerprints(now: Fingerprint, then: Fingerprint | None) -> Diagnosis:
    """Return where `now` differs from `then`, in order of importance: model, template, partition,
    the first difference in the prompt, settings. A prompt that extends the earlier one, or is a
    prefix of it, is a hit. `then` None: the earlier prompt is not known. O(boundaries)."""
    if then is None:
        return Diagnosis("unknown")
    if now.model != then.model:
        return _miss(now, "model", 0)
    if now.template != then.template:
        return _miss(now, "template", 0)
    if now.partition != then.partition:
        return _miss(now, "partition", 0)
    same = 0
    earlier = {mark.digest for mark in then.marks}
    for mark in now.marks:
        if mark.digest not in earlier:
            break
        same = mark.tokens
    last = then.marks[-1].tokens if then.marks else 0
    if same < last and (not now.marks or same < now.marks[-1].tokens):
        first = next((mark for mark in now.marks if mark.digest not in earlier), None)
        was = next(mark for mark in then.marks if mark.tokens > same)
        tier: Cause = min((first or was).tier, was.tier, key=("tools", "system", "messages").index)
        return _miss(now, tier, same, path=(first or was).path)
    changed = _changed(dict(now.settings), dict(then.settings))
    if changed:
        return Diagnosis("unavailable", "settings", 0, same, setting=changed)
    return Diagnosis("hit", None, 0, same)


def _miss(now: Fingerprint, cause: Cause, same: int, path: str = "") -> Diagnosis:
    return Diagnosis("miss", cause, now.total_tokens - same, same, path)


def _changed(now: dict[str, str], then: dict[str, str]) -> str:
    names = [name for name in sorted({*now, *then}) if now.get(name) != then.get(name)]
    return names[0] if names else ""


class PromptDigests:
    """Digests of a prompt's content up to each boundary, computed on first use: the same under
    every model and template, as tokens are not."""

    def __init__(
        self, prompt: Prompt, boundaries: Sequence[Boundary], positions: Sequence[int]
    ) -> None:
        """`positions`: token counts of the boundaries at which a written prefix would be found."""
        self._prompt = prompt
        self._boundaries = boundaries
        self.positions = positions

    def upto(self, tokens: int) -> bytes:
        """Return the digest of the first `tokens` tokens' content; b"" for a raw prompt.
        O(characters) once."""
        return self._digests.get(tokens, b"")

    def segment_behind(self, tokens: int) -> str:
        """Return the path of the segment that contains the token after the first `tokens`."""
        return path_behind(self._boundaries, tokens)

    @cached_property
    def _digests(self) -> dict[int, bytes]:
        parts: tuple[Tool | Segment, ...] = (*self._prompt.tools, *self._prompt.segments)
        if len(parts) != len(self._boundaries):
            return {}
        running, found = hashlib.blake2b(digest_size=DIGEST_BYTES), {}
        for part, mark in zip(parts, self._boundaries, strict=True):
            running.update(msgspec.msgpack.encode(_content_of(part)))
            found[mark.tokens] = running.digest()
        return found


def _content_of(part: Tool | Segment) -> tuple[object, ...]:
    if isinstance(part, Tool):
        return ("", part.name, part.description, part.parameters)
    return (part.role, part.message, part.name, part.text, part.call, part.answers)
