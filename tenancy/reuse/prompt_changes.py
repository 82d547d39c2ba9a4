"""Compare each prompt of a tenant with its earlier ones: what could be reused, what was lost, and
where a prompt parts from the prompts before it although much the same text follows.

A prompt is a chain of parts (all tools, a system text, a message). Of each part the module keeps
keyed digests, its length, and, of system texts and first messages, keyed digests of twelve tokens
in a row, which show where a text changes and how much of the rest is the same. Of each prefix it
counts uses and hits. It keeps no token and no text, and the key never leaves the process. Memory is
bounded: some hundred prompts of the latest namespaces. The module knows no engine and no clock.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import nlargest, nsmallest
from itertools import islice, pairwise
from sys import intern
from typing import Literal, TypeVar

from msgspec import Struct, structs
from xxhash import xxh3_64, xxh3_64_intdigest

T = TypeVar("T")

NAMESPACES_MAX = 256
"""Namespaces of one tenant with prompts that are kept, the latest ones."""
SIBLINGS_MAX = 16
"""Namespaces that a new prompt is looked up in beside its own, the latest ones."""
NAMESPACES_BYTES_MAX = 3 * 2**20
"""About how large they are together; beyond it the oldest ones are dropped."""
RECENT_MAX = 32
"""Prompts of one namespace that the next one is compared with."""
RECENT_PARTS_MAX = 640
"""Parts of these prompts together."""
HEADS_MAX = 12
"""Beginnings (tools and system texts) of one namespace that the next one is compared with."""
PREFIXES_MAX = 1_024
"""Prefixes of one namespace that are known again."""
WINDOWS_MAX = 20
"""Parts of one namespace with window digests, at most 10 kB each."""
PARTS_MAX = 512
"""Parts of one prompt that are considered."""
PLACES_MAX = 256
"""Places of one tenant where prompts part that are counted, the latest ones."""
PATH_CHARS_MAX = 120
"""Characters of a path that are kept."""
_INDEX = re.compile(r"\[(\d+)\]")

WINDOW_TOKENS = 12
"""Tokens in a row that one digest covers: about nine words, which unrelated texts rarely share."""
WINDOWED_TOKENS_MAX = 8_192
SAMPLED_WINDOWS = 192
"""Of a part with more windows than this, a power of two less of them are kept, by first token."""
CHECK_TOKENS = 16
"""Tokens between two digests of a text's beginning: how exactly the place of a change is known."""

LEAST_WINDOWS = 32
_HISTORY_BYTES = 3_000
_RANK_FACTOR, _RANK_MAX = 2_654_435_761, 2**32 - 1  # Knuth's multiplicative hash

Tier = Literal["tools", "system", "messages"]
ChangeCause = Literal[
    "tools_reordered", "tools_changed", "system_changes", "history_edited", "prompt_changes"
]


class PromptPart(Struct, frozen=True):
    """A part of a prompt: its tokens are [start, end)."""

    path: str
    tier: Tier
    start: int
    end: int
    is_answer: bool = False
    """An assistant's message, a tool call or its result: what only a conversation has."""


class ToolDigest(Struct, frozen=True, array_like=True, gc=False):
    """A tool: digests of its name, and of all that it says, in any order of its keys."""

    name: int
    content: int


class ObservedPrompt(Struct, frozen=True):
    """A prompt that was computed. `total` and `cached`: tokens of the prompt, and those found in
    the cache."""

    data: bytes
    """Its first token ids, four bytes each; `parts` cover no more."""
    parts: tuple[PromptPart, ...]
    total: int
    cached: int
    started_s: float
    ended_s: float
    epoch: str = ""
    losses: Mapping[str, int] | None = None
    """Blocks that its namespace has lost so far, by cause; None if that was not looked up."""
    tools: tuple[ToolDigest, ...] = ()
    """In the order in which the request has them."""


class Divergence(Struct, frozen=True):
    """Where a prompt parts from an earlier one."""

    cause: ChangeCause
    path: str
    shared: int
    """Tokens before the first difference, and `at` those of them inside the part at `path`, which
    has `part_tokens`."""
    at: int
    part_tokens: int
    repeated: int
    """Tokens behind the difference that the earlier prompt also had there."""
    changed: int
    """The tokens of the part that differ, about."""
    is_repetition: bool
    """The repeated tokens are so many that the change, and not another text, is why they were
    computed again."""
    is_shortened: bool
    """Messages before the rest were left out."""
    has_other_tools: bool = False
    """Tools were added, left out or replaced by others."""


