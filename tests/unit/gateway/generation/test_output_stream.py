"""Engine events to deltas: text, stop strings, choices, logprobs, usage, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import Finished, PromptLogprobs, SampledToken, Sampling, TokenLogprob, Usage
from gateway.caching import CacheScope, Contract, ContractManager
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
from gateway.retention_classes import CachingConfig
from tests.examples import examples
from tests.tiny_tokenizer import byte_tokens
from tests.unit.gateway.fake_engine import FakeEngine

END_OF_TURN = 2
ANYTHING = Prompt()


def contracts_of(call: Call, rendered: Sequence[Rendered]) -> list[Contract]:
    """Return the contracts of prompts in a gateway that has seen no other."""
    manager = ContractManager(CachingConfig(), float, lambda _: {}, lambda _: "", lambda _: True)
    return [manager.resolve(call, prompt, CacheScope(b"", 1, "1/")) for prompt in rendered]


class Answer:
    """A call, a scripted engine and the deltas."""

    def __init__(
        self, renderer: Renderer, *texts: str, asks: Prompt = ANYTHING, **generation: Any
    ) -> None:
        self.engine = FakeEngine()
        prompts = texts or ("hi",)
        self.call = Call(
            "m", tuple(replace(asks, text=t) for t in prompts), GenerationParameters(**generation)
        )
        self.rendered = [Rendered(tuple(byte_tokens(text))) for text in prompts]
        streams = [self.engine.open(str(n)) for n in range(len(prompts))]
        contracts = contracts_of(self.call, self.rendered)
        self.stream = OutputStream(self.call, self.rendered, renderer, contracts)
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
    """Return tokens with logprobs."""
    return [SampledToken(token, logprob) for token, logprob in tokens]


async def test_begins_with_cached_tokens_and_ends_with_usage(
    renderer: Renderer,
) -> None:
    """Some dialects report the cache before the first token, all report it at the end."""
    answer = Answer(renderer, "nine char")
    answer.engine.play("0", [byte_tokens("ok")], prompt_tokens=9, cached_tokens=6)
    await answer.read()

    assert isinstance(answer.deltas[0], Begin)
    assert answer.deltas[0].usage.physical_cached == 6
    assert answer.text() == "ok"
    assert answer.ends() == {0: ChoiceEnd(0, "length")}
    usage = answer.deltas[-1]
    assert isinstance(usage, End)
    assert (usage.usage.total_in, usage.usage.read_tokens(), usage.usage.fresh) == (9, 6, 3)
    assert answer.stream.ending == "done"


async def test_stop_string_ends_sample_and_charges_needed_tokens(renderer: Renderer) -> None:
    """The engine runs some tokens ahead; they are neither sent nor charged."""
    answer = Answer(renderer, stop=("END",))
    answer.engine.play("0", [byte_tokens("a long END of it")])
    await answer.read()

    assert answer.text() == "a long "
    assert answer.ends() == {0: ChoiceEnd(0, "stop", "END")}
    assert answer.output_tokens == len("a long END")


async def test_engine_is_told_of_stop_string(renderer: Renderer) -> None:
    """Otherwise it would continue to max_tokens."""
    answer = Answer(renderer, stop=("END",))
    answer.engine.start("0", 4)
    answer.engine.tokens("0", 0, byte_tokens("no END here"))
    reading = asyncio.create_task(answer.read())
    while not answer.engine.ended_samples:  # noqa: ASYNC110 (the fake has no event to wait for)
        await asyncio.sleep(0)
    answer.engine.end("0", 0, "stop", 6)
    answer.engine.finish("0", Usage(prompt_tokens=4, output_tokens=6))
    await reading

    assert answer.engine.ended_samples == [(0, 6)]
    assert (answer.text(), len(answer.ends())) == ("no ", 1)


async def test_held_text_is_sent_at_the_end(renderer: Renderer) -> None:
    """The length ended the sample, not the partial stop string."""
    answer = Answer(renderer, stop=("END",))
    answer.engine.play("0", [byte_tokens("the EN")])

    assert (await answer.read()).text() == "the EN"


async def test_stop_tokens_are_not_text(renderer: Renderer) -> None:
    """`<|im_end|>` ends the turn; a client never sees it, nor in logprobs."""
    answer = Answer(renderer, sampling=Sampling(logprobs=0))
    tokens = logged(*((token, -1.0) for token in [*byte_tokens("ok"), END_OF_TURN]))
    answer.engine.play("0", [tokens], reason="stop")
    await answer.read()

    assert (answer.text(), answer.token_ids()) == ("ok", byte_tokens("ok"))
    assert answer.output_tokens == 3


async def test_stop_token_before_min_tokens_is_text(renderer: Renderer) -> None:
    answer = Answer(renderer, stop_token_ids=tuple(byte_tokens(".")))
    answer.engine.play("0", [byte_tokens("a.b.")], reason="stop")

    assert (await answer.read()).text() == "a.b"


async def test_numbers_samples_and_prompts_as_choices(renderer: Renderer) -> None:
    """choice = prompt * n + sample, in any order of engine events."""
    answer = Answer(renderer, "one", "two", choices=2, samples=2)
    answer.engine.play("1", [byte_tokens("c"), byte_tokens("d")], prompt_tokens=3)
    answer.engine.play("0", [byte_tokens("a"), byte_tokens("b")], prompt_tokens=3)
    await answer.read()

    assert [answer.text(choice) for choice in range(4)] == ["a", "b", "c", "d"]
    assert sorted(answer.ends()) == [0, 1, 2, 3]
    assert answer.output_tokens == 4


async def test_best_of_ranks_by_mean_logprob(renderer: Renderer) -> None:
    """By mean, so short answers do not win by being short."""
    answer = Answer(renderer, choices=1, samples=3, sampling=Sampling(logprobs=0))
    x, y, z = ([*map(byte_tokens, text)] for text in ("xx", "yyy", "z"))
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


async def test_echo_returns_prompt_verbatim(renderer: Renderer) -> None:
    """Special tokens of a raw prompt have no bytes; the client wrote them as text."""
    answer = Answer(renderer, "a<|im_end|>b", echo=True)
    answer.engine.play("0", [byte_tokens("c")])

    assert (await answer.read()).text() == "a<|im_end|>bc"


async def test_echo_with_logprobs_reports_prompt_tokens(renderer: Renderer) -> None:
    """The first token has no logprob."""
    answer = Answer(renderer, "ab", echo=True, prompt_logprobs=0, sampling=Sampling(logprobs=0))
    first, second = byte_tokens("ab")
    answer.engine.start("0", 2)
    answer.engine.emit("0", PromptLogprobs("0", (SampledToken(first), SampledToken(second, -2.0))))
    answer.engine.tokens("0", 0, logged((byte_tokens("c")[0], -1.0)))
    answer.engine.end("0", 0, "length", 1)
    answer.engine.finish("0")
    await answer.read()

    assert (answer.text(), answer.token_ids()) == ("abc", byte_tokens("abc"))
    text = next(d for d in answer.deltas if isinstance(d, Text))
    assert [token.logprob for token in text.tokens] == [None, -2.0]


async def test_alternatives_have_bytes(renderer: Renderer) -> None:
    """Special tokens are written as the template writes them."""
    top = (TokenLogprob(byte_tokens("a")[0], -0.1), TokenLogprob(END_OF_TURN, -3.0))
    answer = Answer(renderer, sampling=Sampling(logprobs=2))
    answer.engine.play("0", [[SampledToken(byte_tokens("a")[0], -0.1, top)]])
    await answer.read()

    text = next(d for d in answer.deltas if isinstance(d, Text))
    assert [t.data for t in text.tokens[0].top] == [b"a", b"<|im_end|>"]


@given(
    text=st.text(alphabet="ab🙂", max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=2).map(tuple),
    together=st.booleans(),
)
@settings(max_examples=examples(40))
def test_logprob_tokens_spell_the_text(
    renderer: Renderer, text: str, stops: tuple[str, ...], together: bool
) -> None:
    """No token of a stop string, none lost, and equal for fast and slow readers."""

    async def run() -> Answer:
        answer = Answer(renderer, stop=stops, sampling=Sampling(logprobs=0))
        tokens = logged(*((token, -1.0) for token in byte_tokens(text)))
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

    assert answer.token_ids() == byte_tokens(answer.text())
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    needed = len(text[: min(ends)].encode()) if ends else len(text.encode())
    assert answer.output_tokens == needed


async def test_engine_failure_is_a_refusal_with_usage(renderer: Renderer) -> None:
    """The client is told, and the computed tokens are settled."""
    answer = Answer(renderer)
    answer.engine.start("0", 7, 3)
    answer.engine.tokens("0", 0, byte_tokens("half"))
    answer.engine.finish("0", Usage(prompt_tokens=7, output_tokens=4), "failed", "engine_died")

    with pytest.raises(Refusal) as raised:
        await answer.read()

    assert (raised.value.kind, raised.value.code) == (Kind.BUSY, "engine_restarting")
    assert raised.value.retry_after_s == 1.0
    assert answer.stream.ending == "engine_died"
    assert answer.stream.usage_so_far().out == 4


@pytest.mark.parametrize(("engine_s", "told_s"), [(43_200.0, 60.0), (7.5, 7.5), (0.0, 1.0)])
async def test_retry_time_of_the_engine_is_bounded(
    renderer: Renderer, engine_s: float, told_s: float
) -> None:
    """The memory may be promised for hours; clients give up beyond a minute."""
    answer = Answer(renderer)
    ending = Finished("0", "failed", Usage(), "kv_promised", "why", engine_s)
    answer.engine.emit("0", ending)

    with pytest.raises(Refusal) as raised:
        await answer.read()

    assert (raised.value.code, raised.value.retry_after_s) == ("cache_memory_promised", told_s)


async def test_yields_tokens_in_their_step(renderer: Renderer) -> None:
    """Nothing waits for more."""
    answer = Answer(renderer)
    batches = answer.stream.batches()
    answer.engine.start("0", 2)
    await anext(batches)
    seen = []
    for letter in "abc":
        answer.engine.tokens("0", 0, byte_tokens(letter))
        seen.append(await anext(batches))
    await batches.aclose()

    assert seen == [[Text(0, letter)] for letter in "abc"]


async def test_yields_none_when_idle_and_continues(renderer: Renderer) -> None:
    """For keep-alives; later deltas are not lost."""
    answer = Answer(renderer)
    batches = answer.stream.batches(idle_s=0.001)
    silence = [await anext(batches), await anext(batches)]
    answer.engine.play("0", [byte_tokens("ab")])
    rest = [delta async for batch in batches for delta in batch or ()]

    assert silence == [None, None]
    assert "".join(delta.text for delta in rest if isinstance(delta, Text)) == "ab"
    assert isinstance(rest[-1], End)


async def test_cancel_stops_every_prompt(renderer: Renderer) -> None:
    """Usage counts the tokens seen."""
    answer = Answer(renderer, "one", "two")
    for request_id in ("0", "1"):
        answer.engine.start(request_id, 3, 1)
        answer.engine.tokens(request_id, 0, byte_tokens("ab"))
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
    """Return names and arguments."""
    found: dict[int, tuple[str, str]] = {}
    for delta in answer.deltas:
        if isinstance(delta, CallText) and delta.index == choice:
            name, arguments = found.get(delta.call, ("", ""))
            found[delta.call] = (name + delta.name, arguments + delta.arguments)
    return list(found.values())


async def test_streams_calls(renderer: Renderer) -> None:
    """The finish reason is "tool_calls"."""
    answer = Answer(renderer, asks=TOOLS)
    answer.engine.play("0", [[*byte_tokens(f"Hm {CALL}\n{CALL}"), END_OF_TURN]], reason="stop")
    await answer.read()

    assert answer.text() == "Hm "
    assert calls(answer) == [("get", '{"a": 1}')] * 2
    assert answer.ends() == {0: ChoiceEnd(0, "tool_calls")}
    ids = [d.call_id for d in answer.deltas if isinstance(d, CallText) and d.call_id]
    assert len(set(ids)) == 2


async def test_truncated_call_has_length_reason(renderer: Renderer) -> None:
    """The client has to know."""
    answer = Answer(renderer, asks=TOOLS)
    answer.engine.play("0", [byte_tokens(CALL[:47])])
    await answer.read()

    assert calls(answer) == [("get", '{"a": ')]
    assert answer.ends() == {0: ChoiceEnd(0, "length")}


async def test_stop_string_ends_a_call(renderer: Renderer) -> None:
    """The finish reason is "stop"."""
    answer = Answer(renderer, asks=TOOLS, stop=("1}",))
    answer.engine.play("0", [byte_tokens(CALL)], reason="stop")
    await answer.read()

    assert answer.ends() == {0: ChoiceEnd(0, "stop", "1}")}


async def test_tools_without_calls_is_a_text_answer(renderer: Renderer) -> None:
    """Text that was held back is sent at the end."""
    answer = Answer(renderer, asks=TOOLS)
    answer.engine.play("0", [[*byte_tokens("a <tool_"), END_OF_TURN]], reason="stop")
    await answer.read()

    assert answer.text() == "a <tool_"
    assert answer.ends() == {0: ChoiceEnd(0, "stop")}


async def test_single_call_ends_the_sample(renderer: Renderer) -> None:
    """It is charged for the call's tokens, however many arrived at once."""
    asks = replace(TOOLS, tool_choice=ToolChoice(parallel=False))
    answer = Answer(renderer, asks=asks)
    answer.engine.start("0", 4)
    answer.engine.tokens("0", 0, byte_tokens(CALL + "\n" + CALL))
    answer.engine.end("0", 0, "length", 2 * len(CALL) + 1)
    answer.engine.finish("0", Usage(prompt_tokens=4, output_tokens=2 * len(CALL) + 1))
    await answer.read()

    needed = len(CALL.removesuffix("}\n</tool_call>")) + 1
    assert calls(answer) == [("get", '{"a": 1}')]
    assert answer.output_tokens == needed
    assert answer.ends() == {0: ChoiceEnd(0, "tool_calls")}


