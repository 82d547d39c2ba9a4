"""What packed KV costs in quality: perplexity, divergence and recall beside exact KV.

    python -m tests.bench.kv_quality [--format int8c,int4c,int8t] [--pool]
        [--policy window,h2o,...|all] [--budget 128,256] [--model NAME] [--models FOLDER]
        [--text FILE] [--context 768] [--windows 1] [--tasks 1] [--full]

Formats run the engine's own path (`kv_reading`): a block is packed when it is full, and later
tokens read it back. `--pool` adds an engine whose pool is int8 (`engine.kv_dtype`). Policies keep
tokens by attention; they run in a harness of their own (`kv_policies`), since they may never enter
the shared tree, and are compared over the second half of a text. They are left out unless they are
named.

All variants read the same tokens. *Perplexity* is that of the text's next tokens, beside exact
KV's; *KL* the divergence of the next-token distribution from exact KV's, mean and 99th percentile
over positions; *top-1* how often the likeliest token is the same. *Copied*: tokens of a random run
that are predicted when it is read again. *Pairs*: numbers asked back from prose, all tokens right.
The noise floor is exact KV computed in steps of another size. About 2 minutes on 2 free cores;
`--full` reads 16 windows of 2,048 tokens of each text, and 6 tasks of each kind.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from msgspec import Struct
from tokenizers import Tokenizer

from engine.model_store import DEFAULT_MODEL, ModelCard
from tests.bench import kv_texts
from tests.bench.kv_policies import POLICIES, PolicyReader
from tests.bench.kv_reading import INT8_POOL, BesideInt8, Reader
from tests.bench.models import default_card
from tests.bench.results import print_line

FORMATS = ("int8c", "int4c", "int8t")
Read = Callable[[Sequence[int], Sequence[str]], Iterator[tuple[int, torch.Tensor]]]
"""Yields positions and logits [variants, n, vocab] of consecutive runs of tokens."""


class Comparison:
    """One variant beside exact KV, over the positions that it was given."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.exact_losses: list[float] = []
        self.divergences: list[float] = []
        self.same: list[bool] = []

    def add(self, exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> None:
        """Add log-probabilities [n, vocab] of both, and the n tokens that followed."""
        at = torch.arange(len(targets))
        self.exact_losses += (-exact[at, targets]).tolist()
        self.losses += (-other[at, targets]).tolist()
        self.divergences += (exact.exp() * (exact - other)).sum(-1).clamp(min=0).tolist()
        self.same += (exact.argmax(-1) == other.argmax(-1)).tolist()

    def summary(self) -> Summary:
        """Return the figures over everything added."""
        change = statistics.fmean(self.losses) - statistics.fmean(self.exact_losses)
        ordered = sorted(self.divergences)
        return Summary(
            perplexity=math.exp(statistics.fmean(self.losses)),
            change=math.expm1(change),
            divergence=statistics.fmean(ordered),
            divergence_p99=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            same=statistics.fmean(self.same),
        )


class Summary(Struct, frozen=True):
    """`change`: of perplexity, as a part of exact KV's. `same`: part of the positions."""

    perplexity: float
    change: float
    divergence: float
    divergence_p99: float
    same: float


def compare(
    read: Read, variants: Sequence[str], windows: Iterable[Sequence[int]], first: int = 0
) -> dict[str, Comparison]:
    """Return a comparison with exact KV of each variant over the windows, from position `first`."""
    found = {name: Comparison() for name in variants}
    for window in windows:
        for start, logits in read(window, ["", *variants]):
            targets = torch.tensor(window[start + 1 : start + 1 + logits.shape[1]])
            if start < first or not len(targets):
                continue
            logs = torch.log_softmax(logits[:, : len(targets)], -1)
            for index, name in enumerate(variants, 1):
                found[name].add(logs[0], logs[index], targets)
    return found


def recall(read: Read, variants: Sequence[str], tasks: Iterable[kv_texts.Task]) -> list[float]:
    """Return the part of the answers that each variant predicts, all tokens right."""
    right = [0] * len(variants)
    asked = 0
    for task in tasks:
        predicted: list[list[int]] = [[] for _ in variants]
        for _, logits in read(task.token_ids, variants):
            for found, best in zip(predicted, logits.argmax(-1).tolist(), strict=True):
                found += best
        asked += len(task.answers)
        for index, found in enumerate(predicted):
            right[index] += sum(
                found[first - 1 : end - 1] == task.token_ids[first:end]
                for first, end in task.answers
            )
    return [count / asked for count in right]


def noise_floor(reader: Reader, window: Sequence[int]) -> Summary:
    """Return exact KV beside itself in steps of 48 tokens."""
    comparison = Comparison()
    coarse = torch.cat([logits[0] for _, logits in reader.read(window, [""], chunk=48)])
    for start, logits in reader.read(window, [""]):
        targets = torch.tensor(window[start + 1 : start + 1 + logits.shape[1]])
        both = [logits[0, : len(targets)], coarse[start : start + len(targets)]]
        exact, other = (torch.log_softmax(part, -1) for part in both)
        comparison.add(exact, other, targets)
    return comparison.summary()


def table(
    summaries: dict[str, Summary], recalls: dict[str, list[float]], kinds: Sequence[str]
) -> list[str]:
    """Return the lines of a Markdown table, a variant a line."""
    lines = [
        "| KV | perplexity | KL mean, p99 | top-1 the same | " + " | ".join(kinds) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(kinds),
    ]
    for name, parts in recalls.items():
        shown = " | ".join(f"{100 * part:.1f} %" for part in parts)
        if name not in summaries:
            lines.append(f"| {name} | – | – | – | {shown} |")
            continue
        s = summaries[name]
        lines.append(
            f"| {name} | {100 * s.change:+.2f} % | {s.divergence:.5f}, {s.divergence_p99:.4f} |"
            f" {100 * s.same:.2f} % | {shown} |"
        )
    return lines


def tasks_of(
    card: ModelCard, tokenizer: Tokenizer, context: int, count: int
) -> dict[str, list[kv_texts.Task]]:
    """Return the recall tasks that fit the context, by kind."""
    special = set(card.special_token_ids)
    ordinary = [token for token in range(card.config.vocab) if token not in special]
    pairs = [kv_texts.pairs(tokenizer, 24, seed) for seed in range(count)]
    return {
        "copied": [kv_texts.copying(ordinary, context // 2, seed) for seed in range(count)],
        "pairs": [task for task in pairs if len(task.token_ids) <= context],
    }


def report_formats(
    reader: Reader, read: Read, formats: Sequence[str], windows: dict[str, list[list[int]]],
    tasks: dict[str, list[kv_texts.Task]],
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of the report on packed formats: a table a text. `read`: the reader's own, or
    one with further variants."""
    recalls = {kind: recall(read, ["", *formats], asked) for kind, asked in tasks.items() if asked}
    by_name = {
        name or "exact": [parts[index] for parts in recalls.values()]
        for index, name in enumerate(["", *formats])
    }
    for name, chosen in windows.items():
        if not chosen:
            continue
        comparisons = compare(read, formats, chosen)
        floor = noise_floor(reader, chosen[0][:512])
        exact = comparisons[formats[0]].exact_losses
        yield (
            f"\n{name}: {len(exact):,} tokens, perplexity {math.exp(statistics.fmean(exact)):.3f}"
            f" with exact KV; floor: KL {floor.divergence:.6f}, top-1 {100 * floor.same:.2f} %\n"
        )
        summaries = {variant: found.summary() for variant, found in comparisons.items()}
        yield from table(summaries, by_name, list(recalls))


def report_policies(
    reader: PolicyReader, policies: Sequence[str], windows: dict[str, list[list[int]]],
    copied: Sequence[kv_texts.Task],
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of the report on policies: one table, over the second half of all texts."""
    chosen = [window for part in windows.values() for window in part]
    recalls = recall(reader.read, ["", *policies], copied)
    found = compare(reader.read, policies, chosen, first=reader.context // 2) if chosen else {}
    yield f"\npolicies, fp32, the second half of {len(chosen)} windows\n"
    yield from table(
        {name: comparison.summary() for name, comparison in found.items()},
        {name or "exact": [part] for name, part in zip(["", *policies], recalls, strict=True)},
        ["copied"],
    )


def options() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", default=",".join(FORMATS))
    parser.add_argument("--pool", action="store_true")
    parser.add_argument("--policy", default="")
    parser.add_argument("--budget", default="128,256")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--models", type=Path, help="a folder of models")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--full", action="store_true")
    chosen = parser.parse_args()
    if chosen.full:
        chosen.context, chosen.windows, chosen.tasks = 2048, 16, 6
    return chosen


def main() -> None:
    chosen = options()
    policies = POLICIES if chosen.policy == "all" else chosen.policy.split(",")
    budgets = [
        f"{name} {budget}" for budget in chosen.budget.split(",") for name in policies if name
    ]
    card = default_card(chosen.model, chosen.models)
    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    formats = [name for name in chosen.format.split(",") if name]
    windows = {
        name: kv_texts.windows(text, tokenizer, chosen.context, chosen.windows, seed=1)
        for name, text in kv_texts.texts(chosen.text).items()
    }
    tasks = tasks_of(card, tokenizer, chosen.context, chosen.tasks)
    if formats or chosen.pool:
        reader = Reader(card, chosen.context, len(formats) + 1, chosen.threads)
        read: Read = reader.read
        print("\n".join(sizes(reader, formats)))
        if chosen.pool:
            beside = BesideInt8(reader, chosen.threads)
            read, formats = beside.read, [*formats, INT8_POOL]
            size, plain = beside.int8.kv.format.block_bytes, reader.kv.format.block_bytes
            print(f"{INT8_POOL}: {size:,} bytes a block, {size / plain:.3f}")
        for line in report_formats(reader, read, formats, windows, tasks):
            print_line(line)
    if budgets:
        policy_reader = PolicyReader(card, chosen.context)
        for line in report_policies(policy_reader, budgets, windows, tasks["copied"]):
            print_line(line)


def sizes(reader: Reader, formats: Sequence[str]) -> Iterator[str]:
    """Yield what is measured: the model, its KV, and the bytes of each format's blocks."""
    kv = reader.kv.format
    yield (
        f"{reader.card.name}, KV in {kv.name}, blocks of {kv.block_bytes:,} bytes, windows of"
        f" {reader.context} tokens"
    )
    for name in formats:
        size = reader.packer(name).block_bytes
        yield f"{name}: {size:,} bytes a block, {size / kv.block_bytes:.3f}"


if __name__ == "__main__":
    main()
