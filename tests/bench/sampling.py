"""Cost of sampling: what rows with special wishes add to a step, on the CPU and on a GPU.

    python -m tests.bench.sampling [--rows 32,100,200] [--layers 32] [--repeats 3] [--cpu]

On the CPU: one call of the sampler for 16 rows of 49,152 tokens, by kind, beside 16 calls of one
row. On a GPU: the sampling kernels alone under a graph, by kind; then steps at Llama-3.1-8B's shape
through the core. *plain* rows have usual temperatures and top-p; in *extras* a quarter of the rows
also asks for logprobs, a penalty, a bias or a seed with top-p; in *grammars* a quarter follows a
JSON schema. The three alternate, and a step is the time between two steps in which at least all
other rows have drawn. Random weights give nearly flat rows, the worst case of the filters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llguidance import LLTokenizer

from engine.api import CacheGrant, Finished, Grammar, Request, Sampling, Tokens
from engine.core.constraints import Constraints
from engine.grammar.grammar import GrammarLimits, MaskFiller, Vocabulary
from engine.plan import BegunSequence
from engine.sampling.gpu_sampler import DRAW_COLUMNS, Draws, GpuSampler
from engine.sampling.sampler import Sampler
from tests.bench.gpu_workloads import Bench
from tests.bench.models import LLAMA_8B, with_layers
from tests.bench.results import print_line, spread
from tests.bench.timing import seconds_of
from tests.grammars import PolledGrammars, tokenizer_json

CPU_ROWS, CPU_VOCAB = 16, 49_152
OUTPUT, CONTEXT = 128, 512

USUAL = (
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=0),
)
EXTRAS = (
    Sampling(temperature=0.7, top_p=0.9, logprobs=5),
    Sampling(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(temperature=0.7, logit_bias={i * 31: 1.0 for i in range(100)}),
    Sampling(temperature=0.7, top_p=0.9, seed=7),
)
STRING = Grammar("json_schema", json.dumps({"type": "string", "minLength": 4_000}))

KINDS = {
    "greedy": (Sampling(temperature=0),),
    "temperature": (Sampling(temperature=0.8),),
    "top-p": (Sampling(temperature=0.8, top_p=0.9),),
    "top-k": (Sampling(temperature=0.8, top_k=40),),
    "penalties": (Sampling(temperature=0, repetition_penalty=1.1, presence_penalty=0.5),),
    "logprobs": (Sampling(temperature=0, logprobs=20),),
    "usual": USUAL,
    "usual, a quarter with extras": (*USUAL[:3], EXTRAS[0], *USUAL[:3], EXTRAS[1],
                                     *USUAL[:3], EXTRAS[2], *USUAL[:3], EXTRAS[3]),
}  # fmt: skip


def spread_over(kinds: tuple[Sampling, ...], rows: int) -> list[Sampling]:
    """Return a way of sampling for each row, all kinds in turn."""
    return list(itertools.islice(itertools.cycle(kinds), rows))


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call in microseconds."""
    call()
    return statistics.median(seconds_of(call, repeats)) * 1e6


