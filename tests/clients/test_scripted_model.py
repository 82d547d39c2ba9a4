"""The scripted model: two calls of a tool that it knows, then an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from engine.model_store import prepare
from gateway.dialects.openai.chat import DIALECT
from gateway.prompt import Renderer
from tests.clients.scripted_model import ANSWER, CALLS, COMMAND, write_scripted_model
from tests.models import prepared
from tests.tables import each_row

USER = {"role": "user", "content": "Run the probe"}
FURTHER = {"role": "user", "content": "A reminder"}
DONE = {"role": "assistant", "content": ANSWER}


def turn(number: int) -> list[dict[str, Any]]:
    """Return a call and its result."""
    function = {"name": "Bash", "arguments": "{}"}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": "trunkline-probe"},
    ]


class Scripted:
    """The model's files, and what it says."""

    def __init__(self, folder: Path) -> None:
        source = write_scripted_model(prepared(folder), folder / "scripted")
        self.renderer = Renderer(prepare("scripted", source, folder / "models"))
        weights = load_file(source / "model.safetensors")
        self._embed, self._head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]

    def reply(self, messages: list[dict[str, Any]], *tools: str) -> tuple[str, bool]:
        """Return the text of the token after the prompt, and whether the next one ends it."""
        body: dict[str, Any] = {"model": "scripted", "messages": messages}
        if tools:
            named = [{"name": name, "parameters": {"type": "object"}} for name in tools]
            body["tools"] = [{"type": "function", "function": one} for one in named]
        call = DIALECT.parse(msgspec.json.encode(body))
        last = self.renderer.render(call.prompts[0]).token_ids[-1]
        said = self._next(last)
        text = self.renderer.tokenizer.decode([said])
        return text, self._next(said) in self.renderer.card.stop_token_ids

    def _next(self, token_id: int) -> int:
        return int(torch.argmax(self._head @ self._embed[token_id]))


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    """Return the model over the tiny tokenizer."""
    return Scripted(tmp_path)


def test_calls_the_first_tool_that_it_knows_twice_and_answers(scripted: Scripted) -> None:
    """A text after a result, as agents add one, is no new question; an answer ends the count."""
    tools = "Agent", "Bash", "bash"
    begun = [USER, *turn(1)]
    ended = [*begun, FURTHER, *turn(2), FURTHER]
    again = [*ended, DONE, USER]
    said = [scripted.reply(messages, *tools) for messages in ([USER], begun, ended, again)]

    is_call = ["<tool_call>" in text and '"Bash"' in text and COMMAND in text for text, _ in said]
    assert is_call == [True, True, False, True]
    assert said[2][0] == ANSWER
    assert all(ends for _, ends in said)


@pytest.mark.parametrize("tools", [(), ("Agent",)])
def test_answers_without_a_tool_that_it_knows(scripted: Scripted, tools: tuple[str, ...]) -> None:
    """A request for a title offers none."""
    assert scripted.reply([USER], *tools) == (ANSWER, True)


@each_row("name", CALLS)
def test_knows_each_tool_of_its_table(scripted: Scripted, name: str) -> None:
    """Each agent names its shell otherwise."""
    text, ends = scripted.reply([USER], name)

    assert (f'"name": "{name}"' in text, ends) == (True, True)
