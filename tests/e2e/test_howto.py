"""Runs the commands of every page of docs/howto, against a server of a tiny model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import load_config
from tests.e2e.howto_shell import MODEL, HowToShell
from tests.e2e.installed_wheel import ROOT
from tests.ports import free_ports

PAGES = sorted(path for path in (ROOT / "docs" / "howto").glob("*.md") if path.stem != "README")
LINES_MAX = 40

PRINTED = {
    "another-model": (
        rf"model\.name +environment .*{MODEL}",
        rf"^(ok +)?model +\S*/{MODEL}",
        "gpt-4o-mini",
    ),
    "budget": (r'"completion_tokens":\d', r"studio .*month .*20\.000000.*16\.000000"),
    "disk": (
        r"^ok +configuration +\S*/trunkline.toml is valid",
        r"^ok +disk level speed +[0-9,]+ MB/s written",
        r"^ok +disk level worth",
        r"^device +open",
        r"^disk +open +2\.0 GiB",
        r"^\d+ records read, 0 dropped",
        r"/levels is empty",
    ),
    "docker": (r'"completion_tokens":\d', r"default +1 "),
    "fleet-size": (r"^seconds +0\.\d+ ", r"^round-robin +0\.\d+ ", r'"again_tokens": \d'),
    "from-litellm": (r'"object":"list"',),
    "from-openai": (r"(\d+) 0\n\1 [1-9]",),
    "from-vllm": (r'"completion_tokens":\d', "vllm:num_requests_running"),
    "gpt-oss": (r"engine\.kv_memory_mib .*49152",),
    "gpu": (r"engine\.kv_memory_mib .*40960",),
    "grafana": (r"trunkline_engine_ready 1",),
    "kubernetes": (r"^tl-", "orchard"),
    "kubernetes-engines": (r"^tl-", r"copy it to the host of engine/llm-trunkline-engine-3"),
    "litellm-in-front": (r'"object":"list"',),
    "one-hour": (
        r'"ephemeral_1h_input_tokens":[1-9]',
        r'"cache_read_input_tokens":[1-9]',
        r'"class":"1h"',
    ),
    "ray": (r"data/fleet/engine-e1: copy it to the host of engine/e1",),
    "savings": (r"default +2 ", r'"saved_usd":"0\.000[0-9]*[1-9]'),
    "remote-store": (
        r"^ok +remote level +file://.*/bucket answers in [0-9]+ ms",
        r"^disk +open +2\.0 GiB",
        r"^remote +(open|off) ",
    ),
    "sealed-disk": (
        r"/levels\.key has the new key [0-9a-f]{8}",
        r"^ok +disk level seal +key [0-9a-f]{8} of .*/levels\.key",
        r"/levels: 0 keys wrapped anew",
    ),
    "shared-store": (
        r"/shared\.key has the new key [0-9a-f]{8}",
        r"^disk +open +4\.0 GiB",
        r"^remote +open ",
        r'"remote":\{"blocks":\d+.*"state":"gone"',
    ),
    "several-gpus": (r": 2 replicas with a GPU each", r"engine\.gpus .*0,1"),
    "systemd": (r'"ready"', r"\btl-"),
    "tls": (r"server\.hosts .*llm\.example\.org", r'"ready"'),
    "two-gpus": (
        r"copy it to the host of gateway/g0",
        r'"ready"',
        r"data: \[DONE\]",
        r'trunkline_replica_ready\{.*replica="e1".*\} 1',
    ),
    "two-machines": (r"^ok +configuration", r"^ok +fleet +\S*gateway-g0\S* is valid until"),
    "two-models": (
        r"^(ok +)?model small +",
        r'"id":"large".*"id":"small".*"id":"gpt-4o-mini"',
        r'"model":"small"',
        r"small +1 ",
    ),
    "upgrade": (r'"ready"',),
}
"""What the commands of each page print, beside ending without an error.