async def test_best_of_keeps_calls(renderer: Renderer) -> None:
    """With the choice index that the client knows."""
    answer = Answer(renderer, asks=TOOLS, samples=2, choices=1)
    worse = logged(*((token, -2.0) for token in byte_tokens("Hello")))
    better = logged(*((token, -1.0) for token in byte_tokens(CALL)))
    answer.engine.play("0", [worse, better], reason="stop")
    await answer.read()

    assert (answer.text(), calls(answer)) == ("", [("get", '{"a": 1}')])
    assert answer.ends() == {0: ChoiceEnd(0, "tool_calls")}


@pytest.mark.parametrize(("text", "violations"), [('{"a": 1}', 0), ('{"a": "x"}', 1), ("a", 1)])
async def test_counts_format_violations(renderer: Renderer, text: str, violations: int) -> None:
    """The answer is sent unchanged."""
    schema = '{"properties": {"a": {"type": "integer"}}}'
    answer = Answer(renderer, asks=Prompt(output_format=OutputFormat("json_schema", schema)))
    answer.engine.play("0", [[*byte_tokens(text), END_OF_TURN]], reason="stop")
    await answer.read()

    assert (answer.text(), answer.stream.format_violations) == (text, violations)


async def test_truncated_answer_is_no_format_violation(renderer: Renderer) -> None:
    answer = Answer(renderer, asks=Prompt(output_format=OutputFormat("json_object")))
    answer.engine.play("0", [byte_tokens('{"a"')])
    await answer.read()

    assert answer.stream.format_violations == 0
