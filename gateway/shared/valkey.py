"""Shared limits in Valkey, or Redis: one script changes both accounts of a request.

The script uses the server's clock, so gateways need none in common. The changes of a turn of the
event loop leave in one pipeline, and what comes while it is on its way in the next. What is kept
are counts under the numbers of tenants and lines of keys, never a key, a name or a word.

Where the server does not answer within `ANSWER_S`, each gateway goes on by itself, and asks again
each half second. State that was lost begins half used: what was spent of it is not known.

The only module that imports `redis`, an extra; it is imported only where `fleet.shared` is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from msgspec import structs
from redis import DriverInfo
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from engine.api import Clock
from gateway.periodic_task import PeriodicTask
from gateway.shared.interface import (
    LEASE_S,
    REQUEST_S,
    Account,
    Change,
    Counts,
    SharedAway,
    Standing,
)

ANSWER_S: Final = 0.05
"""Longest wait for an answer, in seconds: then each gateway goes on by itself."""
POLL_S: Final = 0.5
"""Seconds between two attempts to reach a server that is away."""
BEAT_S: Final = 20.0
"""Seconds between two signs of life, which renew the places of running requests."""
SEEN_S: Final = 60.0
"""How long a gateway counts after its last sign of life."""
POLICY: Final = "noeviction"
BEGUN: Final = "trunkline:begun"
"""When the state was lost, in milliseconds; 0 if it never was. Without it, it was lost just now."""

CHANGE: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local kind, id = ARGV[1], ARGV[2]
local begun = redis.call('GET', KEYS[6])
if not begun then
  begun = string.format('%.0f', now)
  redis.call('SET', KEYS[6], begun)
end
begun = tonumber(begun)
local before = redis.call('HMGET', KEYS[1], 1, 2, 3, 4)
local known = before[1]
local taking = kind == 'take' and not known
local free = kind == 'correct' or kind == 'settle'
local changes = not (kind == 'take' and known) and not (free and not known)
local more = {}
for m = 1, 4 do
  more[m] = changes and (ARGV[4 + m] - (before[m] or 0)) * 60000 or 0
end
local owed, fits = {}, 1
for a = 0, 1 do
  local hash, running = KEYS[2 + 2 * a], KEYS[3 + 2 * a]
  redis.call('ZREMRANGEBYSCORE', running, '-inf', now)
  local at_once = tonumber(ARGV[13 + 5 * a])
  if taking and at_once > 0 and redis.call('ZCARD', running) >= at_once then fits = 0 end
  for m = 1, 4 do
    local limit, debt = tonumber(ARGV[8 + 5 * a + m]), 0
    if limit > 0 then
      local kept = redis.call('HMGET', hash, m, m .. '@', m .. '#')
      if kept[1] then
        debt = tonumber(kept[1])
        if tonumber(kept[3]) ~= limit then debt = math.ceil(debt * limit / kept[3]) end
        debt = math.max(0, debt - (now - kept[2]) * limit)
      elseif begun > 0 then
        debt = math.max(0, limit * 30000 - (now - begun) * limit)
      end
      if not free and more[m] > 0 and debt + more[m] > limit * 60000 then fits = 0 end
    end
    owed[4 * a + m] = debt
  end
end
if fits == 1 and changes then
  for a = 0, 1 do
    local hash, running = KEYS[2 + 2 * a], KEYS[3 + 2 * a]
    local last = 0
    for m = 1, 4 do
      local limit, debt = tonumber(ARGV[8 + 5 * a + m]), 0
      if limit > 0 then
        debt = math.max(0, owed[4 * a + m] + more[m])
        redis.call('HSET', hash, m, string.format('%.0f', debt), m .. '@',
          string.format('%.0f', now), m .. '#', limit)
        last = math.max(last, math.ceil(debt / limit))
      end
      owed[4 * a + m] = debt
    end
    if last > 0 then redis.call('PEXPIRE', hash, last + 60000) end
    if taking then
      redis.call('ZADD', running, now + ARGV[3], id)
      redis.call('PEXPIRE', running, 2 * ARGV[3])
    elseif kind == 'settle' then
      redis.call('ZREM', running, id)
    end
  end
  redis.call('HSET', KEYS[1], 1, ARGV[5], 2, ARGV[6], 3, ARGV[7], 4, ARGV[8])
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
return {fits, owed[1], owed[2], owed[3], owed[4], owed[5], owed[6], owed[7], owed[8],
  redis.call('ZCARD', KEYS[3]), redis.call('ZCARD', KEYS[5])}
"""

