"""Policies that keep tokens by attention, in a harness of their own: what each loses.

None of them may enter the shared tree: a choice made for one request's queries is wrong for the
next one's, and tokens computed under a policy differ from exact ones. Here a text is read in steps
of 16 tokens in plain torch, fp32, and each policy says which earlier tokens a KV head of a layer
still sees. Shapes: K KV heads, G query heads of each, t tokens of a step, n tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from engine.attention.interface import attention_spec
from engine.attention.rope import rope_tables
from engine.model_store import Architecture, ModelCard
from engine.models.decoder import DecoderModel
from engine.models.layers import TorchOps
from engine.weights import load_weights
from kernels.reference import rotate

STEP = 16
SINKS = 16
OBSERVED = 32
"""Last tokens of a prompt whose attention SnapKV and its kin choose by."""
PAGE = 16

Choice = Callable[["LayerState", int], torch.Tensor]
"""Returns which tokens stay [K, n], given a layer's state and a budget in tokens."""


class LayerState:
    """What a policy may know of one layer after a step.

    `mass` [K, n]: attention that each token has got, all queries; `recent` [K, n]: that of the last
    `OBSERVED` queries; `entropy`: of their attention, in nats, mean. `kept` [K, n].
    """

    def __init__(self, layer: int, layers: int) -> None:
        self.layer, self.layers = layer, layers
        self.keys = self.values = torch.empty(0)
        self.kept = torch.empty(0, 0, dtype=torch.bool)
        self.mass = self.recent = torch.empty(0, 0)
        self.entropy = 0.0
        self.entropies: list[float] = []
        """Of all layers, once the prompt has been read."""

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append keys and values [K, t, D] of new tokens, which are kept."""
        kv_heads, count = keys.shape[:2]
        if not len(self.keys):
            self.keys, self.values = keys, values
            self.kept = torch.ones(kv_heads, count, dtype=torch.bool)
            self.mass = self.recent = torch.zeros(kv_heads, count)
            return
        self.keys = torch.cat([self.keys, keys], 1)
        self.values = torch.cat([self.values, values], 1)
        self.kept = torch.nn.functional.pad(self.kept, (0, count), value=True)
        self.mass = torch.nn.functional.pad(self.mass, (0, count))
        self.recent = torch.nn.functional.pad(self.recent, (0, count))

    def observe(self, weights: torch.Tensor, is_observed: bool) -> None:
        """Note attention weights [K, G, t, n] of a step."""
        got = weights.sum((1, 2))
        self.mass = self.mass + got
        if is_observed:
            self.recent = self.recent + got
            share = weights.clamp(min=1e-12)
            self.entropy += float(-(weights * share.log()).sum(-1).mean()) * STEP / OBSERVED


def last_tokens(state: LayerState, count: int) -> torch.Tensor:
    """Return a mask [K, n] of the last `count` tokens."""
    tokens = state.kept.shape[1]
    return (torch.arange(tokens) >= tokens - count).expand_as(state.kept)


def best(state: LayerState, scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return a mask [K, n] of the `count` kept tokens of each head with the highest scores."""
    scores = scores.masked_fill(~state.kept, -1.0)
    count = max(0, min(count, scores.shape[1]))
    chosen = torch.zeros_like(state.kept)
    return chosen.scatter(1, scores.topk(count, 1).indices, value=True)


def window(state: LayerState, budget: int) -> torch.Tensor:
    """Sinks and the last tokens (StreamingLLM)."""
    sinks = torch.arange(state.kept.shape[1]) < SINKS
    return last_tokens(state, budget - SINKS) | sinks


