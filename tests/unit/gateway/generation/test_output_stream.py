"""Engine events to deltas: text, stop strings, choices, logprobs, usage; and leaving early."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import PromptLogprobs, SampledToken, Sampling, TokenLogprob, Usage
from engine.model_store import ModelCard
from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    GenerationParameters,
    OutputFormat,
    Prompt,
    Rendered,
    Text,
    Tool,
    ToolChoice,
)
from gateway.errors import Kind, Refusal
from gateway.generation.output_stream import OutputStream
from gateway.prompt import Renderer
from tests.unit.gateway.fake_engine import FakeEngine

END_OF_TURN = 2
ANYTHING = Prompt()


@pytest.fixture(scope="session")
def renderer(card: ModelCard) -> Renderer:
    """The tiny model's: token 3 + b is the byte b."""
    return Renderer(card)


def spelt(text: str) -> list[int]:
    """One token a byte."""
    return [3 + byte for byte in text.encode()]


class Answer:
    """A call, an engine to script, and what came out."""

    def __init__(
        self, renderer: Renderer, *texts: str, asks: Prompt = ANYTHING, **generation: Any
    ) -> None:
        self.engine = FakeEngine()
        prompts = texts or ("hi",)
        self.call = Call(
            "m", tuple(replace(asks, text=t) for t in prompts), GenerationParameters(**generation)
        )
        self.rendered = [Rendered(tuple(spelt(text))) for text in prompts]
        streams = [self.engine.open(str(n)) for n in range(len(prompts))]
        self.stream = OutputStream(self.call, self.rendered, renderer)
        self.stream.follow(streams)
        self.deltas: list[Delta] = []

    async def read(self) -> Answer:
        async for batch in self.stream.batches():
            self.deltas.extend(batch or ())
        return self

    def text(self, choice: int = 0) -> str:
        return "".join(d.text for d in self.deltas if isinstance(d, Text) and d.index == choice)

    def token_ids(self, choice: int = 0) -> list[int]:
        texts = [d for d in self.deltas if isinstance(d, Text) and d.index == choice]
        return [token.token_id for text in texts for token in text.tokens]

    def ends(self) -> dict[int, ChoiceEnd]:
        return {d.index: d for d in self.deltas if isinstance(d, ChoiceEnd)}

    @property
    def output_tokens(self) -> int:
        last = self.deltas[-1]
        assert isinstance(last, End)
        return last.usage.out


def logged(*tokens: tuple[int, float]) -> list[SampledToken]:
    """Tokens with logprobs."""
    return [SampledToken(token, logprob) for token, logprob in tokens]


async def test_an_answer_begins_with_what_was_cached_and_ends_with_its_usage(
    renderer: Renderer,
) -> None:
    """Some dialects report the cache before the first token, all at the end."""
    answer = Answer(renderer)
    answer.engine.play("0", [spelt("ok")], prompt_tokens=9, cached_tokens=6)
    await answer.read()

    assert isinstance(answer.deltas[0], Begin)
    assert answer.deltas[0].usage.physical_cached == 6
    assert answer.text() == "ok"
    assert answer.ends() == {0: ChoiceEnd(0, "length")}
    usage = answer.deltas[-1]
    assert isinstance(usage, End)
    assert (usage.usage.total_in, usage.usage.read_tokens(), usage.usage.fresh) == (9, 6, 3)
    assert answer.stream.ending == "done"


async def test_a_stop_string_ends_the_sample_and_charges_what_it_needed(renderer: Renderer) -> None:
    """The engine is some tokens ahead; they are neither shown nor charged."""
    answer = Answer(renderer, stop=("END",))
    answer.engine.play("0", [spelt("a long END of it")])
    await answer.read()

    assert answer.text() == "a long "
    assert answer.ends() == {0: ChoiceEnd(0, "stop", "END")}
    assert answer.output_tokens == len("a long END")


async def test_the_engine_is_told_of_a_stop_string_while_it_still_runs(renderer: Renderer) -> None:
    """Or it would go on to max_tokens for nobody."""
    answer = Answer(renderer, stop=("END",))
    answer.engine.start("0", 4)
    answer.engine.tokens("0", 0, spelt("no END here"))
    reading = asyncio.create_task(answer.read())
    while not answer.engine.ended_samples:  # noqa: ASYNC110 (the fake has no event to wait for)
        await asyncio.sleep(0)
    answer.engine.end("0", 0, "stop", 6)
    answer.engine.finish("0", Usage(prompt_tokens=4, output_tokens=6))
    await reading

    assert answer.engine.ended_samples == [(0, 6)]
    assert (answer.text(), len(answer.ends())) == ("no ", 1)


