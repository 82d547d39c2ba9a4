"""Hypothesis strategies: tokens of a tiny vocabulary, leases, requests.

Two tokens, short prompts and few namespaces make equal prefixes the rule.
"""

from __future__ import annotations

from hypothesis import strategies as st

from engine.api import CacheGrant, Grammar, LeaseRequest, Quota, Request, Retention, Sampling

RETENTIONS = (
    Retention("short", promise_s=5, limit_s=10),
    Retention("started", limit_s=30, clock="request_start"),
    Retention("absolute", limit_s=20, clock="absolute", renewed_on_read=False),
    Retention("pinned", limit_s=40, clock="absolute", renewed_on_read=False, pinned=True),
    Retention("kept", promise_s=15),
)
NAMESPACES = (b"north", b"south", b"east")

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
namespaces = st.sampled_from(NAMESPACES)
leases = st.lists(
    st.builds(
        LeaseRequest,
        tokens=st.integers(0, 14),
        retention=st.sampled_from(RETENTIONS),
        lease_id=st.sampled_from(["a", "b"]),
    ),
    max_size=2,
).map(tuple)
quotas = st.builds(
    Quota,
    floor_blocks=st.sampled_from([0, 0, 2]),
    ceiling_blocks=st.sampled_from([None, None, 5]),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    logprobs=st.sampled_from([None, 0]),
)
grammars = st.sampled_from(
    [
        Grammar("regex", "[ab]*"),
        Grammar("regex", "(ab)+"),
        Grammar("regex", "a{2}b?"),
        Grammar("regex", "b[ab]{2}|aa*b"),
        Grammar("lark", 'start: "a" start "b" | "a"'),
        Grammar("regex", "abc"),  # no token spells it: a dead end
        Grammar("regex", "(a"),
    ]
)


def requests(quota_of: dict[bytes, Quota]) -> st.SearchStrategy[Request]:
    """Draw a request of one of the namespaces, under its quota; the caller gives the id."""
    grants = namespaces.flatmap(
        lambda namespace: st.builds(
            CacheGrant,
            namespace=st.just(namespace),
            quota=st.just(quota_of[namespace]),
            leases=leases,
            read=st.sampled_from([True, True, True, False]),
            write=st.sampled_from([True, True, True, False]),
        )
    )
    return st.builds(
        Request,
        request_id=st.just(""),
        tokens=tokens,
        max_tokens=st.integers(0, 6),
        grant=grants,
        sampling=samplings,
        samples=st.sampled_from([1, 1, 1, 2, 3]),
        stop_token_ids=st.sampled_from([(), (2,), (0,)]),
        min_tokens=st.integers(0, 2),
        priority=st.sampled_from([0, 0, 1]),
        deadline_s=st.sampled_from([None, None, 5.0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        isolated_tokens=st.sampled_from([0, 0, 0, 0, 1, 3]),
        grammar=st.one_of(st.none(), st.none(), grammars),
    )
