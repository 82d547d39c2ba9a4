"""The GPU runner under the core, against dense recomputation of every sequence.

Without a GPU the kernels run in Triton's interpreter, and no graphs are captured.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import triton
from msgspec import structs

from engine.api import (
    Grammar,
    Sampling,
)
from engine.model_store import Layer
from engine.plan import BegunSequence, Group, Row, StepPlan
from engine.runner import gpu_runner
from engine.runner.warmup import SAMPLINGS
from tests.grammars import characters
from tests.unit.engine.runner.gpu_engine import (
    DEVICE,
    ERROR_MAX,
    FAMILIES,
    GREEDY,
    HEADS,
    IN_INTERPRETER,
    VOCAB,
    Engine,
    config_of,
    request,
    tokens_of,
    torch_logits,
)

DEPTHS = [pytest.param(1, marks=pytest.mark.nightly), 2]
"""Steps in flight. Triton's interpreter takes seconds for what a device does in milliseconds."""

pytestmark = IN_INTERPRETER


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(heads, id=name, marks=() if name == "gqa" else pytest.mark.nightly)
        for name, heads in HEADS.items()
    ],
)
def test_shared_forked_and_chunked_prompts_equal_recomputation(
    heads: tuple[int, int], depth: int
) -> None:
    """Two rounds: cold with a prompt longer than a chunk, then with cached prefixes."""
    engine = Engine(depth, heads)
    shared = tokens_of(1, 66)
    prompts = [shared + tokens_of(2, 3), shared + tokens_of(3, 9), tokens_of(4, 5)]
    expected = [engine.expected(prompt) for prompt in prompts]

    for r in range(2):
        engine.run(*(request(f"{r}{i}", p, samples=1 + (i == 1)) for i, p in enumerate(prompts)))

    for r in range(2):
        for i in range(3):
            assert expected[i] == engine.output(f"{r}{i}")
        assert expected[1] == engine.output(f"{r}1", 1)
    assert engine.finished["10"].usage.cached_tokens >= 64


ALL_FEATURES = ("attention of gpt-oss", "deepseek_v3", "qwen3_next")
"""Families that have windows, sinks, biases, latents, states and experts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALL_FEATURES else pytest.mark.nightly)
        for name in FAMILIES
    ],
)
def test_families_equal_the_torch_twin(name: str) -> None:
    """Cold with a prompt longer than a chunk, forked, then with cached prefixes and two steps deep:
    tokens and logprobs are those of a whole recomputation in torch."""
    engine = Engine(2, config=FAMILIES[name], blocks=120)
    shared = tokens_of(1, 34)
    prompts = [shared + tokens_of(2, 3), shared + tokens_of(3, 9), tokens_of(4, 5)]
    sampling = Sampling(temperature=0, logprobs=0)

    for r in range(2):
        engine.run(
            *(request(f"{r}{i}", p, sampling, samples=1 + (i == 1)) for i, p in enumerate(prompts))
        )

    assert engine.finished["10"].usage.cached_tokens >= 32
    for r in range(2):
        for i, prompt in enumerate(prompts):
            engine.check_logprobs(f"{r}{i}", prompt)


@pytest.mark.nightly
def test_window_blocks_that_others_took_change_nothing() -> None:
    """A small pool: blocks behind a window go to other sequences while tables on the GPU still name
    them, cached runs are evicted, and sequences are preempted."""
    engine = Engine(2, config=FAMILIES["gemma3"], blocks=30)
    shared = tokens_of(1, 40)
    prompts = [shared + tokens_of(9 + i, 12 + 9 * i) for i in range(3)]
    sampling = Sampling(temperature=0, logprobs=0)

    for r in range(2):
        order = prompts if r == 0 else prompts[::-1]
        engine.run(*(request(f"{r}{i}", p, sampling, count=4) for i, p in enumerate(order)))

    assert engine.core.stats().evicted_blocks_total > 0
    for r in range(2):
        for i, prompt in enumerate(prompts if r == 0 else prompts[::-1]):
            engine.check_logprobs(f"{r}{i}", prompt)


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_output_and_prompt_logprobs_equal_dense(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full sampler computes them, and also samples the plain row of the same batch. Logits of a
    whole prompt would take memory that nothing has reserved.
    """
    monkeypatch.setattr(gpu_runner, "SCORED_ROWS", 8)
    engine = Engine(depth)
    at_once, logits = list[int](), engine.runner.model.logits

    def count(hidden: torch.Tensor) -> torch.Tensor:
        at_once.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(engine.runner.model, "logits", count)
    prompt, other = tokens_of(5, 20), tokens_of(6, 10)

    engine.run(
        request("a", prompt, Sampling(temperature=0, logprobs=2), prompt_logprobs=0),
        request("b", other),
    )

    assert max(at_once) <= 8
    assert engine.expected(prompt) == engine.output("a")
    assert engine.expected(other) == engine.output("b")
    known = engine.check_logprobs("a", prompt)
    entries = [entry for entry in engine.prompt_logprobs["a"] if entry is not None][1:]
    assert list(prompt[1:]) == [entry.token_id for entry in entries]
    for at, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(known[at, entry.token_id]), abs=ERROR_MAX)