BEAT: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for n = 2, #KEYS do
  redis.call('ZADD', KEYS[n], 'XX', now + ARGV[3], ARGV[n + 2])
  redis.call('PEXPIRE', KEYS[n], 2 * ARGV[3])
end
return redis.call('ZCARD', KEYS[1])
"""
"""Keys: the gateways, then a set of running requests for each id. Arguments: this gateway, how long
it counts, the length of a lease, the ids."""

Log = Callable[[str, dict[str, object]], None]
Waiting = tuple[Change, asyncio.Future[Standing] | None]


class ValkeyLimits:
    """See `SharedLimits`. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        gateway: str,
        log: Log,
        clock: Clock,
        *,
        password: str | None = None,
        on_state: Callable[[bool], None] = lambda is_away: None,
        answer_s: float | None = None,
    ) -> None:
        """`gateway`: this one's id. `on_state`: called with `is_away` where it changes. `answer_s`:
        in place of `ANSWER_S`."""
        answer_s = ANSWER_S if answer_s is None else answer_s
        self._client: Redis = Redis.from_url(
            url,
            password=password,
            retry=Retry(NoBackoff(), 0),
            driver_info=DriverInfo(lib_version=""),  # it is read from a file otherwise
            socket_connect_timeout=max(answer_s, ANSWER_S),
        )
        self._gateway, self._log, self._clock = gateway, log, clock
        self._on_state, self._answer_s = on_state, answer_s
        self._waiting: list[Waiting] = []
        self._has_work = asyncio.Event()
        self._running: dict[str, tuple[str, str]] = {}
        """The accounts of running requests, whose places are renewed."""
        self._was_there = False
        self._beat_at_s = float("-inf")
        self._change, self._beat = "", ""
        self._worker: asyncio.Task[None] | None = None
        self._task = PeriodicTask("shared", self.poll, POLL_S, log, clock)
        self.gateways = 1
        self.is_away = True
        self.reason = ""
        """Why it is away."""

    async def open(self) -> None:
        """Reach the server, or begin without it, and go on until `close`."""
        self._worker = asyncio.create_task(self._work())
        await self.poll()
        self._task.start()

    async def close(self) -> None:
        """Send what waits, and disconnect. Safe to call twice."""
        await self._task.close()
        if self._worker is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while self._waiting and not self.is_away:
                        await self._send()
            self._worker.cancel()
            await asyncio.wait([self._worker])
            self._worker = None
        await self._client.aclose()

    async def change(self, change: Change) -> Standing:
        """See `SharedLimits`."""
        if self.is_away:
            raise SharedAway
        future: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        self._put(change, future)
        return await future

    def note(self, change: Change) -> None:
        """See `SharedLimits`."""
        if change.kind == "settle":
            self._running.pop(change.request_id, None)
        if not self.is_away:
            self._put(change, None)

    async def poll(self) -> None:
        """Reach a server that is away; tell one that is there that this gateway lives."""
        if not self.is_away and self._clock() - self._beat_at_s < BEAT_S:
            return
        try:
            async with asyncio.timeout(max(self._answer_s, ANSWER_S) * 4):
                if self.is_away:
                    await self._begin()
                running = [(key, name) for name, pair in self._running.items() for key in pair]
                keys = ["trunkline:gateways", *(key for key, _ in running)]
                said = [self._gateway, str(int(SEEN_S * 1_000)), str(int(LEASE_S * 1_000))]
                said += [name for _, name in running]
                beat = self._client.evalsha(self._beat, len(keys), *keys, *said)
                self.gateways = int(await _ready(beat))
        except NoScriptError:
            self._lose("its scripts are gone")
        except (RedisError, OSError, TimeoutError) as error:
            self._lose(str(error) or type(error).__name__)
        else:
            self._beat_at_s = self._clock()
            self._found()

    # -- internals ----------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Load the scripts into a server that keeps what it is given. Raises RedisError."""
        info: dict[str, Any] = await _ready(self._client.info("memory"))
        policy = info.get("maxmemory_policy", POLICY)
        if policy != POLICY:
            raise RedisError(f"its maxmemory-policy is {policy}; expected {POLICY}")
        self._change = await _ready(self._client.script_load(CHANGE))
        self._beat = await _ready(self._client.script_load(BEAT))
        if not self._was_there:
            await self._client.set(BEGUN, "0", nx=True)
            self._was_there = True

    def _put(self, change: Change, future: asyncio.Future[Standing] | None) -> None:
        self._waiting.append((change, future))
        self._has_work.set()

    async def _work(self) -> None:
        """Send what waits, a pipeline at a time: what comes meanwhile leaves together."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            await self._send()

    async def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        pipe = self._client.pipeline(transaction=False)
        for change, _ in waiting:
            _ = pipe.evalsha(self._change, 6, *_keys(change), *self._arguments(change))
        try:
            async with asyncio.timeout(self._answer_s):
                answers = await pipe.execute(raise_on_error=False)
        except (RedisError, OSError, TimeoutError) as error:
            self._lose(str(error) or type(error).__name__)
            answers = [error] * len(waiting)
        for (change, future), answer in zip(waiting, answers, strict=True):
            if isinstance(answer, Exception):
                if not self.is_away:
                    self._lose(str(answer))
                if future is not None and not future.done():
                    future.set_exception(SharedAway())
                continue
            standing = _standing(answer)
            if future is not None and not future.done():
                if change.kind == "take" and standing.fits:
                    self._running[change.request_id] = _running_keys(change.accounts)
                future.set_result(standing)
            elif change.kind == "take" and standing.fits:  # its client left meanwhile
                self._put(structs.replace(change, kind="settle"), None)

    def _arguments(self, change: Change) -> list[str]:
        tenant, key = change.accounts
        numbers = (
            *(int(LEASE_S * 1_000), int(REQUEST_S * 1_000)),
            *(*change.counts, *tenant.limits, *key.limits),
        )
        return [change.kind, change.request_id, *map(str, numbers)]

    def _lose(self, reason: str) -> None:
        """Go on without the server; those that wait for it do not wait longer."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if future is not None and not future.done():
                future.set_exception(SharedAway())
        if self.reason != reason:
            self._log("shared_away", {"reason": reason})
        was_away, self.is_away, self.reason = self.is_away, True, reason
        if not was_away or not self._was_there:
            self._on_state(True)

    def _found(self) -> None:
        if self.is_away:
            self.is_away, self.reason = False, ""
            self._log("shared_reached", {"gateways": self.gateways})
            self._on_state(False)


async def _ready(answer: Awaitable[Any] | Any) -> Any:
    """Return an answer of the client, which says that it may be one or the promise of one."""
    return await answer


def _keys(change: Change) -> list[str]:
    tenant, key = change.accounts
    return [
        f"trunkline:request:{change.request_id}",
        *(f"trunkline:used:{tenant.name}", f"trunkline:running:{tenant.name}"),
        *(f"trunkline:used:{key.name}", f"trunkline:running:{key.name}"),
        BEGUN,
    ]


def _running_keys(accounts: tuple[Account, Account]) -> tuple[str, str]:
    return f"trunkline:running:{accounts[0].name}", f"trunkline:running:{accounts[1].name}"


def _standing(answer: list[int]) -> Standing:
    fits, *rest = map(int, answer)
    tenant: Counts = (rest[0], rest[1], rest[2], rest[3])
    key: Counts = (rest[4], rest[5], rest[6], rest[7])
    return Standing(bool(fits), (tenant, key), (rest[8], rest[9]))
