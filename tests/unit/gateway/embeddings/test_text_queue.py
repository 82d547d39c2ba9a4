"""Texts that wait: turns of tenants, bounds, and counts that never drift."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.embeddings.text_queue import TextQueue, TextRequest
from gateway.errors import Kind, Refusal


def text(tokens: int) -> bytes:
    return bytes(4 * tokens)


def taken(queue: TextQueue, tokens_max: int) -> list[tuple[int, int]]:
    """Return (tenant, place) of a batch's texts."""
    return [(one.request.tenant_id, one.place) for one in queue.take(tokens_max)]


async def test_tenants_give_a_text_in_turn() -> None:
    """The one text of a tenant that came last is in the first batch."""
    queue = TextQueue(1_000)
    queue.add(1, [text(10)] * 20)
    queue.add(2, [text(10)])

    assert taken(queue, 40) == [(1, 0), (2, 0), (1, 1), (1, 2)]


async def test_requests_of_a_tenant_give_a_text_in_turn() -> None:
    """A long request does not hold up a short one of the same tenant."""
    queue = TextQueue(1_000)
    first = queue.add(1, [text(10)] * 20)
    second = queue.add(1, [text(10)] * 2)

    requests = [one.request for one in queue.take(50)]

    assert requests == [first, second, first, second, first]


async def test_a_batch_has_at_most_its_tokens_or_one_text() -> None:
    """A text longer than a batch still leaves."""
    queue = TextQueue(1_000)
    queue.add(1, [text(50), text(30), text(30)])

    assert [taken(queue, 40) for _ in range(4)] == [[(1, 0)], [(1, 1)], [(1, 2)], []]
    assert queue.tokens == 0


async def test_a_removed_job_leaves_no_text() -> None:
    """Its client has gone; what was taken already is not counted twice."""
    queue = TextQueue(1_000)
    request = queue.add(1, [text(10)] * 4)
    queue.add(2, [text(10)])
    queue.take(10)

    queue.remove(request)
    queue.remove(request)

    assert (queue.tokens, taken(queue, 100)) == (10, [(2, 0)])
    queue.check()


async def test_texts_that_were_put_back_leave_first_and_without_others() -> None:
    """Until a vector of their request arrives."""
    queue = TextQueue(1_000)
    first = queue.add(1, [text(1)] * 4)
    second = queue.add(2, [text(1)] * 2)
    queue.add(3, [text(1)])
    queue.put_back([one for one in queue.take(4) if one.request.tenant_id < 3])
    queue.check()

    left = [[(one.request.tenant_id, one.place) for one in queue.take(4)] for _ in range(2)]
    for request in (first, second):
        request.set_vector(0, b"")

    assert sorted(left) == [[(1, 0)], [(2, 0)]]
    assert sorted(taken(queue, 10)) == [(1, 1), (1, 2), (1, 3), (2, 1)]
    queue.check()


async def test_a_tenant_may_hold_half_of_what_the_others_leave() -> None:
    """RATE for its own share, BUSY where others fill the queue; then a smaller request still
    fits."""
    queue = TextQueue(100)
    queue.add(1, [text(50)])
    with pytest.raises(Refusal) as own:
        queue.add(1, [text(1)])
    queue.add(2, [text(25)])
    with pytest.raises(Refusal) as busy:
        queue.add(3, [text(13)])
    queue.add(3, [text(12)])

    assert (own.value.kind, busy.value.kind) == (Kind.RATE, Kind.BUSY)
    assert queue.tokens == 87
    queue.check()


async def test_all_jobs_end_with_the_queue() -> None:
    """Every request ends."""
    queue = TextQueue(100)
    requests = [queue.add(tenant, [text(5)]) for tenant in (1, 2)]

    queue.fail_all(ValueError("closed"))

    assert [type(request.future.exception()) for request in requests] == [ValueError] * 2
    assert (queue.tokens, queue.take(100)) == (0, [])
    queue.check()


async def test_a_job_ends_with_its_last_vector() -> None:
    """In the order of its texts, for any order of batches."""
    request = TextQueue(100).add(1, [text(1), text(2)])

    request.set_vector(1, b"two")
    assert not request.future.done()
    request.set_vector(0, b"one")

    assert request.future.done()
    assert request.vectors == [b"one", b"two"]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4)
        ),
        st.tuples(st.just("take"), st.integers(1, 8), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 5), st.none()),
        st.tuples(st.just("lose"), st.integers(1, 8), st.none()),
    ),
    max_size=40,
)


@given(STEPS)
def test_each_text_leaves_once_unless_its_job_was_removed(
    steps: list[tuple[str, int, object]],
) -> None:
    """Against a model: a list of what waits."""

    async def run() -> None:
        queue = TextQueue(40)
        requests: list[TextRequest] = []
        waiting: set[tuple[int, int]] = set()
        for kind, number, sizes in steps:
            if kind == "add":
                assert isinstance(sizes, list)
                try:
                    request = queue.add(number, [text(size) for size in sizes])
                except Refusal:
                    continue
                waiting |= {(id(request), place) for place in range(len(sizes))}
                requests.append(request)
            elif kind == "take":
                for one in queue.take(number):
                    waiting.remove((id(one.request), one.place))
            elif kind == "lose":
                queue.put_back(queue.take(number))
            elif number < len(requests):
                queue.remove(requests[number])
                waiting = {pair for pair in waiting if pair[0] != id(requests[number])}
            queue.check()
        while batch := queue.take(4):
            for one in batch:
                waiting.remove((id(one.request), one.place))
        assert waiting == set()
        assert queue.tokens == 0

    asyncio.run(run())
