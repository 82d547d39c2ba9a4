"""The default model under grammars: every complete text satisfies its grammar.

Through the whole engine, with the compiler's threads and processes. Needs the model on disk (`make
pull`); `make test` runs that first.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.api import CacheGrant, Grammar, Request, Sampling
from engine.core.core import Core
from engine.model_store import ModelCard
from tests.e2e.real_core import run_samples

pytestmark = [pytest.mark.model, pytest.mark.slow]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z]{2,8}@[a-z]{2,8}\\.com$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}


def answers(
    core: Core, card: ModelCard, grammar: Grammar, sampling: Sampling, *, samples: int = 1
) -> list[tuple[str, str]]:
    """Return each sample's text and finish reason."""
    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    question = "Describe Ada Lovelace as JSON."
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    request = Request(
        request_id="r",
        tokens=tuple(prompt),
        max_tokens=200,
        grant=CacheGrant(b"n"),
        sampling=sampling,
        samples=samples,
        stop_token_ids=card.stop_token_ids,
        grammar=grammar,
    )
    drawn, reasons = run_samples(core, request)
    return list(zip((tokenizer.decode(ids) for ids in drawn), reasons, strict=True))


def check_person(document: Any) -> None:
    assert set(document) == {"name", "age", "email", "tags"}
    assert isinstance(document["name"], str)
    assert len(document["name"]) <= 20
    assert type(document["age"]) is int
    assert 0 <= document["age"] <= 120
    assert re.fullmatch(r"[a-z]{2,8}@[a-z]{2,8}\.com", document["email"])
    assert set(document["tags"]) <= {"a", "b", "c"}
    assert len(document["tags"]) <= 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_small_model_satisfies_a_schema(
    default_core: Core, default_card: ModelCard, temperature: float
) -> None:
    """A model of 135 M parameters cannot write such a document unconstrained, greedy or not."""
    grammar = Grammar("json_schema", json.dumps(PERSON))
    sampling = Sampling(temperature=temperature, seed=11)

    said = answers(default_core, default_card, grammar, sampling, samples=4 if temperature else 1)

    for text, reason in said:
        assert reason == "stop"
        check_person(json.loads(text))


def test_samples_at_temperature_5_satisfy_a_schema(
    default_core: Core, default_card: ModelCard
) -> None:
    """At temperature 5 the unconstrained model is noise."""
    grammar = Grammar("json_schema", json.dumps(PERSON))

    said = answers(
        default_core, default_card, grammar, Sampling(temperature=5.0, seed=5), samples=3
    )

    ended = [text for text, reason in said if reason == "stop"]
    assert ended
    for text in ended:
        check_person(json.loads(text))


def test_choice_is_one_of_its_options(default_core: Core, default_card: ModelCard) -> None:
    """Classification: one of three words, and nothing around it."""
    grammar = Grammar("regex", "positive|negative|neutral")

    ((text, reason),) = answers(default_core, default_card, grammar, Sampling(temperature=0))

    assert text in {"positive", "negative", "neutral"}
    assert reason == "stop"
