"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the ids that a prompt would have."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.api.tokenizer import INLINE_TOKENS_MAX
from gateway.config import ModelSettings
from gateway.prompt import Renderer
from tests.tables import each_row
from tests.unit.gateway.engines.fake_link import FakeLink
from tests.unit.gateway.gateway_fixture import GatewayFixture

CONTINUES = "continue_final_message"
TURN = [{"role": "user", "content": "hello"}]
PREFILL = [*TURN, {"role": "assistant", "content": "Well"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def tokenize(gateway: GatewayFixture, **body: Any) -> dict[str, Any]:
    """Return the answer to a body."""
    status, answer, _ = await gateway.ask("/tokenize", body)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


async def refusal(gateway: GatewayFixture, path: str, **body: Any) -> dict[str, Any]:
    """Return the error of a body that is refused as invalid."""
    status, answer, _ = await gateway.ask(path, body)
    assert status == 400, answer
    found: dict[str, Any] = answer["error"]
    return found


@pytest.mark.parametrize("text", ["", "hello", "a b", "naïve 🙂 text\n", "<|im_end|> is a text"])
async def test_a_text_comes_back_from_its_ids(gateway: GatewayFixture, text: str) -> None:
    """A client that cuts prompts by ids must not change them."""
    answer = await tokenize(gateway, prompt=text, add_special_tokens=False)
    _, back, _ = await gateway.ask("/detokenize", {"tokens": answer["tokens"]})

    assert back == {"prompt": text}
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == gateway.context_tokens


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [TOOL]},
        {"messages": [{"role": "system", "content": "Be brief."}, *TURN]},
    ],
)
async def test_a_chat_has_the_ids_of_the_prompt_that_runs(
    gateway: GatewayFixture, more: dict[str, Any]
) -> None:
    """Clients cut their history by this count."""
    chat = {"messages": TURN, **more}
    answer = await tokenize(gateway, **chat)
    status, ran, _ = await gateway.ask(body={**gateway.chat(), **chat})

    assert status == 200, ran
    assert answer["count"] == ran["usage"]["prompt_tokens"]


async def test_the_turn_of_the_answer_is_opened_unless_the_last_message_goes_on(
    gateway: GatewayFixture,
) -> None:
    """The three forms are prefixes of what a template writes next."""
    opened = (await tokenize(gateway, messages=TURN))["tokens"]
    closed = (await tokenize(gateway, messages=TURN, add_generation_prompt=False))["tokens"]
    goes_on = (
        await tokenize(
            gateway, messages=PREFILL, add_generation_prompt=False, continue_final_message=True
        )
    )["tokens"]

    assert opened[: len(closed)] == closed
    assert len(opened) > len(closed)
    assert goes_on[: len(opened)] == opened
    assert len(goes_on) > len(opened)


async def test_a_first_token_stands_before_a_text_if_the_model_expects_one(
    unopened_gateway: GatewayFixture,
) -> None:
    """Templates write it themselves, so a chat gets another one only on request."""
    gateway = unopened_gateway
    first = gateway.card.stop_token_ids[0]
    card = replace(gateway.card, add_bos=True, bos_token_id=first)
    gateway.renderer = await asyncio.to_thread(Renderer, card)
    await gateway.open()
    plain = (await tokenize(gateway, prompt="hello"))["tokens"]
    bare = (await tokenize(gateway, prompt="hello", add_special_tokens=False))["tokens"]
    chat = (await tokenize(gateway, messages=TURN))["tokens"]
    more = (await tokenize(gateway, messages=TURN, add_special_tokens=True))["tokens"]
    await gateway.close()

    assert plain == [first, *bare]
    assert more == [first, *chat]


async def test_spells_tokens_as_the_vocabulary_does(gateway: GatewayFixture) -> None:
    """A space is another letter there, and a special token is itself."""
    end = gateway.renderer.special_text(gateway.card.stop_token_ids[0])
    answer = await tokenize(gateway, prompt=f"a b{end}", return_token_strs=True)
    without = await tokenize(gateway, prompt="a b")

    assert "".join(answer["token_strs"]) == f"aĠb{end}"
    assert answer["tokens"][-1] == gateway.card.stop_token_ids[0]
    assert without["token_strs"] is None


