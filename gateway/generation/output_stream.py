"""From the engine's events to canonical deltas: text, stop strings, choices, usage.

One HTTP request may be several engine requests (several prompts), each with several samples; a
choice is prompt * choices + sample. Stop strings are found here, in text; the engine is told and
charges only the tokens that the text needed. Closing the stream cancels what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from operator import attrgetter

from msgspec.structs import replace

from engine.api import (
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    SampledToken,
    SampleEnded,
    Started,
    Tokens,
    Usage,
)
from engine.client.client import RequestStream, Wakeup
from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    Rendered,
    Text,
    TokenText,
    UsageRecord,
)
from gateway.generation.choice import Choice, token_text
from gateway.generation.output_parser import OutputParser, call_ids
from gateway.generation.usage import PLAIN, Accounting, added
from gateway.http.error_mapping import engine_refusal
from gateway.prompt import Renderer
from gateway.structured_output.grammars import schema_field

_is_over = attrgetter("is_over")


class OutputStream:
    """Deltas of one call. After the end, `usages` and `ending` say how it went. `tokens_seen`: that
    have come from the engine.

    `ending`: "done", or "cancelled", or the refusal's code. `format_violations`: answers that
    ended by themselves and are not what their format asked for.
    """

    def __init__(
        self,
        call: Call,
        rendered: Sequence[Rendered],
        renderer: Renderer,
        contracts: Sequence[Accounting] = (),
    ) -> None:
        """`contracts`: one per prompt; without them usage is physical."""
        self._call = call
        self._contracts = contracts or [PLAIN] * len(rendered)
        self._rendered = rendered
        self._renderer = renderer
        self._ranks = call.generation.samples > call.generation.choices
        self._streams: Sequence[RequestStream] = ()
        self._choices: list[list[Choice]] = []
        self._kept: list[list[list[Delta]]] = []
        self._started: list[Started | None] = []
        self.usages: list[Usage] = []
        self._records: list[UsageRecord] | None = None
        self.format_violations = 0
        self.tokens_seen = 0
        self.unneeded_tokens = 0
        """Drawn to the end of a request that had all it needed: the engine heard of it too late."""
        self.first_token_s: float | None = None
        self.ending = "cancelled"

    def follow(self, streams: Sequence[RequestStream]) -> None:
        """Read these, one for each prompt. Until then nothing is under way."""
        self._streams = streams
        samples, choices = self._call.generation.samples, self._call.generation.choices
        for prompt, stream in enumerate(streams):
            first = prompt * choices
            row = [
                self._choice(stream.request_id, prompt, sample, first + sample)
                for sample in range(samples)
            ]
            self._choices.append(row)
            self._kept.append([[] for _ in row])
            self._started.append(None)
            self.usages.append(Usage())

    async def batches(self, idle_s: float | None = None) -> AsyncGenerator[list[Delta] | None]:
        """Deltas as the engine steps: a list is what can be written at once; it may be empty.
        None where nothing has come for `idle_s`.

        Raises Refusal when the engine refuses or fails. The last batch ends with `End`.
        """
        bell = self._bell(idle_s)
        try:
            while True:
                deltas = self._news()
                if deltas is not None:
                    yield deltas
                    if self.ending == "done":
                        return
                elif not await bell.wait():
                    yield None
        finally:
            bell.close()

    async def whole(self, see: Callable[[Sequence[Delta]], None]) -> list[Delta]:
        """All of it, at its end; `see` is told of each batch as it comes. Raises Refusal."""
        bell = self._bell(None)
        whole: list[Delta] = []
        while self.ending != "done":
            deltas = self._news()
            if deltas is None:
                await bell.wait()
            else:
                see(deltas)
                whole += deltas
        return whole

    @property
    def is_over(self) -> bool:
        """Has every prompt's end been read?"""
        return all(map(_is_over, self._streams))

    async def cancel(self) -> None:
        """Nobody reads on: cancel what still runs, and learn what it has used."""
        running = [(n, stream) for n, stream in enumerate(self._streams) if not stream.is_over]
        for _, stream in running:
            stream.bell = Wakeup()
        ends = await asyncio.gather(*(stream.cancel() for _, stream in running))
        for (number, _), end in zip(running, ends, strict=True):
            if end is not None:
                self.usages[number] = end.usage

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found, as far as it is known."""
        return sum(started.cached_tokens for started in self._started if started is not None)

    def usage_so_far(self) -> UsageRecord:
        """What is known of a call that was broken off: found and computed prompt, tokens seen."""
        records = self.records_so_far()
        return added(records) if records else UsageRecord(0)

    def records_so_far(self) -> list[UsageRecord]:
        """The same for each prompt."""
        if self._records is not None:
            return self._records
        known = []
        for number, usage in enumerate(self.usages):
            started = self._started[number]
            if usage.prompt_tokens or started is None:
                known.append(usage)
                continue
            seen = sum(choice.tokens for choice in self._choices[number])
            known.append(_usage(started, seen))
        return [c.record(u) for c, u in zip(self._contracts, known, strict=False)]

    def usage_passed_on(self) -> UsageRecord:
        """Of tokens that deltas have said in full, and of the prompts of such tokens: what has been
        delivered once those deltas are written."""
        records = []
        for number, started in enumerate(self._started):
            tokens = 0
            for choice in () if self._ranks else self._choices[number]:
                tokens += choice.passed_on.upto(choice.spelt_tokens)
            if started is not None and tokens:
                records.append(self._contracts[number].record(_usage(started, tokens)))
        return added(records) if records else UsageRecord(0)

    # -- inside -------------------------------------------------------------------------------

    def _bell(self, idle_s: float | None) -> Wakeup:
        """One for all prompts."""
        bell = Wakeup(idle_s)
        for stream in self._streams:
            stream.bell = bell
        return bell

    def _news(self) -> list[Delta] | None:
        """What has come since it was asked last; None: nothing."""
        deltas: list[Delta] | None = None
        for prompt, stream in enumerate(self._streams):
            if events := stream.take():
                deltas = deltas or []
                for event in events:
                    deltas += self._take(prompt, event)
        if deltas is not None and self.is_over:
            deltas += self._end()
        return deltas

    def _take(self, prompt: int, event: Event) -> list[Delta]:
        match event:
            case Tokens(index=sample, tokens=tokens):
                self._contracts[prompt].written()
                self.tokens_seen += len(tokens)
                return self._text(prompt, sample, tokens)
            case Started():
                return self._begin(prompt, event)
            case SampleEnded():
                choice = self._choices[prompt][event.index]
                return self._close(prompt, choice, event.reason)
            case PromptLogprobs(tokens=tokens):
                return self._echo(prompt, tokens)
            case Finished():
                self._finish(prompt, event)
                return []

    def _finish(self, prompt: int, event: Finished) -> None:
        self.usages[prompt] = event.usage
        if event.ending != "done":
            self.ending = event.code or event.ending
            field = schema_field(self._call.prompts[prompt])
            raise engine_refusal(event.code, event.message, schema_field=field)
        self._contracts[prompt].written()
        # The engine may have run past a stop string before it heard of it, to the end
        # even: what is charged must not depend on who was faster.
        needed = sum([choice.tokens for choice in self._choices[prompt]])
        if needed < event.usage.output_tokens:
            self.unneeded_tokens += event.usage.output_tokens - needed
            self.usages[prompt] = replace(event.usage, output_tokens=needed)

    def _begin(self, prompt: int, event: Started) -> list[Delta]:
        self._started[prompt] = event
        self._contracts[prompt].begin(event.cached_tokens, event.leases)
        found: list[Delta] = []
        if None not in self._started:
            records = [
                contract.record(_usage(started, 0))
                for contract, started in zip(self._contracts, self._started, strict=True)
                if started is not None
            ]
            found.append(Begin(added(records), self._contracts[0].diagnosis))
        if self._call.generation.echo and self._call.generation.prompt_logprobs is None:
            ids = self._rendered[prompt].token_ids
            found.extend(self._echo(prompt, [SampledToken(token_id) for token_id in ids]))
        return found

    def _echo(self, prompt: int, tokens: Sequence[SampledToken]) -> list[Delta]:
        text = self._call.prompts[prompt].text
        if text is None:
            reader = self._renderer.detokenizer()
            text = "".join(reader.push(token.token_id) for token in tokens) + reader.finish()
        reported: tuple[TokenText, ...] = ()
        if self._call.generation.prompt_logprobs is not None:
            reported = tuple(token_text(token, self._renderer) for token in tokens)
        deltas: list[Delta] = []
        for choice in self._choices[prompt]:
            deltas.extend(self._keep(prompt, choice, [Text(choice.index, text, reported)]))
        return deltas

    def _text(self, prompt: int, sample: int, tokens: Sequence[SampledToken]) -> list[Delta]:
        choice = self._choices[prompt][sample]
        if choice.is_over:
            return []
        deltas: list[Delta] = []
        for some in choice.steps(tokens):
            text = choice.push(some)
            if text is not None:
                deltas += self._keep(prompt, choice, choice.output.push(text))
                if choice.output.reads_calls:
                    choice.passed_on.note(choice.spelt_tokens)
            if choice.stopped_by is not None or choice.output.is_full:
                self._streams[prompt].end_sample(sample, choice.tokens)
                deltas += self._close(prompt, choice, "stop")
                break
        return deltas

    def _close(self, prompt: int, choice: Choice, reason: FinishReason) -> list[Delta]:
        if choice.is_over:
            return []
        choice.is_over = True
        deltas: list[Delta] = []
        rest = choice.finish(reason)
        if rest is not None:
            deltas += choice.output.push(rest)
        deltas += choice.output.finish()
        if choice.stopped_by is not None:
            reason = "stop"
        self.format_violations += reason == "stop" and not choice.output.is_as_asked()
        called = choice.output.has_calls and reason == "stop" and choice.stopped_by is None
        why = "tool_calls" if called else reason
        end = ChoiceEnd(choice.index, why, choice.stopped_by)
        return self._keep(prompt, choice, [*deltas, end])

    def _choice(self, request_id: str, prompt: int, sample: int, index: int) -> Choice:
        make_id = call_ids(request_id, index)
        output = OutputParser(index, self._call.prompts[prompt], self._renderer, make_id)
        return Choice(index, sample, self._call, self._renderer, output)

    def _keep(self, prompt: int, choice: Choice, deltas: list[Delta]) -> list[Delta]:
        """With more samples than choices everything waits for the ranking."""
        if not self._ranks:
            return deltas
        self._kept[prompt][choice.sample].extend(deltas)
        return []

    def _end(self) -> list[Delta]:
        self.ending = "done"
        deltas: list[Delta] = []
        for prompt, row in enumerate(self._choices if self._ranks else []):
            best = sorted(row, key=lambda c: -c.logprob / max(1, c.tokens))
            choices = self._call.generation.choices
            for place, choice in enumerate(best[:choices]):
                index = prompt * choices + place
                deltas.extend(_renumbered(d, index) for d in self._kept[prompt][choice.sample])
        firsts = [u.first_token_s for u in self.usages if u.first_token_s is not None]
        self.first_token_s = min(firsts, default=None)
        self._records = self.records_so_far()
        return [*deltas, End(added(self._records))]


def _usage(started: Started, output_tokens: int) -> Usage:
    found, asked = started.cached_tokens, started.prompt_tokens
    return Usage(prompt_tokens=asked, cached_tokens=found, output_tokens=output_tokens)


def _renumbered(delta: Delta, index: int) -> Delta:
    assert isinstance(delta, Text | CallText | ChoiceEnd), "only a choice's own deltas are kept"
    return replace(delta, index=index)
