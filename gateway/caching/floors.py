"""Check tenants' floors against the block pool: how much of each floor the engine guarantees.

An engine guarantees floors of at most `EngineInfo.floor_blocks_max` blocks in total; floors above
that are scaled down. A floor set through a gateway with an engine is refused if it does not fit,
with the largest value that would fit. A floor set elsewhere (in a file, on the command line, before
there is an engine) is reported in the log, in listings and on the dashboard. Pure; the module knows
no HTTP. The admin API and the command line's list call it.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.api import EngineInfo
from gateway.errors import Kind, Refusal
from tenancy.accounts.tenants import TenantRecord, floor_blocks_of


def check_floor(
    tenants: Iterable[TenantRecord],
    name: str,
    floor_blocks: int,
    info: EngineInfo | None,
    scale: float,
    model: str,
) -> None:
    """Check that a tenant may have this floor beside those of others. A floor that is not raised is
    always allowed. O(tenants).

    `scale`: factor of floors in this engine's pool. `model`: names the engine, if there are
    several. Raises Refusal with the number of blocks that would fit.
    """
    others = before = 0
    for one in tenants:
        if one.tenant.name == name:
            before = one.policy.floor_blocks
        else:
            others += floor_blocks_of(one)
    if info is None or floor_blocks <= before:
        return
    floors_max = int(info.floor_blocks_max / scale)
    if others + floor_blocks <= floors_max:
        return
    most = max(0, floors_max - others)
    engine = f"The engine of the model {model}" if model else "The engine"
    raise Refusal(
        Kind.BAD,
        "floor_too_large",
        f"floor_blocks: {floor_blocks}; expected at most {most}. {engine} has {info.blocks}"
        f" blocks; all floors may take {floors_max}, and other tenants have {others}.",
        param="floor_blocks",
    )


def guaranteed_floors(tenants: Iterable[TenantRecord], floors_max: int | None) -> dict[str, int]:
    """Return the guaranteed part of each floor by tenant name, if floors are scaled down; {} if
    they fit or `floors_max` is unknown. O(tenants)."""
    floors = {one.tenant.name: floor_blocks_of(one) for one in tenants}
    asked = sum(floors.values())
    if floors_max is None or asked <= floors_max:
        return {}
    return {name: guaranteed_blocks(floor, asked, floors_max) for name, floor in floors.items()}


def guaranteed_blocks(floor_blocks: int, asked: int, floors_max: int) -> int:
    """Return the guaranteed part of one floor if all floors together are `asked` blocks."""
    return floor_blocks if asked <= floors_max else floor_blocks * floors_max // asked
