"""`GET /admin/v1/levels` and `/admin/v1/levels/tenants`."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from gateway.config.config_file import ConfigSource
from gateway.engines.replicas import Replicas
from gateway.levels.report import SWITCH_ON
from tenancy.accounts.tenants import find_tenant_record
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.gateway.levels.reported_levels import DISK, STATS, ReportedEngine

LEVELS = "/admin/v1/levels"


def report(gateway: GatewayFixture) -> ReportedEngine:
    """Let the gateway see an engine with levels."""
    context = gateway.gateway.context
    engine = ReportedEngine(gateway.engine, STATS)
    context.models.default.replicas = Replicas.of(engine)
    return engine


async def test_without_levels_it_says_how_to_switch_them_on(gateway: GatewayFixture) -> None:
    status, found = await AdminClient(gateway).ask("GET", LEVELS)

    assert status == 200
    assert (found["is_on"], found["switch_on"]) == (False, SWITCH_ON)
    assert [one["name"] for one in found["levels"]] == ["device"]
    assert found["minutes"]["minute"] == []


async def test_names_the_file_that_the_server_read(gateway: GatewayFixture) -> None:
    """An operator who adds the lines to another file sees why nothing changed."""
    reload, admin = gateway.gateway.reload, AdminClient(gateway)
    _, without = await admin.ask("GET", LEVELS)
    reload.source = ConfigSource(Path("/etc/trunkline.toml"), reload.source.read)
    _, found = await admin.ask("GET", LEVELS)

    assert (without["config_file"], found["config_file"]) == (None, "/etc/trunkline.toml")


async def test_shows_levels_and_what_moved(gateway: GatewayFixture) -> None:
    """Totals of the engine, and the counts of the latest minutes."""
    engine, admin = report(gateway), AdminClient(gateway)
    await admin.ask("GET", LEVELS)
    engine.set_level("disk", state="off", reason="read-only", stored_total=99)
    _, found = await admin.ask("GET", LEVELS)
    disk = found["levels"][2]

    assert (disk["state"], disk["reason"], disk["pending_erasures"]) == ("off", "read-only", 2)
    assert disk["since_ms"] <= found["at_ms"]
    assert sum(found["minutes"]["host_disk"]) == 99
    assert found["loading"] == 1


async def test_shows_bytes_by_tenant(gateway: GatewayFixture) -> None:
    """By name while the tenant exists; as CSV too."""
    engine, admin = report(gateway), AdminClient(gateway)
    ada = find_tenant_record(gateway.store, "ada").tenant.tenant_id
    payers = replace(DISK.payers[0], payer=str(ada).encode()), replace(DISK.payers[1], payer=b"99")
    engine.set_level("disk", payers=payers)
    _, found = await admin.ask("GET", f"{LEVELS}/tenants")
    _, text = await admin.ask("GET", f"{LEVELS}/tenants?format=csv")

    assert [(row["tenant"], row["bytes"]) for row in found["tenants"]] == [
        ("ada", 8_000),
        ("99", 1_000),
    ]
    assert found["tenants"][0]["levels"]["disk"]["promised_bytes"] == 500
    assert text.startswith("tenant,bytes,levels")


async def test_metrics_have_every_level(gateway: GatewayFixture) -> None:
    """Names as documented; what is off is 0, what is full still serves."""
    engine = report(gateway)
    engine.set_level("host", state="off", recovered_total=5, torn_total=1, unnoted_total=2)
    async with gateway.session.get(f"{gateway.admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()

    assert {
        'trunkline_level_bytes{level="disk"} 9000.0',
        'trunkline_level_free_bytes{level="host"} 600.0',
        'trunkline_level_used_bytes{level="host"} 400.0',
        'trunkline_level_up{level="host"} 0.0',
        'trunkline_level_up{level="disk"} 1.0',
        'trunkline_level_blocks{level="device"} 6.0',
        'trunkline_level_copies_bytes{fidelity="near",level="host"} 80.0',
        'trunkline_cached_tokens_by_level_total{level="device"} 88.0',
        'trunkline_cached_tokens_by_level_total{level="disk"} 32.0',
        'trunkline_load_regret_seconds_total{level="host"} 0.5',
        'trunkline_damaged_total{level="disk"} 1.0',
        'trunkline_moves_total{from="device",outcome="done",to="host"} 9.0',
        'trunkline_moves_total{from="disk",outcome="done",to="host"} 2.0',
        'trunkline_loads_total{choice="compute",level="host"} 1.0',
        'trunkline_not_loaded_total{level="host",reason="late"} 2.0',
        "trunkline_uncopied_evictions_total 3.0",
        'trunkline_recovered_blocks_total{level="host"} 5.0',
        'trunkline_unrecovered_blocks_total{level="host",reason="torn"} 1.0',
        'trunkline_unnoted_blocks_total{level="host"} 2.0',
        "trunkline_disk_written_bytes_total 700.0",
        "trunkline_pending_erasures 2.0",
    } <= set(lines)
