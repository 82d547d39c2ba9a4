"""Checks the Dockerfile, compose.yaml and the Helm chart: by their linters, and by what they start.

No test runs a container: `tests/e2e/test_wheel.py` runs what the container would, outside.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from redis import Redis

from gateway.cli.arguments import build_parser
from gateway.config import Config, load_config
from gateway.config.fleet import parse_replicas
from gateway.fleet.keeping import MARKS, SERVES
from gateway.http.authentication import ALL_ADDRESSES
from tests.tables import each_row
from tests.tools.binaries import needs
from tests.unit.gateway.shared.valkey_server import ValkeyServer

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "compose.yaml"
ENGINES = DEPLOY / "compose" / "engines.yaml"
GATEWAYS = DEPLOY / "compose" / "gateways.yaml"
STACKS = (COMPOSE, ENGINES, GATEWAYS)
CHART = DEPLOY / "helm" / "trunkline"
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def run(command: Sequence[str | Path]) -> str:
    """Return the output of a command, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def config_of(text: str, folder: Path, environment: Mapping[str, str] | None = None) -> Config:
    """Return the settings of a configuration file's text under an environment."""
    file = folder / "trunkline.toml"
    file.write_text(text)
    return load_config(file, environment or {}, {})[0]


# --- the image ------------------------------------------------------------------------------------


def test_hadolint_accepts_the_dockerfile() -> None:
    """It parses the file and every shell line in it."""
    run([needs("hadolint"), "--failure-threshold", "info", DOCKERFILE])