def measure_cpu() -> None:
    """Print the CPU sampler's times for rows like a model's: few likely tokens."""
    torch.set_num_threads(1)
    logits = torch.randn(CPU_ROWS, CPU_VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    history = [random.Random(1).randrange(CPU_VOCAB) for _ in range(512)]
    for name, kinds in KINDS.items():
        sampler = Sampler(CPU_VOCAB)
        for i, sampling in enumerate(spread_over(kinds, CPU_ROWS)):
            sampler.begin(BegunSequence(i, sampling, history, 256))
        rows = [logits[i : i + 1] for i in range(CPU_ROWS)]

        def together(sampler: Sampler = sampler) -> None:
            sampler.sample(logits, range(CPU_ROWS))

        def apart(sampler: Sampler = sampler, rows: list[torch.Tensor] = rows) -> None:
            for i, row in enumerate(rows):
                sampler.sample(row, [i])

        whole, single = median_us(together, 30), median_us(apart, 10)
        print_line(
            f"CPU, {CPU_ROWS} rows, {name:<30} {whole:8.0f} us at once,"
            f" {single:8.0f} us row by row, ratio {whole / single:.2f}"
        )


def measure_kernels(rows: int) -> None:
    """Print the device time of all sampling of a step, under a graph, by kind."""
    device, vocab = torch.device("cuda"), LLAMA_8B.vocab
    for scale in (1.3, 4.0):
        logits = (torch.randn(rows, vocab, device=device) * scale).bfloat16()
        for name, kinds in KINDS.items():
            sampler = GpuSampler(vocab, device, slots=rows, rows=rows)
            for i, sampling in enumerate(spread_over(kinds, rows)):
                sampler.begin(BegunSequence(i, sampling, list(range(256)), 128))
            table = torch.zeros(rows, DRAW_COLUMNS, dtype=torch.int32)
            draws = sampler.fill(table.numpy(), range(rows))
            on_device, out = table.cuda(), torch.zeros(rows, dtype=torch.int32, device=device)
            graph = torch.cuda.CUDAGraph()

            def sample(draws: Draws, parts: tuple[Any, ...]) -> None:
                sampler, *given = parts
                sampler.draw(*given)
                if draws.has_extras:
                    sampler.draw_extras(draws, *given)

            parts = (sampler, logits, on_device, out)
            sample(draws, parts)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                sample(draws, parts)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            for _ in range(20):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            us = start.elapsed_time(end) * 1e3 / 20
            host = median_us(partial(sampler.fill, table.numpy(), range(rows)), 20)
            print_line(
                f"kernels, {rows} rows, logits spread {scale}, {name:<30}"
                f" {us:8.1f} us, host {host:.0f} us"
            )


def vocabulary(size: int) -> Vocabulary:
    """Return a vocabulary of words over letters and JSON's signs, and an end token last."""
    signs = 'abcdefghijklmnopqrstuvwxyz0123456789"{}[]:,-.'
    words = (
        "".join(word) for length in (1, 2, 3, 4) for word in itertools.product(signs, repeat=length)
    )
    text = tokenizer_json(list(itertools.islice(words, size - 1)), "<end>")
    return Vocabulary(LLTokenizer(text, eos_token=[size - 1]), GrammarLimits())


class StepBench(Bench):
    """The engine of `gpu_workloads`, with grammars."""

    def __init__(self, layers: int) -> None:
        words = vocabulary(LLAMA_8B.vocab)
        constraints = Constraints(PolledGrammars(vocabulary=words), MaskFiller(4))
        super().__init__(with_layers(LLAMA_8B, layers), 20_000, constraints=constraints)

    def step_ms(self, samplings: list[Sampling], grammars: list[Grammar | None]) -> float:
        """Return the median step while all rows decode; see the module's docstring."""
        core, rng = self.core, random.Random(3)
        for i, (sampling, grammar) in enumerate(zip(samplings, grammars, strict=True)):
            prompt = tuple(rng.randrange(self.config.vocab) for _ in range(CONTEXT))
            core.submit(
                Request(f"{i}", prompt, OUTPUT, CacheGrant(b"n"), sampling, grammar=grammar)
            )
        free = {f"{i}" for i, grammar in enumerate(grammars) if grammar is None}
        steps, before = [], 0.0
        while core.has_work():
            events = core.step()
            now = time.perf_counter()
            drew = {event.request_id for event in events if isinstance(event, Tokens)}
            if free <= drew and before:
                steps.append(now - before)
            before = now if free <= drew else 0.0
            for event in events:
                assert not isinstance(event, Finished) or event.ending == "done", event
        return statistics.median(steps[8:-8]) * 1e3

    def measure(self, rows: int, repeats: int) -> None:
        """Print the step's time by batch, and its ratio to the plain one."""
        plain = spread_over(USUAL, rows)
        extras = list(plain)
        extras[::4] = spread_over(EXTRAS, len(extras[::4]))
        free: list[Grammar | None] = [None] * rows
        held: list[Grammar | None] = [None if i % 4 else STRING for i in range(rows)]
        batches = {"plain": (plain, free), "extras": (extras, free), "grammars": (plain, held)}
        times: dict[str, list[float]] = {name: [] for name in batches}
        for _ in range(repeats):
            for name, (samplings, grammars) in batches.items():
                times[name].append(self.step_ms(samplings, grammars))
        base = statistics.median(times["plain"])
        for name, found in times.items():
            ms = statistics.median(found)
            print_line(
                f"step, {rows} rows, {name:<9} {ms:7.3f} ms, ratio {ms / base:.3f}"
                f"  {spread(found, '.3f')}"
            )


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="32,100,200")
    parser.add_argument("--layers", type=int, default=len(LLAMA_8B.layers))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="the CPU's sampler alone")
    options = parser.parse_args()
    measure_cpu()
    if options.cpu or not torch.cuda.is_available():
        return
    sizes = [int(rows) for rows in options.rows.split(",")]
    print_line(torch.cuda.get_device_name())
    with torch.inference_mode():
        for rows in sizes:
            measure_kernels(rows)
    bench = StepBench(options.layers)
    for rows in sizes:
        bench.step_ms(spread_over(USUAL + EXTRAS, rows), [None] * rows)
        bench.measure(rows, options.repeats)


if __name__ == "__main__":
    main()
