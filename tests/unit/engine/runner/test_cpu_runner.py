"""The CPU runner, in torch and in C, against dense recomputation of every sequence.

Tests compare tokens and logprobs, which is all that a step result shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import SampledToken, Sampling
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_store import ModelCard
from engine.models.cpu_decoder import Kernels
from engine.plan import BegunSequence, BlockCopy, Group, Row, StepPlan, StepResult
from engine.runner import cpu_runner
from engine.runner.cpu_runner import CpuRunner, build_runner
from engine.weights import load_weights
from kernels import reference_int8
from tests.models import prepared, tiny_config
from tests.unit.engine.attention.test_cpu_backend import random_tree
from tests.unit.engine.models.dense_llama import dense_logits

BLOCK, BLOCKS, CONTEXT = 16, 900, 2048
GREEDY = Sampling(temperature=0, logprobs=0)
TOLERANCE = 1e-4

FP32 = EngineConfig(dtype="fp32", kv_dtype="fp32")
AUTO = EngineConfig()
INT8 = EngineConfig(kv_dtype="int8")

Make = Callable[[EngineConfig], CpuRunner]


@pytest.fixture(params=["torch", "c"])
def make(request: pytest.FixtureRequest, card: ModelCard) -> Make:
    """Return a constructor of runners in torch or in C; its threads end with the test."""

    def made(config: EngineConfig) -> CpuRunner:
        kernels = request.getfixturevalue("kernels_of")(2) if request.param == "c" else None
        return CpuRunner(card, config, blocks=BLOCKS, context=CONTEXT, kernels=kernels)

    return made


@pytest.fixture
def runner(make: Make) -> CpuRunner:
    return make(FP32)


class Dense:
    """The dense model: recomputes the next token of any history."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.weights = load_weights(card, torch.float32)

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        return dense_logits(self.card.config, self.weights, list(tokens)).log_softmax(-1)

    def check(self, history: Sequence[int], token: SampledToken) -> None:
        """Assert that `token` is the likeliest after `history` and that its logprob is right."""
        expected = self.logprobs(history)[-1]
        assert token.logprob is not None
        assert abs(token.logprob - float(expected[token.token_id])) < TOLERANCE
        assert float(expected.max() - expected[token.token_id]) < TOLERANCE


@pytest.fixture(scope="module")
def dense(card: ModelCard) -> Dense:
    return Dense(card)


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]


def begun(sequence_id: int, tokens: Sequence[int], prompt: int | None = None) -> BegunSequence:
    return BegunSequence(sequence_id, GREEDY, tokens, len(tokens) if prompt is None else prompt)


def run(runner: CpuRunner, plan: StepPlan) -> StepResult:
    runner.launch(plan)
    return runner.collect()


def drawn(result: StepResult) -> dict[int, SampledToken]:
    """Return the one token that each sequence sampled."""
    return {sequence_id: token for sequence_id, (token,) in result.sampled.items()}


def test_chunked_prompt_then_decoding_equals_dense(runner: CpuRunner, dense: Dense) -> None:
    """While it decodes, only the runner knows the sequence's last token."""
    prompt, table = tokens_of(1, 50), [5, 1, 8, 3, 7]
    plan = StepPlan(0, (Row(1, 0, 33, table, 0, prompt[:33]),), begun=(begun(1, prompt),))
    assert run(runner, plan).sampled == {}
    token = drawn(run(runner, StepPlan(1, (Row(1, 33, 17, table, 0, prompt[33:], (1,)),))))[1]
    history = list(prompt)
    for step in range(2, 20):
        dense.check(history, token)
        history.append(token.token_id)
        row = Row(1, len(history) - 1, 1, table, 0, None, (1,))
        token = drawn(run(runner, StepPlan(step, (row,))))[1]

    dense.check(history, token)


def test_shared_runs_at_several_levels_equal_dense(runner: CpuRunner, dense: Dense) -> None:
    """Four sequences share 80 tokens, two of them 80 more; a prompt is in the same batch."""
    root, branch = tokens_of(2, 80), tokens_of(3, 80)
    histories = [
        root + branch + tokens_of(10, 7),
        root + branch + tokens_of(11, 20),
        root + tokens_of(12, 3),
        root + tokens_of(13, 40),
    ]
    shared, shared_more = list(range(20, 25)), list(range(30, 35))
    tables = [
        shared + shared_more + [40, 41],
        shared + shared_more + [42, 43],
        [*shared, 44],
        [*shared, 45, 46, 47],
    ]
    prefill(runner, histories, tables)
    prompt = tokens_of(14, 30)
    rows = [
        Row(i, len(h) - 1, 1, t, 0, [h[-1]], (i,))
        for i, (h, t) in enumerate(zip(histories, tables, strict=True))
    ]
    rows.append(Row(9, 0, 30, [50, 51], 0, prompt, (9,)))
    groups = (Group(0, 4, 0, 5), Group(0, 2, 5, 10))

    result = run(runner, StepPlan(1, tuple(rows), groups, begun=(begun(9, prompt),)))

    for i, history in enumerate([*histories, prompt]):
        dense.check(history, drawn(result)[i if i < 4 else 9])


