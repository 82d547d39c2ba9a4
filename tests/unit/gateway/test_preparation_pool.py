"""Tenants take turns in the pool; work of clients that left is dropped."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from gateway import preparation_pool
from gateway.errors import Refusal
from gateway.preparation_pool import PreparationPool


class Gate:
    """Work that waits until the test opens it; records the order in which work began."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.began: list[str] = []

    def work(self, name: str) -> Callable[[Callable[[], bool]], str]:
        """Return work that records its name and waits."""

        def run(_is_abandoned: Callable[[], bool]) -> str:
            self.began.append(name)
            assert self.opened.wait(60)
            return name

        return run


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    """A gate that opens at the end, so that no thread stays."""
    made = Gate()
    yield made
    made.opened.set()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_returns_and_raises_what_the_work_does() -> None:
    pool = PreparationPool(2)

    def fail(_is_abandoned: Callable[[], bool]) -> None:
        raise ValueError("wrong")

    assert await pool.run(1, lambda _: threading.current_thread() is threading.main_thread()) is (
        False
    )
    with pytest.raises(ValueError, match="wrong"):
        await pool.run(1, fail)
    await pool.close()


async def test_refused_work_is_freed_at_once() -> None:
    """Else a refused prompt stays in memory until garbage is collected."""

    class Prompt:
        """Something that can be referred to weakly."""

    pool = PreparationPool(2)

    async def refuse() -> weakref.ref[Prompt]:
        prompt = Prompt()

        def fail(_is_abandoned: Callable[[], bool]) -> None:
            raise ValueError(f"{type(prompt)} is too long")

        with pytest.raises(ValueError, match="too long"):
            await pool.run(1, fail)
        return weakref.ref(prompt)

    gc.disable()
    try:
        seen = await refuse()
        await pool.close()

        assert seen() is None
    finally:
        gc.enable()


async def test_a_tenant_never_holds_the_last_thread(gate: Gate) -> None:
    """Another tenant's work begins beside a flood."""
    pool = PreparationPool(2)
    flood = [asyncio.ensure_future(pool.run(1, gate.work(f"a{n}"))) for n in range(5)]
    await settle()

    assert await pool.run(2, lambda _: "quiet") == "quiet"
    assert gate.began[1:] == []
    gate.opened.set()
    assert await asyncio.gather(*flood) == [f"a{n}" for n in range(5)]
    await pool.close()


async def test_tenants_take_turns(gate: Gate) -> None:
    """Each tenant's first work begins before any tenant's second."""
    pool = PreparationPool(1)
    first = asyncio.ensure_future(pool.run(9, gate.work("first")))
    await settle()
    rest = [
        asyncio.ensure_future(pool.run(tenant_id, gate.work(f"{tenant_id}.{n}")))
        for tenant_id in (1, 2, 3)
        for n in range(2)
    ]
    await settle()
    gate.opened.set()
    await asyncio.gather(first, *rest)

    assert gate.began == ["first", "1.0", "2.0", "3.0", "1.1", "2.1", "3.1"]
    await pool.close()


async def test_work_of_a_client_that_left_is_dropped(gate: Gate) -> None:
    """Waiting work never begins; running work learns that its result is not needed."""
    pool = PreparationPool(1)
    told = asyncio.get_running_loop().create_future()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(is_abandoned: Callable[[], bool]) -> None:
        loop.call_soon_threadsafe(began.set)
        assert gate.opened.wait(60)
        loop.call_soon_threadsafe(told.set_result, is_abandoned())

    running = asyncio.ensure_future(pool.run(1, ask))
    waiting = asyncio.ensure_future(pool.run(1, gate.work("dropped")))
    await began.wait()
    running.cancel()
    waiting.cancel()
    await settle()
    gate.opened.set()

    assert await told is True
    assert await pool.run(1, lambda _: 1) == 1
    assert gate.began == []
    await pool.close()


async def test_waiting_work_of_a_tenant_is_bounded(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tenant still gets its turn."""
    monkeypatch.setattr(preparation_pool, "WAITING_PER_TENANT_MAX", 2)
    pool = PreparationPool(2)
    held = [asyncio.ensure_future(pool.run(1, gate.work(f"a{n}"))) for n in range(3)]
    await settle()

    with pytest.raises(Refusal, match="limit 2") as raised:
        await pool.run(1, gate.work("a3"))
    assert raised.value.code == "rate_limit_exceeded"
    assert await pool.run(2, lambda _: 1) == 1
    gate.opened.set()
    await asyncio.gather(*held)
    await pool.close()


async def test_closing_cancels_waiting_work(gate: Gate) -> None:
    pool = PreparationPool(1)
    running = asyncio.ensure_future(pool.run(1, gate.work("a")))
    waiting = asyncio.ensure_future(pool.run(1, gate.work("b")))
    await settle()
    gate.opened.set()
    await pool.close()

    assert await running == "a"
    assert waiting.cancelled() or isinstance(
        (await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError
    )


async def test_work_of_a_running_request_is_never_refused(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer has begun; new requests are refused instead."""
    monkeypatch.setattr(preparation_pool, "WAITING_PER_TENANT_MAX", 1)
    pool = PreparationPool(2)
    tasks = [asyncio.ensure_future(pool.run(1, gate.work(name))) for name in ("a", "b")]
    await settle()
    with pytest.raises(Refusal):
        await pool.run(1, gate.work("c"))
    running = asyncio.ensure_future(pool.run(1, gate.work("d"), is_admitted=True))
    await settle()
    gate.opened.set()

    assert await asyncio.gather(*tasks, running) == ["a", "b", "d"]
    await pool.close()
