"""Checks of every request's events, and of an engine while it runs.

`Stream` follows one request from submission to its one final event. `World` is a whole engine over
the token oracle, checked at every step; the property machine and the simulation drive it without
knowing the right answers. Each failure says what was expected. The invariants' numbers: I1-I3
blocks recounted, I4 no foreign KV, I10 and I12 counters recounted, I14 usage adds up, I15 one
ending, I16 progress, I18 the same output in any batch, I22 true gauges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.api import (
    Erase,
    Event,
    Finished,
    Peek,
    PromptLogprobs,
    Request,
    SampleEnded,
    Started,
    Tokens,
)
from engine.cache import PrefixCache
from engine.client.namespace_stats import NamespaceTable
from engine.config import EngineConfig
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.drafts.drafter import Drafter
from engine.levels.levels import Levels
from engine.statistics import Stats
from tests.draft_oracle import OracleSource
from tests.fakes import FakeClock, FakeRunner, solo_output
from tests.grammars import PolledGrammars, constrained_output

ENDINGS = {
    "done": {""},
    "cancelled": {""},
    "timeout": {"timeout"},
    "shutdown": {"draining"},
    "failed": {"nan_logits", "step_failed", "kv_promised", "grammar_dead_end"},
    "refused": {
        "duplicate_request",
        "kv_exceeded",
        "context_exceeded",
        "queue_full",
        "draining",
        "grammar_invalid",
        "attention_not_allowed",
        "attention_with_prompt_logprobs",
    },
}

MakeLevels = Callable[[PrefixCache, Callable[[], FakeRunner]], Levels]
"""Makes the levels below a cache, over the runner's slots."""


class RuleBroken(AssertionError):
    """The engine broke a rule."""


FREE_DRAFTS = (1.0,) * 64
"""Seconds of steps that take no longer with drafts: all that are proposed are verified."""


def expect(holds: bool, what: str, *found: object) -> None:
    """Raise RuleBroken unless `holds`."""
    if not holds:
        raise RuleBroken(f"{what}: {', '.join(map(str, found))}")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


