"""A token counts as delivered once its text was released, and not while any of it is held back."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Sampling
from gateway.dialects.canonical import (
    Call,
    CallText,
    GenerationParameters,
    Prompt,
    Rendered,
    Text,
    Tool,
)
from gateway.generation.output_stream import OutputStream
from gateway.prompt import Renderer
from tests.examples import examples
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.generation.test_output_stream import contracts_of

SILENT, END_OF_TURN = 1, 2
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = Prompt(tools=(Tool("get"),))


class Streamed:
    """A streamed call over a scripted engine, with its output and its delivered count."""

    def __init__(
        self, renderer: Renderer, generation: GenerationParameters, *prompts: Prompt
    ) -> None:
        self.engine = FakeEngine()
        self._call = Call("m", prompts, generation, stream=True)
        streams = [self.engine.open(str(n)) for n in range(len(prompts))]
        rendered = [Rendered((3, 4, 5, 6, 7))] * len(prompts)
        contracts = contracts_of(self._call, rendered)
        self.answer = OutputStream(self._call, rendered, renderer, contracts)
        self.answer.follow(streams)
        self._batches = self.answer.batches()
        self.text = ""
        self.calls = 0

    async def start(self) -> Streamed:
        for number in range(len(self._call.prompts)):
            self.engine.start(str(number), 5, 1)
        await self.read()
        return self

    async def read(self) -> None:
        for delta in await anext(self._batches) or ():
            if isinstance(delta, Text):
                self.text += delta.text
            elif isinstance(delta, CallText):
                self.calls += 1

    async def token(self, *token_ids: int, prompt: int = 0, sample: int = 0) -> None:
        self.engine.tokens(str(prompt), sample, token_ids)
        await self.read()

    async def say(self, text: str) -> None:
        for byte in text.encode():
            await self.token(3 + byte)

    @property
    def passed_on(self) -> int:
        return self.answer.delivered_usage().out


@given(
    text=st.text(alphabet="ab🙂", max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=2).map(tuple),
    at_once=st.integers(1, 3),
    logprobs=st.sampled_from([None, 0]),
)
@settings(max_examples=examples(60))
def test_counts_released_tokens_only(
    renderer: Renderer, text: str, stops: tuple[str, ...], at_once: int, logprobs: int | None
) -> None:
    """After each step the text of counted tokens is out, and all count while nothing is held back.
    (A token of this model is a byte.)"""
    generation = GenerationParameters(stop=stops, sampling=Sampling(logprobs=logprobs))

    async def run() -> None:
        streamed = await Streamed(renderer, generation, Prompt()).start()
        data, sent = text.encode(), 0
        while sent < len(data) and not streamed.answer.is_over:
            some, sent = data[sent : sent + at_once], sent + at_once
            await streamed.token(*(3 + byte for byte in some))
            seen = data[:sent]

            assert streamed.text.encode().startswith(data[: streamed.passed_on])
            if streamed.text.encode() == seen:
                assert streamed.passed_on == len(seen)

    asyncio.run(run())


async def test_prompt_counts_with_its_first_token(renderer: Renderer) -> None:
    """Before that nothing of it was delivered; several prompts count separately."""
    streamed = await Streamed(renderer, GenerationParameters(), Prompt(), Prompt()).start()
    none = streamed.answer.delivered_usage()
    await streamed.token(3 + ord("a"), prompt=1)
    one = streamed.answer.delivered_usage()

    assert (none.total_in, none.out) == (0, 0)
    assert (one.total_in, one.physical_cached, one.out) == (5, 1, 1)


async def test_token_without_text_counts_with_next_token(renderer: Renderer) -> None:
    """It delivers nothing by itself, and so nothing of its prompt."""
    streamed = await Streamed(renderer, GenerationParameters(), Prompt()).start()
    await streamed.token(SILENT)
    silent = streamed.answer.delivered_usage()
    await streamed.say("a")

    assert (streamed.text, silent.total_in) == ("a", 0)
    assert streamed.passed_on == 2


async def test_call_counts_with_next_output(renderer: Renderer) -> None:
    """A dialect may write it only then, and an incomplete call may become nothing."""
    streamed = await Streamed(renderer, GenerationParameters(), TOOLS).start()
    await streamed.say("Hm. ")
    before = streamed.passed_on
    await streamed.say(CALL)
    first, begun = streamed.passed_on, streamed.calls
    await streamed.say("\n" + CALL[:-13])
    second = streamed.passed_on

    assert (before, first, second) == (4, 4, 4 + len(CALL))
    assert begun > 1, "it comes in pieces all the same"


async def test_waiting_stop_token_does_not_count(renderer: Renderer) -> None:
    """It waits for the next token or the end."""
    streamed = await Streamed(renderer, GenerationParameters(), Prompt()).start()
    await streamed.say("a")
    await streamed.token(3 + ord("b"), END_OF_TURN)
    waiting = streamed.passed_on
    await streamed.say("c")

    assert (waiting, streamed.passed_on) == (2, 4)


async def test_held_tokens_count_when_choice_ends(renderer: Renderer) -> None:
    """While another choice continues; tokens of a stop string never count."""
    generation = GenerationParameters(choices=2, samples=2, stop=("xyz",))
    streamed = await Streamed(renderer, generation, Prompt()).start()
    await streamed.token(*(3 + byte for byte in b"axy"))
    held = streamed.passed_on
    streamed.engine.end("0", 0, "length", 3)
    await streamed.read()
    ended = streamed.passed_on
    await streamed.token(*(3 + byte for byte in b"bxyz"), sample=1)
    stopped = streamed.passed_on

    assert (held, ended) == (0, 3)
    assert stopped == 3


async def test_ranked_samples_count_at_the_end(renderer: Renderer) -> None:
    """Nothing is written before the best sample is known."""
    streamed = await Streamed(renderer, GenerationParameters(samples=2), Prompt()).start()
    await streamed.say("abc")

    assert streamed.text == ""
    assert streamed.passed_on == 0
