"""The directory of prefixes equals a set of digests for each replica and level."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.strides import STRIDE_TOKENS, stride_digests
from gateway.routing.prefix_directory import SENT_COUNTS_S, Found, PrefixDirectory

REPLICAS = (0, 1, 63)
TOKENS = [value % 7 for value in range(6 * STRIDE_TOKENS)]
OTHER = [*TOKENS[: 2 * STRIDE_TOKENS], *(9 for _ in range(4 * STRIDE_TOKENS))]
PROMPTS = [stride_digests(b"n", TOKENS), stride_digests(b"n", OTHER), stride_digests(b"m", TOKENS)]
DIGESTS = sorted({digest for prompt in PROMPTS for digest in prompt})

_digests = st.sets(st.sampled_from(DIGESTS), max_size=6)
_changes = st.tuples(
    st.sampled_from(["device", "below", "clear"]), st.sampled_from(REPLICAS), _digests, _digests
)


def _depth(prompt: list[bytes], held: set[bytes]) -> int:
    return STRIDE_TOKENS * max(
        (i + 1 for i, digest in enumerate(prompt) if digest in held), default=0
    )


@given(st.lists(_changes, max_size=30), st.sampled_from(PROMPTS))
def test_finds_the_deepest_stride_of_each_replica(
    changes: list[tuple[str, int, set[bytes], set[bytes]]], prompt: list[bytes]
) -> None:
    """A stale or lost digest sends a request where its prefix is not."""
    directory = PrefixDirectory()
    held: dict[tuple[str, int], set[bytes]] = {
        (level, replica): set() for level in ("device", "below") for replica in REPLICAS
    }
    for kind, replica, added, removed in changes:
        if kind == "clear":
            directory.clear(replica)
            held["device", replica] = set()
            held["below", replica] = set()
            continue
        directory.change(
            replica, "device" if kind == "device" else "below", b"".join(added), b"".join(removed)
        )
        held[kind, replica] = (held[kind, replica] - removed) | added
    expected = {}
    for replica in REPLICAS:
        device = _depth(prompt, held["device", replica])
        anywhere = max(device, _depth(prompt, held["below", replica]))
        if anywhere:
            expected[replica] = Found(device, anywhere - device)
    assert directory.find(prompt, 2**64 - 1) == expected
    assert directory.find(prompt, 1) == {n: hit for n, hit in expected.items() if n == 0}
    assert len(directory) == len(set().union(*held.values()))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(REPLICAS)), max_size=10))
def test_what_was_sent_counts_until_it_started_or_30_s(sends: list[tuple[str, int]]) -> None:
    """A burst of one prompt stays together before the first facts come."""
    directory = PrefixDirectory()
    for request_id, replica in sends:
        directory.add_sent(request_id, replica, PROMPTS[0], 0.0)
    last = dict(sends)
    assert set(directory.find(PROMPTS[0], 2**64 - 1)) == set(last.values())
    directory.end_sent("a")
    last.pop("a", None)
    assert set(directory.find(PROMPTS[0], 2**64 - 1)) == set(last.values())
    directory.expire_sent(SENT_COUNTS_S)
    assert directory.find(PROMPTS[0], 2**64 - 1) == {}


def test_a_digest_is_of_all_before_it_and_of_the_namespace() -> None:
    """Equal tokens behind another beginning, or in another scope, are another prefix."""
    assert PROMPTS[0][:2] == PROMPTS[1][:2]
    assert not set(PROMPTS[0][2:]) & set(PROMPTS[1])
    assert not set(PROMPTS[0]) & set(PROMPTS[2])
    assert stride_digests(b"n", TOKENS[: STRIDE_TOKENS - 1]) == []