async def test_text_held_back_for_a_stop_string_comes_at_the_end(renderer: Renderer) -> None:
    """Length ended the sample, not the stop string that had begun."""
    answer = Answer(renderer, stop=("END",))
    answer.engine.play("0", [spelt("the EN")])

    assert (await answer.read()).text() == "the EN"


async def test_end_tokens_are_no_text(renderer: Renderer) -> None:
    """`<|im_end|>` ends the turn; a client never sees it, in logprobs neither."""
    answer = Answer(renderer, sampling=Sampling(logprobs=0))
    tokens = logged(*((token, -1.0) for token in [*spelt("ok"), END_OF_TURN]))
    answer.engine.play("0", [tokens], reason="stop")
    await answer.read()

    assert (answer.text(), answer.token_ids()) == ("ok", spelt("ok"))
    assert answer.output_tokens == 3


async def test_a_stop_token_before_min_tokens_is_text(renderer: Renderer) -> None:
    """The engine went on, so the token is part of what it wrote."""
    answer = Answer(renderer, stop_token_ids=tuple(spelt(".")))
    answer.engine.play("0", [spelt("a.b.")], reason="stop")

    assert (await answer.read()).text() == "a.b"


async def test_samples_and_prompts_are_numbered_as_choices(renderer: Renderer) -> None:
    """choice = prompt * n + sample, whatever order the engine speaks in."""
    answer = Answer(renderer, "one", "two", choices=2, samples=2)
    answer.engine.play("1", [spelt("c"), spelt("d")], prompt_tokens=3)
    answer.engine.play("0", [spelt("a"), spelt("b")], prompt_tokens=3)
    await answer.read()

    assert [answer.text(choice) for choice in range(4)] == ["a", "b", "c", "d"]
    assert sorted(answer.ends()) == [0, 1, 2, 3]
    assert answer.output_tokens == 4


async def test_the_best_samples_are_those_with_the_highest_mean_logprob(renderer: Renderer) -> None:
    """best_of: ranked by mean, so that short answers do not win by being short."""
    answer = Answer(renderer, choices=1, samples=3, sampling=Sampling(logprobs=0))
    x, y, z = ([*map(spelt, text)] for text in ("xx", "yyy", "z"))
    answer.engine.play(
        "0",
        [
            logged(*((t[0], -1.0) for t in x)),
            logged(*((t[0], -0.5) for t in y)),
            logged(*((t[0], -0.9) for t in z)),
        ],
    )
    await answer.read()

    assert answer.text() == "yyy"
    assert list(answer.ends()) == [0]
    assert answer.output_tokens == 6


async def test_echo_gives_the_prompt_as_it_was_sent(renderer: Renderer) -> None:
    """Special tokens in a raw prompt have no text of their own; the client wrote some."""
    answer = Answer(renderer, "a<|im_end|>b", echo=True)
    answer.engine.play("0", [spelt("c")])

    assert (await answer.read()).text() == "a<|im_end|>bc"


async def test_echo_with_logprobs_reports_the_prompts_tokens_first(renderer: Renderer) -> None:
    """The first token of all has no logprob: nothing came before it."""
    answer = Answer(renderer, "ab", echo=True, prompt_logprobs=0, sampling=Sampling(logprobs=0))
    first, second = spelt("ab")
    answer.engine.start("0", 2)
    answer.engine.say("0", PromptLogprobs("0", (SampledToken(first), SampledToken(second, -2.0))))
    answer.engine.tokens("0", 0, logged((spelt("c")[0], -1.0)))
    answer.engine.end("0", 0, "length", 1)
    answer.engine.finish("0")
    await answer.read()

    assert (answer.text(), answer.token_ids()) == ("abc", spelt("abc"))
    text = next(d for d in answer.deltas if isinstance(d, Text))
    assert [token.logprob for token in text.tokens] == [None, -2.0]


async def test_alternatives_carry_their_bytes(renderer: Renderer) -> None:
    """Special tokens among them are named as the template writes them."""
    top = (TokenLogprob(spelt("a")[0], -0.1), TokenLogprob(END_OF_TURN, -3.0))
    answer = Answer(renderer, sampling=Sampling(logprobs=2))
    answer.engine.play("0", [[SampledToken(spelt("a")[0], -0.1, top)]])
    await answer.read()

    text = next(d for d in answer.deltas if isinstance(d, Text))
    assert [t.data for t in text.tokens[0].top] == [b"a", b"<|im_end|>"]


