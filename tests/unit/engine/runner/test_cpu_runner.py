"""The CPU runner, in torch and in C, against recomputing every sequence from nothing.

Tokens and their logprobs are what a plan's maker can see, so they are what is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.api import SampledToken, Sampling
from engine.config import EngineConfig
from engine.model_store import ModelCard
from engine.models.cpu_llama import load_kernels
from engine.plan import BegunSequence, BlockCopy, Group, Row, StepPlan, StepResult
from engine.runner.cpu_runner import CpuRunner, build_runner
from engine.weights import load_weights
from tests.models import prepared, tiny_config
from tests.unit.engine.attention.test_cpu_backend import random_tree
from tests.unit.engine.models.dense_llama import dense_logits

BLOCK, BLOCKS, CONTEXT = 16, 900, 2048
GREEDY = Sampling(temperature=0, logprobs=0)
TOLERANCE = 1e-4

FP32 = EngineConfig(dtype="fp32", kv_dtype="fp32")
AS_IT_COMES = EngineConfig()


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    config = tiny_config(head_dim=32, heads=3, kv_heads=1, context=CONTEXT)
    return prepared(tmp_path_factory.mktemp("model"), config)


Make = Callable[[EngineConfig], CpuRunner]


@pytest.fixture(params=["torch", "c"])
def make(request: pytest.FixtureRequest, card: ModelCard) -> Make:
    """A runner by either path; its threads end with the test."""

    def made(config: EngineConfig) -> CpuRunner:
        kernels = None
        if request.param == "c":
            kernels = load_kernels(card.config, threads=2)
            if kernels is None:
                pytest.skip("no C compiler here")
            request.addfinalizer(kernels.close)
        return CpuRunner(card, config, blocks=BLOCKS, context=CONTEXT, kernels=kernels)

    return made


@pytest.fixture
def runner(make: Make) -> CpuRunner:
    return make(FP32)


class Dense:
    """The next token of any history, recomputed from nothing."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.weights = load_weights(card, torch.float32)

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        return dense_logits(self.card.config, self.weights, list(tokens)).log_softmax(-1)

    def check(self, history: Sequence[int], token: SampledToken) -> None:
        """`token` is the likeliest after `history`, and as likely as it says."""
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
    return {sampled.sequence_id: sampled.token for sampled in result.sampled}


def test_a_prompt_in_slices_then_tokens_one_by_one(runner: CpuRunner, dense: Dense) -> None:
    """The life of one request; its last token is known to the runner alone."""
    prompt, table = tokens_of(1, 50), [5, 1, 8, 3, 7]
    plan = StepPlan(0, (Row(1, 0, 33, table, 0, prompt[:33]),), begun=(begun(1, prompt),))
    assert run(runner, plan).sampled == ()
    token = drawn(run(runner, StepPlan(1, (Row(1, 33, 17, table, 0, prompt[33:], (1,)),))))[1]
    history = list(prompt)
    for step in range(2, 20):
        dense.check(history, token)
        history.append(token.token_id)
        row = Row(1, len(history) - 1, 1, table, 0, None, (1,))
        token = drawn(run(runner, StepPlan(step, (row,))))[1]

    dense.check(history, token)


def test_rows_that_share_runs_at_several_levels(runner: CpuRunner, dense: Dense) -> None:
    """Four sequences: all share 80 tokens, two of them 80 more; a prompt runs beside them."""
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
    fill(runner, histories, tables)
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


def fill(runner: CpuRunner, histories: list[list[int]], tables: list[list[int]]) -> None:
    """Begin each sequence and compute all but its last token, one by one."""
    for i, (history, table) in enumerate(zip(histories, tables, strict=True)):
        row = Row(i, 0, len(history) - 1, table, 0, history[:-1])
        run(runner, StepPlan(0, (row,), begun=(begun(i, history),)))


def test_samples_of_one_prompt_draw_from_the_same_logits(runner: CpuRunner, dense: Dense) -> None:
    """After a fork several sequences draw from one row, each with its own last token."""
    prompt = tokens_of(4, 20)
    both = tuple(begun(s, prompt) for s in (1, 2))
    plan = StepPlan(0, (Row(1, 0, 20, [0, 1], 0, prompt, (1, 2)),), begun=both)

    tokens = drawn(run(runner, plan))

    assert tokens[1] == tokens[2]
    dense.check(prompt, tokens[1])


def test_a_copied_block_goes_its_own_way(runner: CpuRunner, dense: Dense) -> None:
    """Copy-on-write: both write the slot behind the copied ones, each its own token."""
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


def test_a_preempted_sequence_resumes_where_it_was(runner: CpuRunner, dense: Dense) -> None:
    """Ended, begun again with its outputs, recomputed into other blocks, in one step."""
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


def test_prompt_logprobs_are_those_of_the_tokens_that_follow(
    runner: CpuRunner, dense: Dense
) -> None:
    """In two slices: the first one's last position is scored by the token after it."""
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