class PromptReuse(Struct, frozen=True):
    """A prompt beside the earlier ones of its namespace."""

    known: int = 0
    """Tokens of the longest prefix that an earlier prompt had computed before this one began, and
    `known_digest` its digest; it was last used `idle_s` seconds before."""
    known_digest: int = 0
    lost: int = 0
    """Those of its tokens that were not cached any more, because of `lost_by`: `restarted`, or the
    causes by which the namespace lost blocks since, with their number."""
    idle_s: float = 0.0
    lost_by: Mapping[str, int] = {}
    divergence: Divergence | None = None
    is_new_head: bool = False
    """No earlier prompt began with the same tools and system text."""
    is_new_conversation: bool = False
    """The first message is new, and nothing that was computed again is to blame."""
    known_elsewhere: int = 0
    """Tokens of the longest prefix that an earlier prompt of a sibling namespace had computed, if
    it is longer than `known`."""


LOST_TOKENS_MIN = 64
"""Fewer tokens are not reported as lost: a cache keeps whole blocks."""
REPEATED_TOKENS_MIN = 64
REPEATED_SHARE_MIN = 0.25
"""The least share of the tokens behind a change that must be the same as before."""
REPEATED_SHARE_OF_MESSAGE_MIN = 0.7
"""The same inside one message: users ask similar things, about the same documents."""
ENOUGH_REPEATED_SHARE = 0.8
COMPARED_MAX = 12
STABLE_SHARE_MIN = 0.35
"""The least share of the latest `COMPARED_MAX` prompts that must have the rest of a message too."""


class PrefixUsage(Struct):
    """A prefix up to the end of the part at `path`."""

    digest: int
    path: str
    tokens: int
    uses: int = 0
    """Prompts that began with it."""
    hits: int = 0
    """Those of them that found all of it cached."""


class PrefixBreak(Struct):
    """A place where prompts part from earlier ones."""

    place: str
    count: int = 0
    """Prompts that parted here."""
    tokens: int = 0
    """Their tokens from the first difference on."""


class _Prefix(PrefixUsage):
    """A known prefix: when it was last used, in which state of the cache, and whether a prompt
    ended here."""

    ended_s: float = 0.0
    epoch: str = ""
    losses: Mapping[str, int] = {}
    is_end: bool = False


class _Windows(Struct, frozen=True):
    """Digests of a part's token windows: `places` and `digests` of those whose `ranks`, which their
    first tokens give, are below 2**32 / `step`."""

    step: int
    places: array[int]
    digests: array[int]
    ranks: array[int]
    first: array[int]
    """Digests of its first tokens, up to each of them."""
    checks: array[int]
    """Digests of its beginning, after each `CHECK_TOKENS`."""
    least: frozenset[int]
    """The smallest digests, of which texts with much in common share some."""
    tokens: int


class _Overlap(Struct, frozen=True):
    """Tokens that two texts share before their first difference, and behind it."""

    before: int
    behind: int


class _Sketch(Struct, frozen=True):
    """A prompt's digests: `own` of each part's tokens, `upto` of all tokens up to its end.
    `tool_names`, `tools`: digests of the tools' names and contents, sorted."""

    parts: tuple[PromptPart, ...]
    own: tuple[int, ...]
    upto: tuple[int, ...]
    heads: int
    """How many parts come before the first message."""
    own_set: frozenset[int]
    """`own` as a set."""
    tool_names: tuple[int, ...]
    tools: tuple[int, ...]

    @property
    def head_digest(self) -> int:
        """Digest of everything before the first message; 0 if there is nothing."""
        return self.upto[self.heads - 1] if self.heads else 0


class _History:
    """The prompts of one namespace. `siblings`: see `PromptChanges.note`."""

    def __init__(self, siblings: bytes) -> None:
        self.siblings = siblings
        self.prefixes: OrderedDict[int, _Prefix] = OrderedDict()
        self.recent: deque[_Sketch] = deque(maxlen=RECENT_MAX)
        self.heads: OrderedDict[int, _Sketch] = OrderedDict()
        self.windows: OrderedDict[int, _Windows] = OrderedDict()
        self.bytes = 0

    def size(self) -> int:
        """Return about how many bytes this takes. O(prompts kept)."""
        parts = sum(len(one.parts) for one in (*self.recent, *self.heads.values()))
        windows = sum(len(one.places) + len(one.checks) for one in self.windows.values())
        return _HISTORY_BYTES + 450 * len(self.prefixes) + 300 * parts + 16 * windows