@given(
    text=st.text(alphabet="ab🙂", max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=2).map(tuple),
    together=st.booleans(),
)
@settings(max_examples=40)
def test_reported_tokens_spell_the_text(
    renderer: Renderer, text: str, stops: tuple[str, ...], together: bool
) -> None:
    """Logprobs belong to the text that is shown: no token of a stop string, none lost, and the
    same whether the reader is fast or slow."""

    async def run() -> Answer:
        answer = Answer(renderer, stop=stops, sampling=Sampling(logprobs=0))
        tokens = logged(*((token, -1.0) for token in spelt(text)))
        reading = asyncio.create_task(answer.read())
        answer.engine.start("0", 2)
        for token in tokens:
            answer.engine.tokens("0", 0, [token])
            for _ in range(0 if together else 4):  # the reader's turn
                await asyncio.sleep(0)
        answer.engine.end("0", 0, "length", len(tokens))
        answer.engine.finish("0", Usage(output_tokens=len(tokens)))
        return await reading

    answer = asyncio.run(run())

    assert answer.token_ids() == spelt(answer.text())
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    needed = len(text[: min(ends)].encode()) if ends else len(text.encode())
    assert answer.output_tokens == needed


async def test_an_engine_that_fails_is_a_refusal_with_what_was_used(renderer: Renderer) -> None:
    """The client hears of it, and what was computed is settled."""
    answer = Answer(renderer)
    answer.engine.start("0", 7, 3)
    answer.engine.tokens("0", 0, spelt("half"))
    answer.engine.finish("0", Usage(prompt_tokens=7, output_tokens=4), "failed", "engine_died")

    with pytest.raises(Refusal) as raised:
        await answer.read()

    assert (raised.value.kind, raised.value.code) == (Kind.BUSY, "engine_restarting")
    assert raised.value.retry_after_s == 1.0
    assert answer.stream.ending == "engine_died"
    assert answer.stream.usage_so_far().out == 4


async def test_a_stream_is_as_lively_as_the_engine(renderer: Renderer) -> None:
    """Tokens leave in the step that made them; nothing waits for more."""
    answer = Answer(renderer)
    batches = answer.stream.batches()
    answer.engine.start("0", 2)
    await anext(batches)
    seen = []
    for letter in "abc":
        answer.engine.tokens("0", 0, spelt(letter))
        seen.append(await anext(batches))
    await batches.aclose()

    assert seen == [[Text(0, letter)] for letter in "abc"]


async def test_silence_is_told_and_then_the_stream_goes_on(renderer: Renderer) -> None:
    """Keep-alives go out while the engine thinks; nothing that comes after is lost."""
    answer = Answer(renderer)
    batches = answer.stream.batches(idle_s=0.001)
    silence = [await anext(batches), await anext(batches)]
    answer.engine.play("0", [spelt("ab")])
    rest = [delta async for batch in batches for delta in batch or ()]

    assert silence == [None, None]
    assert "".join(delta.text for delta in rest if isinstance(delta, Text)) == "ab"
    assert isinstance(rest[-1], End)


async def test_leaving_early_cancels_every_prompt(renderer: Renderer) -> None:
    """Nobody reads on, so nobody computes on; usage counts what was seen."""
    answer = Answer(renderer, "one", "two")
    for request_id in ("0", "1"):
        answer.engine.start(request_id, 3, 1)
        answer.engine.tokens(request_id, 0, spelt("ab"))
    batches = answer.stream.batches()
    await anext(batches)
    await batches.aclose()
    for request_id in ("0", "1"):
        usage = Usage(prompt_tokens=3, cached_tokens=1, output_tokens=2)
        answer.engine.finish(request_id, usage, "cancelled")
    await answer.stream.cancel()

    assert answer.stream.ending == "cancelled"
    assert {type(command).__name__ for command in answer.engine.commands} == {"Cancel"}
    assert len(answer.engine.commands) == 2
    assert answer.stream.usage_so_far().out == 4


# --- tools and formats ---------------------------------------------------------------------------

TOOLS = Prompt(tools=(Tool("get"), Tool("put")))
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'


def calls(answer: Answer, choice: int = 0) -> list[tuple[str, str]]:
    """Names and arguments."""
    found: dict[int, tuple[str, str]] = {}
    for delta in answer.deltas:
        if isinstance(delta, CallText) and delta.index == choice:
            name, arguments = found.get(delta.call, ("", ""))
            found[delta.call] = (name + delta.name, arguments + delta.arguments)
    return list(found.values())