Answers are drawn, as a reader's are, so their lengths vary.
"""
ASKED = {
    "docker": ("docker compose up --build --detach --wait", "docker build --tag trunkline ."),
    "kubernetes": ("helm upgrade --install llm", "kubectl --namespace llm rollout status"),
    "kubernetes-engines": (
        "helm upgrade --install llm",
        *(
            f"kubectl --namespace llm create secret generic llm-trunkline-{holder}-tls"
            for holder in ("0", "engine-0", "engine-3")
        ),
    ),
    "two-machines": ("scp -r data/fleet/engine-e1", "ssh gpu1.example.org sudo install"),
    "systemd": ("make -C ", "systemctl enable --now trunkline"),
    "upgrade": ("trunkline backup /", "trunkline restore /"),
    "tls": ("nginx -t", "caddy validate"),
}
"""Beginnings of what the stand-ins of a page were asked."""


STOPPED = (
    *("another-model", "disk", "gpu", "remote-store", "sealed-disk", "several-gpus"),
    *("shared-store", "systemd", "two-gpus", "two-models"),
)
"""Pages that begin without a server."""
BEFORE = {"sealed-disk": ("disk",), "remote-store": ("disk", "sealed-disk")}
"""Pages that a page builds on, in order."""
CONFIG_FILE = "trunkline.toml"


def blocks(page: Path) -> str:
    """Return the commands of a page, in order."""
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[HowToShell]:
    """Yield a shell with a running server, and stop the server afterwards."""
    with free_ports(4) as ports:
        opened = HowToShell(tmp_path, *ports)
        began = opened.run("systemctl start trunkline")
        assert began.returncode == 0, (opened.folder / "server.log").read_text()
        yield opened
        opened.run("systemctl stop trunkline")


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_work(page: Path, shell: HowToShell) -> None:
    """A reader types them in this order; each has to succeed and to print what the page says."""
    if page.stem in STOPPED:
        shell.run("systemctl stop trunkline")
    for name in BEFORE.get(page.stem, ()):
        before = shell.run(blocks(page.with_stem(name)))
        assert before.returncode == 0, before.stderr
    done = shell.run(blocks(page))
    said = f"{done.stdout}\n{done.stderr}"

    assert done.returncode == 0, said
    for pattern in PRINTED[page.stem]:
        assert re.search(pattern, done.stdout, re.MULTILINE), (pattern, said)
    for beginning in ASKED.get(page.stem, ()):
        assert any(line.startswith(beginning) for line in shell.commands), shell.commands


FOLLOWED = ("budget", "savings", "one-hour", "from-litellm", "litellm-in-front", "savings")
"""Pages that a reader follows one after another on one server."""


@pytest.mark.slow
def test_pages_work_one_after_another_on_a_server_with_a_rate_card(shell: HowToShell) -> None:
    """A second card for the same requests is refused, and so is a tenant's name that is taken."""
    card = "trunkline prices add own --input 1 --output 2 --cache-read 0.1"
    assert shell.run(card).returncode == 0

    for name in FOLLOWED:
        done = shell.run(blocks(PAGES[0].with_stem(name)))
        assert done.returncode == 0, (name, done.stderr)
    assert shell.run("trunkline prices list").stdout.count("@") == 1


def test_pages_are_short_and_in_the_index() -> None:
    """A how-to fits a screen; the index has a line for each."""
    index = (ROOT / "docs" / "howto" / "README.md").read_text()

    for page in PAGES:
        assert len(page.read_text().splitlines()) <= LINES_MAX, page.name
        assert f"]({page.name})" in index, page.name
        assert blocks(page), f"{page.name} has no commands"
    assert PRINTED.keys() == {page.stem for page in PAGES}


def test_pages_add_to_the_configuration_file_and_overwrite_none(tmp_path: Path) -> None:
    """A reader follows one after another: a page must not erase what the one before has written,
    nor write a table a second time."""
    written = ""
    for page in PAGES:
        assert not re.search(rf"[^>]> *{CONFIG_FILE}", blocks(page)), page.name
        added = re.findall(
            rf"cat >> {CONFIG_FILE} <<'?END'?\n(.*?)^END$", blocks(page), re.MULTILINE | re.DOTALL
        )
        written += "".join(added)
    sealed = 'gib = 2\nseal = true\nkey_file = "levels.key"\n'  # sealed-disk.md adds lines by sed
    (tmp_path / CONFIG_FILE).write_text(
        written.replace("gib = 2\n", sealed).replace("$HOME", "/home/reader")
    )
    _, origin = load_config(tmp_path / CONFIG_FILE, {}, {})

    assert {"model.name", "engine.device", "server.hosts", "engine.levels.remote.url"} <= set(
        origin
    )


def test_each_tenant_is_created_once() -> None:
    """By the README's tour and all pages together: a reader follows them on one server, and a name
    that is taken is refused."""
    texts = [(ROOT / "README.md").read_text(), *map(blocks, PAGES)]
    created = re.findall(r"tenant create (\w+)", "\n".join(texts))

    assert len(created) > len(PAGES) // 4
    assert len(created) == len(set(created)), sorted(created)


def test_files_that_commands_name_exist() -> None:
    """A moved file of deploy/ or examples/ is moved in the pages, too."""
    for page in PAGES:
        for name in re.findall(r"\b(?:deploy|examples)/[\w./@-]+\w", page.read_text()):
            assert (ROOT / name).exists(), (page.name, name)
