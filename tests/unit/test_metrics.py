"""The table of metrics, and what is deployed and written about it: queries name only what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from jigsawrl.metrics import METRICS, format_address, parse_address

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SERIES = {series: metric for metric in METRICS for series in metric.series}

BOUNDED = {
    *("pipeline", "role", "worker", "device", "node", "stream", "place"),
    *("command", "event", "fate", "kind", "part", "stage", "state", "work"),
}
"""What a label may be: names that somebody chose, and words from fixed lists."""


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (rule["expr"] for rule in rules())


def queries() -> Iterator[str]:
    yield from expressions()
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_names_follow_the_conventions_and_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) > 40
    for metric in METRICS:
        assert re.fullmatch(r"jigsaw(_[a-z]+)+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.help.endswith("."), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name


def test_no_label_grows_with_the_work_that_is_done() -> None:
    assert {label for metric in METRICS for label in metric.labels} <= BOUNDED


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_each_query_names_only_metrics_and_labels_that_exist(query: str) -> None:
    names = re.findall(r"\bjigsaw_\w+", query)
    assert names or re.search(r"\bup\{", query)
    assert set(names) <= set(SERIES)
    known = {label for name in names for label in SERIES[name].labels} | {"le"}
    grouped = re.findall(r"\b(?:by|on) \(([\w, ]+)\)", query)
    asked = {label.strip() for labels in grouped for label in labels.split(",")}
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", query):
        if name in SERIES:
            asked |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    assert asked <= known


@pytest.mark.parametrize("query", sorted(set(expressions())))
def test_each_query_is_one_that_prometheus_can_read(query: str) -> None:
    assert promql_parser.parse(query)


@pytest.mark.parametrize("panel", dashboard()["panels"], ids=lambda panel: panel["title"])
def test_each_panel_shows_labels_that_its_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel.get("targets", ()):
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouped = re.findall(r"\bby \(([\w, ]+)\)", target["expr"])
        kept = {label.strip() for labels in grouped for label in labels.split(",")}
        if not grouped:
            names = re.findall(r"\bjigsaw_\w+", target["expr"])
            kept = {label for name in names for label in SERIES[name].labels}
        assert shown <= kept
        assert target["datasource"]["uid"] == "${datasource}"
    place = panel["gridPos"]
    assert 0 <= place["x"] < place["x"] + place["w"] <= 24


def test_panels_have_numbers_of_their_own() -> None:
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_each_alert_says_what_it_means_and_where_to_look(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    names = re.findall(r"\bjigsaw_\w+", rule["expr"])
    known = {label for name in names for label in SERIES[name].labels} | {"job", "instance"}
    assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= known


def test_prometheus_scrapes_the_default_ports_and_reads_the_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = [c["static_configs"][0]["targets"] for c in config["scrape_configs"]]
    assert targets == [["127.0.0.1:9464"], ["127.0.0.1:9465"]]
    for name in config["rule_files"]:
        assert (DEPLOY / "prometheus" / name).exists()


def test_the_page_on_operations_lists_every_metric_and_alert_and_no_other() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `jigsaw_")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {
        metric.name for metric in METRICS
    }
    named = set(re.findall(r"\bJigsaw[A-Z]\w+", page.replace("JigsawRL", "")))
    assert named == {rule["alert"] for rule in rules()}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:0", ("::1", 0)),
        ("node.local:1", ("node.local", 1)),
    ],
)
def test_an_address_is_read_and_written(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert format_address(*address) == text


@pytest.mark.parametrize("text", ["9464", ":9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}: "):
        parse_address(text)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on this machine")
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    rules_test = DEPLOY / "prometheus" / "alerts_test.yml"
    done = subprocess.run(
        ["promtool", "test", "rules", str(rules_test)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