async def test_calls_come_as_calls(renderer: Renderer) -> None:
    """And the choice says why it ended."""
    answer = Answer(renderer, asks=TOOLS)
    answer.engine.play("0", [[*spelt(f"Hm {CALL}\n{CALL}"), END_OF_TURN]], reason="stop")
    await answer.read()

    assert answer.text() == "Hm "
    assert calls(answer) == [("get", '{"a": 1}')] * 2
    assert answer.ends() == {0: ChoiceEnd(0, "tool_calls")}
    ids = [d.call_id for d in answer.deltas if isinstance(d, CallText) and d.call_id]
    assert len(set(ids)) == 2


async def test_a_call_cut_off_is_cut_off(renderer: Renderer) -> None:
    """The length ended it, and its client has to know."""
    answer = Answer(renderer, asks=TOOLS)
    answer.engine.play("0", [spelt(CALL[:47])])
    await answer.read()

    assert calls(answer) == [("get", '{"a": ')]
    assert answer.ends() == {0: ChoiceEnd(0, "length")}


async def test_a_stop_string_ends_a_call_as_it_ends_a_text(renderer: Renderer) -> None:
    """It is what ended the sample."""
    answer = Answer(renderer, asks=TOOLS, stop=("1}",))
    answer.engine.play("0", [spelt(CALL)], reason="stop")
    await answer.read()

    assert answer.ends() == {0: ChoiceEnd(0, "stop", "1}")}


async def test_without_calls_an_answer_with_tools_is_an_answer(renderer: Renderer) -> None:
    """Text that was held back comes at the end."""
    answer = Answer(renderer, asks=TOOLS)
    answer.engine.play("0", [[*spelt("a <tool_"), END_OF_TURN]], reason="stop")
    await answer.read()

    assert answer.text() == "a <tool_"
    assert answer.ends() == {0: ChoiceEnd(0, "stop")}


async def test_where_one_call_is_wanted_the_sample_ends_with_it(renderer: Renderer) -> None:
    """It is charged for what the call needed, however many tokens came at once."""
    asks = replace(TOOLS, tool_choice=ToolChoice(parallel=False))
    answer = Answer(renderer, asks=asks)
    answer.engine.start("0", 4)
    answer.engine.tokens("0", 0, spelt(CALL + "\n" + CALL))
    answer.engine.end("0", 0, "length", 2 * len(CALL) + 1)
    answer.engine.finish("0", Usage(prompt_tokens=4, output_tokens=2 * len(CALL) + 1))
    await answer.read()

    needed = len(CALL.removesuffix("}\n</tool_call>")) + 1
    assert calls(answer) == [("get", '{"a": 1}')]
    assert answer.output_tokens == needed
    assert answer.ends() == {0: ChoiceEnd(0, "tool_calls")}


async def test_the_best_of_several_samples_keeps_its_calls(renderer: Renderer) -> None:
    """Under the number that the client knows."""
    answer = Answer(renderer, asks=TOOLS, samples=2, choices=1)
    worse = logged(*((token, -2.0) for token in spelt("Hello")))
    better = logged(*((token, -1.0) for token in spelt(CALL)))
    answer.engine.play("0", [worse, better], reason="stop")
    await answer.read()

    assert (answer.text(), calls(answer)) == ("", [("get", '{"a": 1}')])
    assert answer.ends() == {0: ChoiceEnd(0, "tool_calls")}


@pytest.mark.parametrize(("text", "violations"), [('{"a": 1}', 0), ('{"a": "x"}', 1), ("a", 1)])
async def test_a_finished_answer_is_held_to_its_format(
    renderer: Renderer, text: str, violations: int
) -> None:
    """It is counted, and comes as it is."""
    schema = '{"properties": {"a": {"type": "integer"}}}'
    answer = Answer(renderer, asks=Prompt(output_format=OutputFormat("json_schema", schema)))
    answer.engine.play("0", [[*spelt(text), END_OF_TURN]], reason="stop")
    await answer.read()

    assert (answer.text(), answer.stream.format_violations) == (text, violations)


async def test_half_an_answer_breaks_no_format(renderer: Renderer) -> None:
    """The length ended it."""
    answer = Answer(renderer, asks=Prompt(output_format=OutputFormat("json_object")))
    answer.engine.play("0", [spelt('{"a"')])
    await answer.read()

    assert answer.stream.format_violations == 0