class PromptChanges:
    """The latest prompts of one tenant, as digests. Belongs to one thread."""

    def __init__(self, key: int) -> None:
        """`key`: a random number of 64 bits; digests of different keys tell nothing together."""
        self._key = key
        self._histories: OrderedDict[bytes, _History] = OrderedDict()
        self._bytes = 0
        self._breaks: OrderedDict[str, PrefixBreak] = OrderedDict()

    def note(self, namespace: bytes, prompt: ObservedPrompt, siblings: bytes = b"") -> PromptReuse:
        """Compare a prompt with the earlier ones of its namespace, and keep it.

        `siblings`: what namespaces share that differ only in the client's key; empty for one
        without siblings. O(tokens) at memory speed; of a new system text or first message about 0.2
        us a token.
        """
        history = self._histories.get(namespace)
        if history is None:
            history = self._histories[namespace] = _History(siblings)
        self._histories.move_to_end(namespace)
        sketch = self._sketch(prompt)
        if not sketch.parts:
            return PromptReuse()
        found = self._compare(history, sketch, prompt)
        if siblings and found.known < sketch.parts[-1].end:
            elsewhere = self._known_to_siblings(history, sketch, found.known, prompt.started_s)
            found = structs.replace(found, known_elsewhere=elsewhere)
        if found.divergence is not None:
            self._count_break(found.divergence, prompt.total)
        self._keep(history, sketch, prompt)
        self._drop_oldest(history)
        return found

    def top(self, most: int = 20) -> list[PrefixUsage]:
        """Return the prefixes that saved most tokens, over all namespaces. O(prefixes)."""
        sums: dict[int, PrefixUsage] = {}
        for history in self._histories.values():
            for one in history.prefixes.values():
                known = sums.setdefault(one.digest, PrefixUsage(one.digest, one.path, one.tokens))
                known.uses, known.hits = known.uses + one.uses, known.hits + one.hits
        return nlargest(most, sums.values(), key=lambda one: (one.tokens * one.hits, one.tokens))

    def breaks(self, most: int = 20) -> list[PrefixBreak]:
        """Return the places where prompts part with most tokens behind. O(places)."""
        return nlargest(most, self._breaks.values(), key=lambda one: one.tokens)

    def _count_break(self, found: Divergence, total: int) -> None:
        place = fold_indexes(found.path)
        known = self._breaks.setdefault(place, PrefixBreak(place))
        known.count, known.tokens = known.count + 1, known.tokens + total - found.shared
        self._breaks.move_to_end(place)
        if len(self._breaks) > PLACES_MAX:
            self._breaks.popitem(last=False)

    def _known_to_siblings(
        self, history: _History, sketch: _Sketch, known: int, started_s: float
    ) -> int:
        """Return the tokens of the longest prefix beyond `known` that a sibling had computed; 0
        without one. O(namespaces of the tenant, and parts in `SIBLINGS_MAX` of them)."""
        others = (
            one
            for one in reversed(self._histories.values())
            if one is not history and one.siblings == history.siblings
        )
        longest = 0
        for other in islice(others, SIBLINGS_MAX):
            for part, digest in zip(reversed(sketch.parts), reversed(sketch.upto), strict=True):
                if part.end <= max(known, longest):
                    break
                prefix = other.prefixes.get(digest)
                if prefix is not None and prefix.ended_s <= started_s:
                    longest = part.end
                    break
        return longest

    # -- comparing ----------------------------------------------------------------------------

    def _compare(self, history: _History, sketch: _Sketch, prompt: ObservedPrompt) -> PromptReuse:
        deepest = next(
            (at for at in reversed(range(len(sketch.upto))) if sketch.upto[at] in history.prefixes),
            -1,
        )
        past = _past(history, sketch, prompt)
        next_part = deepest + 1
        is_new_head = sketch.heads > 0 and next_part < sketch.heads
        divergence = None
        if next_part < len(sketch.parts):
            divergence = self._divergence(history, sketch, next_part, prompt)
        is_repetition = divergence is not None and divergence.is_repetition
        is_first_message = next_part == sketch.heads and next_part < len(sketch.parts)
        return structs.replace(
            past,
            divergence=divergence,
            is_new_head=is_new_head,
            is_new_conversation=not is_repetition and (is_new_head or is_first_message),
        )

    def _divergence(
        self, history: _History, sketch: _Sketch, at: int, prompt: ObservedPrompt
    ) -> Divergence | None:
        """Return where the prompt parts from the earlier prompt that had most of the rest; None
        without one. `at`: its first part that is new here."""
        before = sketch.upto[at - 1] if at else 0
        others: Iterable[_Sketch] = reversed(history.recent)
        if at < sketch.heads:
            others = reversed(history.heads.values())
        best: Divergence | None = None
        compared = repeated = 0
        for other in others:
            if len(other.parts) <= at or (at and other.upto[at - 1] != before):
                continue
            looks_inside = compared < COMPARED_MAX
            found = self._compare_from(
                history, sketch, other, at, prompt, looks_inside=looks_inside
            )
            if looks_inside:
                compared += 1
                repeated += found.is_repetition
            if best is None or (found.is_repetition, found.repeated, found.shared) > (
                best.is_repetition,
                best.repeated,
                best.shared,
            ):
                best = found
                if best.is_repetition and best.cause != "prompt_changes":
                    rest = prompt.parts[-1].end - best.shared
                    if best.repeated >= ENOUGH_REPEATED_SHARE * rest:
                        break  # another prompt has hardly more in common
        if best is not None and best.cause == "prompt_changes":
            # Documents come back in some prompts, in any place; text that stays is in many.
            is_stable = repeated >= STABLE_SHARE_MIN * compared
            best = structs.replace(best, is_repetition=best.is_repetition and is_stable)
        return best

    def _compare_from(
        self,
        history: _History,
        sketch: _Sketch,
        other: _Sketch,
        at: int,
        prompt: ObservedPrompt,
        *,
        looks_inside: bool,
    ) -> Divergence:
        """Compare with one earlier prompt that has the same parts before part `at`.

        `looks_inside`: also at what the texts of this part have in common. O(parts), and then
        O(windows).
        """
        part, was = sketch.parts[at], other.parts[at]
        inside, is_reordered = _Overlap(0, 0), False
        if part.tier == was.tier:
            is_reordered = part.tier == "tools" and sketch.tools == other.tools != ()
            if at <= sketch.heads and looks_inside:
                inside = self._overlap(history, sketch, other, at, prompt)
        length = part.end - part.start
        if is_reordered:
            inside = _Overlap(inside.before, length - inside.before)
        same: Counter[int] = Counter()
        if not other.own_set.isdisjoint(sketch.own[at:]):
            same = Counter(sketch.own[at:]) & Counter(other.own[at:])
        later, has_answer = 0, False
        for place in range(at, len(sketch.parts)) if same else ():
            own, one = sketch.own[place], sketch.parts[place]
            if same[own] > 0:
                same[own] -= 1
                later += one.end - one.start
                has_answer |= one.is_answer
        is_shortened = sketch.own[at] in other.own[at + 1 :]
        cause = _cause(part, was, is_reordered=is_reordered, has_answer=has_answer)
        repeated = inside.behind + later
        upto = sketch.parts[max(sketch.heads - 1, at)].end if at < sketch.heads else prompt.total
        rest = max(1, upto - part.start - inside.before)
        least, is_continuation = REPEATED_SHARE_MIN, False
        if cause == "prompt_changes":
            # A conversation that continues an earlier prompt with another answer is not a change.
            least = REPEATED_SHARE_OF_MESSAGE_MIN
            is_continuation = part.is_answer or (at > 0 and _ends_at(history, sketch.upto[at - 1]))
        return Divergence(
            cause=cause,
            path=part.path,
            shared=part.start + inside.before,
            at=inside.before,
            part_tokens=length,
            repeated=repeated,
            changed=max(1, length - inside.before - inside.behind),
            is_repetition=repeated >= max(REPEATED_TOKENS_MIN, least * rest)
            and not is_continuation,
            is_shortened=is_shortened,
            has_other_tools=cause == "tools_changed" and sketch.tool_names != other.tool_names,
        )

    def _overlap(
        self, history: _History, sketch: _Sketch, other: _Sketch, at: int, prompt: ObservedPrompt
    ) -> _Overlap:
        """Return what two texts have in common, by their windows; nothing if the earlier one's are
        not kept any more."""
        theirs = history.windows.get(other.own[at])
        own = self._windows_of(history, sketch.own[at], prompt.data, sketch.parts[at])
        return _Overlap(0, 0) if theirs is None else _overlap(own, theirs)

    def _drop_oldest(self, history: _History) -> None:
        """Drop the namespaces used longest ago, until the others have room beside `history`."""
        size = history.size()
        self._bytes += size - history.bytes
        history.bytes = size
        while len(self._histories) > 1 and (
            self._bytes > NAMESPACES_BYTES_MAX or len(self._histories) > NAMESPACES_MAX
        ):
            self._bytes -= self._histories.popitem(last=False)[1].bytes

    # -- keeping ------------------------------------------------------------------------------

    def _keep(self, history: _History, sketch: _Sketch, prompt: ObservedPrompt) -> None:
        for place, digest in enumerate(sketch.upto):
            prefix, part = history.prefixes.get(digest), sketch.parts[place]
            if prefix is None:
                path = intern(part.path[:PATH_CHARS_MAX])  # the same in many prompts
                prefix = history.prefixes[digest] = _Prefix(digest, path, part.end)
            history.prefixes.move_to_end(digest)
            prefix.uses += 1
            prefix.hits += part.end <= prompt.cached
            prefix.ended_s, prefix.epoch = prompt.ended_s, prompt.epoch
            if prompt.losses is not None:
                prefix.losses = prompt.losses
            if place == len(sketch.upto) - 1 and place >= sketch.heads:
                prefix.is_end = True
        _shorten(history.prefixes, PREFIXES_MAX)
        parts_max = max(RECENT_PARTS_MAX, 2 * len(sketch.parts))
        previous = history.recent[-1] if history.recent else None
        if previous is not None and sketch.upto[: len(previous.upto)] == previous.upto:
            history.recent.pop()  # this prompt continues it
        history.recent.append(sketch)
        while len(history.recent) > 1 and sum(len(one.parts) for one in history.recent) > parts_max:
            history.recent.popleft()
        for place in range(min(sketch.heads + 1, len(sketch.parts))):
            part, own = sketch.parts[place], sketch.own[place]
            self._windows_of(history, own, prompt.data, part)
        if sketch.heads:
            history.heads[sketch.head_digest] = sketch
            history.heads.move_to_end(sketch.head_digest)
            _shorten(history.heads, HEADS_MAX)

    def _sketch(self, prompt: ObservedPrompt) -> _Sketch:
        data, key = prompt.data, self._key
        own, upto, running = [], [], xxh3_64(seed=key)
        for part in prompt.parts[:PARTS_MAX]:
            text = data[4 * part.start : 4 * part.end]
            running.update(text)
            own.append(xxh3_64_intdigest(text, seed=key))
            upto.append(running.intdigest())
        parts = prompt.parts[:PARTS_MAX]
        heads = next((n for n, part in enumerate(parts) if part.tier == "messages"), len(parts))
        names, tools = (
            tuple(sorted(xxh3_64_intdigest(struct.pack("<Q", one), seed=key) for one in digests))
            for digests in (
                [one.name for one in prompt.tools],
                [one.content for one in prompt.tools],
            )
        )
        return _Sketch(parts, tuple(own), tuple(upto), heads, frozenset(own), names, tools)

    def _windows_of(self, history: _History, own: int, data: bytes, part: PromptPart) -> _Windows:
        found = history.windows.get(own)
        if found is None:
            found = history.windows[own] = self._windows(data[4 * part.start : 4 * part.end])
        history.windows.move_to_end(own)
        _shorten(history.windows, WINDOWS_MAX)
        return found

    def _windows(self, data: bytes) -> _Windows:
        """Return the window digests of a text. O(tokens), about 0.1 us each."""
        key, tokens = self._key, memoryview(data).cast("I").tolist()
        count = max(0, min(len(tokens), WINDOWED_TOKENS_MAX) - WINDOW_TOKENS + 1)
        step = 1
        while count > step * SAMPLED_WINDOWS:
            step *= 2
        ranks = [token * _RANK_FACTOR & _RANK_MAX for token in tokens[:count]]
        limit = _RANK_MAX // step
        places = [at for at, rank in enumerate(ranks) if rank <= limit]
        width = 4 * WINDOW_TOKENS
        digests = [xxh3_64_intdigest(data[4 * at : 4 * at + width], key) for at in places]
        first_tokens = range(1, min(len(tokens), WINDOW_TOKENS) + 1)
        checks, digest = [], key
        checked = 4 * min(len(tokens), WINDOWED_TOKENS_MAX)
        for end in range(4 * CHECK_TOKENS, checked + 1, 4 * CHECK_TOKENS):
            digest = xxh3_64_intdigest(data[end - 4 * CHECK_TOKENS : end], digest)
            checks.append(digest)
        return _Windows(
            step,
            array("I", places),
            array("Q", digests),
            array("I", [ranks[at] for at in places]),
            array("Q", [xxh3_64_intdigest(data[: 4 * n], key) for n in first_tokens]),
            array("Q", checks),
            frozenset(nsmallest(LEAST_WINDOWS, digests)),
            len(tokens),
        )


