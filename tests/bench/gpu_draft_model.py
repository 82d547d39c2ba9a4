"""A draft model on a GPU: python -m tests.bench.gpu_draft_model [--json FILE]

Llama-3.1-8B's shape with a draft model of Llama-3.2-1B's, both with random weights in bf16; prompts
of 448 tokens of their own, 128 output tokens, greedy. Nothing else drafts. The small model computes
its guesses as it would for a client; whether they are right is drawn with a given probability. Each
line has tokens a second after the first ones over those without drafts. First, a tiny model that
drafts for itself: its guesses must be right, as far as two batch sizes give the same bits.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from engine.api import CacheGrant, Finished, Request, Sampling, Tokens
from engine.config import DRAFT_PLACE_TOKENS, DRAFT_PLACES_MAX, EngineConfig
from engine.core.step_drafts import EXPOSED_S
from engine.drafts.drafter import Drafter
from engine.drafts.model import READ_TOKENS, ModelSource
from engine.drafts.step_times import StepTimes
from engine.runner.draft_model import count_host_time
from engine.server.composition import core_of_model
from tests.bench.device import describe
from tests.bench.gpu_drafts import DraftBench, measure
from tests.bench.models import BLOCK, LLAMA_1B, LLAMA_8B
from tests.bench.results import Results, print_line
from tests.models import prepared, tiny_config

ROWS = (1, 4, 8, 16, 32)
ACCEPTANCE = (0.8, 0.6, 0.3, 0.0)
RUNS = 3
FREE = (1.0,) * 128


def check(results: Results) -> None:
    """Let a tiny model draft for itself, built as an engine builds both. Raises AssertionError
    where fewer than half of its drafts are right: random weights have many near ties."""
    chance, answers = random.Random(4), list[dict[str, list[int]]]()
    with tempfile.TemporaryDirectory() as scratch:
        shape = tiny_config(layers=4, heads=8, kv_heads=4, head_dim=64, context=4096)
        card = prepared(Path(scratch), shape)
        config = EngineConfig(device="cuda", draft_model=card.folder, sequences_max=64)
        began_s = time.perf_counter()
        core, info = core_of_model(Path(card.folder), config)
        took_s = time.perf_counter() - began_s
        assert info.draft_model == card.name
        assert core.drafts.drafter is not None
        core.drafts.drafter = Drafter(FREE, [], EXPOSED_S, core.drafts.drafter.model)
        prompts = [tuple(chance.randrange(3, 250) for _ in range(n)) for n in (5, 40, 90, 200)]
        drafted = accepted = 0
        for drafts in (True, False):
            found: dict[str, list[int]] = {}
            for number, prompt in enumerate(prompts):
                grant = CacheGrant(b"drafts" if drafts else b"none")
                core.submit(
                    Request(f"{number}", prompt, 200, grant, Sampling(temperature=0), drafts=drafts)
                )
            while core.has_work():
                for event in core.step():
                    if isinstance(event, Tokens):
                        new = [token.token_id for token in event.tokens]
                        found.setdefault(event.request_id, []).extend(new)
                    if isinstance(event, Finished):
                        assert event.ending == "done", event
                        drafted += sum(one.drafted for one in event.usage.drafts)
                        accepted += sum(one.accepted for one in event.usage.drafts)
            answers.append(found)
        core.check()
        core.close()
    equal = sum(answers[0][name] == answers[1][name] for name in answers[1])
    results.add(
        {
            "drafted": drafted, "accepted": accepted, "equal": equal, "of": len(prompts),
            "start_s": round(took_s, 1),
        }
    )  # fmt: skip
    assert drafted > 100, drafted
    assert accepted > 0.5 * drafted, (accepted, drafted)


def draft_source(bench: DraftBench) -> ModelSource:
    """Return the source over a bench's model."""
    bench.runner.capture_all(DRAFT_PLACES_MAX)
    step_s = bench.time_steps()
    source = ModelSource(
        bench.runner, StepTimes(step_s), time.perf_counter,
        places=DRAFT_PLACES_MAX, vocab_size=LLAMA_1B.vocab, block_size=BLOCK,
    )  # fmt: skip
    count_host_time(source, step_s)
    return source


def main() -> None:
    """Print a line of JSON for each number of rows and acceptance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timing-only", action="store_true", help="without the tiny model")
    options = parser.parse_args()
    results = Results()
    if not options.timing_only:
        check(results)
    blocks = DRAFT_PLACES_MAX * DRAFT_PLACE_TOKENS // BLOCK
    small = DraftBench(LLAMA_1B, blocks, sequences=DRAFT_PLACES_MAX)
    bench = DraftBench(LLAMA_8B, 4_000)
    print_line(describe(bench.copy_rate))
    source, times = draft_source(small), bench.time_steps()
    sizes = (1, 2, 4, 8, 16, 32)
    results.add(
        {
            "step_ms": {size: round(times[size - 1] * 1e3, 3) for size in sizes},
            "draft_ms": {
                size: round(source.times.seconds(size) * 1e3, 3) for size in (*sizes, READ_TOKENS)
            },
        }
    )
    measure(bench, results, ROWS, ACCEPTANCE, RUNS, lambda: Drafter(times, [], EXPOSED_S, source))
    results.write(options.json)


if __name__ == "__main__":
    main()
