"""Floors beside the pool that is there: what of them is kept, and what would fit.

An engine guarantees floors together no more than `EngineInfo.floor_blocks_max`; what they ask for
beyond it is cut. Whoever sets a floor by a gateway with an engine is refused what cannot be kept,
with the number that can; whoever sets one elsewhere (a file, the command line, before there is an
engine) is told in the log, by the listings and on the dashboard. Pure. It knows no HTTP; the admin
API, and the command line for its list, call it.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.api import EngineInfo
from gateway.errors import Kind, Refusal
from tenancy.accounts.tenants import TenantRecord, floor_blocks_of


def check_floor(
    tenants: Iterable[TenantRecord], name: str, floor_blocks: int, info: EngineInfo | None
) -> None:
    """May this tenant, there or to be made, have such a floor beside those of others? One that is
    not raised always may. O(tenants).

    Raises Refusal, which says how many blocks would fit.
    """
    others = before = 0
    for one in tenants:
        if one.tenant.name == name:
            before = one.policy.floor_blocks
        else:
            others += floor_blocks_of(one)
    if info is None or floor_blocks <= before or others + floor_blocks <= info.floor_blocks_max:
        return
    most = max(0, info.floor_blocks_max - others)
    raise Refusal(
        Kind.BAD,
        "floor_too_large",
        f"floor_blocks: at most {most} (it is {floor_blocks}). The engine has {info.blocks} blocks;"
        f" floors together may take {info.floor_blocks_max} of them, and others have {others}.",
        param="floor_blocks",
    )


def kept(tenants: Iterable[TenantRecord], floors_max: int | None) -> dict[str, int]:
    """What is kept of each floor, by the tenant's name, where they ask for more than there is; {}
    where they do not, or nobody knows. O(tenants)."""
    floors = {one.tenant.name: floor_blocks_of(one) for one in tenants}
    asked = sum(floors.values())
    if floors_max is None or asked <= floors_max:
        return {}
    return {name: kept_of(floor, asked, floors_max) for name, floor in floors.items()}


def kept_of(floor_blocks: int, asked: int, floors_max: int) -> int:
    """What is kept of one floor where all together ask for so many blocks."""
    return floor_blocks if asked <= floors_max else floor_blocks * floors_max // asked