@pytest.mark.nightly
def test_rows_with_extras_draw_same_tokens_in_any_batch() -> None:
    """Penalties, biases, logprobs and seeds, beside plain rows and two steps deep: the next step is
    launched before the host has seen the token that a penalty counts."""
    kinds = {
        "plain": GREEDY,
        "penalties": Sampling(temperature=0, frequency_penalty=1.5, repetition_penalty=1.2),
        "bias": Sampling(seed=3, logit_bias={5: 2.0, 9: -100.0}),
        "seed": Sampling(seed=4, top_p=0.8, logprobs=2),
    }
    together, alone = Engine(2), Engine(1)
    prompts = {name: tokens_of(80 + i, 8 + 5 * i) for i, name in enumerate(kinds)}
    requests = [request(n, prompts[n], how, count=3) for n, how in kinds.items()]

    together.run(*requests)
    for single in requests:
        alone.run(single)

    for name in kinds:
        assert together.output(name) == alone.output(name)
    assert len(set(together.output("penalties"))) > 1
    for one, other in zip(together.drawn["seed", 0], alone.drawn["seed", 0], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=ERROR_MAX)
        assert len(one.top) == 2


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_preempted_sequence_resumes(depth: int) -> None:
    """Two sequences outgrow the pool: one of them waits, and its output stays right."""
    engine = Engine(depth, blocks=5)
    prompts = [tokens_of(7, 30), tokens_of(8, 30)]

    engine.run(*(request(str(i), prompt, count=8) for i, prompt in enumerate(prompts)))

    assert engine.core.stats().preemptions_total > 0
    for i, prompt in enumerate(prompts):
        assert engine.expected(prompt, 8) == engine.output(str(i))


@pytest.mark.slow
def test_sequences_that_come_back_in_each_others_seats_read_their_own_blocks() -> None:
    """Preempted together, they may come back as the batch that they were: no step is between."""
    engine = Engine(depth=1)
    prompts = {"a": tokens_of(1, 20), "b": tokens_of(2, 40)}
    for name, prompt in prompts.items():
        engine.core.submit(request(name, prompt, count=6))
    while not all(len(engine.drawn.get((name, 0), ())) > 1 for name in prompts):
        engine.step()
    for sequence in list(engine.core.scheduler.running):
        engine.core.scheduler.preempt(sequence, 0.0)

    engine.run()

    for name, prompt in prompts.items():
        assert engine.output(name) == engine.expected(prompt, 6)


@pytest.mark.nightly
def test_reused_seat_keeps_nothing_of_former_sequence() -> None:
    """More sequences than seats, one at a time: none reads another's block table or token."""
    engine = Engine(2, seats=3)

    for i in range(5):
        engine.run(request(str(i), tokens_of(20 + i, 18), count=2))

    for i in range(5):
        assert engine.expected(tokens_of(20 + i, 18), 2) == engine.output(str(i))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("bad_first", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0, logprobs=0)])
def test_nan_row_fails_alone(depth: int, bad_first: bool, sampling: Sampling) -> None:
    """A token's embedding is NaN: its request fails, the other request of the batch does not."""
    engine = Engine(depth)
    bad, good = (1, 2, 63), tuple(t % 60 for t in tokens_of(9, 12))
    expected = engine.expected(good, 1)
    engine.weights["model.embed_tokens.weight"][63] = float("nan")
    both = [request("bad", bad, sampling), request("good", good, count=1)]

    engine.run(*(both if bad_first else reversed(both)))

    assert engine.finished["bad"].code == "nan_logits"
    assert engine.finished["good"].code == ""
    assert expected == engine.output("good")


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_grammar_masks_only_its_own_rows(depth: int) -> None:
    """The full sampler samples the whole batch, and only the constrained request's tokens change.

    The expected tokens are the likeliest that the grammar allows, by dense recomputation.
    """
    engine = Engine(depth)
    free, constrained = tokens_of(30, 20), tokens_of(31, 12)
    words = characters(VOCAB).tokenizer
    expected = list(constrained)
    for _ in range(6):
        allowed = words.tokenize_str("abc" if len(expected) % 2 == 0 else "xy")
        likely = engine.logprobs(expected)[-1][allowed]
        expected.append(allowed[int(likely.argmax())])

    engine.run(
        request("free", free, count=9),
        request(
            "constrained",
            constrained,
            count=9,
            samples=2,
            grammar=Grammar("regex", "([a-c][xy]){3}"),
        ),
    )

    assert engine.output("free") == engine.expected(free, 9)
    assert engine.output("constrained") == expected[len(constrained) :]
    assert engine.output("constrained", 1) == expected[len(constrained) :]
    assert engine.finished["constrained"].ending == "done"