def heavy_hitters(state: LayerState, budget: int) -> torch.Tensor:
    """Half the budget for the last tokens, half for those with most attention so far (H2O)."""
    recent = last_tokens(state, budget // 2)
    return recent | best(state, state.mass.masked_fill(recent, -1.0), budget - budget // 2)


def observed(state: LayerState, budget: int) -> torch.Tensor:
    """The prompt's end, and what its queries attended to, smoothed over 7 tokens (SnapKV)."""
    recent = last_tokens(state, min(OBSERVED, budget))
    smooth = torch.nn.functional.avg_pool1d(state.recent[None], 7, 1, 3, count_include_pad=False)
    return recent | best(state, smooth[0].masked_fill(recent, -1.0), budget - OBSERVED)


def pyramid(state: LayerState, budget: int) -> torch.Tensor:
    """As `observed`; the first layer gets 1.75 of the budget, the last 0.25 (PyramidKV)."""
    share = 1.75 - 1.5 * state.layer / max(1, state.layers - 1)
    return observed(state, max(OBSERVED, round(budget * share)))


def entropy_guided(state: LayerState, budget: int) -> torch.Tensor:
    """As `observed`; a layer's part of the budget is its part of the attention's entropy."""
    total = sum(state.entropies) or 1.0
    share = state.entropy * state.layers / total if state.entropies else 1.0
    return observed(state, max(OBSERVED, round(budget * share)))


STREAMED: dict[str, Choice] = {"window": window, "h2o": heavy_hitters}
"""Policies that choose after every step."""

AT_PROMPT: dict[str, Choice] = {"snapkv": observed, "pyramidkv": pyramid, "entropy": entropy_guided}
"""Policies that choose once, at the end of the prompt, and keep what comes after it."""

POLICIES = (*STREAMED, *AT_PROMPT, "quest")


def quest_pages(q: torch.Tensor, keys: torch.Tensor, budget: int) -> torch.Tensor:
    """Return which tokens [K, t, n] each query reads: all of the pages with the highest bounds on a
    score, by the smallest and largest channel of a page's keys (Quest); one choice a KV head.

    q [K, G, t, D], keys [K, n, D] with n a multiple of the page.
    """
    pages = keys.reshape(keys.shape[0], -1, PAGE, keys.shape[2])
    low, high = pages.amin(2), pages.amax(2)
    bounds = q.clamp(min=0) @ high[:, None].mT + q.clamp(max=0) @ low[:, None].mT
    best_pages = bounds.amax(1).topk(min(budget // PAGE, low.shape[1]), -1).indices
    chosen = torch.zeros(bounds.shape[0], bounds.shape[2], low.shape[1], dtype=torch.bool)
    return chosen.scatter(2, best_pages, value=True).repeat_interleave(PAGE, 2)


class PolicyAttention:
    """`engine.attention.interface.LayerAttention` for one text under one policy."""

    def __init__(
        self, config: Architecture, context: int, policy: str, budget: int, prompt: int
    ) -> None:
        """`policy`: a name of `POLICIES`, or "" for exact. `prompt`: tokens of the prompt, a
        multiple of 16."""
        self.config, self.spec = config, attention_spec(config)
        self.policy, self.budget, self.prompt = policy, budget, prompt
        self.start = 0
        self._tables = rope_tables(config, context)
        self._states = [
            LayerState(index, len(config.layers)) for index in range(len(config.layers))
        ]

    def attend(
        self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend to the tokens that the policy has kept, and to the step's own."""
        spec, state, count = self.spec, self._states[layer], qkv.shape[0]
        cos, sin = self._tables[self.config.layers[layer].rope]
        at = slice(self.start, self.start + count)
        heads = qkv.view(count, -1, spec.head_dim)
        q = rotate(heads[:, : spec.heads], cos[at], sin[at]) * spec.scale
        k = rotate(heads[:, spec.heads : spec.heads + spec.kv_heads], cos[at], sin[at])
        before = state.kept.shape[1] if len(state.keys) else 0
        state.extend(k.transpose(0, 1), heads[:, spec.heads + spec.kv_heads :].transpose(0, 1))
        q = q.view(count, spec.kv_heads, spec.group_size, -1).permute(1, 2, 0, 3)
        seen = state.kept[:, None].expand(-1, count, -1).clone()
        if self.policy == "quest" and before > self.budget:
            seen[..., :before] = quest_pages(q, state.keys[:, :before], self.budget)
        own = torch.ones(count, count, dtype=torch.bool).tril()
        seen[..., before:] = own
        scores = (q @ state.keys[:, None].mT).masked_fill(~seen[:, None], -torch.inf)
        weights = scores.softmax(-1)
        end = self.start + count
        state.observe(weights, is_observed=self.prompt - OBSERVED <= self.start < self.prompt)
        if self.policy in STREAMED and end > self.budget:
            state.kept = state.kept & STREAMED[self.policy](state, self.budget)
        out = (weights @ state.values[:, None]).permute(2, 0, 1, 3)
        return out.reshape(count, spec.output_width)

    def end_step(self, count: int) -> None:
        """Choose at the end of the prompt, when all layers have been read."""
        self.start += count
        if self.policy in AT_PROMPT and self.start == self.prompt:
            entropies = [state.entropy for state in self._states]
            for state in self._states:
                state.entropies = entropies
                state.kept = state.kept & AT_PROMPT[self.policy](state, self.budget)


class PolicyReader:
    """A model in plain torch that reads texts under policies, named `policy budget` or ""."""

    def __init__(self, card: ModelCard, context: int) -> None:
        """Raises ModelError."""
        self.card, self.context = card, context
        weights = load_weights(card, torch.float32, torch.device("cpu"))
        self._model = DecoderModel(card.config, weights, TorchOps())

    def read(
        self, token_ids: Sequence[int], variants: Sequence[str]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (position, logits [variants, t, vocab]) of each step; the first half is the
        prompt."""
        prompt = len(token_ids) // 2 // STEP * STEP
        readings = []
        for name in variants:
            policy, _, budget = name.partition(" ")
            readings.append(
                PolicyAttention(self.card.config, self.context, policy, int(budget or 0), prompt)
            )
        for start in range(0, len(token_ids), STEP):
            tokens = torch.tensor(token_ids[start : start + STEP])
            found = []
            for reading in readings:
                with torch.inference_mode():
                    hidden = self._model.forward(tokens, reading)
                    found.append(self._model.logits(hidden).float())
                reading.end_step(len(tokens))
            yield start, torch.stack(found)
