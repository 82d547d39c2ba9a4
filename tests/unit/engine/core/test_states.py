"""Where an engine keeps the states of a model with recurrent layers, and what they make of hits.

The token oracle checks that each row goes on from the state of its own prefix. A state takes eight
blocks here; one of Qwen3.5-35B-A3B takes as many as 3,145 tokens of its KV.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from engine.api import CacheGrant, Erase, LeaseRequest, Quota, Request, Retention, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig
from tests.checkers import World

BLOCK, STATE = 16, 8
CONFIG = EngineConfig(step_tokens_max=512, sequences_max=4)


def world(blocks: int = 800, depth: int = 1, draft_right: float | None = None) -> World:
    """Return an engine whose model keeps states. `draft_right`: how often its drafts are."""
    return World(
        CONFIG, blocks=blocks, block_size=BLOCK, vocab_size=97, context_tokens=8192, depth=depth,
        draft_right=draft_right, make_cache=partial(PrefixCache, state_blocks=STATE),
    )  # fmt: skip


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(97) for _ in range(count))


def ask(
    made: World,
    name: str,
    tokens: tuple[int, ...],
    output: int = 1,
    leases: tuple[LeaseRequest, ...] = (),
    stops: tuple[int, ...] = (),
    marks: tuple[int, ...] = (),
) -> tuple[int, tuple[int, ...]]:
    """Run a request to its end; return its cached tokens and its output."""
    grant = CacheGrant(b"n", leases=leases)
    made.clock.advance(1)
    sampling = Sampling(temperature=0)
    made.submit(Request(name, tokens, output, grant, sampling, stop_token_ids=stops, marks=marks))
    made.settle()
    stream = made.streams[name]
    assert stream.finished is not None
    return stream.finished.usage.cached_tokens, tuple(stream.outputs[0])


def test_prompts_that_part_anywhere_share_what_they_have_in_common() -> None:
    """Nothing marks the end of the system text: the second prompt keeps a state where it parts
    from the first, and each later one resumes there. The text ends within a block.
    """
    made, system = world(3000), tokens_of(1, 3001)

    hits = [ask(made, f"r{i}", system + tokens_of(2 + i, 60))[0] for i in range(64)]

    assert hits[:2] == [0, 0]
    assert all(3001 <= hit < 3004 for hit in hits[2:])  # own texts may begin alike


def test_keeping_at_ends_of_prompts_alone_would_share_nothing() -> None:
    """The control: the second prompt computes all of it, since no state stands where they part."""
    made, system = world(), tokens_of(1, 601)

    assert [ask(made, f"r{i}", system + tokens_of(2 + i, 60))[0] for i in range(2)] == [0, 0]


def test_a_hit_tells_what_it_cost_that_a_state_lay_further_to_the_front() -> None:
    """The blocks of 601 tokens are there, and no state; then the state at the parting is."""
    made, system = world(), tokens_of(1, 601)
    for number in range(3):
        ask(made, f"r{number}", system + tokens_of(2 + number, 60))

    starts = [made.streams[f"r{number}"].started for number in range(3)]
    gaps = [start.resume_gap_tokens for start in starts if start is not None]
    assert (gaps[0], 601 <= gaps[1] < 604) == (0, True)  # own texts may begin alike
    assert gaps[2] < 4
    assert made.core.stats().resume_gap_tokens_total == sum(gaps)


def test_turns_of_a_chat_resume_at_the_end_of_the_turn_before() -> None:
    """A state is kept at the end of each answer, so a turn computes its own text alone."""
    made, history, shares = world(3000), tokens_of(1, 2000), list[float]()
    for turn in range(8):
        cached, answer = ask(made, f"t{turn}", history, output=40)
        shares.append(cached / len(history))
        history += answer + tokens_of(10 + turn, 30)

    assert min(shares[1:]) > 0.984  # 31 tokens of some 2,000 to 2,500


OPENING = (96, 95, 94)
"""What a template puts behind the last message: an answer begins, and a thought."""
USER, THOUGHT, ANSWER = 50, 24, 40
"""Tokens of each message of a chat."""


class Chat:
    """A client that talks over a template like Qwen's, and sends no thoughts of earlier answers.

    `is_marked`: its requests mark the ends of the last message and of the system text, as the
    gateway does. `gaps`: the tokens that each computed again for want of a state.
    """

    def __init__(self, *, is_marked: bool) -> None:
        self._made, self._is_marked, self.gaps = world(), is_marked, list[int]()
        self.system = self.history = tokens_of(1, 160)

    def ask(self, user: tuple[int, ...]) -> tuple[int, ...]:
        """Send the history and a message, which do not stay; return the answer's text."""
        prompt = (*self.history, *user, *OPENING)
        marks = (len(prompt) - len(OPENING), len(self.system)) if self._is_marked else ()
        name = f"r{len(self.gaps)}"
        _, output = ask(self._made, name, prompt, output=THOUGHT + ANSWER, marks=marks)
        started = self._made.streams[name].started
        assert started is not None
        self.gaps.append(started.resume_gap_tokens)
        return output[THOUGHT:]


@pytest.mark.parametrize("is_marked", [False, True])
def test_marked_turns_resume_where_their_client_comes_back(is_marked: bool) -> None:
    """A thought that the next prompt leaves out parts it from the end of the prompt and of the
    answer. A state at the end of the message lies before that, so that the template's opening alone
    is computed again; unmarked, the whole turn before is, since a state stood where that parted.
    """
    chat, histories = Chat(is_marked=is_marked), list[tuple[int, ...]]()
    for turn in range(7):
        histories.append(chat.history)
        user = tokens_of(100 + turn, USER)
        chat.history += (*user, *OPENING[:2], *chat.ask(user))
    turns = chat.gaps[2:]
    chat.history = histories[-1]
    chat.ask(tokens_of(106, USER))  # the last answer is asked for again
    chat.history = histories[-2]
    chat.ask(tokens_of(7, USER))  # the last message but one is another
    chat.history = chat.system
    chat.ask(tokens_of(8, USER))  # another chat begins
    again, edited, other = chat.gaps[7:]

    opening, turn = len(OPENING), USER + ANSWER
    if is_marked:
        assert max(*turns, again, other) < opening
        assert edited <= ANSWER + opening
    else:
        assert min(*turns, again) >= turn
        assert other >= len(chat.system)


