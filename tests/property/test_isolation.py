"""One namespace's requests change nothing for another inside its floor (T1, T3, T5).

Each property runs the same requests of a victim twice, with and without an attacker who knows the
victim's prompts, and compares the victim's observations.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from engine.api import LeaseRequest, Quota, Retention
from engine.cache import PrefixCache
from tests.strategies import tokens
from tests.unit.engine.cache.sequences import compute, computed

SIZE, BLOCKS, FLOOR = 2, 16, 6
WINDOWS = st.sampled_from([(), (3, 5)])
"""The windows of the KV groups beside the first; pool and floor grow with the groups."""
VICTIM, ATTACKER = b"victim", b"attacker"
LEASED = Retention("leased", promise_s=4, limit_s=8)


@dataclass(frozen=True)
class Act:
    """A prompt that runs to its end, or time that passes."""

    who: bytes
    prompt: tuple[int, ...]
    leased: bool
    wait_s: float


short = tokens.map(lambda words: words[:10])
waits = st.sampled_from([0.0, 0.0, 1.0, 3.0])


def acts(who: bytes) -> st.SearchStrategy[Act]:
    """Draw the acts of one party."""
    return st.builds(Act, who=st.just(who), prompt=short, leased=st.booleans(), wait_s=waits)


lives = st.lists(acts(VICTIM) | acts(ATTACKER) | acts(ATTACKER), min_size=4, max_size=24)


def make_cache(windows: tuple[int, ...] = ()) -> PrefixCache:
    return PrefixCache(blocks=BLOCKS * (1 + len(windows)), block_size=SIZE, windows=windows)


def strict(windows: tuple[int, ...] = ()) -> Quota:
    """Return the quota of a tenant that borrows nothing."""
    floor = FLOOR * (1 + len(windows))
    return Quota(floor_blocks=floor, ceiling_blocks=floor)


def seen_by_victim(
    life: list[Act], windows: tuple[int, ...], *, attacked: bool
) -> list[tuple[int, str]]:
    """Return the victim's hits and lease grants, in order."""
    cache, now_s, seen = make_cache(windows), 0.0, []
    cache.release(cache.begin(VICTIM, [0], 0.0, quota=strict(windows)), [0], 0.0)
    for act in life:
        now_s += act.wait_s
        if act.who == ATTACKER and not attacked:
            continue
        asked = (LeaseRequest(len(act.prompt), LEASED),) if act.leased else ()
        quota = strict(windows) if act.who == VICTIM else Quota()
        table = cache.begin(act.who, act.prompt, now_s, quota=quota, leases=asked)
        if act.who == VICTIM:
            seen.append((table.kv_tokens, "".join(grant.outcome for grant in table.leases)))
        compute(cache, table, act.prompt, now_s)
        cache.release(table, act.prompt, now_s)
        cache.check()
    return seen


LAPSED = [
    *(Act(VICTIM, (0,), False, 0.0),) * 5,
    Act(VICTIM, (0,), True, 0.0),
    Act(ATTACKER, (1,), True, 0.0),
    Act(ATTACKER, (0, 0, 0, 0, 0), True, 3.0),
    Act(ATTACKER, (0, 1, 0, 0, 0, 0, 0, 0, 0), True, 1.0),
    Act(ATTACKER, (1, 0), False, 0.0),
    Act(VICTIM, (0,) * 9, True, 0.0),
]
"""An attacker reads what it was promised once, when it has all it may be promised."""


@example(LAPSED, ())
@given(lives, WINDOWS)
def test_an_attacker_changes_no_hit_inside_a_floor(
    life: list[Act], windows: tuple[int, ...]
) -> None:
    """Eviction channel: filling the pool must neither reveal nor decide the hits of a strict
    tenant.
    """
    alone = seen_by_victim(life, windows, attacked=False)

    attacked = seen_by_victim(life, windows, attacked=True)

    assert attacked == alone


@given(
    own=st.lists(short, min_size=1, max_size=3),
    theirs=st.lists(st.tuples(tokens, st.booleans()), max_size=12),
    windows=WINDOWS,
)
def test_prefixes_inside_a_floor_survive_other_requests(
    own: list[tuple[int, ...]],
    theirs: list[tuple[tuple[int, ...], bool]],
    windows: tuple[int, ...],
) -> None:
    """Prime and probe: the same prefixes are found after any requests of others."""
    cache = make_cache(windows)
    for prompt in own:
        table = cache.begin(VICTIM, prompt, 0.0, quota=strict(windows))
        compute(cache, table, prompt)
        cache.release(table, prompt, 0.0)
    before = [cache.peek(VICTIM, (*prompt, 0), 0.0).cached_tokens for prompt in own]

    for number, (words, holds) in enumerate(theirs):
        prompt = (*words, number % 2, *words)
        table = cache.begin(ATTACKER, prompt, 1.0)
        compute(cache, table, prompt, 1.0)
        if not holds:
            cache.release(table, prompt, 1.0)

    after = [cache.peek(VICTIM, (*prompt, 0), 2.0).cached_tokens for prompt in own]
    assert after == before
    cache.check()


@given(prompt=short, guess=short, windows=WINDOWS)
def test_a_prefix_is_found_only_by_its_own_namespace(
    prompt: tuple[int, ...], guess: tuple[int, ...], windows: tuple[int, ...]
) -> None:
    cache = make_cache(windows)
    table = computed(cache, prompt, 0.0, VICTIM)
    cache.release(table, prompt, 0.0)

    for words in (prompt, guess, (*prompt, *guess)):
        assert cache.peek(ATTACKER, words, 0.0).cached_tokens == 0
        assert cache.begin(ATTACKER, words, 0.0).kv_tokens == 0


@given(prompt=st.tuples(*[st.integers(0, 1)] * 6), reads=st.lists(st.integers(1, 9), max_size=4))
def test_another_tenant_does_not_renew_a_lease(prompt: tuple[int, ...], reads: list[int]) -> None:
    """TTL channel: another tenant's identical prompt renews nothing."""
    cache = make_cache()

    def run(who: bytes, now_s: float) -> None:
        lease = LeaseRequest(len(prompt), LEASED)
        table = computed(cache, prompt, now_s, who, leases=(lease,))
        cache.release(table, prompt, now_s)

    run(ATTACKER, 0.0)
    for second in sorted(reads):
        if second < 8:
            run(VICTIM, float(second))

    assert cache.peek(ATTACKER, (*prompt, 0), 7.999).cached_tokens == len(prompt)
    assert cache.peek(ATTACKER, (*prompt, 0), 8.0).cached_tokens == 0
