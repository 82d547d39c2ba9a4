"""`EncoderProcess`: batches, deaths, stops, and requests that always end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from engine.encoder.bert import BertEncoder, load_tensors
from engine.encoder.protocol import StartEncoder, pack_ids
from engine.errors import ModelError
from gateway.embeddings.encoder_client import BATCH_TOKENS, COMMAND, EncoderProcess
from gateway.errors import Kind, Refusal
from gateway.processes.child_process import RestartPolicy, StartLimit
from tests.encoders import prepared_encoder
from tests.unit.gateway.embeddings.fake_encoder_process import DAMAGED, DIES, HANGS

FAKE = (sys.executable, "-m", "tests.unit.gateway.embeddings.fake_encoder_process")
PATIENCE_S = 60.0
QUICK = RestartPolicy((0.001,), first_starts_max=3)


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: no request is served meanwhile."""


class EncoderUnderTest:
    """An encoder's client, and its reported events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.client: EncoderProcess

    async def open(self, folder: str = "ready", command: tuple[str, ...] = FAKE) -> EncoderProcess:
        """Start a process and wait until it serves."""
        self.client = EncoderProcess(
            StartEncoder(folder, 1), 200_000, self._report, command, QUICK, PATIENCE_S
        )
        self.client.open()
        async with asyncio.timeout(PATIENCE_S):
            await self.client.wait_ready()
        return self.client

    def _report(self, event: str, facts: dict[str, object]) -> None:
        self.events.append(event)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for _ in count():
                if holds():
                    return
                await asyncio.sleep(0)


@pytest.fixture
async def encoder() -> AsyncIterator[EncoderUnderTest]:
    encoder = EncoderUnderTest()
    yield encoder
    await encoder.client.close()


def text(*ids: int) -> bytes:
    return pack_ids(ids)


async def test_texts_of_many_requests_share_batches_and_keep_their_order(
    encoder: EncoderUnderTest,
) -> None:
    """What arrives together leaves together."""
    client = await encoder.open()
    requests = [[text(number, place) for place in range(7)] for number in range(20)]

    found = await asyncio.gather(
        *(client.encode(number % 3, texts) for number, texts in enumerate(requests))
    )

    assert found == requests
    assert client.batches == 1
    assert client.waiting_tokens == 0


async def test_a_batch_is_bounded(encoder: EncoderUnderTest) -> None:
    """The next one leaves when it returns."""
    client = await encoder.open()
    texts = [text(*range(100)) for _ in range(45)]  # ten of them fit

    assert await client.encode(1, texts) == texts
    assert client.batches == 5


async def test_a_text_that_kills_processes_fails_its_own_request_alone(
    encoder: EncoderUnderTest,
) -> None:
    """Who shared its batch is tried again without it, and so is who waits or comes later."""
    client = await encoder.open()
    requests = [
        (1, [text(4)]), (1, [text(DIES), text(6)]), (2, [text(5)]), (2, [text(*range(900))] * 3),
    ]  # fmt: skip
    tasks = [asyncio.create_task(client.encode(*one)) for one in requests]

    results = await asyncio.gather(*tasks, return_exceptions=True)
    later = await client.encode(2, [text(9)])

    refused = results.pop(1)
    assert isinstance(refused, Refusal)
    assert (refused.kind, refused.code) == (Kind.BUSY, "engine_restarting")
    assert results == [[text(4)], [text(5)], [text(*range(900))] * 3]
    assert later == [text(9)]
    assert (client.restarts, encoder.events.count("encoder_died")) == (2, 2)
    assert client.waiting_tokens == 0


async def test_a_vector_that_is_not_finite_fails_its_own_request_alone(
    encoder: EncoderUnderTest,
) -> None:
    """Damaged weights: a client must not pay for numbers that are none."""
    client = await encoder.open()
    requests = [(1, [text(4), text(DAMAGED), *[text(*range(900))] * 3]), (2, [text(5)])]
    tasks = [asyncio.create_task(client.encode(*one)) for one in requests]

    refused, found = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(refused, Refusal)
    assert (refused.kind, refused.code) == (Kind.INTERNAL, "internal_error")
    assert found == [text(5)]
    assert (client.restarts, client.waiting_tokens) == (0, 0)


async def test_a_killed_process_fails_no_request(encoder: EncoderUnderTest) -> None:
    """Its batch is encoded by the next process."""
    client = await encoder.open()
    texts = [text(*range(BATCH_TOKENS)) for _ in range(90)]
    task = asyncio.create_task(client.encode(1, texts))
    await encoder.until(lambda: client.batches == 1)
    os.kill(client.pid, signal.SIGKILL)

    assert await task == texts
    assert client.restarts == 1


@pytest.mark.slow
async def test_a_process_that_hangs_is_replaced(
    encoder: EncoderUnderTest, forward: Callable[[float], None]
) -> None:
    """A batch has a longest time."""
    client = await encoder.open()
    task = asyncio.create_task(client.encode(1, [text(HANGS)]))
    while not task.done():
        forward(1.0)
        await asyncio.sleep(0.001)

    with pytest.raises(Refusal, match="stopped while it worked"):
        await task
    await encoder.until(lambda: client.is_ready)

    assert await client.encode(1, [text(1)]) == [text(1)]
    assert client.restarts == 1


async def test_a_killed_process_is_replaced(encoder: EncoderUnderTest) -> None:
    """While nothing runs, no request notices more than a 503."""
    client = await encoder.open()
    os.kill(client.pid, signal.SIGKILL)
    await encoder.until(lambda: not client.is_ready)

    with pytest.raises(Refusal) as refused:
        await client.encode(1, [text(1)])
    await encoder.until(lambda: client.is_ready)

    assert refused.value.code == "engine_starting"
    assert refused.value.retry_after_s is not None
    assert await client.encode(1, [text(1)]) == [text(1)]


async def test_a_cancelled_request_leaves_the_queue(encoder: EncoderUnderTest) -> None:
    """Its texts that wait are not encoded; one in a batch is, for nothing."""
    client = await encoder.open()
    texts = [text(*range(BATCH_TOKENS)) for _ in range(50)]
    task = asyncio.create_task(client.encode(1, texts))
    await encoder.until(lambda: client.batches == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert client.waiting_tokens == 0
    assert await client.encode(1, [text(3)]) == [text(3)]
    assert client.batches < 10


async def test_close_ends_every_request(encoder: EncoderUnderTest) -> None:
    """Those in a batch and those that wait."""
    client = await encoder.open()
    long = text(*range(BATCH_TOKENS))
    tasks = [asyncio.create_task(client.encode(1, [text(HANGS), long]))]
    await encoder.until(lambda: client.waiting_tokens == BATCH_TOKENS)
    tasks.append(asyncio.create_task(client.encode(2, [text(1)])))
    await encoder.until(lambda: client.waiting_tokens == BATCH_TOKENS + 1)

    await client.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(one) for one in results] == [Refusal] * 2
    assert client.pid == 0


async def test_a_model_that_cannot_be_loaded_is_not_tried_again(encoder: EncoderUnderTest) -> None:
    """The reason is the process's; requests are refused."""
    with pytest.raises(ModelError, match="no model"):
        await encoder.open("corrupt")

    with pytest.raises(Refusal):
        await encoder.client.encode(1, [text(1)])
    assert encoder.events == ["encoder_not_started"]


async def test_a_process_that_never_serves_is_given_up(encoder: EncoderUnderTest) -> None:
    """After a few attempts."""
    with pytest.raises(StartLimit):
        await encoder.open("")


@pytest.mark.slow
async def test_the_real_process_returns_the_models_vectors(
    encoder: EncoderUnderTest, tmp_path: Path
) -> None:
    """Over torch, with a tiny model."""
    card = prepared_encoder(tmp_path)
    texts = [[2, 5, 6, 3], [2, 3], [2, 7, 3]]
    expected = BertEncoder(card, load_tensors(card)).encode(texts)

    client = await encoder.open(card.folder, COMMAND)
    found = await client.encode(1, [pack_ids(one) for one in texts])

    numbers = [array("f", one).tolist() for one in found]
    assert torch.allclose(torch.tensor(numbers), expected, atol=1e-6)
