"""A tenant made with defaults cannot promise itself the pool, unless it is alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.caching.namespaces import promised_default, quota_of
from gateway.retention_classes import CachingConfig
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import change_tenant, create_tenant
from tenancy.types import CachePolicy, wall_ms
from tests.unit.gateway.gateway_fixture import BLOCKS, GatewayFixture

PROMISABLE = BLOCKS * 7 // 8


def promise(first: int) -> dict[str, Any]:
    """Return a completion that asks for a promise of some 25 blocks."""
    cache = {"mode": "implicit", "ttl": "12h"}
    text = " ".join(str(first + number) for number in range(80))
    message = [{"role": "user", "content": text}]
    return {"messages": message, "max_tokens": 1, "prompt_cache_options": cache}


async def promise_all(gateway: GatewayFixture, who: str = "ada") -> tuple[int, str]:
    """Ask for promises until they end; return the promised blocks and what the header says."""
    said = ""
    for number in range(40):
        body = {**promise(1_000 + 100 * number), "model": gateway.model}
        status, answer, response = await gateway.ask(body=body, who=who)
        assert status == 200, answer
        said = response.headers["X-Trunkline-Cache"]
        if "lease=refused" in said:
            break
    await gateway.quiet()
    held = gateway.engine.namespaces
    return sum(one.promised_blocks for one in held), said


async def test_default_tenant_promises_itself_a_quarter(gateway: GatewayFixture) -> None:
    """Beside another tenant: what is promised to one cannot be used by others for as long."""
    promised, said = await promise_all(gateway)
    long = {"model": gateway.model, "prompt": [5] * 400, "max_tokens": 1}
    status, answer, _ = await gateway.ask("/v1/completions", long, who="bob")

    assert PROMISABLE // 8 < promised <= PROMISABLE // 4
    assert "bound=quota" in said
    assert status == 200, answer


async def test_tenant_that_is_alone_may_promise_itself_all(gateway: GatewayFixture) -> None:
    """A first hour of trying: there is no other tenant to protect."""
    change_tenant(gateway.store, "bob", {}, "suspended")
    gateway.gateway.context.authenticator.refresh_now()
    promised, said = await promise_all(gateway)

    assert promised > PROMISABLE * 3 // 4
    assert "bound=pool" in said


def has(counted: Callable[[], int], expected: int) -> bool:
    """Return whether a count is as expected."""
    return counted() == expected


async def test_default_tenants_together_leave_room_for_a_tenant_with_a_bound(
    gateway: GatewayFixture,
) -> None:
    """Four of a quarter each would take all; a bound that the operator set is kept."""
    usage = gateway.gateway.context.usage.tenants
    for name in ("cid", "dan", "eve"):
        tenant = create_tenant(gateway.store, wall_ms, name)
        gateway.keys[name] = create_key(gateway.store, wall_ms, tenant.tenant_id)
    gateway.gateway.context.authenticator.refresh_now()
    said, promised = "", 0
    for name in ("ada", "bob", "cid", "dan"):
        promised, said = await promise_all(gateway, name)
        counted = partial(usage.total, "promised_blocks")
        await gateway.until(partial(has, counted, promised))
    change_tenant(gateway.store, "eve", {"promised_blocks_max": 50})
    gateway.gateway.context.authenticator.refresh_now()
    with_bound, _ = await promise_all(gateway, "eve")

    assert PROMISABLE * 5 // 8 < promised <= PROMISABLE * 3 // 4
    assert "bound=quota" in said
    assert promised + 20 < with_bound <= promised + 50


@pytest.mark.parametrize(
    ("promised", "bound"),
    [((0, 0), 56), ((56, 112), 56), ((0, 140), 28), ((20, 160), 28), ((0, 224), 0)],
)
async def test_default_bound_shrinks_as_promises_grow(
    gateway: GatewayFixture, promised: tuple[int, int], bound: int
) -> None:
    """What a tenant has already counts for it."""
    info = gateway.engine.info
    assert info is not None

    assert promised_default(info.promisable_blocks, CachingConfig(), 5, promised) == bound


async def test_default_bound_holds_on_the_device_too(gateway: GatewayFixture) -> None:
    """Where a disk keeps promises, a tenant without a bound still takes no more of the pool."""
    assert gateway.engine.info is not None
    info = replace(gateway.engine.info, promisable_blocks=22_400, promisable_on_device=224)
    total = promised_default(info.promisable_blocks, CachingConfig(), 2)
    on_device = promised_default(info.promisable_on_device, CachingConfig(), 2, (10, 150))
    quota = quota_of(CachePolicy(), b"1", total, 1.0, on_device)
    explicit = quota_of(CachePolicy(promised_blocks_max=9), b"1", total, 1.0, on_device)

    assert (quota.promised_blocks_max, quota.promised_on_device_max) == (5_600, 28)
    assert (explicit.promised_blocks_max, explicit.promised_on_device_max) == (9, None)
    assert promised_default(gateway.engine.info.promisable_on_device, CachingConfig(), 2) is None


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        (CachePolicy(), 56),
        (CachePolicy(floor_blocks=100), 100),
        (CachePolicy(promised_blocks_max=200), 200),
        (CachePolicy(promised_blocks_max=0, floor_blocks=100), 0),
    ],
)
async def test_an_explicit_bound_replaces_the_default(
    gateway: GatewayFixture, policy: CachePolicy, bound: int
) -> None:
    """And a tenant may promise itself its floor, which others cannot use anyway."""
    info = gateway.engine.info
    assert info is not None
    default = promised_default(info.promisable_blocks, CachingConfig(), 2)

    assert quota_of(policy, b"1", default).promised_blocks_max == bound
    half = CachingConfig(promised_share_default=0.5)
    assert promised_default(info.promisable_blocks, half, 2) == 112
    assert promised_default(info.promisable_blocks, CachingConfig(), 1) is None
