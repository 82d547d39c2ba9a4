"""A small model's drafts: what it reads, where it keeps that, and what it may cost."""

from __future__ import annotations

import random

import pytest

from engine.api import CacheGrant, DraftCount, Quota, Request
from engine.config import DRAFT_PLACE_TOKENS
from engine.drafts.drafter import FORGOTTEN_TOKENS, MODEL_ROWS_MAX, Drafter
from engine.drafts.model import DEPTH_MAX, READ_TOKENS
from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTable
from engine.scheduler.sequence import Sequence
from tests.small_model import SmallModel, Text

VOCAB = 50
GRANT = CacheGrant(b"a")


def follows(text: Text) -> int:
    """Return a token that the last three decide."""
    return sum(place * token for place, token in enumerate(text[-3:], 1)) % VOCAB


class Streams:
    """Sequences over `follows`, and a small model that knows it."""

    def __init__(self, model: SmallModel) -> None:
        self.model, self.table = model, RequestTable()

    def begin(
        self, prompt: int = 5, *, max_tokens: int = 9_000, grant: CacheGrant = GRANT
    ) -> Sequence:
        chance = random.Random(prompt)
        tokens = tuple(chance.randrange(VOCAB) for _ in range(prompt))
        name = str(len(self.table))
        request = Request(name, tokens, max_tokens, grant)
        sequence = self.table.add_sequence(self.table.add(request, 0.0))
        self.model.source.begin(sequence)
        return sequence

    def guess(self, *sequences: Sequence, most: int = 4, tokens_max: int = 64) -> list[Text]:
        limits = {sequence.sequence_id: most for sequence in sequences}
        found = self.model.source.guess(limits, tokens_max)
        return [found.get(sequence.sequence_id, ()) for sequence in sequences]


def say(sequence: Sequence, count: int) -> Text:
    """Let a sequence go on by so many tokens, and return these."""
    for _ in range(count):
        sequence.tokens.append(follows(tuple(sequence.tokens)))
        sequence.output_tokens += 1
    return tuple(sequence.tokens[len(sequence.tokens) - count :])


@pytest.mark.parametrize("groups", [1, 3])
def test_each_guess_goes_on_from_the_text_however_many_were_right(groups: int) -> None:
    """What was right is not computed again: a step reads the tokens that it has not seen."""
    chance = random.Random(5)
    model = SmallModel(follows, groups=groups)
    streams = Streams(model)
    running = [streams.begin(3), streams.begin(40), streams.begin(17)]
    for _ in range(30):
        depth = chance.randint(1, DEPTH_MAX)
        guesses = streams.guess(*running, most=depth)
        for sequence, guess in zip(running, guesses, strict=True):
            right = say(sequence, chance.randint(1, depth + 1))
            assert guess[: len(right)] == right[:depth]
            assert len(guess) == depth

    said = sum(len(sequence.tokens) for sequence in running)
    assert model.read_tokens <= said
    assert {text[:3] for text in model.texts} <= {tuple(one.tokens[:3]) for one in running}


def test_wrong_drafts_leave_no_trace() -> None:
    """The fake model raises where a slot of a wrong draft is read."""
    model = SmallModel(follows, right=0.5)
    streams = Streams(model)
    sequence = streams.begin(20)
    for count in (1, 2, 5, 3, 1, 4) * 5:
        (guess,) = streams.guess(sequence)
        assert len(guess) == 4
        say(sequence, count)
        assert model.texts[-1] == tuple(sequence.tokens[: len(sequence.tokens) - count])


def test_a_text_that_has_not_grown_is_guessed_as_before() -> None:
    """A guess that no step took up leaves nothing behind."""
    model = SmallModel(follows)
    streams = Streams(model)
    for length in (1, 20):
        sequence = streams.begin(length)
        first, again = streams.guess(sequence), streams.guess(sequence, most=2)

        assert first == [say(sequence, 4)]
        assert again == [first[0][:2]]


def test_of_a_long_text_its_first_token_and_its_end_are_read_in_slices() -> None:
    """However much of a prompt was cached, reading takes the same time, spread over steps."""
    model = SmallModel(follows)
    streams = Streams(model)
    sequence = streams.begin(5_000)
    guesses = [streams.guess(sequence)[0] for _ in range(4)]

    assert [len(guess) for guess in guesses] == [0, 0, 0, 4]
    assert model.read_tokens == READ_TOKENS
    assert model.texts == [(sequence.tokens[0], *sequence.tokens[1 - READ_TOKENS :])]