def _past(history: _History, sketch: _Sketch, prompt: ObservedPrompt) -> PromptReuse:
    """Return the prefix known before the prompt began: since when it was not used, and how many of
    its tokens were lost and why."""
    for place in reversed(range(len(sketch.upto))):
        digest = sketch.upto[place]
        prefix = history.prefixes.get(digest)
        if prefix is None or prefix.ended_s > prompt.started_s:
            continue
        known, idle_s = sketch.parts[place].end, prompt.started_s - prefix.ended_s
        lost = min(known, prompt.total - 1) - prompt.cached
        if lost < LOST_TOKENS_MIN:
            return PromptReuse(known, digest, idle_s=idle_s)
        lost_by = {}
        if prefix.epoch != prompt.epoch:
            lost_by["restarted"] = 1
        else:
            for cause, blocks in (prompt.losses or {}).items():
                if blocks > prefix.losses.get(cause, 0):
                    lost_by[cause] = blocks - prefix.losses.get(cause, 0)
        return PromptReuse(known, digest, lost, idle_s, lost_by)
    return PromptReuse()


def _ends_at(history: _History, digest: int) -> bool:
    prefix = history.prefixes.get(digest)
    return prefix is not None and prefix.is_end


def _cause(
    part: PromptPart, was: PromptPart, *, is_reordered: bool, has_answer: bool
) -> ChangeCause:
    if "tools" in (part.tier, was.tier):
        return "tools_reordered" if is_reordered else "tools_changed"
    if "system" in (part.tier, was.tier):
        return "system_changes"
    return "history_edited" if has_answer else "prompt_changes"