class Stream:
    """One request's events, checked on arrival against the output of the request alone."""

    def __init__(self, request: Request, vocab_size: int, now_s: float) -> None:
        self.request = request
        self.submitted_s = now_s
        self.started: Started | None = None
        self.prompt_pieces: list[int] = []
        self.outputs: list[list[int]] = [[] for _ in range(request.samples)]
        self.ended: dict[int, SampleEnded] = {}
        self.cut: dict[int, int] = {}
        self.finished: Finished | None = None
        self.grammar_endings: dict[int, str] = {}
        self.alone = [
            self._output_alone(index, vocab_size) if request.max_tokens or request.grammar else []
            for index in range(request.samples)
        ]

    def _output_alone(self, index: int, vocab_size: int) -> list[int]:
        request = self.request
        if request.grammar is not None:
            output, ending = constrained_output(request, index, vocab_size)
            self.grammar_endings[index] = ending
            return output
        whole = solo_output(request.tokens, request.sampling, index, request.max_tokens, vocab_size)
        for count, token in enumerate(whole, 1):
            if token in request.stop_token_ids and count >= request.min_tokens:
                return whole[:count]
        return whole

    def take(self, event: Event, now_s: float) -> None:
        """Check one more event of this request."""
        name = self.request.request_id
        expect(self.finished is None, "an event after the final one", name, event)  # I15
        if isinstance(event, Started):
            expect(self.started is None, "started twice", name)
            expect(event.prompt_tokens == len(self.request.tokens), "prompt tokens", event)
            expect(event.cached_tokens < event.prompt_tokens, "nothing left to compute", event)
            self.started = event
        elif isinstance(event, PromptLogprobs):
            self._take_prompt(event)
        elif isinstance(event, Tokens):
            self._take_tokens(event)
        elif isinstance(event, SampleEnded):
            self._take_end(event)
        else:
            self._take_final(event, now_s)

    def _take_prompt(self, event: PromptLogprobs) -> None:
        expect(not any(self.outputs), "prompt logprobs", "late")
        known = [token.token_id for token in event.tokens]
        rest = list(self.request.tokens[sum(self.prompt_pieces) :])
        expect(known == rest[: len(known)], "prompt logprobs of other tokens, or twice", known)
        self.prompt_pieces.append(len(known))

    def _take_tokens(self, event: Tokens) -> None:
        expect(self.started is not None, "tokens before the start", event)
        expect(event.index not in self.ended, "tokens after the end of the sample", event)
        output, alone = self.outputs[event.index], self.alone[event.index]
        output.extend(token.token_id for token in event.tokens)
        expect(
            output == alone[: len(output)],
            "not the output of the request alone (I18)",
            output,
            alone,
        )

    def _take_end(self, event: SampleEnded) -> None:
        expect(event.index not in self.ended, "a sample ended twice", event)
        output, alone = self.outputs[event.index], self.alone[event.index]
        self.ended[event.index] = event
        if event.index in self.cut:
            expect(event.reason == "stop", "a stop string was found", event)
            expect(event.output_tokens <= self.cut[event.index], "charged beyond the stop", event)
            return
        expect(output == alone, "ended before its last token", output, alone)
        expect(event.output_tokens == len(output), "a sample's output tokens", event, len(output))
        stopped = bool(output) and output[-1] in self.request.stop_token_ids
        stopped = stopped and len(output) >= self.request.min_tokens
        stopped = stopped or self.grammar_endings.get(event.index) == "stop"
        expect(event.reason == ("stop" if stopped else "length"), "why it ended", event)

    def _take_final(self, event: Finished, now_s: float) -> None:
        request, usage = self.request, event.usage
        self.finished = event
        expect(event.code in ENDINGS[event.ending], "an ending with that code", event)
        prompt = usage.cached_tokens + usage.computed_tokens
        expect(prompt == usage.prompt_tokens, "prompt = cached + computed (I14)", usage)
        expect(prompt <= len(request.tokens), "more prompt tokens than it has", usage)
        cached = 0 if self.started is None else self.started.cached_tokens
        expect(usage.cached_tokens == cached, "the cached tokens it started with", usage, cached)
        got = sum(map(len, self.outputs))
        if not self.cut:
            expect(usage.output_tokens == got, "output tokens", usage, got)
        expect(usage.output_tokens <= got, "charged for tokens it never got", usage, got)
        expect((usage.first_token_s is not None) == (got > 0), "the first token's time", usage)
        expect(min(usage.queue_s, usage.total_s) >= 0, "a time below zero", usage)
        due = {"grammar_dead_end": "dead end", "grammar_invalid": "refused"}.get(event.code)
        expect(due is None or due in self.grammar_endings.values(), "a grammar's end", event)
        if event.ending == "done":
            self._take_done(event)
        if event.ending == "timeout":
            due_s = self.submitted_s + (request.deadline_s or 0.0)
            expect(self.started is None and now_s >= due_s, "a timeout", now_s, due_s)
        if event.ending == "refused":
            expect(self.started is None, "refused after it had started", event)

    def _take_done(self, event: Finished) -> None:
        request = self.request
        samples = request.samples if request.max_tokens else 1
        if not self.cut:
            expect(len(self.ended) == samples, "done before every sample", self.ended)
            prompt = event.usage.prompt_tokens
            expect(prompt == len(request.tokens), "prompt tokens when done", prompt)
            expect(
                sum(self.prompt_pieces) == (0 if request.prompt_logprobs is None else prompt),
                "prompt logprobs",
                event,
            )
            lost = {"dead end", "refused"} & set(self.grammar_endings.values())
            expect(not lost, "done with a grammar that has no end", event, lost)
        total = sum(end.output_tokens for end in self.ended.values())
        if len(self.cut) <= len(self.ended):
            expect(event.usage.output_tokens <= total, "usage beyond the samples'", event, total)


