"""Reload of the configuration while the server runs."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.background.config_reload import ReloadResult, changed_settings
from gateway.background.webhooks import read_endpoints
from gateway.config import Config, ServedModelSettings, load_config
from gateway.config.config_file import ConfigSource
from gateway.errors import Refusal
from tenancy.accounts.declared_keys import KeyChange
from tenancy.accounts.declared_tenants import TenantChange
from tenancy.accounts.keys import digest_of
from tenancy.accounts.shared_scopes import ScopeChange
from tenancy.accounts.tenants import find_tenant_record, list_tenants
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture

ADA = '[[tenants]]\nname = "ada"\nrequests_per_minute = 60\n'
EVE = '[[tenants]]\nname = "eve"\ntier = "gold"\n'


class Reloader:
    """A gateway whose configuration file a test rewrites."""

    def __init__(self, gateway: GatewayFixture, file: Path) -> None:
        self.gateway = gateway
        self.file = file
        self.reload = gateway.gateway.reload
        self.reload.source = ConfigSource(file, lambda: load_config(file, {}, {})[0])
        self.webhooks = self.reload.webhooks = gateway.gateway.sender(
            [],
            read=lambda config: read_endpoints(config.webhooks, {"OPS": f"whsec_{'A' * 40}"}),
        )

    async def write(self, text: str) -> None:
        """Replace the file, as an editor does."""
        await asyncio.to_thread(self.file.write_text, text)

    async def __call__(self, text: str) -> ReloadResult:
        """Write the file and reload."""
        await self.write(text)
        return await self.reload.reload()


@pytest.fixture
async def reloader(gateway: GatewayFixture, tmp_path: Path) -> AsyncIterator[Reloader]:
    yield Reloader(gateway, tmp_path / "t.toml")
    await gateway.check_quiet()


async def test_applies_declared_tenants_without_a_restart(reloader: Reloader) -> None:
    """The next request has the new settings; the log has each change."""
    gateway = reloader.gateway
    found = await reloader(ADA + EVE)
    identity = gateway.gateway.context.authenticator.authenticate(gateway.keys["ada"])

    assert found == ReloadResult(
        (TenantChange("ada", "adopted"), TenantChange("eve", "created")), ()
    )
    assert identity.limits.requests_per_minute == 60
    assert find_tenant_record(gateway.store, "eve").tenant.tier == "gold"
    assert [line["what"] for line in gateway.lines if line["event"] == "tenant_declared"] == [
        "adopted",
        "created",
    ]


async def test_suspends_a_tenant_that_is_no_longer_declared(reloader: Reloader) -> None:
    """Its entries and promises stay; its keys are refused at once."""
    gateway = reloader.gateway
    await reloader(ADA)
    await gateway.ask(body=gateway.chat())
    found = await reloader("tenants = []\n")
    status, body, _ = await gateway.ask(body=gateway.chat())

    assert found.tenants == (TenantChange("ada", "suspended"),)
    assert (status, body["error"]["code"]) == (403, "tenant_suspended")
    assert len(gateway.entries()) == 1


async def test_a_running_request_outlives_reloads(reloader: Reloader) -> None:
    """One that other limits, a wrong file and a suspension of its tenant come across."""
    gateway = reloader.gateway
    gateway.runner.hold_after(1)
    running = asyncio.create_task(gateway.ask(body=gateway.chat()))
    await gateway.until(lambda: gateway.runner.is_held)
    limited = await reloader(ADA)
    with pytest.raises(Refusal, match="not applied"):
        await reloader("[[tenants")
    suspended = await reloader(EVE)
    gateway.runner.release()
    status, answer, _ = await running
    refused, _, _ = await gateway.ask(body=gateway.chat())

    assert limited.tenants == (TenantChange("ada", "adopted"),)
    assert TenantChange("ada", "suspended") in suspended.tenants
    assert (status, answer["usage"]["completion_tokens"] > 0) == (200, True)
    assert refused in (401, 403)


async def test_leases_outlive_a_suspension(reloader: Reloader) -> None:
    """Declared again in time, the tenant reads what it wrote before."""
    gateway = reloader.gateway
    await reloader(ADA)
    text = {
        "type": "text",
        "text": "a text to be kept, " * 20,
        "cache_control": {"type": "ephemeral"},
    }
    body = {
        "model": gateway.model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [text]}],
    }
    headers = {"anthropic-version": "2023-06-01"}
    _, wrote, _ = await gateway.ask("/v1/messages", body, headers=headers)
    await reloader("tenants = []\n")
    refused, _, _ = await gateway.ask("/v1/messages", body, headers=headers)
    await gateway.quiet()
    (space,) = gateway.engine.namespaces
    promised = space.promised_blocks
    await reloader(ADA)
    _, read, _ = await gateway.ask("/v1/messages", body, headers=headers)

    assert refused == 403
    assert promised > 0
    assert wrote["usage"]["cache_creation_input_tokens"] > 0
    assert read["usage"]["cache_read_input_tokens"] == wrote["usage"]["cache_creation_input_tokens"]


async def test_file_without_tenants_changes_no_tenant(reloader: Reloader) -> None:
    """A start without the file, or with an older one, must not suspend all tenants. An operator
    who removed the last table sees in the log that its tenant is still active."""
    await reloader(ADA)
    found = await reloader("[log]\nrequests = true\n")
    told = [line for line in reloader.gateway.lines if line["event"] == "tenants_undeclared"]
    status = find_tenant_record(reloader.gateway.store, "ada").tenant.status
    none = await reloader("tenants = []\n")

    assert (found.tenants, found.left, status) == ((), ("ada",), "active")
    assert told == [{"event": "tenants_undeclared", "tenants": 1}]
    assert (len(none.tenants), none.left) == (1, ())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[[tenants]\n", "not valid TOML"),
        ('[[tenants]]\ntier = "gold"\n', "missing required field `name`"),
        (
            ADA + '[[tenants]]\nname = "x"\nflor_blocks = 1\n',
            "did you mean tenants[1].floor_blocks",
        ),
        (ADA + '[[tenants]]\nname = "x"\nweight = "2"\n', "tenants[1].weight: Expected `float`"),
        (ADA + '[[tenants]]\nname = "../x"\n', "invalid tenant name"),
        (ADA + ADA, "declared twice"),
        ("tenants = 5\n", "tenants: Expected `array"),
        (ADA + "[server]\nlisten = 5\n", "server.listen"),
    ],
)
async def test_wrong_file_changes_nothing(reloader: Reloader, text: str, what: str) -> None:
    """G11: the old settings stay, and the error names the place."""
    gateway = reloader.gateway
    with pytest.raises(Refusal) as caught:
        await reloader(text)

    assert what in caught.value.message
    assert [tenant.is_declared for tenant in list_tenants(gateway.store)] == [False, False]
    assert [line["event"] for line in gateway.lines] == ["reload_refused"]


async def test_missing_file_changes_nothing(reloader: Reloader) -> None:
    """Some editors delete a file before they write it."""
    with pytest.raises(Refusal, match="cannot be read"):
        await reloader.reload.reload()


async def test_reports_settings_that_need_a_restart(reloader: Reloader) -> None:
    found = await reloader("[engine]\nthreads = 7\n[log]\nrequests = false\n")

    assert found.needs_restart == ("engine.threads", "log.requests")


async def test_applies_who_may_use_a_model_without_a_restart(reloader: Reloader) -> None:
    """From the next request on; without the key it is open to all, an empty list closes it."""
    gateway = reloader.gateway
    reload, name = reloader.reload, gateway.model
    models = (ServedModelSettings(name),)
    reload.config = msgspec.structs.replace(reload.config, models=models)
    found, served = [], []
    for more in ('tenants = ["bob"]', 'tenants = ["bob"]', "tenants = []", ""):
        found.append(await reloader(f'[[models]]\nname = "{name}"\n{more}\n'))
        statuses = [(await gateway.ask(body=gateway.chat("a"), who=who))[0] for who in gateway.keys]
        served.append(statuses)

    assert served == [[404, 200], [404, 200], [404, 404], [200, 200]]
    assert [one.models for one in found] == [(name,), (), (name,), (name,)]
    assert [one.needs_restart for one in found] == [(), (), (), ()]


WEBHOOK = '[[webhooks]]\nname = "ops"\nurl = "http://127.0.0.1:9/"\nsecret_env = "OPS"\n'


async def test_applies_webhooks_without_a_restart(reloader: Reloader) -> None:
    """Added, changed and removed ones; a file that repeats them changes none."""
    other = WEBHOOK.replace(":9/", ":9/other")
    found = [await reloader(text) for text in (WEBHOOK, WEBHOOK, other, "")]

    assert [one.webhooks for one in found] == [("ops",), (), ("ops",), ("ops",)]
    assert [one.needs_restart for one in found] == [(), (), (), ()]
    assert reloader.webhooks.endpoints == ()


async def test_a_webhook_without_its_secret_changes_nothing(reloader: Reloader) -> None:
    """Nor do the tenants of the same file."""
    with pytest.raises(Refusal, match="secret_env"):
        await reloader(ADA + WEBHOOK.replace("OPS", "MISSING"))

    registered = list_tenants(reloader.gateway.store)
    assert [tenant.is_declared for tenant in registered] == [False, False]
    assert reloader.webhooks.endpoints == ()


class SlowFile:
    """A configuration file whose first read waits until `go` is set, as on a slow disk."""

    def __init__(self, reloader: Reloader) -> None:
        self._read = reloader.reload.source.read
        reloader.reload.source = ConfigSource(reloader.file, self)
        self.began, self.go = threading.Event(), threading.Event()
        self.reads: list[str] = []

    def __call__(self) -> Config:
        """Read the file, then wait."""
        self.reads.append("begin")
        config = self._read()
        self.began.set()
        assert self.go.wait(PATIENCE_S), "a test forgot to let the read go on"
        self.reads.append("end")
        return config

    async def wait_begun(self) -> None:
        """Wait until the file has been read."""
        assert await asyncio.to_thread(self.began.wait, PATIENCE_S)


async def test_reloads_run_one_after_another(reloader: Reloader) -> None:
    """The slower of two would otherwise bring back a key that the later file revokes."""
    context = reloader.gateway.gateway.context
    await reloader.write(ADA)
    file = SlowFile(reloader)
    first = asyncio.create_task(reloader.reload.reload())
    await file.wait_begun()
    await reloader.write(EVE)
    second = asyncio.create_task(reloader.reload.reload())
    for _ in range(3):
        await asyncio.to_thread(bool)  # another thread's turn
    file.go.set()
    await asyncio.gather(first, second)

    assert file.reads == ["begin", "end"] * 2
    declared = [tenant.name for tenant in list_tenants(context.store) if tenant.is_declared]
    assert "eve" in declared


async def test_a_reload_ends_after_its_client_has_left(reloader: Reloader) -> None:
    """The database, the webhooks and the models must come from one file."""
    await reloader.write(EVE + WEBHOOK)
    file = SlowFile(reloader)
    left = asyncio.create_task(reloader.reload.reload())
    await file.wait_begun()
    left.cancel()
    file.go.set()
    with pytest.raises(asyncio.CancelledError):
        await left

    assert [one.name for one in reloader.webhooks.endpoints] == ["ops"]
    assert reloader.gateway.lines[-1]["event"] == "reloaded"


async def test_reloads_by_the_admin_api(reloader: Reloader) -> None:
    """Signals are hard to send from another container."""
    admin = AdminClient(reloader.gateway)
    await reloader.write(EVE)
    good = await admin.ask("POST", "/admin/v1/reload")
    await reloader.write("x")
    bad = await admin.ask("POST", "/admin/v1/reload")
    tenants = await admin.ask("POST", "/admin/v1/reload", key=reloader.gateway.keys["ada"])

    assert good[1]["tenants"] == [{"tenant": "eve", "what": "created"}]
    assert (bad[0], bad[1]["error"]["code"]) == (409, "bad_config")
    assert tenants[0] == 403


async def test_start_without_declared_tenants_changes_nothing(
    gateway: GatewayFixture,
) -> None:
    changes, _ = await gateway.gateway.reload.declare(Config())

    assert changes == []


def test_equal_settings_need_no_restart() -> None:
    assert changed_settings(Config(), Config()) == []


async def test_sighup_reloads_without_ending_the_process(reloader: Reloader) -> None:
    gateway = reloader.gateway
    await reloader.write(EVE)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, gateway.gateway.reload_soon)
    try:
        signal.raise_signal(signal.SIGHUP)
        await gateway.until(lambda: any(line["event"] == "reloaded" for line in gateway.lines))
    finally:
        loop.remove_signal_handler(signal.SIGHUP)

    assert gateway.lines[0]["tenant"] == "eve"


async def test_applies_declared_scopes_without_a_restart(reloader: Reloader) -> None:
    """Members share from the next request, and separate when the file removes the scope."""
    gateway = reloader.gateway
    text = '[[tenancy.shared_scopes]]\nname = "ours"\nowner = "ada"\nmembers = ["ada", "bob"]\n'
    made = await reloader(text)
    shared = gateway.gateway.context.authenticator.authenticate(gateway.keys["bob"]).scope
    silent = await reloader("")
    removed = await reloader("[tenancy]\nshared_scopes = []\n")
    alone = gateway.gateway.context.authenticator.authenticate(gateway.keys["bob"]).scope

    assert made == ReloadResult((), (), (ScopeChange("ours", "created"),))
    assert shared is not None
    assert silent == ReloadResult((), ())
    assert removed == ReloadResult((), (), (ScopeChange("ours", "removed"),))
    assert alone is None
    assert [line["what"] for line in gateway.lines if line["event"] == "scope_declared"] == [
        "created",
        "removed",
    ]


WEB, NEW = "tl-" + "w" * 43, "tl-" + "n" * 43


def key_table(key: str, terms: str = "") -> str:
    """Return a configuration in which ada has one key."""
    return f'{ADA}[[tenants.keys]]\nlabel = "web"\nsha256 = "{digest_of(key).hex()}"\n{terms}'


async def chat(gateway: GatewayFixture, key: str) -> int | str:
    """Return 200, or the error code."""
    headers = {"Authorization": f"Bearer {key}"}
    status, body, _ = await gateway.ask(body=gateway.chat(), who=None, headers=headers)
    return status if status == 200 else str(body["error"]["code"])


async def test_applies_declared_keys_without_a_restart(reloader: Reloader) -> None:
    """From the next request on; the log has each key's number."""
    gateway = reloader.gateway
    made = await reloader(key_table(WEB))
    opened = await chat(gateway, WEB)
    await reloader(key_table(WEB, 'scopes = ["usage"]\n'))
    narrowed = await chat(gateway, WEB)
    await reloader(key_table(NEW))
    replaced = await chat(gateway, WEB), await chat(gateway, NEW)
    same = await reloader(key_table(NEW))
    await reloader(ADA)
    ended = await chat(gateway, NEW), await chat(gateway, gateway.keys["ada"])

    assert made.keys == (KeyChange("ada", "web", 3, "created"),)
    assert (opened, narrowed) == (200, "scope_missing")
    assert replaced == ("invalid_api_key", 200)
    assert same == ReloadResult((), ())
    assert ended == ("invalid_api_key", 200)
    assert [
        (line["key_id"], line["what"]) for line in gateway.lines if line["event"] == "key_declared"
    ] == [(3, "created"), (3, "changed"), (4, "replaced"), (4, "revoked")]