def test_a_full_place_begins_anew_with_the_end_of_the_text() -> None:
    """Its room is fixed; the model reads each token twice at most."""
    model = SmallModel(follows)
    streams = Streams(model)
    sequence = streams.begin(10)
    while len(sequence.tokens) < 4 * DRAFT_PLACE_TOKENS:
        (guess,) = streams.guess(sequence, tokens_max=READ_TOKENS)
        assert guess == say(sequence, 4)

    assert max(map(len, model.texts)) <= DRAFT_PLACE_TOKENS
    assert model.read_tokens < 2 * len(sequence.tokens)


def test_a_place_goes_to_who_needs_one_and_from_who_does_not() -> None:
    """Sequences that draft at the same time do not take each other's places by turns."""
    model = SmallModel(follows, places=2)
    streams = Streams(model)
    first, second, third = (streams.begin(count) for count in (4, 5, 6))

    assert [len(guess) for guess in streams.guess(first, second, third)] == [4, 4, 0]
    assert [len(guess) for guess in streams.guess(first, second, third)] == [4, 4, 0]
    streams.guess(second)
    assert [len(guess) for guess in streams.guess(second, third)] == [4, 4]  # first was away
    assert streams.guess(first) == [()]
    model.source.end(third.sequence_id)
    assert streams.guess(first)[0] == say(first, 4)
    model.source.check([first.sequence_id, second.sequence_id])
    with pytest.raises(InvariantViolation, match="ended sequences"):
        model.source.check([second.sequence_id])


def test_tokens_that_one_model_lacks_are_neither_read_nor_drafted() -> None:
    """A token of the larger vocabulary is read as the last one of the smaller."""
    model = SmallModel(lambda text: 49 if len(text) > 6 else 3, vocab_size=49)
    streams = Streams(model)
    sequence = streams.begin(5)
    sequence.tokens[2] = 60

    assert streams.guess(sequence) == [(3, 3)]
    assert model.texts[0][2] == 48


def test_a_step_without_logits_gives_no_drafts_and_the_next_reads_again() -> None:
    """What such a step has left in the pool is not trusted."""
    model = SmallModel(follows)
    streams = Streams(model)
    sequence = streams.begin(9)
    model.nan_steps = {1}

    assert streams.guess(sequence, most=1) == [()]
    assert streams.guess(sequence) == [say(sequence, 4)]
    assert model.read_tokens == 18


STEP_S = tuple(0.040 + 0.001 * tokens for tokens in range(64))
"""Of a model on a CPU whose steps are bound by memory, about."""


def taken_s(model: SmallModel | None, answers: list[int]) -> tuple[float, list[DraftCount]]:
    """Return the seconds that answers of so many tokens take, one after the other, with a small
    model beside an engine's steps; and its drafts."""
    streams = Streams(model or SmallModel(follows))
    drafter = Drafter(STEP_S, [], model=None if model is None else model.source)
    seconds, counts = 0.0, list[DraftCount]()
    for answer in answers:
        sequence = streams.begin(600, max_tokens=answer)
        seconds += write(drafter, sequence)
        counts += drafter.counts(sequence.sequence_id)
        drafter.end(sequence)
    return seconds + (0.0 if model is None else model.clock.now_s), counts


def write(drafter: Drafter, sequence: Sequence) -> float:
    """Let a sequence write its answer; return the seconds that the steps take."""
    seconds, answer = 0.0, sequence.parent.request.max_tokens
    while sequence.output_tokens < answer:
        draft = drafter.propose([sequence], 64).get(sequence.sequence_id)
        guess = () if draft is None else draft.token_ids
        right = 0
        text = tuple(sequence.tokens)
        while right < len(guess) and guess[right] == follows((*text, *guess[:right])):
            right += 1
        drafter.note(sequence, draft, say(sequence, right + 1))
        seconds += STEP_S[len(guess)]
    return seconds


def small(right: float, share: float) -> SmallModel:
    """Return a model whose steps take a share of the other's, and read as fast by that share."""
    return SmallModel(follows, right=right, step_s=share * 0.040, token_s=share * 0.001)