class World:
    """A checked engine over the token oracle.

    `restart` drops it and starts another epoch. `make_*` accept variants with a planted fault.
    `promises`: memory may be promised away (floors and leases), so a request may fail for lack of
    it. `windows`: the window groups of its KV. `grammars`: the grammar source. `make_levels`: what
    lies below the device, over its cache and its runner. `draft_right`: sequences get drafts from
    an oracle that is right with this probability.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        blocks: int,
        block_size: int,
        depth: int = 1,
        vocab_size: int = 3,
        context_tokens: int = 24,
        promises: bool = True,
        windows: tuple[int, ...] = (),
        make_cache: Callable[..., PrefixCache] = PrefixCache,
        make_core: Callable[..., Core] = Core,
        grammars: PolledGrammars | None = None,
        make_levels: MakeLevels | None = None,
        draft_right: float | None = None,
    ) -> None:
        self.config = config
        self.blocks, self.block_size, self.depth = blocks, block_size, depth
        self.vocab_size, self.context_tokens = vocab_size, context_tokens
        self.promises = promises
        self.windows = windows
        self.clock = FakeClock()
        self.streams: dict[str, Stream] = {}
        self.endings: dict[str, int] = {}
        self.cached_tokens = 0
        self.written: dict[bytes, list[Stream]] = {}
        self.matched_before: dict[str, list[Stream]] = {}
        self.grammars = grammars or PolledGrammars()
        self._make_cache, self._make_core = make_cache, make_core
        self._make_levels = make_levels
        self._draft_right = draft_right
        self.restart()

    def restart(self) -> None:
        """Drop the engine and all its state; its live requests never get a final event."""
        self.cache = self._make_cache(
            blocks=self.blocks, block_size=self.block_size, windows=self.windows
        )
        self.grammars.close()
        self.runner = FakeRunner(
            self.blocks, self.block_size, vocab_size=self.vocab_size, windows=self.windows
        )
        self.runner.state_blocks = self.cache.states.blocks
        below = {}
        if self._make_levels is not None:
            below["levels"] = self._make_levels(self.cache, lambda: self.runner)
        self.core = self._make_core(
            self.cache,
            self.runner,
            self.config,
            self.clock,
            vocab_size=self.vocab_size,
            context_tokens=self.context_tokens,
            pipeline_depth=self.depth,
            constraints=Constraints(self.grammars),
            **below,
        )
        if self._draft_right is not None:
            source = OracleSource(self._answer, self._draft_right, self.vocab_size, seed=7)
            self.core.drafts.drafter = Drafter(FREE_DRAFTS, [source])
        self.runner.namespace_of = lambda number: self._request_of(number).grant.namespace
        self.runner.spares_smoke_test = True
        self.runner.attention_of = lambda number: self._request_of(number).attention
        self.live: dict[str, Stream] = {}
        if self._make_levels is None:  # a disk outlives the engine
            self.written = {}
        self._requests: dict[int, Request] = {}
        self._stats = Stats()
        self._book = NamespaceTable()

    def _answer(self, request_id: str, index: int) -> list[int]:
        """Return what a sample is to answer; nothing for the engine's own smoke test."""
        stream = self.streams.get(request_id)
        return [] if stream is None else stream.alone[index]

    def _request_of(self, sequence_id: int) -> Request:
        """Return the request of a sequence that has had a row in a step."""
        if sequence_id not in self._requests:
            sequence = self.core.requests.sequence(sequence_id)
            assert sequence is not None, "a step has rows of live sequences"
            self._requests[sequence_id] = sequence.parent.request
        return self._requests[sequence_id]

    # -- commands -----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Submit a request; its id must be new."""
        assert request.request_id not in self.streams
        stream = Stream(request, self.vocab_size, self.clock())
        self.streams[request.request_id] = self.live[request.request_id] = stream
        self.core.submit(request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request."""
        self.core.cancel(request_id)

    def end_sample(self, request_id: str, index: int, output_tokens: int) -> None:
        """End sample `index` at a stop string, charged at most `output_tokens`."""
        stream = self.live.get(request_id)
        if stream is not None and index < stream.request.samples:
            if not stream.outputs[index]:
                return  # no text, so no stop string either
            stream.cut.setdefault(index, output_tokens)  # the first one ends the sample
        self.core.end_sample(request_id, index, output_tokens)

    def final(self, name: str) -> Finished:
        """Return the final event of a request that has ended."""
        final = self.streams[name].finished
        assert final is not None
        return final

    def peek(self, namespace: bytes, tokens: tuple[int, ...]) -> int:
        """Return the cached tokens of a prompt, and check that peeking changes nothing."""
        first = self.core.peek(Peek(1, namespace, tokens))
        expect(first == self.core.peek(Peek(1, namespace, tokens)), "a peek changed something")
        return first.cached_tokens

    def erase(self, namespace: bytes) -> None:
        """Erase a namespace; its live requests commit nothing more."""
        self.core.erase(Erase(1, namespace))
        if self._make_levels is not None:  # those that wait for a load have matched before
            for name, stream in self.live.items():
                if stream.request.grant.namespace == namespace:
                    self.matched_before[name] = self.written.get(namespace, [])
        self.written[namespace] = []

    def step(self) -> None:
        """Run one step, and check everything that must hold after it."""
        now_s = self.clock()
        for event in self.core.step():
            stream = self.live.get(event.request_id)
            expect(stream is not None, "an event of an unknown request (I15)", event)
            assert stream is not None
            stream.take(event, now_s)
            if isinstance(event, Started):
                self._check_hit(stream, event)
            if isinstance(event, Finished):
                starved = event.ending == "failed" and event.code == "kv_promised"
                expect(self.promises or not starved, "starved, with nothing promised (I16)", event)
                del self.live[event.request_id]
                name = event.ending if not event.code else f"{event.ending} {event.code}"
                self.endings[name] = self.endings.get(name, 0) + 1
        self.check()

    def settle(self) -> None:
        """Step until no work is left, within a bound given by the work (I16)."""
        tokens = sum(
            (len(s.request.tokens) + s.request.max_tokens) * s.request.samples
            for s in self.live.values()
        )
        steps = 20 + 4 * len(self.live) + 4 * tokens
        steps *= 1 if self.core.levels is None else 20
        while self.core.has_work() or (self.core.levels is not None and self.core.levels.is_busy):
            expect(steps > 0, "no progress (I16)", list(self.live))
            steps -= 1
            self.step()
        expect(not self.live, "without a final event (I15)", list(self.live))
        expect(self.core.stats().pinned_blocks == 0, "blocks pinned at rest", self.core.stats())
        forgotten = set(self.core.scheduler.ended_ids)
        expect(set(self.runner.begun) <= forgotten, "the runner misses an ended sequence")

    # -- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount blocks (I1, I2, I3, I10, I12), and check that the gauges add up (I22)."""
        self.cache.check()
        self.core.check()
        stats, before = self.core.stats(), self._stats
        held = stats.free_blocks + stats.cached_blocks + stats.pinned_blocks
        expect(held == stats.blocks == self.blocks, "blocks = free + cached + pinned", stats)
        for name in stats.__struct_fields__:
            if name.endswith("_total"):
                now, then = getattr(stats, name), getattr(before, name)
                expect(now >= then, f"{name} fell", then, now)
        expect(stats.waiting + stats.running == len(self.core.requests), "live requests", stats)
        self._book.add(self.core.stats(names=self.core.take_changed()).changed)
        whole = {
            one.namespace: one for one in self.core.stats(names=self.core.namespaces()).changed
        }
        kept = {one.namespace: one for one in self._book}
        expect(kept == whole, "namespace statistics by changes", kept, whole)
        for follower in self.core.scheduler.prefix_sharing.waiting.values():
            leader, own = follower.leader, follower.parent.request.grant.namespace
            expect(leader is not None, "waits without a leader", own)
            theirs = leader.parent.request.grant.namespace if leader else b""
            expect(theirs == own, "waits for another namespace's work", own, theirs)
        self._stats = stats

    def _check_hit(self, stream: Stream, event: Started) -> None:
        """Check that a hit is at most what its namespace has written (I4), and 0 unless read is
        granted.
        """
        request = stream.request
        self.cached_tokens += event.cached_tokens
        if not request.grant.read or request.prompt_logprobs is not None:
            expect(event.cached_tokens == 0, "a hit without the read grant", event)
        reach = 0
        before = self.matched_before.get(request.request_id, [])
        for other in (*self.written.get(request.grant.namespace, []), *before):
            for alone in other.alone:
                history = (*other.request.tokens, *alone)[: self._shared_tokens(other.request)]
                reach = max(reach, common_prefix(request.tokens, history))
        reach = min(reach, self._shared_tokens(request))
        expect(
            event.cached_tokens <= reach, "a hit on tokens its namespace never wrote", event, reach
        )
        if request.grant.write:
            self.written.setdefault(request.grant.namespace, []).append(stream)

    def _shared_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a request others may find, and it of theirs."""
        asked, longest = request.attention, self.context_tokens
        return longest if asked is None else asked.shared_tokens(self.block_size)


def outcome(act: Callable[[], Any]) -> str:
    """Return the name and text of the exception that `act` raised, or ""."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
