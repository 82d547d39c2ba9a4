"""Gemma 3 270M against `transformers`, with the same dequantised weights and real text.

A real model with windows, norms of queries and keys, two rotary tables, heads of 256 and a
SentencePiece vocabulary. Needs the model on disk: `trunkline pull gemma-3-270m`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.attention.batch import make_batch
from engine.model_store import ModelCard
from engine.plan import Row, StepPlan
from engine.runner.cpu_runner import CpuRunner
from engine.weights import load_weights
from tests.e2e.real_core import exact_runner, real_card

pytestmark = [pytest.mark.model, pytest.mark.slow]

BLOCK, BLOCKS, TOKENS = 16, 256, 600
LOGIT_ERROR_MAX = 2e-4
STEP = 7
"""Positions from one compared to the next: a row of logits takes a MiB."""
PROSE = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is"
    " named after the engineer Gustave Eiffel, whose company designed and built the tower from 1887"
    " to 1889. The tower is 330 metres tall, about the same height as an 81-storey building, and"
    " the tallest structure in Paris. "
) * 8
PERPLEXITY = 1.354
"""Of the text above. Read with the wrong order of channels it is 56, with norms that lack the 1
about 10^7, with the theta of full layers in window layers 3.4."""


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return real_card("gemma-3-270m")


@pytest.fixture(scope="module")
def tokens(card: ModelCard) -> list[int]:
    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    ids: list[int] = tokenizer.encode(PROSE, add_special_tokens=False).ids
    assert card.bos_token_id is not None
    return [card.bos_token_id, *ids][:TOKENS]


@pytest.fixture(scope="module", params=["torch", "C"])
def runner(request: pytest.FixtureRequest, card: ModelCard) -> CpuRunner:
    """Return a runner by torch and one by the C kernels, both in fp32."""
    return exact_runner(card, request.param, BLOCKS, 1024)


@pytest.fixture(scope="module")
def expected(card: ModelCard, tokens: list[int]) -> Iterator[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        import transformers

        c = card.config
        model: Any = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(
                vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.intermediate,
                num_hidden_layers=len(c.layers), num_attention_heads=c.heads,
                num_key_value_heads=c.kv_heads, head_dim=c.head_dim, query_pre_attn_scalar=256,
                sliding_window=512, rms_norm_eps=c.norm_eps, max_position_embeddings=c.context,
            )
        )  # fmt: skip
    names = {
        "attention_output_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_layernorm": "post_feedforward_layernorm",
    }
    weights = {}
    for name, tensor in load_weights(card, torch.float32).items():
        *head, part, kind = name.split(".")
        value = tensor - 1 if "norm" in part else tensor  # theirs leave the 1 out
        weights[".".join([*head, names.get(part, part), kind])] = value
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    with torch.no_grad():
        hidden = model.eval().model(torch.tensor([tokens])).last_hidden_state[0]
        yield model.lm_head(hidden[::STEP])


def our_hidden(runner: CpuRunner, tokens: list[int], slices: tuple[int, ...]) -> torch.Tensor:
    """Return the hidden states of a prompt computed in slices, in blocks out of order."""
    used = math.ceil(len(tokens) / BLOCK)
    blocks, *beside = (
        list(range(BLOCKS - 1 - group * used, BLOCKS - 1 - (group + 1) * used, -1))
        for group in range(runner.kv.format.blocks_per_run)
    )
    found, start = [], 0
    for count in (*slices, len(tokens) - sum(slices)):
        known = tokens[start : start + count]
        row = Row(0, start, count, blocks, 0, known, beside=tuple(beside))
        plan = StepPlan(step=0, rows=(row,))
        with torch.inference_mode():
            batch = make_batch(plan, BLOCK, lambda _: 0)
            runner.attention.begin(plan, batch)
            found.append(runner.model.forward(batch.token_ids, runner.attention).clone())
        start += count
    return torch.cat(found)


@pytest.mark.parametrize("slices", [(), (300, 7, 205, 1, 1)], ids=["whole", "in slices"])
def test_logits_agree_with_transformers(
    runner: CpuRunner, tokens: list[int], expected: torch.Tensor, slices: tuple[int, ...]
) -> None:
    """Across the window: the last 88 tokens do not see the first ones."""
    got = runner.model.logits(our_hidden(runner, tokens, slices)[::STEP])

    assert float((got - expected).abs().max() / expected.std()) < LOGIT_ERROR_MAX


def test_perplexity_of_prose_is_low(runner: CpuRunner, tokens: list[int]) -> None:
    """A model that is read wrongly is fluent now and then; it is never right about a text."""
    hidden, following = our_hidden(runner, tokens, ())[:-1], torch.tensor(tokens[1:])
    losses = [
        torch.nn.functional.cross_entropy(
            runner.model.logits(hidden[at : at + 100]), following[at : at + 100], reduction="sum"
        )
        for at in range(0, len(hidden), 100)
    ]

    assert math.exp(sum(map(float, losses)) / len(hidden)) == pytest.approx(PERPLEXITY, abs=0.002)
