"""The sampling kernel against the full sampler, for the same uniform numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from engine.api import Sampling
from engine.plan import BegunSequence
from engine.sampling.gpu_sampler import GpuSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 300

PLAIN = {
    "greedy": Sampling(temperature=0),
    "temperature": Sampling(temperature=0.8, seed=3),
}
FILTERED = {
    "top-k": Sampling(temperature=1.3, top_k=7, seed=4),
    "top-p": Sampling(temperature=1.0, top_p=0.7, seed=5),
    "min-p": Sampling(temperature=1.0, min_p=0.05, seed=6),
    "all three": Sampling(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, seed=-7),
}


def sampler_of(*settings: Sampling, vocab: int = VOCAB) -> GpuSampler:
    """Return a sampler of sequences 0, 1, ... at their first output token."""
    sampler = GpuSampler(vocab, DEVICE)
    for sequence_id, sampling in enumerate(settings):
        sampler.begin(BegunSequence(sequence_id, sampling, [1, 2], 2))
    return sampler


def drawn(sampler: GpuSampler, logits: torch.Tensor) -> list[int]:
    """Return one draw of every row by the kernel."""
    table = torch.from_numpy(sampler.parameters(range(len(logits)))).to(DEVICE)
    out = torch.full((len(logits),), -7, dtype=torch.int32, device=DEVICE)
    sampler.draw(logits, table, out)
    return out.tolist()


def noise(seed: int, rows: int, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 3).to(DEVICE)


@pytest.mark.parametrize("sampling", PLAIN.values(), ids=PLAIN.keys())
def test_kernel_draws_same_tokens_as_full_sampler(sampling: Sampling) -> None:
    """A batch moves to the full sampler when one row needs logprobs; tokens must not change."""
    compare(sampling)


@pytest.mark.parametrize("sampling", FILTERED.values(), ids=FILTERED.keys())
def test_seeded_filtered_row_is_not_plain(sampling: Sampling) -> None:
    """The samplers add weights in different orders; a seed must use one of them in every batch."""
    assert not sampler_of(sampling).is_plain([0])
    assert sampler_of(msgspec.structs.replace(sampling, seed=None)).is_plain([0])


def compare(sampling: Sampling) -> None:
    by_kernel, fully = sampler_of(sampling), sampler_of(sampling)
    rows = noise(1, 4)

    got = [drawn(by_kernel, row[None])[0] for row in rows]

    assert [fully.draw_fully(row[None], [0])[0].token_id for row in rows] == got


def test_switching_samplers_keeps_random_position() -> None:
    """Both samplers share one position per sequence."""
    sampling = Sampling(temperature=5.0, seed=11)
    kernel_only, mixed = sampler_of(sampling), sampler_of(sampling)
    rows = noise(2, 4)
    expected = [drawn(kernel_only, row[None])[0] for row in rows]

    got = [
        mixed.draw_fully(row[None], [0])[0].token_id if i % 2 else drawn(mixed, row[None])[0]
        for i, row in enumerate(rows)
    ]

    assert expected == got


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("vocab", [VOCAB, 5000], ids=["one stride", "two"])
@pytest.mark.parametrize("sampling", [*PLAIN.values(), Sampling(top_k=3), Sampling(top_p=0.5)])
def test_row_with_nan_has_no_token(sampling: Sampling, vocab: int) -> None:
    """A NaN first, last, at the best token or beside infinity: the runner ends that sequence alone
    with nan_logits. A row of minus infinity has no token either."""
    sampler = sampler_of(*[sampling] * 7, vocab=vocab)
    rows = noise(3, 7, vocab)
    rows[1, 0] = rows[2, -1] = rows[3, int(rows[3].argmax())] = rows[6] = float("nan")
    rows[4, 7], rows[4, 8] = float("nan"), float("inf")
    rows[5] = float("-inf")

    got = drawn(sampler, rows)

    assert [token >= 0 for token in got] == [True] + [False] * 6
    assert got[1:] == [-1] * 6
    assert [t.token_id for t in sampler.draw_fully(rows[1:], range(1, 7))] == [-1] * 6


@pytest.mark.parametrize(
    ("sampling", "is_plain"),
    [
        (Sampling(top_k=3), True),
        (Sampling(logprobs=0), False),
        (Sampling(logit_bias={1: 2.0}), False),
        (Sampling(presence_penalty=0.1), False),
        (Sampling(frequency_penalty=0.1), False),
        (Sampling(repetition_penalty=1.1), False),
    ],
)
def test_sequence_with_history_is_not_plain(sampling: Sampling, is_plain: bool) -> None:
    """The kernel has no history; one sequence that needs it moves the whole batch."""
    sampler = sampler_of(Sampling(), sampling)

    assert sampler.is_plain([0])
    assert sampler.is_plain([0, 1]) is is_plain


INFINITE = [
    ({}, "noise"),
    ({}, "least"),
    ({"top_k": 2}, "noise"),
    ({"top_p": 0.9}, "noise"),
    ({"min_p": 0.5}, "noise"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: overflow
@pytest.mark.parametrize(("filters", "others"), INFINITE)
def test_infinite_logits_share_the_draw(filters: dict[str, Any], others: str) -> None:
    """Overflow makes infinite logits: all are equally likely, and likelier than any finite one.

    The full sampler draws among them too: a result must not depend on the batch.
    """
    settings = [Sampling(temperature=0.7, seed=seed, **filters) for seed in range(4)]
    rows = noise(4, len(settings))
    if others == "least":
        rows[:] = torch.finfo(torch.float32).min
    rows[:, [17, 211]] = float("inf")
    fully = sampler_of(*settings).draw_fully(rows, range(len(rows)))

    got = drawn(sampler_of(*settings), rows)

    assert [token.token_id for token in fully] == got
    assert set(got) == {17, 211}