def test_the_image_copies_what_exists_and_what_the_build_context_has() -> None:
    """A file that .dockerignore leaves out fails only when a daemon builds the image."""
    text = DOCKERFILE.read_text()
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for name in line.split()
    ]
    let_in = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)

    assert {"gateway", "engine", "kernels", "tenancy", "constraints.txt"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(name == one or name.startswith(f"{one}/") for one in let_in), name


def test_the_image_runs_the_server_without_rights() -> None:
    """Its last stage is the CPU's; both serve as a user whose folder is the volume."""
    text = DOCKERFILE.read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    (command,) = re.findall(r'^CMD \["(\w+)"\]$', text, re.MULTILINE)
    (user,) = re.findall(r"^USER (\d+)", text, re.MULTILINE)

    assert stages[-2:] == ["cuda", "cpu"]
    assert command == "serve"
    assert int(user) > 0
    assert "/readyz" in text


def test_the_images_configuration_opens_both_listeners(tmp_path: Path) -> None:
    """A container's ports reach no listener on 127.0.0.1; Host may be any address, as of probes."""
    config = config_of((DEPLOY / "docker" / "trunkline.toml").read_text(), tmp_path)

    assert (config.server.listen, config.admin.listen) == ("0.0.0.0:8080", "0.0.0.0:8081")
    assert ALL_ADDRESSES[0] in config.server.hosts
    assert "*" not in config.server.hosts


# --- compose --------------------------------------------------------------------------------------


def test_compose_file_is_valid() -> None:
    """By the published schema of the Compose specification, and by yamllint."""
    rules = "{extends: relaxed, rules: {line-length: {max: 110}}}"
    run([needs("yamllint"), "--strict", "-d", rules, COMPOSE, DEPLOY / "compose"])
    for file in STACKS:
        run([needs("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", file])


def test_compose_mounts_files_that_exist() -> None:
    """A missing file would become an empty folder of root's."""
    mounted = re.findall(r"^ +- (\./[^:]+):", COMPOSE.read_text(), re.MULTILINE)

    assert len(mounted) == 6
    assert [name for name in mounted if not (ROOT / name).exists()] == []


def test_compose_publishes_only_tls_to_the_world() -> None:
    """Everything else is bound to this machine, and the gateway waits for its database."""
    ports = re.findall(r'"((?:[\d.]+:)?\d+:\d+(?:/udp)?)"', COMPOSE.read_text())
    public = {port for port in ports if not port.startswith("127.0.0.1:")}

    assert public == {"80:80", "443:443", "443:443/udp"}
    assert COMPOSE.read_text().count("service_healthy") == 2


def test_compose_configures_the_gateway_behind_a_proxy(tmp_path: Path) -> None:
    """Prometheus asks by the service's name; PostgreSQL is reached by the shared socket."""
    config = config_of((DEPLOY / "compose" / "trunkline.toml").read_text(), tmp_path)
    scraped = re.findall(
        r'targets: \["(\w+):(\d+)"\]', (DEPLOY / "compose" / "prometheus.yml").read_text()
    )

    assert scraped == [("gateway", config.admin.listen.rpartition(":")[2])]
    assert "gateway" in config.admin.hosts
    assert config.server.connections_per_address_max == 0
    socket = re.search(r"host=(.+)$", config.tenancy.database)
    assert socket is not None
    assert COMPOSE.read_text().count(f"postgres-socket:{socket[1]}") == 2


def test_stop_timeouts_are_longer_than_a_drain(tmp_path: Path) -> None:
    """A container that is killed earlier would cut running answers."""
    drain_s = config_of("", tmp_path).engine.drain_timeout_s
    chart = (CHART / "values.yaml").read_text()
    found = re.findall(r"stop_grace_period: (\d+)s", "".join(map(Path.read_text, STACKS)))
    found += re.findall(r"^terminationGracePeriodSeconds: (\d+)$", chart, re.MULTILINE)

    assert len(found) == 4
    assert all(int(one) > drain_s for one in found)


def test_versions_of_image_and_chart_are_the_products() -> None:
    """One number for a release."""
    assert VERSION is not None
    chart = (CHART / "Chart.yaml").read_text()

    assert f'appVersion: "{VERSION[1]}"' in chart
    for file in STACKS:
        assert f"TRUNKLINE_VERSION:-{VERSION[1]}" in file.read_text()


def test_compose_s_gateway_finds_the_engines_and_their_certificates(tmp_path: Path) -> None:
    """Each service's command is one of ours; names, ports and certificates are those that the
    gateway asks for, and nothing is published beyond this machine."""
    text = ENGINES.read_text()
    config = config_of((DEPLOY / "compose" / "engines.toml").read_text(), tmp_path)
    replicas = parse_replicas(config.served_models()[0].replicas)
    commands = [
        re.sub(r"""["']""", "", line).split(", ")
        for line in re.findall(r"command:\s+\[(.+)\]$", text, re.MULTILINE)
    ]
    parser = build_parser(("fleet", "engine", "serve"))
    init, *engines, serve = [parser.parse_args(words) for words in commands]

    assert (init.action, init.dir, serve.command) == ("init", None, "serve")
    assert [one.name for one in engines] == [one.name for one in replicas] == ["e0", "e1"]
    assert init.engines.split(",") == ["e0", "e1"]
    for one, replica in zip(engines, replicas, strict=True):
        assert re.search(rf"^  {replica.host}:$", text, re.MULTILINE)
        assert one.listen == f"0.0.0.0:{replica.port}"
        assert str(one.tls) == f"/certificates/fleet/engine-{replica.name}"
    assert str(config.fleet_folder) == f"/certificates/fleet/gateway-{init.gateways}"
    assert config.fleet.name == init.gateways
    assert set(re.findall(r'"([\d.]+):\d+:\d+"', text)) == {"127.0.0.1"}
    for name in re.findall(r"- \./([^:]+):", text):
        assert (ENGINES.parent / name).exists(), name


def test_compose_s_two_gateways_share_books_limits_and_engines(tmp_path: Path) -> None:
    """Each has a name, a certificate and a volume of its own; sockets are where a service makes
    them, and Caddy asks both."""
    text = GATEWAYS.read_text()
    names = re.findall(r"TRUNKLINE_FLEET_NAME: (\S+)", text)
    folders = re.findall(r"TRUNKLINE_FLEET_TLS: (\S+)", text)
    settings = (DEPLOY / "compose" / "gateways.toml").read_text()
    configs = [
        config_of(settings, tmp_path, {"TRUNKLINE_FLEET_NAME": name, "TRUNKLINE_FLEET_TLS": folder})
        for name, folder in zip(names, folders, strict=True)
    ]
    (init,) = re.findall(r"command: \[(fleet, init.+)\]$", text, re.MULTILINE)
    options = build_parser(("fleet",)).parse_args(init.replace('"', "").split(", "))
    (valkey,) = re.findall(r"valkey-socket:(/data)\"", text)

    assert options.gateways.split(",") == names == [one.fleet.name for one in configs]
    for one in configs:
        assert str(one.fleet_folder) == f"/certificates/fleet/gateway-{one.fleet.name}"
        assert one.fleet.shared == "unix:///run/valkey/valkey.sock"
        assert one.server.connections_per_address_max == 0
        assert one.served_models()[0].replicas == ("e0=e0:7443", "e1=e1:7443")
    socket = re.search(r"host=(.+)$", configs[0].tenancy.database)
    assert socket is not None
    assert text.count(f"postgres-socket:{socket[1]}") == 3
    assert text.count("valkey-socket:/run/valkey:ro") == 2
    assert text.count(f"{valkey}/valkey.sock") == 2
    assert re.findall(r"^  (\S+):\n    <<: \*gateway", text, re.MULTILINE) == ["gateway", "g1"]
    assert "TRUNKLINE_UPSTREAM: gateway:8080 g1:8080" in text
    ports = set(re.findall(r'"([\d.:]*\d+:\d+)(?:/udp)?"', text))
    assert ports == {"127.0.0.1:8082:8081", "80:80", "443:443"}
    for name in re.findall(r"- (\.\.?/[^:]+):", text):
        assert (GATEWAYS.parent / name).exists(), name


def test_compose_s_valkey_starts_as_it_is_told(tmp_path: Path) -> None:
    """Its options are a server's, and gateways may use what it does when memory is short."""
    (command,) = re.findall(r"\[valkey-server, ([^]]+)\]", GATEWAYS.read_text())
    words = [word.strip('" ') for word in re.split(r",\s+", command)]
    words[words.index("--unixsocket") + 1] = "valkey.sock"
    server = ValkeyServer(tmp_path, *words)
    with Redis(unix_socket_path=str(tmp_path / "valkey.sock")) as client:
        policy = client.config_get("maxmemory-policy")
    server.kill()

    assert policy == {"maxmemory-policy": "noeviction"}


# --- Helm -----------------------------------------------------------------------------------------

VALUES = {
    "plain": (),
    "all": (
        "replicas=2",
        "database=postgresql://trunkline@db.example/books",
        "passwordSecret=books",
        "ingress.enabled=true",
        "ingress.host=llm.example.org",
        "ingress.className=nginx",
        "ingress.tlsSecret=llm-tls",
        "serviceMonitor.enabled=true",
        "serviceMonitor.labels.release=prometheus",
        "hosts={llm.internal}",
        "image.repository=registry.example/trunkline",
        "imagePullSecrets[0].name=pull",
        "resources.limits.nvidia\\.com/gpu=1",
        "nodeSelector.pool=gpu",
        "extraEnv[0].name=A",
        "extraEnv[0].value=b",
        "persistence.storageClass=fast",
        "settings.server=body_bytes_max = 4194304",
        'tables=[[tenants]]\nname = "acme"',
    ),
    "gateways": (
        "replicas=2",
        "engines.replicas=2",
        "database=postgresql://trunkline@db.example/books",
        "passwordSecret=books",
        "shared=rediss://trunkline@valkey.example:6379/0",
        "sharedSecret=limits",
        "engines.issuer.name=fleet",
    ),
    "engines": (
        "engines.replicas=3",
        "engines.issuer.name=fleet",
        "engines.issuer.kind=Issuer",
        "engines.drainTimeoutSeconds=100",
        "engines.resources.limits.nvidia\\.com/gpu=1",
        "engines.nodeSelector.pool=gpu",
        "engines.persistence.storageClass=fast",
        "engines.tables=[engine.levels]\ndisk_gib = 10",
        'settings.engine=weights = "fp8"',
    ),
}


def rendered(values: Sequence[str]) -> str:
    """Return the chart's objects, as Helm renders them."""
    settings = [part for value in values for part in ("--set", value)]
    return run([needs("helm"), "template", "demo", CHART, "--namespace", "llm", *settings])


def configurations(text: str) -> list[str]:
    """Return the configuration files among objects: the gateway's, then the engines'."""
    blocks = re.findall(r"  trunkline\.toml: \|\n((?:    .*\n|\n)+)", text)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]


def test_the_chart_s_gateway_finds_the_engines_and_their_certificates(tmp_path: Path) -> None:
    """By the headless service; every pod's name has a certificate, mounted where it looks."""
    text = rendered(VALUES["engines"])
    for_gateway, for_engine = configurations(text)
    gateway, engine = config_of(for_gateway, tmp_path), config_of(for_engine, tmp_path)
    settings = gateway.served_models()[0]
    (arguments,) = re.findall(r"args: \[(.+)\]", text)
    words = arguments.replace('"', "").replace("$(POD_NAME)", "demo-trunkline-engine-2").split(", ")
    options = build_parser(("engine",)).parse_args(words)
    uris = re.findall(r'uris: \["(.+)"\]', text)
    (folder,) = re.findall(r"TRUNKLINE_FLEET_TLS, value: (\S+)/\$\(TRUNKLINE_FLEET_NAME\)", text)
    paths = re.findall(r"path: (\S+)/certificate\.pem", text)
    secrets = set(re.findall(r"secretName: (\S+)", text))
    kinds = re.findall(r"^kind: (\w+)$", text, re.MULTILINE)
    names = [f"demo-trunkline-engine-{number}" for number in range(3)]

    assert settings.replicas_dns == "demo-trunkline-engine:7443"
    assert options.listen == "0.0.0.0:7443"
    assert str(options.tls) == f"/etc/trunkline-tls/{names[2]}"
    assert {f"trunkline://engine/{name}" for name in names} < set(uris)
    assert "trunkline://gateway/demo-trunkline-0" in uris
    assert folder == "/etc/trunkline-tls"
    assert set(paths) == {*names, "demo-trunkline-0"}
    assert {f"{name}-tls" for name in paths} == secrets
    assert engine.engine.drain_timeout_s == 100
    assert engine.engine.levels.disk_gib == 10
    assert f"terminationGracePeriodSeconds: {100 + 30}" in text
    assert {"PodDisruptionBudget", "NetworkPolicy"} <= set(kinds)


def test_the_chart_s_gateways_have_names_certificates_and_one_valkey(tmp_path: Path) -> None:
    """Two pods of one configuration: the pod's name is the gateway's."""
    text = rendered(VALUES["gateways"])
    environment = {
        "TRUNKLINE_FLEET_NAME": "demo-trunkline-1",
        "TRUNKLINE_FLEET_TLS": "/etc/trunkline-tls/demo-trunkline-1",
    }
    config = config_of(configurations(text)[0], tmp_path, environment)
    uris = re.findall(r'uris: \["(.+)"\]', text)

    assert config.fleet.name == "demo-trunkline-1"
    assert str(config.fleet_folder) == "/etc/trunkline-tls/demo-trunkline-1"
    assert config.fleet.shared == "rediss://trunkline@valkey.example:6379/0"
    assert {f"trunkline://gateway/demo-trunkline-{n}" for n in range(2)} < set(uris)
    assert "path: demo-trunkline-1/certificate.pem" in text
    assert re.findall(r"key: (VALKEY_PASSWORD|PGPASSWORD)", text)
    assert "fieldPath: metadata.name" in text


def test_probes_of_the_engines_look_for_the_keeper_s_mark() -> None:
    """A mark that nobody makes would leave every pod unready."""
    text = rendered(VALUES["engines"])
    (mark,) = set(re.findall(r'test -e "/var/lib/trunkline/(\w+)/\$POD_NAME(\.\w+)"', text))

    assert mark == (MARKS, SERVES)


@each_row("prefill", [0, 1])
def test_engines_get_roles_by_their_numbers(prefill: int) -> None:
    """The script says them; without roles the image's own command runs."""
    text = rendered((*VALUES["engines"], f"engines.prefill={prefill}"))
    script = re.search(r"command:\n +- sh\n +- -c\n +- \|\n((?: {14,}.*\n)+)", text)

    assert ('prompts_apart = "auto"' in text) == bool(prefill)
    assert (script is not None) == bool(prefill)
    for number, role in enumerate(("prefill", "decode", "decode") if script else ()):
        assert script is not None
        told = script[1].replace("exec trunkline", "echo")
        shell = ["sh", "-c", textwrap.dedent(told), "trunkline", "engine", "serve"]
        pod = {"POD_NAME": f"demo-trunkline-engine-{number}"}
        said = subprocess.run(shell, env=pod, capture_output=True, text=True, check=True).stdout
        assert said == f"engine serve --role {role}\n"


REFUSED = {
    "two gateways on one file": (("replicas=2",), "needs `database`"),
    "two gateways of engines on one file": (("replicas=2", "engines.replicas=2"), "`database`"),
    "shared limits over HTTP": (("shared=http://valkey.example",), "shared"),
    "a misspelt value": (("replica=2",), "replica"),
    "a misspelt value of engines": (("engines.replica=2",), "replica"),
    "more engines than a router has": (("engines.replicas=65",), "65"),
    "less than none": (("engines.replicas=-1",), "-1"),
    "no engine that answers": (("engines.replicas=2", "engines.prefill=2"), "engines.prefill"),
    "engines in words": (("engines.replicas=two",), "replicas"),
    "another kind of issuer": (("engines.issuer.kind=Vault",), "kind"),
    "no time to drain": (("engines.drainTimeoutSeconds=-1",), "drainTimeoutSeconds"),
}


@each_row("name", REFUSED)
def test_chart_refuses(name: str) -> None:
    """The error names the value; a misspelt one would be ignored silently."""
    values, says = REFUSED[name]
    settings = [part for value in values for part in ("--set", value)]
    command = [needs("helm"), "template", "demo", str(CHART), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert says in done.stderr


def test_helm_accepts_the_chart() -> None:
    """Names, values against their schema, and every template."""
    run([needs("helm"), "lint", "--strict", CHART])


@pytest.mark.parametrize("name", VALUES)
def test_rendered_objects_are_valid(name: str, tmp_path: Path) -> None:
    """By Kubernetes' own schemas, without fields that it does not know."""
    file = tmp_path / "objects.yaml"
    file.write_text(rendered(VALUES[name]))
    said = run([needs("kubernetes-validate"), "--strict", file])
    kinds = re.findall(r"^kind: (\w+)$", file.read_text(), re.MULTILINE)

    assert said == "" or "FAIL" not in said
    assert kinds.count("Service") == (3 if "engines.issuer" in str(VALUES[name]) else 2)
    assert ("Ingress" in kinds) is ("ServiceMonitor" in kinds) is (name == "all")


@pytest.mark.parametrize("name", VALUES)
def test_rendered_configuration_is_valid(name: str, tmp_path: Path) -> None:
    """The gateway reads it; probes ask by the pod's address, clients by the service's name."""
    text = rendered(VALUES[name])
    config = config_of(configurations(text)[0], tmp_path)

    assert {ALL_ADDRESSES[0], "demo-trunkline.llm.svc"} <= set(config.server.hosts)
    assert "*" not in (*config.server.hosts, *config.admin.hosts)
    assert config.engine.threads == (4 if name in ("plain", "all") else 0)
    if name == "all":
        assert {"llm.example.org", "llm.internal"} <= set(config.server.hosts)
        assert config.tenancy.database.startswith("postgresql://")
        assert config.server.body_bytes_max == 4_194_304
        assert [one.name for one in config.tenants or ()] == ["acme"]
