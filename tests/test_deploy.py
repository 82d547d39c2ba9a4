"""Checks what operators install: the systemd unit, Prometheus rules and the Grafana dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.statistics import Stats
from gateway.caching.promises import OUTCOMES
from gateway.cli.arguments import build_parser
from gateway.config import load_config
from gateway.config.config_file import find_config_file
from gateway.observability.metrics import CounterGroup, DurationHistogram, LabelledCounter, Metrics

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
CASES = RULES.with_name("rules_test.yml")
FILES = (RULES, DEPLOY / "grafana" / "trunkline.json")
_METRIC = re.compile(r"\btrunkline[a-z0-9_]*_[a-z0-9_]+|\bvllm:[a-z_]+")

ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture(scope="module")
def existing() -> set[str]:
    """Return every metric name of the exposition, with each histogram's buckets."""
    metrics = Metrics(10)
    metrics.set_engine_stats(Stats(), is_ready=True, restarts=0)
    metrics.process.read()
    found = set()
    for family in metrics.registry.collect():
        kinds = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        found |= {family.name + end for end in kinds.get(family.type, ("",))}
    return found


def test_make_serve_installs_no_developers_tools(tmp_path: Path) -> None:
    """An operator's first command installs 1.1 GB; with the tools it would be 2.6 GB."""
    command = ["make", "--dry-run", f"VENV={tmp_path}", "TORCH=cpu"]
    printed = {
        target: subprocess.run(
            [*command, target], cwd=DEPLOY.parent, capture_output=True, text=True, check=True
        ).stdout
        for target in ("serve", "pull", "setup")
    }

    assert {target: "--group dev" in text for target, text in printed.items()} == {
        "serve": False,
        "pull": False,
        "setup": True,
    }
    assert "--index-url" in printed["serve"]


def test_the_systemd_unit_starts_the_command(tmp_path: Path) -> None:
    """The unit's command and variables exist, and its stop timeout exceeds the drain timeout."""
    text = (DEPLOY / "systemd" / "trunkline.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S*/trunkline (\w+)$", text, re.MULTILINE)
    settings = dict(re.findall(r"^Environment=(TRUNKLINE_\w+)=(\S+)$", text, re.MULTILINE))
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    (tmp_path / "trunkline.toml").touch()
    settings["TRUNKLINE_CONFIG"] = str(tmp_path / "trunkline.toml")
    config, _ = load_config(find_config_file(None, settings, tmp_path), settings, {})

    assert build_parser((command,)).parse_args([command]).command == "serve"
    assert str(config.data) == "/var/lib/trunkline"
    assert int(stop_s) > config.engine.drain_timeout_s


def test_the_keeper_s_unit_starts_an_engine(tmp_path: Path) -> None:
    """Its command exists, its certificate is where the page puts it, and it stops after a drain."""
    text = (DEPLOY / "systemd" / "trunkline-engine@.service").read_text()
    settings = dict(re.findall(r"^Environment=(\w+)=(\S+)$", text, re.MULTILINE))
    (command,) = re.findall(r"^ExecStart=\S*/trunkline (.+)$", text, re.MULTILINE)
    words = command.replace("%i", "e0").replace("${LISTEN}", settings.pop("LISTEN")).split()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    (tmp_path / "trunkline.toml").touch()
    ours = {name: value.replace("%i", "e0") for name, value in settings.items()}
    ours["TRUNKLINE_CONFIG"] = str(tmp_path / "trunkline.toml")
    config, _ = load_config(find_config_file(None, ours, tmp_path), ours, {})
    options = build_parser(("engine",)).parse_args(words)

    assert (options.command, options.action, options.name) == ("engine", "serve", "e0")
    assert options.listen == "0.0.0.0:7443"
    assert str(config.data) == "/var/lib/trunkline-e0"
    assert int(stop_s) > config.engine.drain_timeout_s


def test_the_command_beside_the_service_has_its_user_and_environment() -> None:
    """Otherwise `sudo trunkline tenant create` changes another database, or finds none."""
    unit = (DEPLOY / "systemd" / "trunkline.service").read_text()
    command = (DEPLOY / "systemd" / "trunkline").read_text().replace("\\\n", " ")
    (user,) = re.findall(r"^User=(\w+)$", unit, re.MULTILINE)
    (program,) = re.findall(r"^ExecStart=(\S+) serve$", unit, re.MULTILINE)
    settings = re.findall(r"^Environment=(\S+)$", unit, re.MULTILINE)

    assert command.split("\nexec ")[1].split() == [
        *("runuser", "-u", user, "--", "env"),
        *settings,
        *(program, '"$@"'),
    ]
    assert os.access(DEPLOY / "systemd" / "trunkline", os.X_OK)