async def test_describes_the_tokenizer(gateway: GatewayFixture) -> None:
    """lm-eval reads the end token and the template."""
    status, answer, _ = await gateway.ask("/tokenizer_info", method="GET")
    ids = (await tokenize(gateway, prompt=answer["eos_token"], add_special_tokens=False))["tokens"]

    assert status == 200
    assert ids == [gateway.card.eos_token_id] != [gateway.card.stop_token_ids[0]]
    assert answer["chat_template"] == gateway.renderer.template_source
    assert answer["model_max_length"] == gateway.context_tokens


@each_row(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TURN}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "temperature": 0}, "temperature"),
        ("/tokenize", {"messages": TURN, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": PREFILL, "continue_final_message": True}, CONTINUES),
        (
            "/tokenize",
            {"messages": TURN, "continue_final_message": True, "add_generation_prompt": False},
            CONTINUES,
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [2**30]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_names_what_is_wrong_with_a_body(
    gateway: GatewayFixture, path: str, body: dict[str, Any], param: str
) -> None:
    """A guess at what was meant would be another prompt."""
    error = await refusal(gateway, path, **body)

    assert error["param"].partition("[")[0] == param
    await gateway.check_quiet()


async def test_a_text_far_beyond_the_context_is_refused(gateway: GatewayFixture) -> None:
    """Tokenizing is free, so it has a bound."""
    error = await refusal(gateway, "/tokenize", prompt="a " * 40_000)

    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"


async def test_long_answers_are_made_in_the_tenants_turn(unopened_gateway: GatewayFixture) -> None:
    """Neither many ids nor their text may hold the event loop."""
    gateway, seen = unopened_gateway, set[int]()
    tokenizer = gateway.renderer.tokenizer
    decode, spell = tokenizer.decode, tokenizer.token_strings

    def watched_decode(token_ids: Any) -> str:
        seen.add(threading.get_ident())
        return decode(token_ids)

    def watched_spell(token_ids: Any) -> list[str]:
        seen.add(threading.get_ident())
        return spell(token_ids)

    gateway.context_tokens = 4 * INLINE_TOKENS_MAX
    await gateway.open()
    text = "a b " * INLINE_TOKENS_MAX
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "decode", watched_decode)
        patch.setattr(tokenizer, "token_strings", watched_spell)
        answer = await tokenize(gateway, prompt=text, return_token_strs=True)
        _, back, _ = await gateway.ask("/detokenize", {"tokens": answer["tokens"]})
    await gateway.close()

    assert back["prompt"] == text
    assert threading.get_ident() not in seen
    assert seen


async def test_names_of_models_are_looked_up_as_in_a_generation(
    unopened_gateway: GatewayFixture,
) -> None:
    """Without a name the default model is meant: vLLM's clients send none."""
    gateway = unopened_gateway
    gateway.config = replace(gateway.config, model=ModelSettings(aliases=("other",)))
    await gateway.open()
    known = await tokenize(gateway, prompt="a", model="other")
    unnamed = await tokenize(gateway, prompt="a")
    missing, error, _ = await gateway.ask("/tokenize", {"prompt": "a", "model": "none"})
    no_info, _, _ = await gateway.ask("/tokenizer_info?model=none", method="GET")
    await gateway.close()

    assert known == unnamed
    assert (missing, no_info) == (404, 404)
    assert error["error"]["code"] == "model_not_found"


async def test_a_default_model_that_failed_says_so(gateway: GatewayFixture) -> None:
    """A client that names no model must not be told that `` does not exist."""
    (replica,) = gateway.gateway.context.models.default.replicas
    replica.link = FakeLink("its weights are not numbers")
    gateway.engine.info = None
    status, answer, _ = await gateway.ask("/tokenize", {"prompt": "a"})

    assert (status, answer["error"]["code"]) == (503, "model_failed")