def mixed_step(vocab: int = VOCAB) -> StepPlan:
    """Return a step of two decoding rows, two prompts (of which one forks) and a chunk that does
    not sample; the first four rows share 32 tokens."""
    lengths = [(40, 1, 1), (37, 1, 1), (32, 9, 3), (32, 2, 1), (0, 18, 0)]
    rows, begun, free, name = [], [], 3, 0
    for start, count, samples in lengths:
        own = -(-(start + count) // 16) - (2 if start else 0)
        table = [1, 2] * (start > 0) + list(range(free, free + own))
        free += own
        tokens = [(7 * name + i) % vocab for i in range(count)]
        ids = tuple(range(name, name + max(1, samples)))
        rows.append(Row(name, start, count, table, 0, tokens, ids[:samples]))
        begun += [BegunSequence(i, GREEDY, [0] * (start + count), start + count) for i in ids]
        name += len(ids)
    return StepPlan(0, tuple(rows), (Group(0, 4, 0, 2),), tuple(begun))


@pytest.mark.slow
def test_padded_mixed_step_equals_exact_step() -> None:
    """A graph's step is padded to its bucket, in rows and in draws. Padding writes no KV and no
    seat's token, and changes no bit of the others."""
    found = []
    for graphs in (False, True):
        engine = Engine(graphs=graphs)
        engine.kv.data.copy_(torch.linspace(-1, 1, engine.kv.data.numel()).view_as(engine.kv.data))
        engine.runner.last_tokens.fill_(11)
        plan = mixed_step()
        engine.runner.launch(plan)
        first = engine.runner.collect()
        decode = [
            structs.replace(r, start=r.start + r.count, count=1, token_ids=None)
            for r in plan.rows[:4]
        ]
        engine.runner.launch(structs.replace(plan, rows=tuple(decode), begun=()))
        second = engine.runner.collect()
        seats = engine.runner.last_tokens[:-1].clone()  # the last one is padding's
        found.append((first.sampled, second.sampled, engine.kv.data.clone(), seats))

    exact, padded = found
    assert exact[0] == padded[0]
    assert list(padded[0]) == [0, 1, 2, 3, 4, 5]
    assert exact[1] == padded[1]
    assert torch.equal(exact[2], padded[2])
    assert torch.equal(exact[3], padded[3])


def test_step_with_more_draws_than_rows_has_graph() -> None:
    """A short prompt that forks widely takes the bucket of its draws."""
    engine = Engine(seats=40)
    prompt = tokens_of(71, 3)

    engine.run(request("a", prompt, count=2, samples=6))

    expected = engine.expected(prompt, 2)
    assert all(engine.output("a", i) == expected for i in range(6))


@pytest.mark.slow
def test_warm_up_leaves_no_kv_and_no_seat() -> None:
    """All blocks are zero, and all seats can be taken afterwards."""
    engine = Engine(2, seats=6)
    prompts = [tokens_of(40 + i, 5) for i in range(6)]

    engine.runner.warm_up(structs.replace(engine.limits, step_tokens=4))
    has_kv = bool(engine.kv.data.any())
    engine.run(*(request(str(i), prompt, count=1) for i, prompt in enumerate(prompts)))

    assert not has_kv
    for i, prompt in enumerate(prompts):
        assert engine.expected(prompt, 1) == engine.output(str(i))


@pytest.mark.gpu
def test_garbage_graph_survives_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Destroying a graph would break the capture. Each forward pass leaves a captured graph in a
    reference cycle, and the collector runs as often as possible."""
    engine = Engine(2)
    prompt, forward = tokens_of(70, 20), engine.runner.model.forward
    expected = engine.expected(prompt)
    graphs = [captured_sum() for _ in range(3)]  # of warm-ups and captures

    def leaving_garbage(*given: Any) -> torch.Tensor:
        cycle: list[Any] = [graphs.pop()] if graphs else []
        cycle.append(cycle)
        del cycle
        return forward(*given)

    monkeypatch.setattr(engine.runner.model, "forward", leaving_garbage)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        engine.run(request("a", prompt))
    finally:
        gc.set_threshold(*thresholds)

    assert not graphs
    assert engine.output("a") == expected


def captured_sum() -> torch.cuda.CUDAGraph:
    graph, value = torch.cuda.CUDAGraph(), torch.zeros(1, device=DEVICE)
    with torch.cuda.graph(graph):
        value += 1
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 32), (torch.bfloat16, 128)], ids=["triton", "gluon"]
)
def test_nothing_is_compiled_after_warm_up(
    dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client would wait for the compiler: a burst, a fork, every way of sampling, cold and
    cached.

    No other test has three heads per group, so no other test has compiled these kernels.
    """
    engine = Engine(2, (6, 2), dtype=dtype, head_dim=head_dim, step_tokens=200)
    compiled: list[str] = []

    def note(**given: Any) -> None:
        compiled.append(given["repr"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    engine.runner.warm_up(engine.limits)
    assert compiled
    compiled.clear()
    shared = tokens_of(50, 130)

    for r in range(2):
        lengths = enumerate((1, 2, 3, 7, 18, 33, 50, 90))
        engine.run(*(request(f"{r}-{i}", shared + tokens_of(i, n)) for i, n in lengths))
        for i, n in enumerate((1, 3, 17, 65, 250)):
            engine.run(request(f"{r}-alone-{i}", tokens_of(60 + i, n)))
        engine.run(
            request(f"{r}-fork", shared[:70], samples=3),
            *(request(f"{r}-{i}-draw", shared[:40], how) for i, how in enumerate(SAMPLINGS)),
            request(f"{r}-known", shared, prompt_logprobs=2),
            request(
                f"{r}-constrained", shared[:9], count=9, grammar=Grammar("regex", "([a-c][xy]){3}")
            ),
        )

    assert compiled == []


LOGPROBS = Sampling(temperature=0, logprobs=0)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_int8_pool_answers_as_its_torch_twin(windows: bool) -> None:
    """After a hit, a fork and a copy on write; a window's blocks are a group of their own."""
    layers = (Layer(), Layer(window=40)) if windows else (Layer(), Layer())
    config = structs.replace(config_of(4, 2), layers=layers)
    engine = Engine(config=config, kv_dtype=torch.int8)
    prefix = tokens_of(1, 37)
    prompts = {"a": prefix, "b": (*prefix, *tokens_of(2, 9)), "c": (*prefix, *tokens_of(3, 30))}
    for name, prompt in prompts.items():
        engine.run(request(name, prompt, LOGPROBS, samples=2 if name == "b" else 1))

    for (name, _), tokens in engine.drawn.items():
        history = [*prompts[name], *(token.token_id for token in tokens)]
        twin = torch_logits(config, engine.weights, history, torch.int8).log_softmax(-1)
        for at, token in enumerate(tokens, len(prompts[name]) - 1):
            assert token.logprob is not None
            assert abs(token.logprob - float(twin[at, token.token_id])) < 0.02
            assert float(twin[at].max() - twin[at, token.token_id]) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "step_tokens", "samples"), [(1, 64, 2), (3, 2, 1)], ids=["forks", "slices"]
)
def test_rows_of_one_token_that_do_not_decode_go_on_from_their_states(
    length: int, step_tokens: int, samples: int
) -> None:
    """A prompt of one token with two samples, and one in slices of one token: such a step has no
    row of several tokens, and is none of decoding rows either."""
    found = []
    for tokens, count in ((64, 1), (step_tokens, samples)):
        engine = Engine(1, config=FAMILIES["granite hybrid"], blocks=120, step_tokens=tokens)
        longer = tokens_of(9, 30), Sampling(seed=5)
        engine.run(request("before", *longer, count=1))  # leaves lists of its own
        sampling = Sampling(seed=5, logprobs=0)
        engine.run(request("one", tokens_of(3, length), sampling, samples=count, count=3))
        found.append(engine.drawn["one", 0])

    assert [t.token_id for t in found[0]] == [t.token_id for t in found[1]]
    for one, other in zip(*found, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=ERROR_MAX)


@pytest.mark.slow
def test_a_block_that_held_a_state_is_read_as_kv_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of a state's word may be no number in bf16, and 0 times that is none either: neither
    the slots that a sequence has not written nor those behind its table may have it."""
    hybrid = structs.replace(FAMILIES["qwen3_next"], layers=(Layer("delta"), Layer()))
    engine = Engine(1, config=hybrid, blocks=17)
    launch, held = engine.runner.launch, set[int]()

    def launch_and_note(plan: StepPlan) -> None:
        launch(plan)
        held.update(block for copy in plan.keeps for block in copy.blocks)

    monkeypatch.setattr(engine.runner, "launch", launch_and_note)
    for name, tokens in (("short", 40), ("long", 58), ("short again", 36)):
        engine.run(request(name, tokens_of(0, tokens), count=2))
        assert held, "a state was kept"
        engine.kv.data[sorted(held)] = float("nan")
        held.clear()
        engine.core.cache.erase(b"x")

    assert {one.ending for one in engine.finished.values()} == {"done"}