def test_the_example_configuration_takes_the_hosts_of_the_pages() -> None:
    """The page of systemd installs it and asks 127.0.0.1."""
    config, _ = load_config(DEPLOY.parent / "examples" / "trunkline.toml", {}, {})

    assert {"localhost", "127.0.0.1"} <= set(config.server.hosts)


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("name", ["trunkline.service", "trunkline-engine@.service"])
def test_the_systemd_unit_may_do_little(name: str) -> None:
    """systemd's own rating, from 0 (confined) to 10; 9.0 without the directives."""
    unit = DEPLOY / "systemd" / name
    command = [str(ANALYZE), "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (exposure,) = re.findall(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)

    assert float(exposure) <= 3.0


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_metric_in_a_query_exists(file: Path, existing: set[str]) -> None:
    """A renamed metric would leave an alert that never fires."""
    text = file.read_text()
    recorded = set(re.findall(r"record: (\S+)", text))

    queried = {name for name in _METRIC.findall(text) if ":" not in name or name.startswith("vllm")}

    assert queried, "no query names a metric"
    assert queried - existing == set()
    assert set(re.findall(r"trunkline:[a-z0-9_:]+", text)) <= recorded | {"trunkline:"}


def test_every_alert_has_a_firing_and_a_silent_case(existing: set[str]) -> None:
    """`rules_test.yml` has both cases of each alert, over metrics that exist, for promtool."""
    text = CASES.read_text()
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    silent = set(re.findall(r"{alertname: (\w+), eval_time: \w+}", text))
    firing = set(re.findall(r"- alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:", text))

    assert alerts
    assert silent == firing == alerts
    assert set(re.findall(r"series: '?(\w+)", text)) - existing == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_sees_the_alerts_fire() -> None:
    """promtool runs the cases over samples such as a gateway exposes."""
    command = ["promtool", "test", "rules", CASES.name]
    done = subprocess.run(command, cwd=CASES.parent, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_counters_of_alerts_exist_at_zero() -> None:
    """Prometheus sees no increase in a counter that first appears above 0, so each labelled counter
    of an alert is exposed at 0 from the start."""
    metrics = Metrics(10)
    metrics.promises.by_class = {"1h": dict.fromkeys(OUTCOMES, 0) | {"running": 0}}
    metrics.prompts_apart.set(0, "m", "apart")  # as for each model that is served
    queried = re.findall(r"increase\((\w+)\{(\w+)=\"(\w+)\"\}", RULES.read_text())
    exposed = [
        (sample.name, *label, sample.value)
        for family in metrics.registry.collect()
        for sample in family.samples
        for label in sample.labels.items()
    ]

    assert queried
    assert [series for series in queried if (*series, 0) not in exposed] == []


def test_labels_in_queries_exist() -> None:
    """`by (cause)` on a metric without that label draws one flat line."""
    metrics = Metrics(10)
    metrics.promises.by_class = {"1h": {"given": 1, "running": 1}}
    metrics.money.dollars = {"ada": (1.0, 2.0)}
    labels = {
        family.name + suffix: set(metric.labels)
        for metric in vars(metrics).values()
        if isinstance(metric, LabelledCounter | CounterGroup | DurationHistogram)
        for family in metric.describe()
        for suffix in ("_total", "_bucket", "_count", "_sum")
    }
    for family in metrics.registry.collect():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    queried = [
        (metric, label)
        for file in FILES
        for by, metric in re.findall(
            r"by \(([a-z, ]+)\) \((?:rate|increase)\((trunkline_[a-z_]+)", file.read_text()
        )
        for label in by.split(", ")
        if label != "le"
    ]

    assert queried
    assert [pair for pair in queried if pair[1] not in labels[pair[0]]] == []


def test_dashboard_panels_have_titles_targets_and_places() -> None:
    """A panel at another's place would hide it."""
    dashboard = json.loads(FILES[1].read_text())

    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["title"] and panel["targets"] for panel in dashboard["panels"])
