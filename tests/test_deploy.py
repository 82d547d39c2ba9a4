"""What is shipped for operators names only what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.api import Stats
from gateway.caching.promises import OUTCOMES
from gateway.cli.arguments import build_parser
from gateway.config import load_config
from gateway.observability.metrics import CounterGroup, DurationHistogram, LabelledCounter, Metrics

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
CASES = RULES.with_name("rules_test.yml")
FILES = (RULES, DEPLOY / "grafana" / "trunkline.json")
_METRIC = re.compile(r"\btrunkline[a-z0-9_]*_[a-z0-9_]+|\bvllm:[a-z_]+")


@pytest.fixture(scope="module")
def existing() -> set[str]:
    """Every name in the exposition, and each histogram's buckets."""
    telemetry = Metrics(10)
    telemetry.show_engine(Stats(), is_ready=True, restarts=0)
    found = set()
    for family in telemetry.registry.collect():
        kinds = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        found |= {family.name + end for end in kinds.get(family.type, ("",))}
    return found


def test_the_service_is_started_as_the_program_is(tmp_path: Path) -> None:
    """Its command, and the variables that it sets, are ours; it is given time to drain."""
    text = (DEPLOY / "systemd" / "trunkline.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S*/trunkline (\w+)$", text, re.MULTILINE)
    settings = dict(re.findall(r"^Environment=(TRUNKLINE_\w+)=(\S+)$", text, re.MULTILINE))
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    (tmp_path / "trunkline.toml").touch()
    settings["TRUNKLINE_CONFIG"] = str(tmp_path / "trunkline.toml")
    config, _ = load_config(None, settings, {})

    assert build_parser({}).parse_args([command]).command == "serve"
    assert str(config.data) == "/var/lib/trunkline"
    assert int(stop_s) > config.engine.drain_timeout_s


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_metric_that_is_asked_for_exists(file: Path, existing: set[str]) -> None:
    """A renamed metric would leave an alert that never fires."""
    text = file.read_text()
    recorded = set(re.findall(r"record: (\S+)", text))

    asked = {name for name in _METRIC.findall(text) if ":" not in name or name.startswith("vllm")}

    assert asked, "nothing is asked for"
    assert asked - existing == set()
    assert set(re.findall(r"trunkline:[a-z0-9_:]+", text)) <= recorded | {"trunkline:"}


def test_every_alert_is_shown_firing_on_metrics_that_exist(existing: set[str]) -> None:
    """And silent before: `rules_test.yml` has both of each, for promtool."""
    text = CASES.read_text()
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    silent = set(re.findall(r"{alertname: (\w+), eval_time: \w+}", text))
    firing = set(re.findall(r"- alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:", text))

    assert alerts
    assert silent == firing == alerts
    assert set(re.findall(r"series: '?(\w+)", text)) - existing == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_itself_sees_them_fire() -> None:
    """Its own tool, over samples as a gateway would tell them."""
    command = ["promtool", "test", "rules", CASES.name]
    done = subprocess.run(command, cwd=CASES.parent, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_what_an_alert_waits_for_is_told_before_it_happens() -> None:
    """A counter that begins with its first rise has not risen, as Prometheus reckons: each that an
    alert names by a label is there from the start, at 0."""
    telemetry = Metrics(10)
    telemetry.show_cache({"1h": dict.fromkeys(OUTCOMES, 0) | {"running": 0}}, 0)
    asked = re.findall(r"increase\((\w+)\{(\w+)=\"(\w+)\"\}", RULES.read_text())
    told = [
        (sample.name, *label, sample.value)
        for family in telemetry.registry.collect()
        for sample in family.samples
        for label in sample.labels.items()
    ]

    assert asked
    assert [one for one in asked if (*one, 0) not in told] == []


def test_labels_that_are_asked_for_exist() -> None:
    """`by (cause)` on a metric without causes would be one flat line."""
    telemetry = Metrics(10)
    telemetry.show_cache({"1h": {"given": 1, "running": 1}}, 1)
    labels = {
        family.name + suffix: set(metric.labels)
        for metric in vars(telemetry).values()
        if isinstance(metric, LabelledCounter | CounterGroup | DurationHistogram)
        for family in metric.describe()
        for suffix in ("_total", "_bucket", "_count", "_sum")
    }
    for family in telemetry.registry.collect():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    asked = [
        (metric, label)
        for file in FILES
        for by, metric in re.findall(
            r"by \(([a-z, ]+)\) \((?:rate|increase)\((trunkline_[a-z_]+)", file.read_text()
        )
        for label in by.split(", ")
        if label != "le"
    ]

    assert asked
    assert [pair for pair in asked if pair[1] not in labels[pair[0]]] == []


def test_the_dashboard_is_json_with_a_panel_for_each_question() -> None:
    """Panels have titles, targets and places that do not overlap."""
    dashboard = json.loads(FILES[1].read_text())

    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["title"] and panel["targets"] for panel in dashboard["panels"])
