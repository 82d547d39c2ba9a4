"""What operators are told of engines elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.cli.fleet.fleet import explain
from gateway.cli.result import CommandError, CommandResult
from gateway.config import AdminConfig, Config
from gateway.engines.replicas import Replicas
from gateway.http.request_context import RequestState, record_of
from gateway.routing.pairs import PairCost
from gateway.routing.prefix_directory import Found
from gateway.routing.router import Cost, RouteChoice
from tenancy.history.request_records import write_records
from tests.fakes import FakeClock
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.engines.test_replica_choice import (
    PREFIX,
    RecordedEngine,
    homes_of,
    replicas_of,
    request,
)
from tests.unit.gateway.gateway_fixture import GatewayFixture


def split(gateway: GatewayFixture) -> Replicas:
    """Give the model one engine that serves and one that is lost."""
    replicas = Replicas()
    replicas.add("e0", gateway.engine)
    lost = replicas.add("e1")
    lost.state, lost.reason = "lost", "silent for 2.2 s"
    gateway.gateway.context.models.default.replicas = replicas
    return replicas


async def test_analytics_have_a_row_for_each_engine_elsewhere(gateway: GatewayFixture) -> None:
    """An engine of the gateway's own machine has none: the figures beside are its own."""
    admin = AdminClient(gateway)
    _, alone = await admin.ask("GET", "/admin/v1/analytics")
    split(gateway)
    _, seen = await admin.ask("GET", "/admin/v1/analytics")

    assert "replicas" not in alone["engine"]
    rows = seen["engine"]["replicas"]
    assert [(one["name"], one["state"], one["reason"]) for one in rows] == [
        ("e0", "ready", ""),
        ("e1", "lost", "silent for 2.2 s"),
    ]
    assert (rows[0]["blocks"] > 0, rows[1]["epoch"]) == (True, None)
    assert seen["engine"]["moved_requests"] == 0


async def test_metrics_have_a_series_for_each_engine_elsewhere(gateway: GatewayFixture) -> None:
    """A replica that is removed has none any more."""
    admin = AdminClient(gateway)
    replicas = split(gateway)
    replicas.moved = 3
    _, shown = await admin.ask("GET", "/metrics")
    replicas.remove(list(replicas)[1])
    _, later = await admin.ask("GET", "/metrics")

    lines = str(shown).splitlines()
    name, model = "trunkline_replica_ready", gateway.model
    assert f'{name}{{model="{model}",replica="e0"}} 1.0' in lines
    assert f'{name}{{model="{model}",replica="e1"}} 0.0' in lines
    assert "trunkline_moved_requests_total 3.0" in lines
    assert 'replica="e1"' not in str(later)


def routed(gateway: GatewayFixture) -> None:
    """Give the model two engines elsewhere, of which one has told a prefix and got a request."""
    engines = [RecordedEngine("a"), RecordedEngine("b")]
    replicas = replicas_of(engines, FakeClock())
    gateway.gateway.context.models.default.replicas = replicas
    replicas.submit(request(1))
    home, _ = homes_of(engines)
    home.start(cached_tokens=96)
    home.beat()
    replicas.add("e2")
    replicas.submit(request(1, 1))
    replicas.apart.outcomes["apart"] += 2
    replicas.promise_moves["found"] += 1


async def test_the_fleet_is_shown_with_its_choices(gateway: GatewayFixture) -> None:
    """An operator sees what each engine has, and why a request went where it went."""
    admin = AdminClient(gateway)
    routed(gateway)
    _, seen = await admin.ask("GET", "/admin/v1/fleet")
    (model,) = seen["models"]
    newest, oldest = model["choices"]
    status, alone = await admin.ask("GET", "/admin/v1/fleet/choices/1-1")
    unknown, error = await admin.ask("GET", "/admin/v1/fleet/choices/none")

    assert (model["model"], model["prefixes_asked_anew"]) == (gateway.model, 0)
    assert (model["prompts_apart"], model["promise_moves"]) == ({"apart": 2}, {"found": 1})
    assert seen["broken_promises"] == 0
    assert {one["role"] for one in model["replicas"]} == {"any"}
    told = {one["name"]: one.get("device_prefix_tokens") for one in model["replicas"]}
    assert sorted(told) == ["e0", "e1", "e2"]
    assert told[newest["replica"]] == PREFIX
    assert (newest["request_id"], oldest["request_id"]) == ("1-1", "1-0")
    assert (status, alone) == (200, newest)
    assert newest["refused"] == {"e2": "not ready"}
    best = newest["costs"][0]
    assert (best["replica"], best["device_tokens"]) == (newest["replica"], PREFIX)
    terms = best["wait_s"] + best["fill_s"] + best["displaced_s"] + best["decode_s"]
    assert abs(best["total_s"] - terms) < 1e-5
    assert unknown == 404
    assert "expected one of the last 1,000" in error["error"]["message"]