def prefill(runner: CpuRunner, histories: list[list[int]], tables: list[list[int]]) -> None:
    """Begin each sequence and compute all but its last token, one sequence per step."""
    for i, (history, table) in enumerate(zip(histories, tables, strict=True)):
        row = Row(i, 0, len(history) - 1, table, 0, history[:-1])
        run(runner, StepPlan(0, (row,), begun=(begun(i, history),)))


def test_forked_sequences_sample_from_same_logits(runner: CpuRunner, dense: Dense) -> None:
    """After a fork several sequences sample from one row, and each keeps its own last token."""
    prompt = tokens_of(4, 20)
    both = tuple(begun(s, prompt) for s in (1, 2))
    plan = StepPlan(0, (Row(1, 0, 20, [0, 1], 0, prompt, (1, 2)),), begun=both)

    tokens = drawn(run(runner, plan))

    assert tokens[1] == tokens[2]
    dense.check(prompt, tokens[1])


def test_copied_block_is_independent_of_source(runner: CpuRunner, dense: Dense) -> None:
    """Copy-on-write: both sequences write the slot behind the copied ones."""
    prompt = tokens_of(5, 20)
    first = StepPlan(0, (Row(1, 0, 20, [0, 1], 0, prompt, ()),), begun=(begun(1, prompt),))
    run(runner, first)
    rows = (
        Row(1, 20, 1, [0, 1], 0, [11], (1,)),
        Row(2, 20, 1, [0, 6], 0, [22], (2,)),
    )
    plan = StepPlan(1, rows, begun=(begun(2, [*prompt, 22]),), copies=(BlockCopy(1, 6, 4),))

    tokens = drawn(run(runner, plan))

    dense.check([*prompt, 11], tokens[1])
    dense.check([*prompt, 22], tokens[2])


def test_preempted_sequence_resumes(runner: CpuRunner, dense: Dense) -> None:
    """One step ends it, begins it again with its outputs, and recomputes it into other blocks."""
    prompt = tokens_of(6, 30)
    plan = StepPlan(0, (Row(1, 0, 30, [0, 1], 0, prompt, (1,)),), begun=(begun(1, prompt),))
    history = [*prompt, drawn(run(runner, plan))[1].token_id]
    plan = StepPlan(
        1,
        (Row(1, 0, 31, [7, 8], 0, history, (1,)),),
        begun=(begun(1, history, prompt=30),),
        ended=(1,),
    )

    token = drawn(run(runner, plan))[1]

    dense.check(history, token)


def test_prompt_logprobs_are_of_following_tokens(runner: CpuRunner, dense: Dense) -> None:
    """In two chunks: the first chunk's last position is scored by the next chunk's first token."""
    prompt = tokens_of(7, 25)
    rows = [
        Row(1, 0, 10, [0, 1], 0, prompt[:10], (), prompt_logprobs=2, next_token_id=prompt[10]),
        Row(1, 10, 15, [0, 1], 0, prompt[10:], (1,), prompt_logprobs=2),
    ]
    entries: list[SampledToken] = []
    for step, row in enumerate(rows):
        plan = StepPlan(step, (row,), begun=() if step else (begun(1, prompt),))
        entries.extend(run(runner, plan).prompt_logprobs[1])

    assert [entry.token_id for entry in entries] == prompt[1:]
    expected = dense.logprobs(prompt)
    for at, entry in enumerate(entries):
        assert entry.logprob is not None
        assert abs(entry.logprob - float(expected[at, entry.token_id])) < TOLERANCE
        assert len(entry.top) == 2


def test_sequence_with_nan_kv_fails_alone(runner: CpuRunner, dense: Dense) -> None:
    """NaN logits end their sequence and no other sequence of the step."""
    prompts = [tokens_of(8, 20), tokens_of(9, 20)]
    tables = [[0, 1], [2, 3]]
    prefill(runner, prompts, tables)
    runner.kv.data[2] = float("nan")
    rows = tuple(Row(i, 19, 1, tables[i], 0, [prompts[i][-1]], (i,)) for i in (0, 1))

    result = run(runner, StepPlan(1, rows))

    assert result.failed == {1: "nan_logits"}
    assert list(result.sampled) == [0]
    dense.check(prompts[0], drawn(result)[0])