def _overlap(own: _Windows, theirs: _Windows) -> _Overlap:
    """Compare two texts by their windows. O(windows)."""
    before = CHECK_TOKENS * common_prefix(own.checks, theirs.checks)
    if not before:
        before = common_prefix(own.first, theirs.first)
    if own.least.isdisjoint(theirs.least):
        return _Overlap(before, 0)
    limit = _RANK_MAX // max(own.step, theirs.step)
    behind = _digests_behind(own, before, limit)
    total = sum(behind.values())
    if not total:
        return _Overlap(before, 0)
    share = sum((behind & _digests_behind(theirs, before, limit)).values()) / total
    # A change of one token hides all windows that contain it.
    hidden = 0 if share in (0.0, 1.0) else WINDOW_TOKENS - 1
    rest = max(0, own.tokens - before)
    return _Overlap(before, min(rest, round(share * rest) + hidden))


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many first items are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _digests_behind(windows: _Windows, place: int, limit: int) -> Counter[int]:
    rows = zip(windows.places, windows.digests, windows.ranks, strict=True)
    return Counter([digest for at, digest, rank in rows if at >= place and rank <= limit])


def _shorten(kept: OrderedDict[int, T], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)


def parts_of(marks: Sequence[tuple[int, str, Tier, bool]], tokens: int) -> tuple[PromptPart, ...]:
    """Return the parts of a prompt from the ends of its segments: (end, path, tier, is_answer), in
    any order. Tools that follow each other are one part; text behind the last end belongs to no
    part; a prompt without marks is one message."""
    if not marks:
        return (PromptPart("prompt", "messages", 0, tokens),) if tokens else ()
    found: list[PromptPart] = []
    ordered = sorted(((0, "", "messages", False), *marks), key=lambda mark: mark[0])
    for (start, *_), (end, path, tier, is_answer) in pairwise(ordered):
        if end <= start or end > tokens:
            continue
        if tier == "tools" and found and found[-1].tier == "tools":
            first = found.pop()
            found.append(PromptPart(first.path, "tools", first.start, end))
        else:
            path = "tools" if tier == "tools" else path
            found.append(PromptPart(path, tier, start, end, is_answer))
    return tuple(found)


@lru_cache(maxsize=512)
def fold_indexes(path: str) -> str:
    """Return the path with indexes above 1 folded, so all later messages are one place."""
    folded = _INDEX.sub(lambda match: match[0] if int(match[1]) < 2 else "[2+]", path)
    return folded[:PATH_CHARS_MAX]