async def test_a_choice_of_another_gateway_is_explained_from_its_record(
    gateway: GatewayFixture,
) -> None:
    """As that gateway told it, with the least costs."""
    admin = AdminClient(gateway)
    costs = tuple(Cost(f"e{n}", Found(128 * n, n), 0.5, 8 - n, 0.25, 0.125) for n in range(8))
    pair = PairCost("e5", "e6", 1.0, 0.5, 0.25, 2.0, 0.125)
    there = RouteChoice("there", "time", "e1", costs, {"e9": "no room"}, pair=pair)
    state = RequestState("there", 0.0, model=gateway.model, is_generation=True)
    state.choice = there
    records = [record_of(state, 200, 1.0), record_of(RequestState("alone", 0.0), 200, 1.0)]
    await asyncio.to_thread(write_records, gateway.store, records)
    status, told = await admin.ask("GET", "/admin/v1/fleet/choices/there")
    unknown, _ = await admin.ask("GET", "/admin/v1/fleet/choices/alone")

    assert (status, told["model"], told["replica"]) == (200, gateway.model, "e1")
    assert [one["replica"] for one in told["costs"]] == ["e7", "e6", "e5", "e4", "e1"]
    assert (told["costs"][4]["device_tokens"], told["costs"][4]["below_tokens"]) == (128, 1)
    assert (told["costs"][4]["total_s"], told["refused"]) == (7.875, {"e9": "no room"})
    assert (told["pair"]["prompt_at"], told["pair"]["total_s"]) == ("e5", 3.875)
    assert unknown == 404


async def test_a_choice_is_explained_on_the_command_line(
    gateway: GatewayFixture, tmp_path: Path
) -> None:
    """As a table of predicted seconds."""
    admin = AdminClient(gateway)
    routed(gateway)
    listen = gateway.admin_url.removeprefix("http://")
    config = Config(data_dir=str(tmp_path), admin=AdminConfig(listen=listen))

    def ask(request_id: str) -> CommandResult:
        (tmp_path / "admin.key").write_text(f"{admin.key}\n")
        return explain(config, request_id)

    found = await asyncio.to_thread(ask, "1-1")
    with pytest.raises(CommandError, match="No choice of 'none' is known"):
        await asyncio.to_thread(ask, "none")

    lines = found.text.splitlines()
    assert lines[0].startswith(f"1-1 of {gateway.model} went to e")
    titles = "engine seconds wait fill displaced decode tokens there below fetched"
    assert " ".join(lines[1].split()) == titles
    assert lines[-1] == "e2: not ready"


async def test_metrics_tell_predicted_and_missing_tokens(gateway: GatewayFixture) -> None:
    """Facts that are wrong show as tokens that were predicted and not found."""
    admin = AdminClient(gateway)
    routed(gateway)
    _, shown = await admin.ask("GET", "/metrics")

    counts = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in str(shown).splitlines()
        if line.startswith(("trunkline_routed_tokens_total{", "trunkline_replica_facts_total{"))
    }
    sums = {
        kind: sum(count for name, count in counts.items() if f'kind="{kind}"' in name)
        for kind in ("prompt", "cached", "predicted", "missing")
    }
    assert sums == {"prompt": PREFIX + 32, "cached": 96, "predicted": 0, "missing": 0}
    facts = [count for name, count in counts.items() if "replica_facts" in name]
    assert sorted(facts) == [0, 2, 4]