@pytest.mark.parametrize("config", [AUTO, INT8], ids=["auto", "int8"])
def test_slots_of_other_sequences_are_never_read(config: EngineConfig, make: Make) -> None:
    """Freed blocks keep their last owner's values. Huge values in every slot outside the history
    change no bit of the result."""
    runner = make(config)
    prompt = tokens_of(10, 37)
    outcomes = []
    for sign in (0, 1, -1):
        runner.kv.data.fill_(sign * (127 if config is INT8 else 1e30))
        if config is INT8:
            reference_int8.scales_of(runner.kv.data.flatten(-2)).fill_(abs(sign) * 65504.0)
        plan = StepPlan(0, (Row(1, 0, 37, [4, 2, 6], 0, prompt, (1,)),), begun=(begun(1, prompt),))
        first = drawn(run(runner, plan))[1]
        plan = StepPlan(1, (Row(1, 37, 1, [4, 2, 6], 0, None, (1,)),), copies=(BlockCopy(6, 5, 5),))
        outcomes.append((first, drawn(run(runner, plan))[1]))
        run(runner, StepPlan(2, (), ended=(1,)))

    assert outcomes[1] == outcomes[0]
    assert outcomes[2] == outcomes[0]


def test_step_without_rows_returns_empty_result(runner: CpuRunner) -> None:
    """The last sequence was cancelled: the plan only ends it."""
    prompt = tokens_of(1, 5)
    run(runner, StepPlan(0, (Row(1, 0, 5, [0], 0, prompt, (1,)),), begun=(begun(1, prompt),)))

    result = run(runner, StepPlan(1, (), ended=(1,)))

    assert result == StepResult(1, elapsed_s=result.elapsed_s)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("config", [FP32, AUTO, INT8], ids=["fp32", "auto", "int8"])
def test_batch_changes_no_bit_of_a_row_in_c(
    seed: int, config: EngineConfig, card: ModelCard, kernels_of: Callable[[int], Kernels]
) -> None:
    """Alone, in a batch, with groups, with 1 thread or 3: the logprobs are equal to the last bit.
    The KV holds arbitrary numbers, because rows share blocks of any content."""
    plan = random_tree(random.Random(seed))
    plans = {
        "groups": [plan],
        "no groups": [StepPlan(0, plan.rows)],
        "alone": [StepPlan(0, (row,)) for row in plan.rows],
    }
    outcomes = {}
    for threads in (1, 3):
        kernels = kernels_of(threads)
        runner = CpuRunner(card, config, blocks=BLOCKS, context=CONTEXT, kernels=kernels)
        for name, parts in plans.items():
            fill(runner, seed)
            outcomes[name, threads] = [token for part in parts for token in draws(runner, part)]

    expected = outcomes["alone", 1]
    assert len(expected) == len(plan.rows)
    for how, outcome in outcomes.items():
        assert outcome == expected, (seed, how)


def fill(runner: CpuRunner, seed: int) -> None:
    """Fill the pool with arbitrary values and scales."""
    generator = torch.Generator().manual_seed(seed)
    if not runner.kv.format.is_int8:
        runner.kv.data.normal_(generator=generator)
        return
    units = runner.kv.data.flatten(-2)
    units.random_(-127, 128, generator=generator)
    scales = reference_int8.scales_of(units)
    scales.copy_(torch.rand(scales.shape, generator=generator) / 50 + 0.001)


def draws(runner: CpuRunner, plan: StepPlan) -> list[SampledToken]:
    """Begin the plan's sequences and return a sampled token of each row."""
    rows = tuple(
        Row(r.sequence_id, r.start, r.count, r.block_ids, 0, r.token_ids, (r.sequence_id,))
        for r in plan.rows
    )
    starting = tuple(begun(r.sequence_id, [0]) for r in rows)
    result = run(runner, StepPlan(0, rows, plan.groups, begun=starting))
    return list(drawn(result).values())


def test_built_runner_is_warm_and_has_requested_size(tmp_path: Path) -> None:
    """The KV takes `kv_memory_mib`; warm-up leaves the KV zero."""
    card = prepared(tmp_path, tiny_config(head_dim=32, heads=3, kv_heads=1))
    built = build_runner(card, EngineConfig(kv_memory_mib=4, threads=1))

    runner = built.runner
    assert isinstance(runner, CpuRunner)
    assert runner.kv.data.nbytes == built.blocks * built.kv_format.block_bytes
    assert 4 * 2**20 - built.kv_format.block_bytes < runner.kv.data.nbytes <= 4 * 2**20
    assert not runner.kv.data.any()
    assert built.context == card.config.context


@pytest.mark.parametrize("smallest", [{"kv_blocks": 1}, {"context_tokens_max": 5}], ids=str)
def test_warm_up_stays_within_the_pool_and_the_context(
    smallest: dict[str, Any], card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C it would write behind the pool's memory, or read behind the rotary tables."""
    monkeypatch.setattr(cpu_runner, "load_kernels", lambda config, threads: None)
    built = build_runner(card, EngineConfig(**smallest, kv_memory_mib=1, threads=1))

    assert not built.kv.shards[0].data.any()


def test_weights_in_fp8_are_refused(card: ModelCard) -> None:
    """Only a GPU's kernels multiply them; the message names the setting."""
    with pytest.raises(ModelError, match=r"engine\.weights is fp8") as caught:
        build_runner(card, EngineConfig(weights="fp8"))

    assert caught.value.code == "unsupported"