def test_a_sequence_with_broken_kv_fails_alone(runner: CpuRunner, dense: Dense) -> None:
    """NaN logits end the sequence that has them, and nobody else in its step."""
    prompts = [tokens_of(8, 20), tokens_of(9, 20)]
    tables = [[0, 1], [2, 3]]
    fill(runner, prompts, tables)
    runner.kv.data[2] = float("nan")
    rows = tuple(Row(i, 19, 1, tables[i], 0, [prompts[i][-1]], (i,)) for i in (0, 1))

    result = run(runner, StepPlan(1, rows))

    assert result.failed == {1: "nan_logits"}
    assert list(drawn(result)) == [0]
    dense.check(prompts[0], drawn(result)[0])


def test_slots_that_are_not_a_sequences_own_are_never_seen(make: Make) -> None:
    """Freed blocks keep what their last owner wrote. Poisoned with numbers as large as they get,
    every slot that is not part of the history changes no bit of the outcome."""
    runner = make(AS_IT_COMES)
    prompt = tokens_of(10, 37)
    outcomes = []
    for poison in (0.0, 1e30, -1e30):
        runner.kv.data.fill_(poison)
        plan = StepPlan(0, (Row(1, 0, 37, [4, 2, 6], 0, prompt, (1,)),), begun=(begun(1, prompt),))
        first = drawn(run(runner, plan))[1]
        plan = StepPlan(1, (Row(1, 37, 1, [4, 2, 6], 0, None, (1,)),), copies=(BlockCopy(6, 5, 5),))
        outcomes.append((first, drawn(run(runner, plan))[1]))
        run(runner, StepPlan(2, (), ended=(1,)))

    assert outcomes[1] == outcomes[0]
    assert outcomes[2] == outcomes[0]


def test_a_step_of_no_rows_is_answered(runner: CpuRunner) -> None:
    """The last sequence was cancelled: there is something to end and nothing to compute."""
    prompt = tokens_of(1, 5)
    run(runner, StepPlan(0, (Row(1, 0, 5, [0], 0, prompt, (1,)),), begun=(begun(1, prompt),)))

    result = run(runner, StepPlan(1, (), ended=(1,)))

    assert result == StepResult(1, elapsed_s=result.elapsed_s)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("config", [FP32, AS_IT_COMES], ids=["fp32", "auto"])
def test_in_c_the_batch_changes_no_bit_of_a_row(
    seed: int, config: EngineConfig, card: ModelCard, request: pytest.FixtureRequest
) -> None:
    """Alone, in a batch, with groups, with 1 thread or 3: the same logprob to the last bit. KV is
    arbitrary numbers: what is shared are the blocks, whatever they hold."""
    plan = random_tree(random.Random(seed))
    plans = {
        "groups": [plan],
        "no groups": [StepPlan(0, plan.rows)],
        "alone": [StepPlan(0, (row,)) for row in plan.rows],
    }
    outcomes = {}
    for threads in (1, 3):
        kernels = load_kernels(card.config, threads)
        if kernels is None:
            pytest.skip("no C compiler here")
        request.addfinalizer(kernels.close)
        for name, parts in plans.items():
            runner = CpuRunner(card, config, blocks=BLOCKS, context=CONTEXT, kernels=kernels)
            runner.kv.data.normal_(generator=torch.Generator().manual_seed(seed))
            outcomes[name, threads] = [token for part in parts for token in draws(runner, part)]

    expected = outcomes["alone", 1]
    assert len(expected) == len(plan.rows)
    for how, outcome in outcomes.items():
        assert outcome == expected, (seed, how)


def draws(runner: CpuRunner, plan: StepPlan) -> list[SampledToken]:
    """A token from each row, of sequences begun here."""
    rows = tuple(
        Row(r.sequence_id, r.start, r.count, r.block_ids, 0, r.token_ids, (r.sequence_id,))
        for r in plan.rows
    )
    starting = tuple(begun(r.sequence_id, [0]) for r in rows)
    result = run(runner, StepPlan(0, rows, plan.groups, begun=starting))
    return [sampled.token for sampled in result.sampled]


def test_a_built_runner_is_warm_and_as_large_as_was_asked(tmp_path: Path) -> None:
    """`kv_memory_mib` is what the KV takes; the warm-up leaves nothing behind."""
    card = prepared(tmp_path, tiny_config(head_dim=32, heads=3, kv_heads=1))
    threads = torch.get_num_threads()
    try:
        built = build_runner(card, EngineConfig(kv_memory_mib=4, threads=1))
    finally:
        torch.set_num_threads(threads)

    runner = built.runner
    assert isinstance(runner, CpuRunner)
    assert runner.kv.data.nbytes == built.blocks * built.form.block_bytes
    assert 4 * 2**20 - built.form.block_bytes < runner.kv.data.nbytes <= 4 * 2**20
    assert not runner.kv.data.any()
    assert built.context == card.config.context
