"""The drafter: how many drafts a step gets, from which source, and what it learns."""

from __future__ import annotations

import random
from collections import abc

import pytest

from engine.api import CacheGrant, DraftCount, Request
from engine.drafts.drafter import DRAFTS_MAX, REST_TOKENS, Drafter
from engine.drafts.source import DraftSource
from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTable
from engine.scheduler.sequence import Sequence
from tests.draft_oracle import OracleSource

FREE = (1.0,) * 64
ROWS_COST = tuple(float(rows) for rows in range(1, 65))
"""Steps whose time grows with their tokens, as where many rows are computed."""
SOME = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4)


class Named(OracleSource):
    """An oracle under a name of its own: always right, or always wrong."""

    def __init__(self, name: str, *, is_right: bool) -> None:
        token = 7 if is_right else 8
        super().__init__(lambda request_id, index: [token] * 1_000, 1.0, 10, seed=1)
        self.name = name


def sequences(count: int = 1, **wanted: int) -> list[Sequence]:
    table = RequestTable()
    found = []
    for number in range(count):
        request = Request(f"{number}", (1, 2), wanted.get("max_tokens", 900), CacheGrant(b"a"))
        found.append(table.add_sequence(table.add(request, 0.0)))
    return found


def say(drafter: Drafter, sequence: Sequence, tokens_max: int = 64) -> int:
    """Let a sequence, whose every token is 7, take a step alone; return how many it sampled."""
    draft = drafter.propose([sequence], tokens_max).get(sequence.sequence_id)
    sampled = 1
    for token in () if draft is None else draft.token_ids:
        if token != 7:
            break
        sampled += 1
    sequence.tokens += [7] * sampled
    sequence.output_tokens += sampled
    drafter.note(sequence, draft, [7] * sampled)
    return sampled


def drafted(drafter: Drafter, batch: abc.Sequence[Sequence], tokens_max: int = 64) -> int:
    """Return how many drafts a step of these sequences gets."""
    return sum(len(draft.token_ids) for draft in drafter.propose(batch, tokens_max).values())


def right() -> list[DraftSource]:
    return [Named("right", is_right=True)]


def test_free_drafts_are_all_taken() -> None:
    """A step of sixteen rows that takes no longer than one of one."""
    assert drafted(Drafter(FREE, right()), sequences()) == DRAFTS_MAX
    assert drafted(Drafter(FREE, right()), sequences(4)) == 60, "as many as the table has"


def test_rows_that_cost_what_they_bring_get_no_drafts() -> None:
    """A draft is right at most always: where each row takes a row's time, none can gain."""
    assert drafted(Drafter(ROWS_COST, right()), sequences()) == 0


def test_more_sequences_get_fewer_drafts_each() -> None:
    """The likeliest drafts are the first of each sequence."""
    drafter = Drafter(SOME, right())

    alone = drafted(drafter, sequences())
    many = drafter.propose(sequences(6), 64)

    assert 0 < alone < DRAFTS_MAX
    assert all(len(draft.token_ids) == 1 for draft in many.values())
    assert drafted(drafter, sequences(8)) == 0, "the table ends there"


def test_no_draft_goes_beyond_the_answer_or_the_step() -> None:
    """The last token of an answer cannot be a draft: nothing follows it."""
    assert drafted(Drafter(FREE, right()), sequences(max_tokens=5)) == 4
    assert drafted(Drafter(FREE, right()), sequences(max_tokens=1)) == 0
    assert drafted(Drafter(FREE, right()), sequences(), tokens_max=3) == 3


def test_trust_grows_with_right_drafts() -> None:
    """One that is always right comes to draft further than one that was never tried."""
    drafter, (sequence,) = Drafter(SOME, right()), sequences()
    steps = [say(drafter, sequence) for _ in range(21)]

    assert steps[-1] > steps[0]
    (count,) = drafter.counts(sequence.sequence_id)
    assert count == DraftCount("right", count.accepted, sequence.output_tokens - 21)


def test_a_source_that_is_always_wrong_rests_and_is_tried_again() -> None:
    """Its drafts cost time; but a text may begin to repeat later."""
    wrong = Named("wrong", is_right=False)
    drafter, (sequence,) = Drafter(SOME, [wrong]), sequences()
    tried = []
    for _ in range(4 * REST_TOKENS):
        before = sum(one.drafted for one in drafter.counts(sequence.sequence_id))
        say(drafter, sequence)
        tried.append(sum(one.drafted for one in drafter.counts(sequence.sequence_id)) > before)

    assert any(tried[:20])
    assert any(tried[REST_TOKENS:])
    assert sum(tried) < len(tried) / 8


@pytest.mark.parametrize("seed", range(4))
def test_a_source_that_is_mostly_right_is_not_given_up_in_a_crowd(seed: int) -> None:
    """Eight answers, seven of ten drafts right, steps that wait 1.5 of 4.7 ms for the host, as
    measured on an H200: a few wrong drafts in a row are chance.
    """
    chance = random.Random(seed)
    step_s = tuple(0.00474 + 0.0000067 * tokens for tokens in range(256))
    drafter = Drafter(step_s, [Named("often", is_right=True)], exposed_s=0.0015)
    running, steps = sequences(8, max_tokens=128), 0
    while running:
        steps += 1
        drafts = drafter.propose(running, 248)
        for sequence in list(running):
            draft, sampled = drafts.get(sequence.sequence_id), [7]
            while draft and len(sampled) <= len(draft.token_ids) and chance.random() < 0.7:
                sampled.append(7)
            sampled[-1] = 9
            sequence.tokens += sampled
            sequence.output_tokens += len(sampled)
            drafter.note(sequence, draft, sampled)
            if sequence.output_tokens >= 128:
                running.remove(sequence)

    assert steps < 75  # 128 without drafts


def test_the_source_that_was_right_is_preferred() -> None:
    """Whatever the order of sources; the wrong one is soon given up."""
    sources = [Named("wrong", is_right=False), Named("right", is_right=True)]
    drafter, (sequence,) = Drafter(FREE, sources), sequences()
    for _ in range(12):
        say(drafter, sequence)

    by_name = {one.source: one for one in drafter.counts(sequence.sequence_id)}
    assert by_name["right"].accepted > 50
    assert by_name["wrong"].accepted == 0
    assert drafter.propose([sequence], 64)[sequence.sequence_id].source == "right"


def test_what_one_sequence_teaches_another_does_not_learn() -> None:
    """Its depth would tell how well another tenant's answers are guessed."""
    drafter = Drafter(SOME, right())
    before = drafted(drafter, sequences(3)[2:])
    teacher, learner = sequences(2)
    for _ in range(30):
        say(drafter, teacher)
    drafter.end(teacher)

    assert drafted(drafter, [learner]) == before


def test_ended_sequences_are_forgotten_by_all_sources() -> None:
    """`check` finds one that was not."""
    source = Named("right", is_right=True)
    drafter, (sequence,) = Drafter(FREE, [source]), sequences()
    drafter.propose([sequence], 64)
    with pytest.raises(InvariantViolation, match="ended sequences"):
        drafter.check([])

    drafter.end(sequence)

    drafter.check([])
    assert source.live == {}
    assert drafter.counts(sequence.sequence_id) == ()