@pytest.mark.parametrize(
    ("right", "share", "least"), [(0.8, 0.1, 1.9), (0.95, 0.1, 2.8), (0.7, 0.2, 1.2)]
)
def test_answers_come_faster_where_a_small_model_is_often_right(
    right: float, share: float, least: float
) -> None:
    """Its own time is counted."""
    without_s, _ = taken_s(None, [300])
    with_s, _ = taken_s(small(right, share), [300])

    assert without_s / with_s > least


@pytest.mark.parametrize("right", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_answers_take_hardly_longer_where_it_is_wrong(right: float, share: float) -> None:
    """Trials, and what is read for them, are few."""
    without_s, _ = taken_s(None, [100, 300])
    with_s, _ = taken_s(small(right, share), [100, 300])

    assert with_s < 1.06 * without_s


def test_a_model_that_is_as_slow_is_not_asked() -> None:
    """Even if it were always right, its drafts would cost what they save."""
    model = small(1.0, 1.0)
    without_s, _ = taken_s(None, [100])

    with_s, counts = taken_s(model, [100])

    assert with_s == pytest.approx(without_s)
    assert (model.steps, counts) == (0, [])


@pytest.mark.parametrize(
    ("grant", "is_read"),
    [
        (GRANT, False),
        (CacheGrant(b"other"), True),
        (CacheGrant(b"a", Quota(payer=b"another tenant")), True),
    ],
    ids=["the same client", "another namespace", "another tenant in it"],
)
def test_a_client_for_whom_it_is_wrong_has_no_further_text_read(
    grant: CacheGrant, is_read: bool
) -> None:
    """What it costs one client tells nothing of another."""
    model = small(0.0, 0.1)
    streams, drafter = Streams(model), Drafter(STEP_S, [], model=model.source)
    write(drafter, streams.begin(300, max_tokens=100))
    before = model.read_tokens

    write(drafter, streams.begin(310, max_tokens=100, grant=grant))

    assert (model.read_tokens > before) == is_read


@pytest.mark.parametrize("way", ["erasure", "many tokens"])
def test_what_is_known_of_a_client_is_forgotten(way: str) -> None:
    """With the namespace, and where it was long ago: what it writes may be another text by now."""
    model = small(0.0, 0.1)
    streams, drafter = Streams(model), Drafter(STEP_S, [], model=model.source)
    write(drafter, streams.begin(300, max_tokens=100))
    before = model.read_tokens
    if way == "erasure":
        drafter.erase(b"a")

    write(drafter, streams.begin(310, max_tokens=100 if way == "erasure" else FORGOTTEN_TOKENS))

    assert model.read_tokens > before


def test_of_many_texts_of_a_client_that_nobody_knows_two_are_tried() -> None:
    """To read all of them would take several steps' time, for drafts that may all be wrong."""
    model = small(0.8, 0.1)
    streams, drafter = Streams(model), Drafter(STEP_S, [], model=model.source)
    batch = [streams.begin(100 + place) for place in range(4)]
    first = drafter.propose(batch, 64)
    for sequence in batch:
        drafter.note(sequence, first.get(sequence.sequence_id), say(sequence, 3))
    second = drafter.propose(batch, 64)
    for sequence in batch:
        drafter.note(sequence, second.get(sequence.sequence_id), say(sequence, 3))

    assert set(first) == set(second) == {one.sequence_id for one in batch[:2]}
    assert set(drafter.propose(batch, 64)) == {one.sequence_id for one in batch}


def test_a_large_batch_is_not_read() -> None:
    """With so many texts to read, even a model that is always right would save too little."""
    model = small(1.0, 0.1)
    streams, drafter = Streams(model), Drafter(STEP_S, [], model=model.source)
    batch = [streams.begin(100 + place) for place in range(MODEL_ROWS_MAX + 1)]

    assert drafter.propose(batch, 64) == {}
    assert model.read_tokens == 0
    assert drafter.propose(batch[1:], 64) != {}


def test_a_model_that_fails_is_not_asked_again() -> None:
    """Its failure ends no request."""
    model = small(0.9, 0.1)
    model.broken_steps = {30}
    _, counts = taken_s(model, [100, 100])

    assert model.steps == 30
    assert [count.source for count in counts] == ["model"]