async def test_key_file_changes_apply_on_reload(reloader: Reloader) -> None:
    """As a mounted secret is renewed; a file that other users can read changes nothing."""
    gateway, secret = reloader.gateway, reloader.file.with_name("secret")
    text = f'{ADA}[[tenants.keys]]\nlabel = "web"\nfile = "{secret}"\n'

    def mount(key: str, mode: int) -> None:
        secret.write_text(key + "\n")
        secret.chmod(mode)

    await asyncio.to_thread(mount, WEB, 0o600)
    await reloader(text)
    opened = await chat(gateway, WEB)
    await asyncio.to_thread(mount, NEW, 0o644)
    with pytest.raises(Refusal, match="chmod 600"):
        await reloader(text + EVE)
    kept = await chat(gateway, WEB), await chat(gateway, NEW)
    await asyncio.to_thread(secret.chmod, 0o600)
    await reloader(text)
    renewed = await chat(gateway, WEB), await chat(gateway, NEW)

    assert (opened, kept, renewed) == (
        200,
        (200, "invalid_api_key"),
        ("invalid_api_key", 200),
    )
    assert "eve" not in [tenant.name for tenant in list_tenants(gateway.store)]


async def test_refused_key_changes_nothing(reloader: Reloader) -> None:
    """The key has another key's digest; no tenant of the same file is created."""
    gateway = reloader.gateway
    await reloader(key_table(WEB))
    with pytest.raises(
        Refusal,
        match="Configuration not applied: ada: key 'web': the digest is that of key 2 of bob",
    ):
        await reloader(key_table(gateway.keys["bob"]) + EVE)

    assert (await chat(gateway, WEB), await chat(gateway, gateway.keys["bob"])) == (200, 200)
    assert "eve" not in [tenant.name for tenant in list_tenants(gateway.store)]


async def test_refuses_changes_to_a_declared_key(
    reloader: Reloader,
) -> None:
    """All three are 409; the list shows that it is declared."""
    admin = AdminClient(reloader.gateway)
    await reloader.write(key_table(WEB))
    _, made = await admin.ask("POST", "/admin/v1/reload")
    (key_id,) = [one["key_id"] for one in made["keys"]]
    path = f"/admin/v1/keys/{key_id}"
    _, shown = await admin.ask("GET", path)
    answers = [
        await admin.ask("PATCH", path, {"label": "x"}),
        await admin.ask("POST", f"{path}/rotate", {}),
        await admin.ask("POST", f"{path}/revoke"),
    ]

    assert (shown["label"], shown["declared"]) == ("web", True)
    assert shown["shown"] == f"sha256:{digest_of(WEB).hex()[:8]}…"
    assert [(status, body["error"]["code"]) for status, body in answers] == [
        (409, "key_declared")
    ] * 3
    assert await chat(reloader.gateway, WEB) == 200