def test_a_prompt_that_waits_for_what_another_computes_resumes_there() -> None:
    """The one that goes first keeps a state where they part, although nothing marks it."""
    made, shared = world(), tokens_of(1, 900)
    for name, seed in (("first", 2), ("second", 3)):
        tokens = shared + tokens_of(seed, 60)
        made.submit(Request(name, tokens, 1, CacheGrant(b"n"), Sampling(temperature=0)))
    made.settle()

    finished = made.streams["second"].finished
    assert finished is not None
    assert finished.usage.cached_tokens >= 896  # whole blocks of it


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [34, 40, 100])
def test_an_answer_with_drafts_is_resumed_near_its_end(length: int, depth: int) -> None:
    """Its state is the one before the drafts of its last row, up to 15 tokens before the end, also
    where the answer is little longer than what no second state is kept within."""
    made = world(depth=depth, draft_right=0.9)
    prompt = tokens_of(1, 640)
    _, answer = ask(made, "first", prompt, output=length)
    drafts = made.streams["first"].finished
    cached, _ = ask(made, "next", prompt + answer + tokens_of(2, 30))

    assert drafts is not None
    assert sum(draft.accepted for draft in drafts.usage.drafts) > length // 2
    assert 639 + length - 15 <= cached <= 639 + length


def test_the_state_of_an_answer_that_a_stop_token_ends_is_its_own() -> None:
    """With two steps in flight a sequence may have run past its end, with a state to match."""
    made, history = world(depth=2), tokens_of(1, 400)
    for turn in range(12):
        _, answer = ask(made, f"t{turn}", history, output=80, stops=tuple(range(0, 97, 60)))
        history += answer + tokens_of(10 + turn, 3)

    assert len(history) > 600


def test_a_promise_holds_the_state_at_its_end() -> None:
    """A client's breakpoint is where it will resume, also after a crowd has filled the pool."""
    made, system = world(blocks=400), tokens_of(1, 1500)
    lease = LeaseRequest(1000, Retention("1h", promise_s=3600.0))
    ask(made, "first", system, leases=(lease,))
    for number in range(12):
        ask(made, f"other {number}", tokens_of(50 + number, 1500))

    assert ask(made, "again", system[:1000] + tokens_of(3, 50))[0] == 1000


def test_a_promise_without_room_for_a_state_is_refused() -> None:
    """What could not be resumed is not promised: here quotas leave room for the KV alone."""
    made = world(blocks=400)
    quota = Quota(promised_blocks_max=60)
    lease = LeaseRequest(900, Retention("1h", promise_s=3600.0))
    grant = CacheGrant(b"n", quota=quota, leases=(lease,))
    made.submit(Request("r", tokens_of(1, 950), 1, grant, Sampling(temperature=0)))
    made.settle()

    started = made.streams["r"].started
    assert started is not None
    assert [(one.outcome, one.bound) for one in started.leases] == [("refused", "quota")]


def test_an_erased_prefix_takes_the_state_at_its_end_along() -> None:
    """The prefix ends within a block: the state there is of its tokens, and of no other block."""
    made, system = world(), tokens_of(1, 601)
    for number in range(2):
        ask(made, f"r{number}", system + tokens_of(2 + number, 60))

    made.core.erase(Erase(1, b"n", tokens=system))

    (use,) = [use for use in made.cache.namespaces() if use.namespace == b"n"]
    assert use.blocks == 601 // BLOCK


def test_states_count_as_blocks_of_their_payer() -> None:
    """A kept state takes room: it is held, may be evicted, and leaves with its prefix."""
    made = world()
    ask(made, "one", tokens_of(1, 800))
    (use,) = [use for use in made.cache.namespaces() if use.namespace == b"n"]
    assert use.blocks == -(-801 // BLOCK) - 1 + STATE or use.blocks == 800 // BLOCK + STATE

    made.erase(b"n")

    assert made.cache.stats().free == 800


def test_a_full_pool_gives_up_states_by_their_last_resume() -> None:
    """The state of a prompt that no one resumes goes before that of one in use."""
    made, kept = world(blocks=180), tokens_of(1, 600)
    ask(made, "kept", kept)
    for number in range(12):
        ask(made, f"other {number}", tokens_of(50 + number, 600))
        cached, _ = ask(made, f"again {number}", (*kept, number))
        assert cached == 600


@pytest.mark.parametrize("where", ["short", "long"])
def test_a_state_broken_by_eviction_is_not_resumed(where: str) -> None:
    """Each block of a state is evicted alone; what is left of it is no hit, and goes next."""
    made, first = world(blocks=120), tokens_of(1, 900 if where == "short" else 1200)
    ask(made, "first", first)
    ask(made, "second", tokens_of(2, 900))

    cached, _ = ask(made, "first again", (*first, 5))

    assert cached in (0, len(first))


def test_a_quota_has_room_for_a_state_beside_a_sequence() -> None:
    """The longest sequence of a ceiling leaves room for the state that it begins from."""
    made = world(blocks=400)
    quota = Quota(ceiling_blocks=40)

    assert made.cache.max_sequence_tokens(b"n", quota) == (40 - STATE) * BLOCK
