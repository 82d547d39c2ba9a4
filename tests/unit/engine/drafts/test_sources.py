"""The sources over sequences: whose answers are kept, and who is drafted for."""

from __future__ import annotations

import pytest

from engine.api import CacheGrant, Request
from engine.drafts.prediction import PredictionSource
from engine.drafts.suffix import SuffixSource
from engine.scheduler.request_table import RequestTable
from engine.scheduler.sequence import Sequence

ANSWER = [20, 21, 22, 23, 24, 25]


class Sequences:
    """Makes sequences of requests, and lets them answer."""

    def __init__(self) -> None:
        self.table = RequestTable()
        self.source = SuffixSource()

    def make(
        self,
        namespace: bytes = b"a",
        *,
        read: bool = True,
        write: bool = True,
        prediction: tuple[int, ...] = (),
    ) -> Sequence:
        name = f"{len(self.table)}"
        grant = CacheGrant(namespace, read=read, write=write)
        request = Request(name, (1, 2, 3), 10, grant, prediction=prediction)
        return self.table.add_sequence(self.table.add(request, 0.0))

    def answer(self, sequence: Sequence, tokens: list[int]) -> None:
        """Begin a sequence, let it answer, end it."""
        self.source.begin(sequence)
        say(sequence, tokens)
        self.source.end(sequence.sequence_id)

    def drafts(self, sequence: Sequence) -> list[int]:
        """Return what is drafted for a new sequence, which has said nothing yet."""
        self.source.begin(sequence)
        return self.source.propose(sequence.sequence_id, 3)


def say(sequence: Sequence, tokens: list[int]) -> None:
    """Append output tokens to a sequence."""
    sequence.tokens += tokens
    sequence.output_tokens += len(tokens)


@pytest.fixture
def sequences() -> Sequences:
    return Sequences()


def test_an_answer_is_drafted_from_its_first_token_on(sequences: Sequences) -> None:
    """The end of the prompt is a part of what is looked up."""
    sequences.answer(sequences.make(), ANSWER)

    assert sequences.drafts(sequences.make()) == ANSWER[:3]


@pytest.mark.parametrize(("read", "write"), [(False, True), (True, False)])
def test_who_may_not_use_the_cache_neither_writes_nor_reads(
    sequences: Sequences, *, read: bool, write: bool
) -> None:
    """It asked to leave no trace, or to depend on none."""
    sequences.answer(sequences.make(read=read, write=write), ANSWER)
    assert sequences.drafts(sequences.make()) == []

    sequences.answer(sequences.make(), ANSWER)
    assert sequences.drafts(sequences.make(read=read, write=write)) == []


def test_an_erasure_reaches_answers_that_still_run(sequences: Sequences) -> None:
    """Core takes the right to write from live requests; their answers must not come back later."""
    running = sequences.make()
    sequences.source.begin(running)
    say(running, ANSWER)

    running.parent.may_write = False
    sequences.source.erase(b"a")
    sequences.source.end(running.sequence_id)

    assert sequences.drafts(sequences.make()) == []


def test_an_erasure_leaves_other_namespaces_theirs(sequences: Sequences) -> None:
    for namespace in (b"a", b"b"):
        sequences.answer(sequences.make(namespace), ANSWER)

    sequences.source.erase(b"a")

    assert sequences.drafts(sequences.make(b"a")) == []
    assert sequences.drafts(sequences.make(b"b")) == ANSWER[:3]


def test_tokens_behind_a_stop_string_are_not_kept(sequences: Sequences) -> None:
    """The client never saw them, and the next answer stops before them, too."""
    sequence = sequences.make()
    sequences.source.begin(sequence)
    say(sequence, ANSWER)
    sequence.output_tokens = 2
    sequences.source.end(sequence.sequence_id)

    assert sequences.drafts(sequences.make()) == ANSWER[:2]


def test_a_prediction_is_drafted_for_the_first_sample_alone(sequences: Sequences) -> None:
    """Each sample would take its memory again."""
    source = PredictionSource()
    first = sequences.make(prediction=tuple(ANSWER))
    second = sequences.table.add_sequence(first.parent)
    for sequence in (first, second):
        source.begin(sequence)

    assert source.propose(first.sequence_id, 2) == ANSWER[:2]
    assert source.propose(second.sequence_id, 2) == []


def test_a_prediction_goes_on_after_a_preemption(sequences: Sequences) -> None:
    """A sequence that begins again has a part of its answer already."""
    source = PredictionSource()
    sequence = sequences.make(prediction=tuple(ANSWER))
    say(sequence, ANSWER[:2])
    source.begin(sequence)
    assert source.propose(sequence.sequence_id, 2) == ANSWER[2:4]

    source.extend(sequence.sequence_id, ANSWER[2:3])
    assert source.propose(sequence.sequence_id, 2) == ANSWER[3:5]
    source.end(sequence.sequence_id)
    assert source.propose(sequence.sequence_id, 2) == []
