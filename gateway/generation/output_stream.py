"""Turn engine events into canonical deltas: text, stop strings, choices, usage.

One HTTP request may be several engine requests (one per prompt), each with several samples; the
index of a choice is prompt * choices + sample. Stop strings are found here, in text; the engine is
asked to stop, and only the tokens that the text needed are charged. Closing the stream cancels the
requests that still run. The module knows no HTTP; `gateway.generation.generation` reads the stream.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Protocol, TypeVar

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
from engine.client.request_stream import RequestStream, Wakeup
from gateway.caching import Contract
from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    OutputCount,
    Rendered,
    Text,
    Thought,
    TokenText,
    UsageRecord,
)
from gateway.generation.admission import retry_after_s
from gateway.generation.choice import Choice, OutputParser, call_id_generator, token_text
from gateway.generation.usage import sum_usage
from gateway.http.error_mapping import engine_refusal
from gateway.prompt import Renderer
from gateway.structured_output.grammars import locate_fault
from gateway.structured_output.tool_call_parser import Cut

_is_over = attrgetter("is_over")
_tokens = attrgetter("tokens")

T = TypeVar("T")


class InThread(Protocol):
    """Runs work off the event loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return the result of `work`."""


class OutputStream:
    """The deltas of one call. After the end, `usages` and `ending` hold the result.

    `ending`: "done", "cancelled", or a refusal's code. `tokens_seen`: tokens received from the
    engine. `format_violations`: complete answers that do not satisfy their output format.
    """

    def __init__(
        self,
        call: Call,
        rendered: Sequence[Rendered],
        renderer: Renderer,
        contracts: Sequence[Contract],
        in_thread: InThread | None = None,
    ) -> None:
        """`contracts`: one per prompt. `in_thread`: where the logprobs of whole prompts are
        rendered; None if the call asks for none."""
        self._call = call
        self._in_thread = in_thread
        self._contracts = contracts
        self._rendered = rendered
        self._renderer = renderer
        self._is_ranked = call.generation.samples > call.generation.choices
        self._streams: Sequence[RequestStream] = ()
        self._on_started: Callable[[int], None] = lambda prompt: None
        self._choices: list[list[Choice]] = []
        self._buffered: list[list[list[Delta]]] = []
        self._started: list[Started | None] = []
        self.usages: list[Usage] = []
        self._records: list[UsageRecord] | None = None
        self.format_violations = 0
        self.tokens_seen = 0
        self._unneeded: list[int] = []  # tokens after a stop string, before the engine stopped
        self.first_token_s: float | None = None
        self.ending = "cancelled"

    def follow(
        self,
        streams: Sequence[RequestStream],
        on_started: Callable[[int], None] = lambda prompt: None,
    ) -> None:
        """Read these engine streams, one per prompt; `on_started` is called with the index of each
        prompt that starts.
        """
        self._streams, self._on_started = streams, on_started
        samples, choices = self._call.generation.samples, self._call.generation.choices
        for prompt, stream in enumerate(streams):
            first = prompt * choices
            row = [
                self._choice(stream.request_id, prompt, sample, first + sample)
                for sample in range(samples)
            ]
            self._choices.append(row)
            self._buffered.append([[] for _ in row] if self._is_ranked else [])
            self._started.append(None)
            self.usages.append(Usage())
            self._unneeded.append(0)

    async def batches(self, idle_s: float | None = None) -> AsyncGenerator[list[Delta] | None]:
        """Yield deltas as the engine steps: each list, possibly empty, can be written at once.

        Yields None if nothing arrived for `idle_s` seconds. Raises Refusal if the engine refuses or
        fails. The last batch ends with `End`.
        """
        wakeup = self._new_wakeup(idle_s)
        try:
            while True:
                deltas = self._poll() if self._in_thread is None else await self._poll_echo()
                if deltas is not None:
                    yield deltas
                    if self.ending == "done":
                        return
                elif not await wakeup.wait():
                    yield None
        finally:
            wakeup.close()

    async def collect(self, on_batch: Callable[[Sequence[Delta]], None]) -> list[Delta]:
        """Return all deltas at the end; calls `on_batch` with each batch. Raises Refusal."""
        wakeup = self._new_wakeup(None)
        deltas_so_far: list[Delta] = []
        while self.ending != "done":
            deltas = self._poll() if self._in_thread is None else await self._poll_echo()
            if deltas is None:
                await wakeup.wait()
            else:
                on_batch(deltas)
                deltas_so_far += deltas
        return deltas_so_far

    @property
    def epoch(self) -> str:
        """The epoch of the engine that computes the call, or has finished it; "" before."""
        return self._streams[0].epoch if self._streams else ""

    @property
    def uncounted(self) -> dict[str, tuple[int, int, int]]:
        """By the epoch of an engine, what the call's entry, under `epoch`, has more of prompt,
        cached and output tokens than that engine has counted; below 0 for less. Prompts of one call
        may be computed by several engines."""
        found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for prompt, stream in enumerate(self._streams):
            tokens, cached, output = stream.correction
            more = tokens, cached, output - self._unneeded[prompt]
            if stream.epoch != self.epoch:
                record = self.records_so_far()[prompt]
                entered = record.total_in, record.physical_cached, record.out
                _add(found[stream.epoch], (a - b for a, b in zip(more, entered, strict=True)))
                more = entered
            if any(more):
                _add(found[self.epoch], more)
        return {epoch: (counts[0], counts[1], counts[2]) for epoch, counts in found.items()}

    @property
    def is_over(self) -> bool:
        """Whether the final event of every prompt has been read."""
        return all(map(_is_over, self._streams))

    async def cancel(self) -> None:
        """Cancel the requests that still run and record their usage."""
        running = [(n, stream) for n, stream in enumerate(self._streams) if not stream.is_over]
        for _, stream in running:
            stream.wakeup = Wakeup()
        ends = await asyncio.gather(*(stream.cancel() for _, stream in running))
        for (number, _), end in zip(running, ends, strict=True):
            if end is not None:
                self.usages[number] = end.usage

    def usage_so_far(self) -> UsageRecord:
        """Return the usage known so far: prompt tokens found and computed, output tokens seen."""
        records = self.records_so_far()
        return sum_usage(records) if records else UsageRecord(0)

    def records_so_far(self) -> list[UsageRecord]:
        """Return the usage known so far, one record per prompt."""
        if self._records is not None:
            return self._records
        known = []
        for number, usage in enumerate(self.usages):
            started = self._started[number]
            if usage.prompt_tokens or started is None:
                known.append(usage)
                continue
            seen = sum(choice.tokens for choice in self._choices[number])
            known.append(_partial_usage(started, seen))
        records = []
        for contract, usage, row in zip(self._contracts, known, self._choices, strict=False):
            record, thoughts = contract.record(usage), 0
            for choice in row:
                thoughts += choice.thinking_tokens
            records.append(replace(record, thinking=thoughts) if thoughts else record)
        return records

    def delivered_usage(self) -> UsageRecord:
        """Return the usage of fully released tokens and of their prompts: what is delivered once
        the deltas are written."""
        records = []
        for number, started in enumerate(self._started):
            tokens = 0
            for choice in () if self._is_ranked else self._choices[number]:
                tokens += choice.delivered.count(choice.decoded_tokens)
            if started is not None and tokens:
                records.append(self._contracts[number].record(_partial_usage(started, tokens)))
        return sum_usage(records) if records else UsageRecord(0)

    # -- internals ----------------------------------------------------------------------------

    def _new_wakeup(self, idle_s: float | None) -> Wakeup:
        """Return one wakeup for all engine streams."""
        wakeup = Wakeup(idle_s)
        for stream in self._streams:
            stream.wakeup = wakeup
        return wakeup

    def _poll(self) -> list[Delta] | None:
        """Return the deltas that arrived since the last call; None if none did."""
        deltas: list[Delta] | None = None
        for prompt, stream in enumerate(self._streams):
            if events := stream.take():
                deltas = deltas or []
                for event in events:
                    deltas += self._handle(prompt, event)
        if deltas is not None and self.is_over:
            deltas += self._end()
        return deltas

    async def _poll_echo(self) -> list[Delta] | None:
        """Do as `_poll` for a call that asks for its prompt's logprobs, which may be thousands."""
        assert self._in_thread is not None
        deltas: list[Delta] | None = None
        for prompt, stream in enumerate(self._streams):
            for event in stream.take():
                deltas = deltas or []
                if isinstance(event, PromptLogprobs):
                    deltas += await self._in_thread(partial(self._handle, prompt, event))
                else:
                    deltas += self._handle(prompt, event)
        if deltas is not None and self.is_over:
            deltas += self._end()
        return deltas

    def _handle(self, prompt: int, event: Event) -> list[Delta]:
        match event:
            case Tokens(index=sample, tokens=tokens):
                self._contracts[prompt].written()
                self.tokens_seen += len(tokens)
                return self._text(prompt, sample, tokens)
            case Started():
                return self._begin(prompt, event)
            case SampleEnded():
                choice = self._choices[prompt][event.index]
                return self._close_choice(prompt, choice, event.reason)
            case PromptLogprobs(tokens=tokens):
                return self._echo(prompt, tokens)
            case Finished():
                self._finish(prompt, event)
                return []

    def _finish(self, prompt: int, event: Finished) -> None:
        self.usages[prompt] = event.usage
        if event.ending != "done":
            self.ending = event.code or event.ending
            sent = self._call.prompts[prompt]
            is_schema = sent.output_format.kind not in ("regex", "lark")
            wait_s = event.retry_after_s
            if wait_s is not None:
                wait_s = retry_after_s(wait_s)
            field, message = locate_fault(sent, event.code, event.message)
            raise engine_refusal(
                event.code,
                message,
                wait_s,
                schema_field=field,
                is_schema=is_schema,
            )
        self._contracts[prompt].written()
        # The engine may run past a stop string, even to the end, before it is told. The charge must
        # not depend on that race.
        needed = sum(map(_tokens, self._choices[prompt]))
        if needed < event.usage.output_tokens:
            self._unneeded[prompt] += event.usage.output_tokens - needed
            self.usages[prompt] = replace(event.usage, output_tokens=needed)

    def _begin(self, prompt: int, event: Started) -> list[Delta]:
        self._started[prompt] = event
        self._on_started(prompt)
        self._contracts[prompt].epoch = self._streams[prompt].epoch
        self._contracts[prompt].begin(event)
        found: list[Delta] = []
        if None not in self._started:
            records = [
                contract.record(_partial_usage(started, 0))
                for contract, started in zip(self._contracts, self._started, strict=True)
                if started is not None
            ]
            found.append(Begin(sum_usage(records), self._contracts[0].diagnosis))
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
            deltas.extend(self._emit(prompt, choice, [Text(choice.index, text, reported)]))
        return deltas

    def _text(self, prompt: int, sample: int, tokens: Sequence[SampledToken]) -> list[Delta]:
        choice = self._choices[prompt][sample]
        if choice.is_over:
            return []
        deltas: list[Delta] = []
        for step in choice.split_steps(tokens):
            was_thinking = choice.output.is_thinking
            text = choice.push(step)
            if self._call.continuous_usage:
                deltas.append(OutputCount(choice.index, choice.tokens))
            if text is not None:
                deltas += self._emit(prompt, choice, choice.output.push(text))
                if choice.output.reads_calls:
                    choice.delivered.note(choice.decoded_tokens)
            choice.thinking_tokens += was_thinking * len(step)
            if choice.stopped_by is not None or choice.output.is_full:
                self._streams[prompt].end_sample(sample, choice.tokens)
                deltas += self._close_choice(prompt, choice, "stop")
                break
        return deltas

    def _close_choice(self, prompt: int, choice: Choice, reason: FinishReason) -> list[Delta]:
        if choice.is_over:
            return []
        choice.is_over = True
        deltas: list[Delta] = []
        rest = choice.finish(reason)
        if rest is not None:
            deltas += choice.output.push(rest)
        stopped_by = choice.stopped_by
        cut: Cut = "stop_string" if stopped_by is not None else ""
        deltas += choice.output.finish("limit" if reason == "length" else cut)
        if stopped_by is not None:
            reason = "stop"
        self.format_violations += reason == "stop" and not choice.output.satisfies_format()
        called = reason == "stop" and stopped_by is None and choice.output.has_calls
        why = "tool_calls" if called else reason
        end = ChoiceEnd(choice.index, why, stopped_by)
        return self._emit(prompt, choice, [*deltas, end])

    def _choice(self, request_id: str, prompt: int, sample: int, index: int) -> Choice:
        make_id = call_id_generator(request_id, index)
        thought = self._rendered[prompt].thought
        output = OutputParser(index, self._call.prompts[prompt], self._renderer, make_id, thought)
        return Choice(index, sample, self._call, self._renderer, output)

    def _emit(self, prompt: int, choice: Choice, deltas: list[Delta]) -> list[Delta]:
        """Return the deltas, or buffer them until the ranking if only the best samples are sent."""
        if not self._is_ranked:
            return deltas
        self._buffered[prompt][choice.sample].extend(deltas)
        return []

    def _end(self) -> list[Delta]:
        self.ending = "done"
        deltas: list[Delta] = []
        for prompt, row in enumerate(self._choices if self._is_ranked else []):
            best = sorted(row, key=lambda c: -c.logprob / max(1, c.tokens))
            choices = self._call.generation.choices
            for place, choice in enumerate(best[:choices]):
                index = prompt * choices + place
                deltas.extend(_renumber(d, index) for d in self._buffered[prompt][choice.sample])
        for usage in self.usages:
            at_s = usage.first_token_s
            if at_s is not None and (self.first_token_s is None or at_s < self.first_token_s):
                self.first_token_s = at_s
        self._records = self.records_so_far()
        return [*deltas, End(sum_usage(self._records))]


def _add(counts: list[int], more: Iterable[int]) -> None:
    counts[:] = map(sum, zip(counts, more, strict=True))


def _partial_usage(started: Started, output_tokens: int) -> Usage:
    found, asked = started.cached_tokens, started.prompt_tokens
    return Usage(prompt_tokens=asked, cached_tokens=found, output_tokens=output_tokens)


def _renumber(delta: Delta, index: int) -> Delta:
    assert isinstance(delta, Text | Thought | CallText | ChoiceEnd), (
        "only deltas of a choice are buffered"
    )
    return replace(delta, index=index)
