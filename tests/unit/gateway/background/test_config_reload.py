"""Reading the configuration again while the server runs."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.background.config_reload import ReloadResult, changed_settings, declare, reload
from gateway.config import Config, load_config
from gateway.errors import Refusal
from tenancy.accounts.declared_keys import KeyChange
from tenancy.accounts.declared_tenants import TenantChange
from tenancy.accounts.keys import digest_of
from tenancy.accounts.shared_scopes import ScopeChange
from tenancy.accounts.tenants import find_tenant_record, list_tenants
from tests.unit.gateway.admin_client import Admin
from tests.unit.gateway.gateway_fixture import GatewayFixture

ADA = '[[tenants]]\nname = "ada"\nrequests_per_minute = 60\n'
EVE = '[[tenants]]\nname = "eve"\ntier = "gold"\n'


class Reloader:
    """A gateway whose configuration is a file that a test rewrites."""

    def __init__(self, gateway: GatewayFixture, file: Path) -> None:
        self.gateway = gateway
        self.file = file
        gateway.gateway.context.read_config = lambda: load_config(file, {}, {})[0]

    async def write(self, text: str) -> None:
        """As an editor does."""
        await asyncio.to_thread(self.file.write_text, text)

    async def __call__(self, text: str) -> ReloadResult:
        """Write the file and reload."""
        await self.write(text)
        return await reload(self.gateway.gateway.context)


@pytest.fixture
async def reloader(gateway: GatewayFixture, tmp_path: Path) -> AsyncIterator[Reloader]:
    yield Reloader(gateway, tmp_path / "t.toml")
    await gateway.check_quiet()


async def test_declared_tenants_are_made_so_without_a_restart(reloader: Reloader) -> None:
    """The next request meets the new settings; the log says what was done."""
    gateway = reloader.gateway
    found = await reloader(ADA + EVE)
    identity = gateway.gateway.context.registry.authenticate(gateway.keys["ada"])

    assert found == ReloadResult(
        (TenantChange("ada", "adopted"), TenantChange("eve", "created")), ()
    )
    assert identity.limits.requests_per_minute == 60
    assert find_tenant_record(gateway.store, "eve").tenant.tier == "gold"
    assert [line["what"] for line in gateway.lines if line["event"] == "tenant_declared"] == [
        "adopted",
        "created",
    ]


async def test_a_tenant_that_is_declared_no_longer_is_suspended(reloader: Reloader) -> None:
    """Its entries and what was promised to it stay; its keys are refused at once."""
    gateway = reloader.gateway
    await reloader(ADA)
    await gateway.ask(body=gateway.chat())
    found = await reloader("tenants = []\n")
    status, body, _ = await gateway.ask(body=gateway.chat())

    assert found.tenants == (TenantChange("ada", "suspended"),)
    assert (status, body["error"]["code"]) == (403, "tenant_suspended")
    assert len(gateway.entries()) == 1


async def test_leases_outlive_a_tenant_that_is_declared_no_longer(reloader: Reloader) -> None:
    """What was promised stays promised: put back in time, it reads what it wrote before."""
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


async def test_a_file_without_tenants_says_nothing_of_them(reloader: Reloader) -> None:
    """Starting without the file, or with an older one, must not turn everybody away. But whoever
    took out the last one is told that it still works."""
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
async def test_a_file_with_a_mistake_changes_nothing(
    reloader: Reloader, text: str, what: str
) -> None:
    """G11: the old settings stay, and the mistake is told where it stands."""
    gateway = reloader.gateway
    with pytest.raises(Refusal) as caught:
        await reloader(text)

    assert what in caught.value.message
    assert [tenant.is_declared for tenant, _ in list_tenants(gateway.store)] == [False, False]
    assert [line["event"] for line in gateway.lines] == ["reload_refused"]


async def test_a_file_that_is_gone_changes_nothing(reloader: Reloader) -> None:
    """An editor replaces files; between two moments there is none."""
    with pytest.raises(Refusal, match="cannot be read"):
        await reload(reloader.gateway.gateway.context)


async def test_what_needs_a_restart_is_said(reloader: Reloader) -> None:
    """Instead of looking as if it had been taken."""
    found = await reloader("[engine]\nthreads = 7\n[log]\nrequests = false\n")

    assert found.needs_restart == ("engine.threads", "log.requests")


async def test_an_administrator_reloads_over_http(reloader: Reloader) -> None:
    """Where signals are hard to send: from another container."""
    admin = Admin(reloader.gateway)
    await reloader.write(EVE)
    good = await admin.ask("POST", "/admin/v1/reload")
    await reloader.write("x")
    bad = await admin.ask("POST", "/admin/v1/reload")
    tenants = await admin.ask("POST", "/admin/v1/reload", key=reloader.gateway.keys["ada"])

    assert good[1]["tenants"] == [{"tenant": "eve", "what": "created"}]
    assert (bad[0], bad[1]["error"]["code"]) == (409, "bad_config")
    assert tenants[0] == 403


async def test_at_the_start_too_a_file_without_tenants_changes_nothing(
    gateway: GatewayFixture,
) -> None:
    """And one with some is made so before the first request."""
    changes = await declare(gateway.gateway.context, Config())

    assert changes == []


def test_settings_that_are_the_same_do_not_differ() -> None:
    """However often they are read."""
    assert changed_settings(Config(), Config()) == []


async def test_sighup_reloads_and_does_not_end_the_process(tmp_path: Path) -> None:
    """The signal that ends other programs is an order here."""
    program = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.unit.gateway.gateway_fixture import GatewayFixture\n"
        "from tests.models import prepared\n"
        "from gateway.config import load_config\n"
        "async def main():\n"
        "    folder = Path(sys.argv[1])\n"
        "    gateway = GatewayFixture(prepared(folder / 'model'), folder)\n"
        "    await gateway.open()\n"
        "    file = folder / 't.toml'\n"
        "    gateway.gateway.context.read_config = lambda: load_config(file, {}, {})[0]\n"
        "    loop = asyncio.get_running_loop()\n"
        "    loop.add_signal_handler(signal.SIGHUP, gateway.gateway.reload_soon)\n"
        "    print('ready', flush=True)\n"
        "    await gateway.until(lambda: any(l['event'] == 'reloaded' for l in gateway.lines))\n"
        "    print(gateway.lines[0]['tenant'], flush=True)\n"
        "    await gateway.close()\n"
        "asyncio.run(main())\n"
    )
    await asyncio.to_thread((tmp_path / "model").mkdir)
    await asyncio.to_thread((tmp_path / "t.toml").write_text, EVE)
    child = await create_subprocess_exec(sys.executable, "-c", program, str(tmp_path), stdout=PIPE)
    assert child.stdout is not None
    ready = await child.stdout.readline()
    child.send_signal(signal.SIGHUP)
    said = await child.stdout.readline()
    status = await child.wait()

    assert (ready, said, status) == (b"ready\n", b"eve\n", 0)


async def test_declared_scopes_are_made_so_without_a_restart(reloader: Reloader) -> None:
    """Members share from the next request, and go on alone once the file says so."""
    gateway = reloader.gateway
    text = '[[tenancy.shared_scopes]]\nname = "ours"\nowner = "ada"\nmembers = ["ada", "bob"]\n'
    made = await reloader(text)
    shared = gateway.gateway.context.registry.authenticate(gateway.keys["bob"]).scope
    silent = await reloader("")
    removed = await reloader("[tenancy]\nshared_scopes = []\n")
    alone = gateway.gateway.context.registry.authenticate(gateway.keys["bob"]).scope

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


def keyed(key: str, terms: str = "") -> str:
    """Ada with one key."""
    return f'{ADA}[[tenants.keys]]\nlabel = "web"\nsha256 = "{digest_of(key).hex()}"\n{terms}'


async def chat(gateway: GatewayFixture, key: str) -> int | str:
    """200, or why not."""
    headers = {"Authorization": f"Bearer {key}"}
    status, body, _ = await gateway.ask(body=gateway.chat(), who=None, headers=headers)
    return status if status == 200 else str(body["error"]["code"])


async def test_declared_keys_open_change_and_end_without_a_restart(reloader: Reloader) -> None:
    """With the next request; the log says which, by number."""
    gateway = reloader.gateway
    made = await reloader(keyed(WEB))
    opened = await chat(gateway, WEB)
    await reloader(keyed(WEB, 'scopes = ["usage"]\n'))
    narrowed = await chat(gateway, WEB)
    await reloader(keyed(NEW))
    replaced = await chat(gateway, WEB), await chat(gateway, NEW)
    same = await reloader(keyed(NEW))
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


async def test_a_key_that_is_declared_by_its_file_follows_the_file(reloader: Reloader) -> None:
    """As a secret is mounted and renewed; one that others may read changes nothing."""
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
    assert "eve" not in [tenant.name for tenant, _ in list_tenants(gateway.store)]


async def test_a_key_that_cannot_be_leaves_what_runs(reloader: Reloader) -> None:
    """Another's digest, and no tenant of the same file is made."""
    gateway = reloader.gateway
    await reloader(keyed(WEB))
    with pytest.raises(
        Refusal,
        match="Configuration not applied: ada: key 'web': the digest is that of key 2 of bob",
    ):
        await reloader(keyed(gateway.keys["bob"]) + EVE)

    assert (await chat(gateway, WEB), await chat(gateway, gateway.keys["bob"])) == (200, 200)
    assert "eve" not in [tenant.name for tenant, _ in list_tenants(gateway.store)]


async def test_an_administrator_sees_a_declared_key_and_cannot_change_it(
    reloader: Reloader,
) -> None:
    """409 for all three; the file says what it is."""
    admin = Admin(reloader.gateway)
    await reloader.write(keyed(WEB))
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
